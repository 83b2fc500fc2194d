"""The MLP's output edge: down projection and residual."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.matrix import Matrix
from husky_mlx.ops.gemv import Platform, gemv_tile, launch_gemv
from husky_mlx.pack import Projections


def down_add(activated: mx.array, residual: mx.array, down_proj: Projections) -> mx.array:
    """(B, 1, intermediate) projected and added to the residual (B, 1, hidden)."""
    (y,) = down_proj(activated)
    return residual + y


def down_add_kernel(
    activated: mx.array, residual: mx.array, matrix: Matrix, platform: Platform
) -> mx.array:
    """(M, K) projected and added to the residual (M, N)."""
    m = activated.shape[0]
    tile = gemv_tile("down_add", m, matrix, platform)
    (y,) = launch_gemv(
        "down_add",
        matrix,
        tile,
        -(-matrix.rows // tile.outputs),
        {"activated": activated, "residual": residual},
        [((m, matrix.rows), matrix.dtype)],
        {"N": matrix.rows, "M": m, "HAS_BIAS": matrix.has_bias},
        platform,
    )
    return y
