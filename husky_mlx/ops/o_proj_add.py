"""Attention's output edge: projection and residual."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.matrix import Matrix
from husky_mlx.ops.gemv import Platform, gemv_tile, launch_gemv
from husky_mlx.pack import Projections


def o_proj_add(attended: mx.array, residual: mx.array, o_proj: Projections) -> mx.array:
    """(B, 1, heads * head_dim) projected and added to the residual (B, 1, hidden)."""
    (y,) = o_proj(attended)
    return residual + y


def o_proj_add_kernel(
    attended: mx.array, residual: mx.array, matrix: Matrix, platform: Platform
) -> mx.array:
    """(M, K) projected and added to the residual (M, N)."""
    m = attended.shape[0]
    tile = gemv_tile("o_proj_add", m, matrix, platform)
    (y,) = launch_gemv(
        "o_proj_add",
        matrix,
        tile,
        -(-matrix.rows // tile.outputs),
        {"attended": attended, "residual": residual},
        [((m, matrix.rows), matrix.dtype)],
        {"N": matrix.rows, "M": m, "HAS_BIAS": matrix.has_bias},
        platform,
    )
    return y
