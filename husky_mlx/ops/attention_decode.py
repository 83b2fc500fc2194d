"""One query a row against the live rows of a fixed-capacity cache."""

from __future__ import annotations

import mlx.core as mx


def attention_decode(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, live: mx.array
) -> mx.array:
    """(B, heads, 1, head_dim) and (B, kv_heads, capacity, head_dim) -> (B, 1, heads * head_dim).

    ``live``: bool, broadcast to (B, heads, 1, capacity), true for the rows that hold a token.
    """
    y = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=live)
    return y.swapaxes(1, 2).reshape(y.shape[0], 1, -1)
