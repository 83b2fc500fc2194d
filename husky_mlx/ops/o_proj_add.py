"""Attention's output edge: projection and residual."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx


def o_proj_add(
    attended: mx.array, residual: mx.array, o_proj: Callable[[mx.array], mx.array]
) -> mx.array:
    """(B, 1, heads * head_dim) projected and added to the residual (B, 1, hidden)."""
    return residual + o_proj(attended)
