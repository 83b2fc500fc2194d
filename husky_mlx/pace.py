"""How long one-token steps take where they follow one another as in a reply."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from husky_mlx.freeze import DecodeStep

WARM, STEPS = 4, 24
ROWS = WARM + STEPS  # that a cache gains


def microseconds(step: DecodeStep, caches: Sequence[Any], token: mx.array) -> float:
    """Of a step after ``token`` (1, 1), one encoded ahead of the one that is waited for.

    The caches gain ``ROWS`` rows.
    """
    started = 0.0
    ahead, _ = step.greedy(token, caches)
    mx.async_eval(ahead)
    for number in range(WARM + STEPS - 1):
        if number == WARM:
            started = time.perf_counter()
        token, (ahead, _) = ahead, step.greedy(ahead, caches)
        mx.async_eval(ahead)
        mx.eval(token)
    mx.eval(ahead)
    return (time.perf_counter() - started) / STEPS * 1e6
