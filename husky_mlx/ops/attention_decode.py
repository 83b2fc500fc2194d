"""One query a row against the live rows of a fixed-capacity cache."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.kernels import TAKE_CUDA_TEXT, ArraySpec, launch
from husky_mlx.ops.gemv import Platform
from husky_mlx.policy import chained_attention, policy
from husky_mlx.tiles import AttentionShape

# MLX keeps arrays of 8 bytes and less in memory that CUDA shares with the CPU.
_FEWEST_TICKETS, _NO_PARTIALS = 16, 8


def ticket_count(rows: int, heads: int) -> int:
    """Tickets that are enough for attention of so many rows, however it is cut."""
    return max(rows * heads, _FEWEST_TICKETS)


def attention_decode(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, live: mx.array
) -> mx.array:
    """(B, heads, 1, head_dim) and (B, kv_heads, capacity, head_dim) -> (B, 1, heads * head_dim).

    ``live``: bool, broadcast to (B, heads, 1, capacity), true for the rows that hold a token.
    """
    y = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=live)
    return y.swapaxes(1, 2).reshape(y.shape[0], 1, -1)


def attention_decode_kernel(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    place: mx.array,
    batched: bool,
    tickets: mx.array | None,
    platform: Platform,
) -> mx.array:
    """(M, heads, head_dim) against the live rows of the cache -> (M, heads * head_dim).

    ``place``: see ``places.py``; row 0 sees its live rows, later rows of a sequence one more each.
    ``batched``: each row is a sequence. ``tickets``: on CUDA, where threadgroups merge their splits
    themselves, ``ticket_count`` zeros of uint32 at least, which no other launch counts in at the
    same time; zeros again afterwards. Elsewhere not looked at. Raises ValueError without them.
    """
    m, heads, head_dim = queries.shape
    shape = AttentionShape(
        m, heads, keys.shape[1], head_dim, keys.shape[2], batched, queries.dtype.size
    )
    tile = (
        chained_attention(shape, platform.chip)
        if platform.chained
        else policy("attention_decode", shape, 16, platform.chip)
    )
    whole = tile.splits == 1  # type: ignore[union-attr]
    inputs = {"queries": queries, "keys": keys, "values": values, "place": place}
    result: ArraySpec = (m, heads * head_dim), queries.dtype
    partials: ArraySpec = (_NO_PARTIALS if whole else tile.partials(shape),), mx.float32  # type: ignore[union-attr]
    merges = platform.backend in TAKE_CUDA_TEXT
    if merges and tickets is not None:
        inputs["tickets"] = tickets
    outputs = [result, partials] if merges else [result if whole else partials]
    attended, *_ = launch(
        "attention_decode",
        inputs,
        outputs,
        {
            "T": queries.dtype,
            "M": m,
            "HEADS": heads,
            "KV_HEADS": shape.kv_heads,
            "D": head_dim,
            "BATCHED": batched,
            **tile.template(),
        },
        tile.grid(shape),  # type: ignore[arg-type]
        tile.threadgroup,
        platform.backend,
    )
    if not (whole or merges):
        combine = policy("attention_combine", shape, 16, platform.chip)
        (attended,) = launch(
            "attention_combine",
            {"partials": attended},
            [result],
            {"T": queries.dtype, "VECTORS": m * heads, "D": head_dim, **combine.template()},
            combine.grid(shape),  # type: ignore[arg-type]
            combine.threadgroup,
            platform.backend,
        )
    return attended
