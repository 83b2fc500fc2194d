"""The last edge: final norm and the vocabulary projection."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx


def rms_lm_head(
    x: mx.array, norm: mx.array, eps: float, head: Callable[[mx.array], mx.array]
) -> mx.array:
    """(B, 1, hidden) -> logits (B, 1, vocabulary)."""
    return head(mx.fast.rms_norm(x, norm, eps))
