"""How far one model's predictions are from another's: KL divergence, agreement and perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from husky_mlx.calibrate_forward import FloatLlama

# Positions whose logits are in memory together.
_POSITIONS = 128


@dataclass
class Divergence:
    """Totals over ``tokens`` positions: ``divergence`` KL(reference || model) and ``surprise``
    -log p(next token), both in nats; ``agreeing``: where both rank the same token first."""

    tokens: int = 0
    divergence: float = 0.0
    surprise: float = 0.0
    agreeing: int = 0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(
            self.tokens + other.tokens,
            self.divergence + other.divergence,
            self.surprise + other.surprise,
            self.agreeing + other.agreeing,
        )

    @property
    def kl(self) -> float:
        """Nats a token."""
        return self.divergence / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.tokens)

    @property
    def agreement(self) -> float:
        """The part of the positions, 0 to 1."""
        return self.agreeing / self.tokens


def compare(reference: Any, logits: Any, targets: np.ndarray, xp: Any = np) -> Divergence:
    """Logits of two models (positions, vocabulary) and the tokens that came next (positions,)."""
    p, q = _log_probabilities(reference, xp), _log_probabilities(logits, xp)
    divergence = _divergence(p, q, xp).sum(axis=-1)
    following = xp.take_along_axis(q, xp.array(targets)[:, None], axis=-1)
    same = reference.argmax(axis=-1) == logits.argmax(axis=-1)
    return Divergence(
        tokens=len(targets),
        divergence=float(np.asarray(divergence).sum(dtype=np.float64)),
        surprise=-float(np.asarray(following).sum(dtype=np.float64)),
        agreeing=int(np.asarray(same).sum()),
    )


def final_states(llama: FloatLlama, tokens: np.ndarray) -> Any:
    """Token ids (sequences, length) -> what the head multiplies where a next token is known,
    (sequences * (length - 1), hidden)."""
    states = llama.hidden(tokens)[:, :-1]
    return states.reshape(-1, states.shape[-1])


def compare_states(
    reference: Callable[[slice], Any], llama: FloatLlama, states: Any, tokens: np.ndarray
) -> Divergence:
    """The same for what ``final_states`` gave, a few positions at a time.

    ``reference``: those positions -> the other model's logits.
    """
    targets = tokens[:, 1:].reshape(-1)
    total = Divergence()
    for start in range(0, len(targets), _POSITIONS):
        rows = slice(start, start + _POSITIONS)
        total += compare(reference(rows), llama.logits(states[rows]), targets[rows], llama.xp)
    return total


def _log_probabilities(logits: Any, xp: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))


def _divergence(p: Any, q: Any, xp: Any) -> Any:
    """Terms whose sum is KL: exp(p) (p - q), and exp(q) - exp(p), which adds up to 0.

    So no term is negative, and an error of p or q counts only as far as they differ.
    """
    difference, likely = q - p, xp.exp(p)
    near = likely * xp.expm1(xp.minimum(difference, 1.0))
    return xp.where(difference > 1, xp.exp(q) - likely, near) - likely * difference
