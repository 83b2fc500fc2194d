"""How each kernel is cut up on each kind of chip: a pure table, and the few rules that apply it.

``policy(op, shape, bits, chip)`` returns a tile: template integers of the kernel, and the grid that
covers the shape with them. Nothing here asks the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from husky_mlx.chips import Chip

# Limits of every Apple GPU; CUDA's are wider.
MAX_THREADS = 1024
MAX_THREADGROUP_BYTES = 32 * 1024

GEMV_OPS = ("rms_qkv_rope_append", "o_proj_add", "rms_gate_up_swiglu", "down_add", "rms_lm_head")
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class GemvShape:
    """A projection: ``m`` rows of x (m, k) against an (n, k) matrix, x after RMS norm or not."""

    m: int
    n: int
    k: int
    norm: bool = False


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
class EmbedShape:
    """``m`` token ids to rows of ``width`` values."""

    m: int
    width: int


@dataclass(frozen=True)
class GemvTile:
    """metal_kernels/gemv.h: ROWS a simdgroup, KSPLIT simdgroups that share them and split K."""

    rows: int
    simdgroups: int
    k_split: int
    unroll: int

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
        }

    def grid(self, shape: GemvShape) -> Grid:
        """In threads, as MLX takes it."""
        return -(-shape.n // self.outputs) * self.threadgroup[0], 1, 1

    def threadgroup_bytes(self, shape: GemvShape) -> int:
        """The float32 partial sums; on CUDA x after its norm is staged beside them."""
        return 4 * shape.m * (self.rows * self.simdgroups + self.k_split)


@dataclass(frozen=True)
class AttentionTile:
    """metal_kernels/attention_decode.metal: QUERIES vectors a threadgroup, SPLITS of the context."""

    queries: int
    lanes: int
    splits: int
    simdgroups: int
    unroll: int

    @property
    def threadgroup(self) -> Grid:
        return 32 * self.simdgroups, 1, 1

    def template(self) -> dict[str, int]:
        return {
            "QUERIES": self.queries,
            "LANES": self.lanes,
            "SPLITS": self.splits,
            "SIMDGROUPS": self.simdgroups,
            "UNROLL": self.unroll,
        }

    def grid(self, shape: AttentionShape) -> Grid:
        """In threads: KV heads with their slices of query vectors, splits, sequences."""
        slices = shape.kv_heads * (shape.vectors // self.queries)
        return slices * self.threadgroup[0], self.splits, shape.m if shape.batched else 1

    def threadgroup_bytes(self, shape: AttentionShape) -> int:
        """A maximum, a sum and the weighted values for each simdgroup and query vector."""
        return 4 * self.simdgroups * self.queries * (shape.head_dim + 2)

    def partials(self, shape: AttentionShape) -> int:
        """Float32 values that the splits leave for ``attention_combine``."""
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
        return {"SPLITS": self.splits, "SIMDGROUPS": self.simdgroups}

    def grid(self, shape: AttentionShape) -> Grid:
        return shape.m * shape.heads * self.threadgroup[0], 1, 1

    def threadgroup_bytes(self, shape: AttentionShape) -> int:
        return 4 * self.simdgroups * shape.head_dim


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


Shape = GemvShape | AttentionShape | EmbedShape
Tile = GemvTile | AttentionTile | CombineTile | EmbedTile


@dataclass(frozen=True)
class _Attention:
    """``vector_floats``: query and accumulator values of a lane, each; ``groups``: threadgroups a
    core to aim for; ``one_split``: rows up to which a second launch is not worth its cost;
    ``split_rows``: the fewest rows a split."""

    simdgroups: int
    unroll: int
    vector_floats: int
    groups: int
    one_split: int
    split_rows: int


@dataclass(frozen=True)
class _Tuning:
    """Tiles of one kind of chip; ``gemv`` by bits."""

    gemv: dict[int, GemvTile]
    attention: _Attention


def _gemv(four: Tiling, eight: Tiling, sixteen: Tiling) -> dict[int, GemvTile]:
    return {4: GemvTile(*four), 8: GemvTile(*eight), 16: GemvTile(*sixteen)}


Tiling = tuple[int, int, int, int]
