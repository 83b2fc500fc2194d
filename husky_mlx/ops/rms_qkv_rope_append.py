"""Attention's input edge: norm, the three projections, rotary embedding, append to the KV cache."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.matrix import Heads, Matrix
from husky_mlx.ops.gemv import Platform, float_bits, launch_gemv, normed
from husky_mlx.ops.rope_append import heads_template, norm_rope_append_kernel
from husky_mlx.ops.rotate import Rotation
from husky_mlx.pack import Projections


def rms_qkv_rope_append(
    x: mx.array,
    norm: mx.array,
    eps: float,
    qkv: Projections,
    head_norms: tuple[mx.array, mx.array] | None,
    rotate: Rotation,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    slot: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """(B, 1, hidden) -> queries (B, heads, 1, head_dim), and the KV buffers with one more row.

    ``keys`` and ``values``: (B, kv_heads, capacity, head_dim). ``head_norms``: weights (head_dim,)
    of RMS norms over each head of q and of k, before the rotation. ``positions``: (B,) int32, of
    the rotation. ``slot``: (1,) int32, the row to write.
    """
    head_dim = keys.shape[-1]
    q, k, v = (
        part.reshape(*part.shape[:2], -1, head_dim).swapaxes(1, 2)
        for part in qkv(mx.fast.rms_norm(x, norm, eps))
    )
    if head_norms is not None:
        q, k = (mx.fast.rms_norm(x, w, eps) for x, w in zip((q, k), head_norms, strict=True))
    keys = mx.slice_update(keys, rotate(k, offset=positions), slot, axes=(2,))
    values = mx.slice_update(values, v, slot, axes=(2,))
    return rotate(q, offset=positions), keys, values


def rms_qkv_rope_append_kernel(
    x: mx.array,
    eps: float,
    matrix: Matrix,
    heads: Heads,
    head_norms: tuple[mx.array, mx.array] | None,
    keys: mx.array,
    values: mx.array,
    place: mx.array,
    batched: bool,
    platform: Platform,
) -> mx.array:
    """(M, hidden) -> queries (M, heads, head_dim); ``keys`` and ``values`` gain rows in place.

    ``matrix`` has the norm and the rotary frequencies. With ``head_norms`` these are two launches:
    a head is longer than a threadgroup's rows. ``place`` (see ``places.py``) has the slot
    of row 0: row m of a sequence goes m further; with ``batched`` each row has a sequence of its
    own and all go there. Who reads the buffers must take the queries as an input too.
    """
    m = x.shape[0]
    x, tile = normed("rms_qkv_rope_append", x, eps, matrix, platform)
    if head_norms is not None:
        (qkv,) = launch_gemv(
            "rms_qkv",
            matrix,
            tile,
            -(-matrix.rows // tile.outputs),
            {"x": x},
            [((m, matrix.rows), matrix.dtype)],
            {"N": matrix.rows, "M": m, "EPS_BITS": float_bits(eps), "HAS_BIAS": matrix.has_bias},
            platform,
        )
        return norm_rope_append_kernel(
            qkv, matrix, heads, head_norms, eps, keys, values, place, platform, batched=batched
        )
    (queries,) = launch_gemv(
        "rms_qkv_rope_append",
        matrix,
        tile,
        (heads.heads + 2 * heads.kv_heads) * -(-heads.head_dim // tile.outputs),
        {
            "x": x,
            "place": place,
            "keys": keys,
            "values": values,
        },
        [((m, heads.heads, heads.head_dim), matrix.dtype)],
        {
            "M": m,
            "EPS_BITS": float_bits(eps),
            "BATCHED": batched,
            **heads_template(matrix, heads),
        },
        platform,
    )
    return queries
