"""GPTQ in MLX's affine layout (Frantar et al. 2022, arXiv:2210.17323).

mlx_lm.quant.gptq packs 2, 4 and 8 bit only, the same for every matrix.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from husky_mlx.recipe import QuantSpec
from husky_mlx.rounding import Packed, pack
from husky_mlx.rounding_range import best_range, encode

# The part of the mean of the Hessian's diagonal that is added to it, as published.
DAMPING = 0.01
# Rows that are rounded together: a group of them stays in a core's cache.
_ROWS = 2048


def gptq(matrix: np.ndarray, hessian: np.ndarray, spec: QuantSpec, dtype: mx.Dtype) -> Packed:
    """Round float32 (rows, columns) column by column, each error made up for by later columns.

    ``hessian``: (columns, columns), the mean of x xT over the inputs of the matrix. A group's scale
    and bias are chosen when the first of its columns is due, and stay.
    """
    factor = _inverse_factor(hessian)
    parts = [
        _round_rows(matrix[start : start + _ROWS], factor, spec, dtype)
        for start in range(0, len(matrix), _ROWS)
    ]
    codes, scales, biases = (np.concatenate(each) for each in zip(*parts, strict=True))
    return pack(codes, scales, biases, spec.bits, dtype)


def _round_rows(
    rows: np.ndarray, factor: np.ndarray, spec: QuantSpec, dtype: mx.Dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (rows, columns), scales and biases (rows, groups); rows do not know of each other."""
    weights = np.array(rows.T, np.float32, order="C")  # (columns, rows): a column is contiguous
    columns, group = len(weights), spec.group_size
    codes = np.empty(weights.shape, np.uint8)
    scales, biases = (np.empty((columns // group, len(rows)), np.float32) for _ in range(2))
    importance = 1 / np.square(np.diag(factor))
    for number, start in enumerate(range(0, columns, group)):
        end = start + group
        block, corner = weights[start:end], factor[start:end, start:end]
        scale, bias = best_range(block, importance[start:end], spec.bits, dtype)
        errors = np.empty_like(block)
        for k in range(group):
            code = encode(block[k], scale, bias, spec.bits)
            codes[start + k] = code
            errors[k] = (block[k] - (code * scale + bias)) / corner[k, k]
            block[k + 1 :] -= np.outer(corner[k, k + 1 :], errors[k])
        weights[end:] -= factor[start:end, end:].T @ errors
        scales[number], biases[number] = scale, bias
    return codes.T, scales.T, biases.T


def _inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """The upper Cholesky factor of the damped Hessian's inverse, float32."""
    damped = hessian.astype(np.float64)
    diagonal = np.diag(damped)
    # An input that never came has no say: its weights are rounded alone.
    mean = diagonal.mean() or 1.0
    damped[np.diag_indices_from(damped)] += DAMPING * mean
    return np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
