"""How each kernel is cut up on each kind of chip: a pure table, and the few rules that apply it.

``policy(op, shape, bits, chip)`` returns a tile. Nothing here asks the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, overload

from husky_mlx.chips import Chip
from husky_mlx.places import MAX_ROWS
from husky_mlx.tiles import (
    ArgmaxShape,
    ArgmaxTile,
    AttentionShape,
    AttentionTile,
    CombineTile,
    EmbedShape,
    EmbedTile,
    GemvShape,
    GemvTile,
    Shape,
    Tile,
)

MAX_THREADS = 1024
# Bytes of threadgroup memory that a kernel may declare.
THREADGROUP_BYTES = {"metal": 32 * 1024, "cuda": 48 * 1024, "unknown": 32 * 1024}

GEMV_OPS = (
    "rms_qkv_rope_append",
    "o_proj_add",
    "rms_gate_up_swiglu",
    "down_add",
    "rms_lm_head",
    "rms_lm_head_argmax",
)


@dataclass(frozen=True)
class _Attention:
    """How to cut attention on one kind of chip.

    ``lane_floats``: how many query values a lane may hold, and as many weighted values. ``groups``:
    threadgroups a core to aim for; on matrix units one, which its registers fill. ``one_split``:
    rows up to which there is one split and nothing to merge. ``split_rows``: the fewest rows worth
    a split.
    """

    simdgroups: int
    unroll: int
    lane_floats: int
    groups: int
    one_split: int
    split_rows: int


@dataclass(frozen=True)
class _Tuning:
    """Tiles of one kind of chip; ``gemv`` by bits, before the rules for small matrices."""

    gemv: dict[int, GemvTile]
    attention: _Attention


_METAL_GEMV = {4: GemvTile(4, 2, 1, 1), 8: GemvTile(4, 2, 1, 1), 16: GemvTile(4, 2, 1, 1)}
_METAL_WIDE_GEMV = {4: GemvTile(4, 4, 1, 2), 8: GemvTile(4, 4, 1, 2), 16: GemvTile(4, 4, 1, 2)}

# (target, generation, large) -> tiles. Every figure is predicted, on 2026-11-30, from the number of
# cores, their registers and MLX's own choices; measured ones are in ``_mma_tile`` and
# ``_integer_tile``. The generations of a target that are missing take those of the next older one.
_TABLE: dict[tuple[str, int, bool], _Tuning] = {
    ("metal", 13, False): _Tuning(_METAL_GEMV, _Attention(4, 2, 32, 2, 1024, 256)),
    ("metal", 13, True): _Tuning(_METAL_GEMV, _Attention(8, 2, 32, 2, 512, 256)),
    ("metal", 14, False): _Tuning(_METAL_GEMV, _Attention(4, 2, 32, 2, 1024, 256)),
    ("metal", 14, True): _Tuning(_METAL_GEMV, _Attention(8, 2, 32, 2, 512, 256)),
    # From here on registers are shared dynamically: more loads in flight.
    ("metal", 15, False): _Tuning(_METAL_GEMV, _Attention(4, 4, 32, 2, 1024, 256)),
    ("metal", 15, True): _Tuning(_METAL_WIDE_GEMV, _Attention(8, 4, 32, 2, 512, 256)),
    ("metal", 16, False): _Tuning(_METAL_GEMV, _Attention(4, 4, 32, 2, 1024, 256)),
    ("metal", 16, True): _Tuning(_METAL_WIDE_GEMV, _Attention(8, 4, 32, 2, 512, 256)),
    ("metal", 17, False): _Tuning(_METAL_GEMV, _Attention(4, 4, 32, 2, 1024, 256)),
    ("metal", 17, True): _Tuning(_METAL_WIDE_GEMV, _Attention(8, 4, 32, 2, 512, 256)),
    ("cuda", 80, False): _Tuning(_METAL_GEMV, _Attention(8, 4, 32, 2, 1024, 128)),
    ("cuda", 80, True): _Tuning(_METAL_GEMV, _Attention(8, 4, 32, 2, 1024, 128)),
    # Half the resident warps of the data centre chips.
    ("cuda", 86, False): _Tuning(_METAL_GEMV, _Attention(8, 2, 32, 1, 1024, 128)),
    ("cuda", 86, True): _Tuning(_METAL_GEMV, _Attention(8, 2, 32, 1, 1024, 128)),
    ("cuda", 90, True): _Tuning(_METAL_GEMV, _Attention(8, 4, 32, 2, 1024, 128)),
    ("cuda", 100, True): _Tuning(_METAL_GEMV, _Attention(8, 4, 32, 2, 1024, 128)),
    ("cuda", 110, False): _Tuning(_METAL_GEMV, _Attention(8, 2, 32, 2, 1024, 128)),
    ("cuda", 120, False): _Tuning(_METAL_GEMV, _Attention(8, 2, 32, 2, 1024, 128)),
    ("cuda", 120, True): _Tuning(_METAL_GEMV, _Attention(8, 2, 32, 2, 1024, 128)),
}
_UNKNOWN = _Tuning(_METAL_GEMV, _Attention(4, 1, 32, 1, 2048, 512))
# Cores from which a GPU counts as large: Max and Ultra, the big GPU of an NVIDIA generation.
_LARGE = {"metal": 24, "cuda": 100}
# On matrix units: the longest head, the most query vectors in a threadgroup, and the values of a
# tile's keys (its rows of 16 times the head) whose loads and the values' fill a lane's registers.
_MATRIX_HEAD_DIM = 128
_MATRIX_QUERIES = 8
_MATRIX_VALUES = 256
# A lane's share of a head up to which wider loads are worth more registers.
_LANE_SHARE = 16
_COMBINE_SIMDGROUPS = 8
# Rows of the steps that take short prompts, where matrix units have as many columns anyway.
_SHORT_PROMPTS = (8, 16)
_FROZEN_ROWS = (32, 64, 128, 256)
CHAIN_SIMDGROUPS = 16
# Rows of a cache up to which a chain was measured against launches of their own: in longer ones
# attention decides.
CHAIN_LONGEST = 4096
# Of products in a chain, predicted: what a multiprocessor reads alone, some three times its share
# of an H200's 4 TB/s, and what a wave of threadgroups costs besides.
_CORE_BYTES_A_MICROSECOND, _CHAIN_WAVE_MICROSECONDS = 90_000, 1.0
# Shared memory that a block may have, KiB, by compute capability (CUDA C++ Programming Guide, table
# of technical specifications), and what a chain keeps of it for its table and its barrier.
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227}
_CHAIN_KEEPS = 56 * 1024
# Measured on an H200 on 2026-12-01, bfloat16, GPU microseconds of MLX's product against both of
# ours on cold weights. 4 bit, 17 rows of x: 4096x14336 263 and 75, 4096x4096 90 and 25, 3072x2048
# 41 and 13, 576x576 13 and 5, but 28672x4096 132 and 142, 16384x2048 39 and 42; those two at 128
# rows 284 and 147, 67 and 45. 8 bit: 4096x14336 200 and 82, 28672x4096 110 and 154; at 64 rows 123
# and 155, at 256 396 and 184.
_DEQUANTIZE_FROM = 17
# Compute capabilities whose tensor cores multiply integers at a fraction of the rate of floats: a
# B300 has 0.15 dense INT8 POPS, a B200 4.5 (NVIDIA's figures for the HGX boards, a GPU).
_SLOW_INTEGERS = (103,)
_WIDE, _WIDE_DEQUANTIZE_FROM = 16384, {4: 64, 8: 128}


@overload
def policy(
    op: Literal["attention_decode"], shape: AttentionShape, bits: int, chip: Chip
) -> AttentionTile: ...
@overload
def policy(
    op: Literal["attention_combine"], shape: AttentionShape, bits: int, chip: Chip
) -> CombineTile: ...
@overload
def policy(op: str, shape: GemvShape, bits: int, chip: Chip) -> GemvTile: ...
@overload
def policy(op: str, shape: ArgmaxShape, bits: int, chip: Chip) -> ArgmaxTile: ...
@overload
def policy(op: str, shape: EmbedShape, bits: int, chip: Chip) -> EmbedTile: ...
@overload
def policy(op: str, shape: Shape, bits: int, chip: Chip) -> Tile: ...
def policy(op: str, shape: Shape, bits: int, chip: Chip) -> Tile:
    """The tile for kernel ``op`` on ``shape``, with weights of ``bits`` (16: not quantized).

    Raises ValueError for an operation, shape or number of bits that no kernel takes.
    """
    tuning = _tuning(chip)
    if op == "attention_decode" and isinstance(shape, AttentionShape):
        return _attention_tile(shape, tuning.attention, chip)
    if op == "attention_combine" and isinstance(shape, AttentionShape):
        splits = _attention_tile(shape, tuning.attention, chip).splits
        return CombineTile(splits, min(_COMBINE_SIMDGROUPS, splits))
    if op == "argmax_combine" and isinstance(shape, ArgmaxShape):
        return ArgmaxTile(_COMBINE_SIMDGROUPS)
    if bits not in (4, 8, 16):
        raise ValueError(f"[{op}] kernels take weights of 4, 8 or 16 bits, found {bits}")
    if op == "embed" and isinstance(shape, EmbedShape):
        return EmbedTile(64, bits)
    if op in GEMV_OPS and isinstance(shape, GemvShape):
        # CUDA's matrix units take x in 16 bit only; the kernel for the rest is Metal's.
        if chip.target != "cuda" or shape.itemsize != 2:
            return _gemv_tile(shape, tuning.gemv[bits], chip)
        if bits < 16 and shape.m <= MAX_ROWS and chip.generation not in _SLOW_INTEGERS:
            tile = _gemv_tile(shape, _integer_tile(shape, bits), chip)
            if tile.threadgroup_bytes(shape) <= THREADGROUP_BYTES[chip.target]:
                return tile
        return _gemv_tile(shape, _mma_tile(shape, bits), chip)
    raise ValueError(f"[{op}] no kernel of this name takes a {type(shape).__name__}")


def dequantize_from(chip: Chip, out_features: int, bits: int) -> int | None:
    """Rows of x from which a quantized matrix is dequantized first and multiplied as such.

    None: never, because MLX multiplies quantized weights as fast (Metal).
    """
    if chip.target != "cuda":
        return None
    return _DEQUANTIZE_FROM if out_features < _WIDE else _WIDE_DEQUANTIZE_FROM[bits]


def short_prompts(chip: Chip, itemsize: int) -> tuple[int, ...]:
    """Lengths of the steps that take prompts of more rows than a decode step, shortest first.

    ``itemsize`` of an activation in bytes. Empty: such prompts take MLX's products.
    """
    return _SHORT_PROMPTS if chip.target == "cuda" and itemsize == 2 else ()


def chained_tile(op: str, shape: GemvShape, bits: int, group_size: int, chip: Chip) -> GemvTile:
    """The tile of a product in a chain, whose threadgroups have CHAIN_SIMDGROUPS simdgroups and run
    side by side, one a multiprocessor.

    The cheapest by a model of one: a fixed time for each wave, and the share of a multiprocessor in
    the matrix.
    """
    own = policy(op, shape, bits, chip)
    chunk = 512 // bits

    def cost(tile: GemvTile) -> tuple[float, int]:
        waves = -(-tile.threadgroups(shape) // chip.cores)
        share = tile.outputs * shape.k * bits / 8 / _CORE_BYTES_A_MICROSECOND
        # Then where all simdgroups have as much to do.
        return waves * (_CHAIN_WAVE_MICROSECONDS + share), batches % tile.k_split

    # 128 bytes of a row at a time, or as many as bring two of its scales, the least that is copied.
    unroll = 2 if bits == 16 else max(2, 2 * group_size // chunk)
    batches = -(-shape.k // (unroll * chunk))
    base = replace(own, rows=16, simdgroups=CHAIN_SIMDGROUPS, unroll=unroll)
    splits = [split for split in (1, 2, 4, 8, 16) if split == 1 or shape.k >= split * chunk]
    tile = min((replace(base, k_split=split) for split in splits), key=cost)
    room = chain_memory(chip) - _CHAIN_KEEPS - tile.threadgroup_bytes(shape)
    fits = room // (CHAIN_SIMDGROUPS * tile.batch_bytes(bits, group_size))
    return replace(tile, queue=max(0, min(-(-batches // tile.k_split), fits)))


def chain_memory(chip: Chip) -> int:
    """Bytes of shared memory that a block of a chain may have."""
    return _SHARED_KIB.get(chip.generation, min(_SHARED_KIB.values())) * 1024


def chained_attention(shape: AttentionShape, chip: Chip) -> AttentionTile:
    """The tile of attention in a chain: the fewest rows at once, for a block's few registers."""
    return replace(policy("attention_decode", shape, 16, chip), unroll=1)


