"""REF of the cases: greedy tokens in numpy float64, without a cache, under an explicit mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy_llama

# (number of tokens) -> bool (queries, keys)
Visible = Callable[[int], np.ndarray]


def causal(length: int) -> np.ndarray:
    return np.tri(length, dtype=bool)


def band(window: int) -> Visible:
    """Each token sees the last ``window`` tokens, itself among them."""
    return lambda length: causal(length) & ~np.tri(length, k=-window, dtype=bool)


def sinks_and_band(sinks: int, size: int, prompt: int) -> Visible:
    """What mlx-lm's rotating cache shows: a band of ``size`` to all but the last prompt token,
    then the first ``sinks`` tokens and the last ``size - sinks``."""

    def visible(length: int) -> np.ndarray:
        mask = band(size)(length)
        ring = band(size - sinks)(length)
        ring[:, :sinks] = causal(length)[:, :sinks]
        mask[prompt - 1 :] = ring[prompt - 1 :]
        return mask

    return visible


def greedy(
    weights: dict[str, np.ndarray],
    config: dict[str, Any],
    prompt: list[int],
    count: int,
    visible: Visible = causal,
) -> list[int]:
    """The argmax over the whole sequence again at every step."""
    tokens = list(prompt)
    for _ in range(count):
        logits = numpy_llama.logits(config, weights, tokens, visible=visible(len(tokens)))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]
