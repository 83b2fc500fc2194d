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


def ring(size: int, sinks: int, calls: list[int]) -> Visible:
    """A cache of ``size`` tokens that drops the oldest but never the first ``sinks``.

    ``calls``: the lengths of the first calls; all later ones are of one token. As mlx-lm documents
    it, a call of several tokens shows each of them the last ``size``.
    """

    def visible(length: int) -> np.ndarray:
        mask = np.zeros((length, length), bool)
        held: list[int] = []
        start = 0
        for count in [*calls, *[1] * (length - sum(calls))]:
            surplus = len(held) + 1 - size
            if surplus > 0:
                del held[sinks : sinks + surplus]
            if count == 1:
                mask[start, [*held, start]] = True
            for query in range(start, start + count) if count > 1 else ():
                mask[query, [*held, *range(start, query + 1)][-size:]] = True
            held += range(start, start + count)
            start += count
        return mask

    return visible


def check(
    weights: dict[str, np.ndarray],
    config: dict[str, Any],
    prompt: list[int],
    reply: list[int],
    visible: Visible = causal,
) -> list[int]:
    """The most likely token at each position of ``reply``, with the ones before it given.

    Equal to ``reply`` exactly where that is REF's own greedy reply, for the price of one forward.
    """
    tokens = prompt + reply[:-1]
    logits = numpy_llama.logits(config, weights, tokens, visible=visible(len(tokens)))
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


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
        tokens += check(weights, config, tokens, [-1], visible)
    return tokens[len(prompt) :]
