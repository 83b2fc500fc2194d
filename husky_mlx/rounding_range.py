"""Where the codes of a group should lie: the scale and bias of least weighted squared error."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from husky_mlx.rounding import as_stored

# How much of the range of a group the first guesses cover.
_SHRINKS = (1.0, 0.85, 0.7)
_REFITS = 2


def best_range(
    weights: np.ndarray, importance: np.ndarray, bits: int, dtype: mx.Dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases (rows,), as ``dtype`` stores them, for groups (columns, rows).

    Aims at the least sum over columns of ``importance`` (columns,) times the squared error. The
    first guesses are shrunken ranges; from each, codes and the line through them are fitted in
    turn, as llama.cpp does for its K-quants (``make_qkx2_quants``).
    """
    top = np.float32(2**bits - 1)
    low, high = weights.min(axis=0), weights.max(axis=0)
    best = np.full(weights.shape[1], np.inf, np.float32)
    scales, biases = np.zeros_like(best), np.zeros_like(best)
    for shrink in _SHRINKS:
        scale, bias = shrink * (high - low) / top, shrink * low
        for refit in range(_REFITS + 1):
            scale, bias = _usable(as_stored(scale, dtype)), as_stored(bias, dtype)
            codes = encode(weights, scale, bias, bits)
            error = importance @ np.square(codes * scale + bias - weights)
            better = error < best
            best = np.where(better, error, best)
            scales, biases = np.where(better, scale, scales), np.where(better, bias, biases)
            if refit < _REFITS:
                scale, bias = _line(codes, weights, importance, scale, bias)
    return scales, biases


def encode(weights: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> np.ndarray:
    """The nearest codes, as floats."""
    return np.clip(np.rint((weights - biases) / scales), 0, np.float32(2**bits - 1))


def _usable(scale: np.ndarray) -> np.ndarray:
    """A group of equal weights has no range: any scale but 0 does."""
    return np.where(scale == 0, np.float32(1), scale)


def _line(
    codes: np.ndarray,
    weights: np.ndarray,
    importance: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The weighted least squares line from codes to weights; as it was where codes are all one."""
    total = importance.sum()
    code_mean, weight_mean = importance @ codes / total, importance @ weights / total
    centred = codes - code_mean
    spread = importance @ np.square(centred)
    slope = importance @ (centred * weights) / np.where(spread == 0, 1, spread)
    sloped = np.where((spread == 0) | (slope == 0), scale, slope).astype(np.float32)
    return sloped, np.where(spread == 0, bias, weight_mean - sloped * code_mean)
