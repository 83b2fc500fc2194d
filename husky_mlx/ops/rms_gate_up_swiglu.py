"""The MLP's input edge: norm, gate and up projection, SwiGLU."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.pack import Projections


def rms_gate_up_swiglu(x: mx.array, norm: mx.array, eps: float, gate_up: Projections) -> mx.array:
    """(B, 1, hidden) -> silu(gate) * up, (B, 1, intermediate)."""
    gate, up = gate_up(mx.fast.rms_norm(x, norm, eps))
    return gate * mx.sigmoid(gate) * up
