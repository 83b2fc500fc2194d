"""Token ids to the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from husky_mlx.device import activation_dtype


def embed(tokens: mx.array, embedding: Callable[[mx.array], mx.array]) -> mx.array:
    """(B, L) token ids -> (B, L, hidden) in the activation dtype."""
    x = embedding(tokens)
    return x.astype(activation_dtype(x.dtype))
