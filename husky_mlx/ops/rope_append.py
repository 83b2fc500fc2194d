"""A prompt's queries, keys and values: rotary embedding, and the append to the KV cache."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.kernels import launch
from husky_mlx.matrix import Matrix
from husky_mlx.ops.elementwise import flat
from husky_mlx.ops.gemv import Platform
from husky_mlx.ops.rms_qkv_rope_append import Heads


def rope_append_kernel(
    qkv: mx.array,
    matrix: Matrix,
    heads: Heads,
    keys: mx.array,
    values: mx.array,
    place: mx.array,
    platform: Platform,
) -> mx.array:
    """Projections (L, rows of ``matrix``) -> queries (1, heads, L, head_dim), rotated.

    ``keys`` and ``values`` (1, kv_heads, capacity, head_dim) gain L rows in place from the slot of
    ``place`` on (see ``places.py``). Who reads the buffers must take the queries as an input too.
    """
    length, head_dim = qkv.shape[0], heads.head_dim
    grid, threadgroup = flat(length * (heads.heads + 2 * heads.kv_heads) * head_dim // 8)
    (queries,) = launch(
        "rope_append",
        {
            "qkv": qkv,
            "constants": matrix.constants,
            "place": place,
            "keys": keys,
            "values": values,
        },
        [((1, heads.heads, length, head_dim), matrix.dtype)],
        {
            **matrix.template,
            "K": matrix.columns,
            "HEADS": heads.heads,
            "KV_HEADS": heads.kv_heads,
            "D": head_dim,
            "HAS_BIAS": matrix.has_bias,
            "TRADITIONAL": heads.traditional,
        },
        grid,
        threadgroup,
        platform.backend,
    )
    return queries