def chains_steps(chip: Chip, itemsize: int) -> bool:
    """Whether one-token steps can be one launch; ``itemsize`` of an activation in bytes.

    All its threadgroups must run at once, one on each multiprocessor: their number must be known.
    """
    return chip.target == "cuda" and itemsize == 2 and not chip.stand_in


def tuning_name(chip: Chip) -> str:
    """Which row of the table a chip takes, for people."""
    key = _tuning_key(chip)
    if key is None:
        return "policy of an unknown chip"
    target, generation, large = key
    return f"policy of {target} generation {generation}, {'large' if large else 'small'}"


def frozen_rows(chip: Chip, itemsize: int) -> tuple[int, ...]:
    """Numbers of rows for which a prompt's way is traced once, shorter ones padded to them.

    Where a GPU needs less time for so few rows than the host to hand them over one by one.
    """
    return _FROZEN_ROWS if chip.target == "cuda" and itemsize == 2 else ()


def _tuning(chip: Chip) -> _Tuning:
    key = _tuning_key(chip)
    return _UNKNOWN if key is None else _TABLE[key]


def _tuning_key(chip: Chip) -> tuple[str, int, bool] | None:
    large = chip.cores >= _LARGE.get(chip.target, 0)
    known = [gen for target, gen, size in _TABLE if (target, size) == (chip.target, large)]
    if not known:
        return None
    older = [generation for generation in known if generation <= chip.generation]
    return chip.target, max(older) if older else min(known), large


