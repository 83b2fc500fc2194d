"""Rotary embedding of projected queries and keys, and the append to the KV cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from husky_mlx.kernels import launch
from husky_mlx.matrix import Heads, Matrix
from husky_mlx.ops.elementwise import flat
from husky_mlx.ops.gemv import Platform, float_bits


def rope_append_kernel(
    qkv: mx.array,
    matrix: Matrix,
    heads: Heads,
    keys: mx.array,
    values: mx.array,
    place: mx.array,
    platform: Platform,
) -> mx.array:
    """Projections (L, rows of ``matrix``) -> queries (L, heads, head_dim), rotated.

    ``keys`` and ``values`` (1, kv_heads, capacity, head_dim) gain L rows in place from the slot of
    ``place`` on (see ``places.py``). Who reads the buffers must take the queries as an input too.
    """
    length = qkv.shape[0]
    (queries,) = launch(
        "rope_append",
        {
            "qkv": qkv,
            "constants": matrix.constants,
            "place": place,
            "keys": keys,
            "values": values,
        },
        [((length, heads.heads, heads.head_dim), matrix.dtype)],
        _template(matrix, heads),
        *flat(length * (heads.heads + 2 * heads.kv_heads) * heads.head_dim // 8),
        platform.backend,
    )
    return queries


def norm_rope_append_kernel(
    qkv: mx.array,
    matrix: Matrix,
    heads: Heads,
    head_norms: tuple[mx.array, mx.array],
    eps: float,
    keys: mx.array,
    values: mx.array,
    place: mx.array,
    platform: Platform,
    *,
    batched: bool = False,
) -> mx.array:
    """The same with an RMS norm of each head of q and of k first, by ``head_norms`` (head_dim,).

    ``batched``: a row is a sequence's, with its own position, and all go to the slot of ``place``.
    """
    length = qkv.shape[0]
    q_norm, k_norm = head_norms
    (queries,) = launch(
        "norm_rope_append",
        {
            "qkv": qkv,
            "constants": matrix.constants,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "place": place,
            "keys": keys,
            "values": values,
        },
        [((length, heads.heads, heads.head_dim), matrix.dtype)],
        {
            **_template(matrix, heads),
            "EPS_BITS": float_bits(eps),
            "BATCHED": batched,
        },
        *flat(length * (heads.heads + 2 * heads.kv_heads) * 32),
        platform.backend,
    )
    return queries


def _template(matrix: Matrix, heads: Heads) -> dict[str, Any]:
    return {**matrix.template, "K": matrix.columns, **heads_template(matrix, heads)}


def heads_template(matrix: Matrix, heads: Heads) -> dict[str, Any]:
    """What a kernel's template says of the heads that the rows of ``matrix`` make."""
    return {
        "HEADS": heads.heads,
        "KV_HEADS": heads.kv_heads,
        "D": heads.head_dim,
        "HAS_BIAS": matrix.has_bias,
        "TRADITIONAL": heads.traditional,
        "MAGNITUDE_BITS": float_bits(heads.magnitude),
    }
