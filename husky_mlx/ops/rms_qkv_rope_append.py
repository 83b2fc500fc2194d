"""Attention's input edge: norm, the three projections, rotary embedding, append to the KV cache."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.ops.rotate import Rotation
from husky_mlx.pack import Projections


def rms_qkv_rope_append(
    x: mx.array,
    norm: mx.array,
    eps: float,
    qkv: Projections,
    rotate: Rotation,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    slot: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """(B, 1, hidden) -> queries (B, heads, 1, head_dim), and the KV buffers with one more row.

    ``keys`` and ``values``: (B, kv_heads, capacity, head_dim). ``positions``: (B,) int32 for the
    rotation. ``slot``: (1,) int32, the row to write.
    """
    head_dim = keys.shape[-1]
    q, k, v = (
        part.reshape(*part.shape[:2], -1, head_dim).swapaxes(1, 2)
        for part in qkv(mx.fast.rms_norm(x, norm, eps))
    )
    keys = mx.slice_update(keys, rotate(k, offset=positions), slot, axes=(2,))
    values = mx.slice_update(values, v, slot, axes=(2,))
    return rotate(q, offset=positions), keys, values
