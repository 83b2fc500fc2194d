"""Shapes of the kernels' work, and tiles that cover them: template integers and grids.

Grids and threadgroups count threads in x, y, z, as MLX takes them.
"""

from __future__ import annotations

from dataclasses import dataclass

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class GemvShape:
    """A projection: ``m`` rows of x (m, k) against an (n, k) matrix, x after RMS norm or not.

    ``block``: rows of the matrix that tiles must not reach across (a head), 0 for all of them.
    ``itemsize`` of x in bytes.
    """

    m: int
    n: int
    k: int
    norm: bool = False
    block: int = 0
    itemsize: int = 2


@dataclass(frozen=True)
class AttentionShape:
    """One query a row for ``m`` rows; ``rows`` is the capacity of the KV cache, in tokens.

    ``batched``: m sequences, else m consecutive tokens of one. ``itemsize`` of T in bytes.
    """

    m: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    batched: bool = False
    itemsize: int = 2

    @property
    def vectors(self) -> int:
        """Query vectors that read the same keys and values."""
        return self.heads // self.kv_heads * (1 if self.batched else self.m)


@dataclass(frozen=True)
class ArgmaxShape:
    """The largest of ``count`` values, for each of ``m`` rows."""

    m: int
    count: int


@dataclass(frozen=True)
class EmbedShape:
    """``m`` token ids to rows of ``width`` values."""

    m: int
    width: int


@dataclass(frozen=True)
class GemvTile:
    """metal_kernels/gemv.h: ROWS a simdgroup, KSPLIT simdgroups that share them and split K.

    ``norm``: x's RMS norm happens inside (else before, by itself). ``stages_x``: the threadgroup
    keeps x after its norm, in 16 bit, which only the CUDA kernel does. ``integer``: it multiplies
    packed weights in whole numbers, CUDA's only too, and keeps x as such. ``queue``: so many
    batches of UNROLL chunks are asked for ahead, into the threadgroup's memory; 0: one, into
    registers (metal_kernels/mma_queue.h).
    """

    rows: int
    simdgroups: int
    k_split: int
    unroll: int
    norm: bool = False
    stages_x: bool = False
    integer: bool = False
    queue: int = 0

    @property
    def outputs(self) -> int:
        """Rows of the matrix a threadgroup."""
        return self.rows * self.simdgroups // self.k_split

    @property
    def threadgroup(self) -> Grid:
        return 32 * self.simdgroups, 1, 1

    def template(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "SIMDGROUPS": self.simdgroups,
            "KSPLIT": self.k_split,
            "UNROLL": self.unroll,
            "QUEUE": self.queue,
            "NORM": self.norm,
            "INTEGER": self.integer,
        }

    def threadgroups(self, shape: GemvShape) -> int:
        block = shape.block or shape.n
        return shape.n // block * -(-block // self.outputs)

    def grid(self, shape: GemvShape) -> Grid:
        return self.threadgroups(shape) * self.threadgroup[0], 1, 1

    def threadgroup_bytes(self, shape: GemvShape) -> int:
        """At most, without a queue: ``integer`` keeps less for groups of more than 32."""
        partial_sums = 4 * shape.m * (self.rows * self.simdgroups + self.k_split)
        staged = 2 * shape.m * shape.k if self.stages_x or self.integer else 16
        if self.integer:  # two floats a group for each row of x, one a simdgroup for each
            staged += shape.m * _whole_vectors(2 * (shape.k // 32))
            staged += _whole_vectors(shape.m * self.simdgroups)
        return partial_sums + staged

    def batch_bytes(self, bits: int, group_size: int) -> int:
        """Of one batch in the queue of one simdgroup."""
        chunk = 512 // bits
        entries = 0 if bits == 16 else max(1, self.unroll * chunk // group_size)
        return self.rows * (64 * self.unroll + 8 * -(-entries // 2))


def _whole_vectors(floats: int) -> int:
    """Bytes of so many floats in vectors of four."""
    return -(-floats // 4) * 16


@dataclass(frozen=True)
class AttentionTile:
    """metal_kernels/attention_decode.metal: QUERIES vectors a threadgroup, splits of the rows.

    ``matrix``: on matrix units, in tiles of 16 rows, which only the CUDA kernel does.
    """

    queries: int
    lanes: int
    splits: int
    simdgroups: int
    unroll: int
    matrix: bool = False

    @property
    def threadgroup(self) -> Grid:
        return 32 * self.simdgroups, 1, 1

    def template(self) -> dict[str, int]:
        return {
            "QUERIES": self.queries,
            "LANES": self.lanes,
            "SPLIT": self.splits > 1,
            "SIMDGROUPS": self.simdgroups,
            "UNROLL": self.unroll,
        }

    def grid(self, shape: AttentionShape) -> Grid:
        """KV heads with their slices of query vectors, then splits, then sequences."""
        slices = shape.kv_heads * (shape.vectors // self.queries)
        return slices * self.threadgroup[0], self.splits, shape.m if shape.batched else 1

    def threadgroup_bytes(self, shape: AttentionShape) -> int:
        """A maximum, a sum and the weighted values for each simdgroup and query vector."""
        room = -(-self.queries // 4) * 4 if self.matrix else self.queries
        return 4 * self.simdgroups * room * (shape.head_dim + 2)

    def partials(self, shape: AttentionShape) -> int:
        """Float32 values that the splits leave to be merged."""
        return shape.m * shape.heads * self.splits * (shape.head_dim + 2)


@dataclass(frozen=True)
class CombineTile:
    """metal_kernels/attention_combine.metal: a threadgroup for each query vector."""

    splits: int
    simdgroups: int

    @property
    def threadgroup(self) -> Grid:
        return 32 * self.simdgroups, 1, 1

    def template(self) -> dict[str, int]:
        return {"SIMDGROUPS": self.simdgroups}

    def grid(self, shape: AttentionShape) -> Grid:
        return shape.m * shape.heads * self.threadgroup[0], 1, 1

    def threadgroup_bytes(self, shape: AttentionShape) -> int:
        return 4 * self.simdgroups * shape.head_dim


@dataclass(frozen=True)
class ArgmaxTile:
    """metal_kernels/argmax_combine.metal: a threadgroup for each row."""

    simdgroups: int

    @property
    def threadgroup(self) -> Grid:
        return 32 * self.simdgroups, 1, 1

    def template(self) -> dict[str, int]:
        return {"SIMDGROUPS": self.simdgroups}

    def grid(self, shape: ArgmaxShape) -> Grid:
        return shape.m * self.threadgroup[0], 1, 1

    def threadgroup_bytes(self, shape: ArgmaxShape) -> int:
        return 8 * self.simdgroups


@dataclass(frozen=True)
class EmbedTile:
    """metal_kernels/embed.metal: a thread for each word of a row."""

    threads: int
    bits: int

    @property
    def threadgroup(self) -> Grid:
        return self.threads, 1, 1

    def template(self) -> dict[str, int]:
        return {}

    def grid(self, shape: EmbedShape) -> Grid:
        words = shape.width if self.bits == 16 else shape.width * self.bits // 32
        return -(-words // self.threads) * self.threads, shape.m, 1

    def threadgroup_bytes(self, shape: EmbedShape) -> int:
        return 0


Shape = GemvShape | AttentionShape | ArgmaxShape | EmbedShape
Tile = GemvTile | AttentionTile | CombineTile | ArgmaxTile | EmbedTile
