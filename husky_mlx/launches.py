"""What the fused step launches, in words: kernel by kernel, with the shape of each launch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from husky_mlx.fused import FusedWeights
from husky_mlx.matrix import Matrix
from husky_mlx.ops.gemv import Platform, gemv_tile
from husky_mlx.policy import policy
from husky_mlx.tiles import AttentionShape, AttentionTile, GemvTile

NORMED = frozenset({"rms_qkv_rope_append", "rms_gate_up_swiglu"})
# The kernels with a matrix of a layer, and the matrix's name in ``FusedLayer``.
GROUP_OF_OP = {
    "rms_qkv_rope_append": "qkv",
    "o_proj_add": "o_proj",
    "rms_gate_up_swiglu": "gate_up",
    "down_add": "down_proj",
}
LONGEST = 131072  # tokens up to which splits of the context are looked for


def launch_lines(weights: FusedWeights, platform: Platform) -> list[str]:
    """A line for each kernel of a step with one row."""
    layers = len(weights.layers)
    apart = any(layer.head_norms is not None for layer in weights.layers)
    lines = [f"embed: {_format(weights.embedding)}"]
    for op, group in GROUP_OF_OP.items():
        matrices = [getattr(layer, group) for layer in weights.layers]
        one_of_each = {_shape(matrix): matrix for matrix in matrices}
        for shape, count in Counter(map(_shape, matrices)).items():
            matrix = one_of_each[shape]
            tile = gemv_tile(op, 1, matrix, platform, norm=op in NORMED)
            norm = "" if op not in NORMED or tile.norm else ", norm before it by itself"
            name = "rms_qkv" if apart and group == "qkv" else op
            lines.append(
                f"{name}: {count} of {layers} layers, {_format(matrix)}, {tile.outputs} rows a "
                f"threadgroup of {tile.simdgroups} simdgroups{_numbers(tile)}{norm}"
            )
        if op == "rms_qkv_rope_append":
            if apart:
                lines.append("norm_rope_append: each head of q and k, then rotated and appended")
            lines.append(f"attention_decode: {_splits(weights, platform)}")
    tile = gemv_tile("rms_lm_head", 1, weights.head, platform, norm=True)
    lines.append(
        f"rms_lm_head: {_format(weights.head)}, {tile.outputs} rows a threadgroup{_numbers(tile)}"
    )
    return lines


def _numbers(tile: GemvTile) -> str:
    return ", in whole numbers" if tile.integer else ""


def _shape(matrix: Matrix) -> tuple[object, ...]:
    return matrix.bits, matrix.group_size, matrix.rows, matrix.columns, matrix.dtype


def _format(matrix: Matrix) -> str:
    dtype = str(matrix.dtype).removeprefix("mlx.core.")
    return dtype if matrix.bits == 16 else f"{matrix.bits} bit in groups of {matrix.group_size}"


def _splits(weights: FusedWeights, platform: Platform) -> str:
    """From which capacity on how many threadgroups share a head's context, and who merges them."""
    heads = weights.heads
    size = weights.embedding.dtype.size
    found: list[tuple[int, int]] = []
    capacity = 256
    while capacity <= LONGEST:
        shape = AttentionShape(
            1, heads.heads, heads.kv_heads, heads.head_dim, capacity, itemsize=size
        )
        tile = policy("attention_decode", shape, 16, platform.chip)
        assert isinstance(tile, AttentionTile)
        found.append((capacity, tile.splits))
        capacity *= 2
    changes = [found[0], *(b for a, b in pairwise(found) if a[1] != b[1])]
    merged = "" if platform.backend == "cuda" else " and attention_combine"
    parts = [
        "whole" if splits == 1 else f"in {splits} parts{merged} from {rows} rows on"
        for rows, splits in changes
    ]
    return "context " + ", ".join(parts)
