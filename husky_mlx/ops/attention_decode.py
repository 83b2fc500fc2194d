"""One query a row against the live rows of a fixed-capacity cache."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.kernels import launch
from husky_mlx.ops.gemv import Platform
from husky_mlx.policy import chained_attention, policy
from husky_mlx.tiles import AttentionShape


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
    platform: Platform,
) -> mx.array:
    """(M, heads, head_dim) against the live rows of the cache -> (M, heads * head_dim).

    ``place``: see ``places.py``; row 0 sees its live rows, later rows of a sequence one more each.
    ``batched``: each row is a sequence.
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
    (attended,) = launch(
        "attention_decode",
        {
            "queries": queries,
            "keys": keys,
            "values": values,
            "place": place,
        },
        [
            ((m, heads * head_dim), queries.dtype)
            if whole
            else ((tile.partials(shape),), mx.float32)
        ],  # type: ignore[union-attr]
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
    if not whole:
        combine = policy("attention_combine", shape, 16, platform.chip)
        (attended,) = launch(
            "attention_combine",
            {"partials": attended},
            [((m, heads * head_dim), queries.dtype)],
            {"T": queries.dtype, "VECTORS": m * heads, "D": head_dim, **combine.template()},
            combine.grid(shape),  # type: ignore[arg-type]
            combine.threadgroup,
            platform.backend,
        )
    return attended
