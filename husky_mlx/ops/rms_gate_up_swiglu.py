"""The MLP's input edge: norm, gate and up projection, SwiGLU."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.matrix import Matrix
from husky_mlx.ops.gemv import Platform, float_bits, launch_gemv, normed
from husky_mlx.pack import Projections


def rms_gate_up_swiglu(x: mx.array, norm: mx.array, eps: float, gate_up: Projections) -> mx.array:
    """(B, 1, hidden) -> silu(gate) * up, (B, 1, intermediate)."""
    gate, up = gate_up(mx.fast.rms_norm(x, norm, eps))
    return gate * mx.sigmoid(gate) * up


def rms_gate_up_swiglu_kernel(
    x: mx.array, eps: float, matrix: Matrix, platform: Platform
) -> mx.array:
    """(M, hidden) -> silu(gate) * up, (M, intermediate).

    ``matrix`` has gate's rows, then up's, and the norm.
    """
    m, width = x.shape[0], matrix.rows // 2
    x, tile = normed("rms_gate_up_swiglu", x, eps, matrix, platform)
    (activated,) = launch_gemv(
        "rms_gate_up_swiglu",
        matrix,
        tile,
        -(-width // (tile.outputs // 2)),
        {"x": x},
        [((m, width), matrix.dtype)],
        {"N": width, "M": m, "HAS_BIAS": matrix.has_bias, "EPS_BITS": float_bits(eps)},
        platform,
    )
    return activated
