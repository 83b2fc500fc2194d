"""What calibration text says about a model: the statistics of each matrix's inputs, and how much
the output diverges when a matrix is rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from husky_mlx.calibrate_forward import FloatLlama


@dataclass
class InputStatistics:
    """Of the inputs x of a matrix: ``hessian`` the mean of x xT, (columns, columns), and
    ``magnitude`` the mean of abs(x), (columns,); both float32."""

    hessian: np.ndarray
    magnitude: np.ndarray
    tokens: int = 0

    @classmethod
    def empty(cls, columns: int) -> InputStatistics:
        return cls(np.zeros((columns, columns), np.float32), np.zeros(columns, np.float32))

    def add(self, x: Any) -> None:
        """Take in more inputs, (tokens, columns)."""
        kept = self.tokens / (self.tokens + len(x))
        share = 1 / (self.tokens + len(x))
        self.hessian = kept * self.hessian + np.asarray(x.T @ x) * share
        self.magnitude = kept * self.magnitude + np.asarray(abs(x).sum(axis=0)) * share
        self.tokens += len(x)


Statistics = dict[str, InputStatistics]


def layer_statistics(llama: FloatLlama, index: int, x: Any) -> tuple[Any, Statistics]:
    """(sequences, length, hidden) before a layer -> after it, and path -> statistics of its inputs.

    Projections that share an input share the object.
    """
    found: Statistics = {}

    def observe(paths: tuple[str, ...], rows: Any) -> None:
        if paths[0] not in found:
            found.update(dict.fromkeys(paths, InputStatistics.empty(rows.shape[1])))
        found[paths[0]].add(rows)

    return llama.layer(index, x, observe), found


def head_statistics(llama: FloatLlama, x: Any) -> Statistics:
    """The same for the matrix that makes the logits, from (sequences, length, hidden) after the
    last layer."""
    found = InputStatistics.empty(x.shape[-1])
    found.add(llama.final_norm(x).reshape(-1, x.shape[-1]))
    return {llama.head: found}


def weighted_error(matrix: np.ndarray, rounded: np.ndarray, hessian: np.ndarray) -> float:
    """The mean squared change of a matrix's outputs, summed over its rows."""
    error = rounded - matrix
    return float(np.einsum("ij,ij->", error @ hessian, error, dtype=np.float64))