def _mma_tile(shape: GemvShape, bits: int) -> GemvTile:
    """The tile for CUDA's matrix units; every figure measured on an H200 on 2026-11-30.

    4 bit, bfloat16, microseconds with this tile: 2048x2048 4.1, 4096x4096 6.6, 2048x8192 7.2,
    4096x14336 14.3, 16384x2048 9.8, 28672x4096 23.8, 128256x2048 47, 128256x4096 91.
    """
    if shape.m > MAX_ROWS:
        return _short_prompt_tile(shape)
    if shape.n >= 65536:
        return GemvTile(16, 4, 1 if bits != 8 else 2, 8 if bits == 16 else 4)
    if shape.n > 8192:
        return GemvTile(32, 4, 4, 2) if bits == 4 else GemvTile(16, 4, 4, 4)
    # Few rows: as many simdgroups share them as leave each a power of two of columns.
    splits = (split for split in range(16, 1, -1) if shape.k % split == 0)
    k_split = next((split for split in splits if shape.k // split in (128, 256, 512, 1024)), 4)
    unroll = max(1, min(shape.k // k_split // 128, 2 if bits == 4 else 4))
    return GemvTile(16, k_split, k_split, unroll)


def _integer_tile(shape: GemvShape, bits: int) -> GemvTile:
    """The tile for products in whole numbers; every figure measured on an H200 on 2026-12-01.

    bfloat16, microseconds a launch in a chain of them, the gap between two included, and with
    ``_mma_tile`` in the same run. 4 bit: 6144x4096 7.9 and 13.5, 28672x4096 19.7 and 24.9,
    4096x14336 14.1 and 20.3, 128256x4096 71 and 92, 16384x2048 8.2 and 11.4, 128256x2048 37 and 48;
    four rows of x: 6144x4096 12.9 and 15.0, 28672x4096 26.1 and 30.1, 16384x2048 10.7 and 13.0,
    128256x2048 50 and 55. 8 bit: 6144x4096 10.2 and 14.9, 28672x4096 31.7 and 39.3, 4096x14336 18.7
    and 26.4.
    """
    few = shape.m > 1  # registers for the sums of more rows of x
    if shape.n >= 65536:
        return GemvTile(16, 8 if few or shape.k > 2048 else 4, 1, 2 if few else 4, integer=True)
    if shape.n > 8192 and bits == 4:
        if few:
            return GemvTile(16, *((4, 1, 4) if shape.k > 2048 else (8, 2, 2)), integer=True)
        return GemvTile(32, *((8, 2, 2) if shape.k > 2048 else (16, 4, 1)), integer=True)
    chunks, remainder = divmod(shape.k, 512 // bits)
    deep = shape.k >= 8192 and bits == 4 and not few
    choices = (16, 8, 4, 2) if deep else (4, 2) if few else (8, 4, 2)
    splits = (split for split in choices if not chunks % split)
    # Four share what does not divide among them, unless there is less than a chunk for each.
    k_split = 4 if remainder else next(splits, 4 if chunks > 2 else chunks)
    most = 4 if (deep or shape.n > 8192) and not few else 2
    unroll = next(
        unroll for unroll in (4, 2, 1) if unroll <= most and not chunks // k_split % unroll
    )
    # Where x is staged for few rows of the matrix: more of them, or a second team of simdgroups.
    short = bits == 4 and not few and not deep
    rows = 32 if short and shape.norm and shape.k <= 2048 and not remainder else 16
    teams = 2 if short and not shape.norm else 1
    return GemvTile(rows, max(k_split, 4) * teams, k_split, unroll, integer=True)


def _short_prompt_tile(shape: GemvShape) -> GemvTile:
    """Sums of 16 columns take 146 registers of a lane: 8 simdgroups at most fit a threadgroup."""
    if shape.n > 8192:
        return GemvTile(16, 4, 4, 2)
    splits = (split for split in range(8, 1, -1) if shape.k % split == 0)
    k_split = next((split for split in splits if shape.k // split % 128 == 0), 4)
    return GemvTile(16, k_split, k_split, max(1, min(shape.k // k_split // 128, 2)))


def _gemv_tile(shape: GemvShape, tile: GemvTile, chip: Chip) -> GemvTile:
    """More simdgroups split K where a small matrix leaves cores without a threadgroup."""
    k_split = tile.k_split
    while (
        2 * k_split <= tile.simdgroups
        and shape.n * k_split < chip.cores * tile.rows * tile.simdgroups
        and shape.k >= 1024 * 2 * k_split
    ):
        k_split *= 2
    chosen = replace(
        tile,
        k_split=k_split,
        norm=shape.norm,
        stages_x=shape.norm and chip.target == "cuda" and shape.itemsize == 2,
    )
    if chosen.threadgroup_bytes(shape) > THREADGROUP_BYTES[chip.target]:
        return replace(chosen, norm=False, stages_x=False)
    return chosen


def _attention_tile(shape: AttentionShape, tuning: _Attention, chip: Chip) -> AttentionTile:
    lanes = _lanes(shape.head_dim, shape.itemsize)
    matrix = chip.target == "cuda" and shape.itemsize == 2 and shape.head_dim <= _MATRIX_HEAD_DIM
    most = _MATRIX_QUERIES if matrix else max(tuning.lane_floats * lanes // shape.head_dim, 1)
    queries = _largest_divisor(shape.vectors, most)
    threadgroups = shape.kv_heads * (shape.vectors // queries) * (shape.m if shape.batched else 1)
    splits = 1
    if shape.rows > tuning.one_split and matrix:
        splits = max(min(chip.cores // threadgroups, shape.rows // tuning.split_rows), 1)
    elif shape.rows > tuning.one_split:
        while (
            threadgroups * splits < chip.cores * tuning.groups
            and shape.rows >= 2 * splits * tuning.split_rows
        ):
            splits *= 2
    unroll = min(_MATRIX_VALUES // shape.head_dim, 4) if matrix else tuning.unroll
    tile = AttentionTile(queries, lanes, splits, tuning.simdgroups, unroll, matrix)
    # Metal's limit everywhere, so that the emulator runs every tile.
    room = THREADGROUP_BYTES["metal"] * tile.simdgroups // tile.threadgroup_bytes(shape)
    return replace(tile, simdgroups=min(tile.simdgroups, room))


def _lanes(head_dim: int, itemsize: int) -> int:
    """Lanes that share one row of a head: the widest aligned loads with a small share each."""
    if head_dim % 16 or head_dim > 256:
        raise ValueError(
            f"[attention_decode] head_dim must be a multiple of 16 up to 256, found {head_dim}"
        )
    choices = []
    for lanes in (2, 4, 8, 16, 32):
        share, remainder = divmod(head_dim, lanes)
        load = min((share & -share) * itemsize, 16)
        if not remainder and load >= 4:
            choices.append((share > _LANE_SHARE, -load, share, lanes))
    return min(choices)[-1]


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)
