"""The MLP's output edge: down projection and residual."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx


def down_add(
    activated: mx.array, residual: mx.array, down_proj: Callable[[mx.array], mx.array]
) -> mx.array:
    """(B, 1, intermediate) projected and added to the residual (B, 1, hidden)."""
    return residual + down_proj(activated)
