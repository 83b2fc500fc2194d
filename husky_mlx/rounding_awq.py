"""AWQ: scales that spare the loud inputs, and clipped ranges (Lin et al. 2023, arXiv:2306.00978).

mlx_lm.quant.awq compares the outputs of whole blocks, each run again for each of 20 scales, which
takes hours on MLX's CPU build. Here the loss is that of the matrices' own outputs, which follows
from the statistics of their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from husky_mlx.calibrate import InputStatistics, weighted_error
from husky_mlx.recipe import QuantSpec
from husky_mlx.rounding import dequantize, nearest

# Both grids, the shrinking to one half and the matrices that keep their range are mlx-lm's.
_GRID = 20
_LEAST_RANGE = 0.5
_NEVER_CLIPPED = ("q_proj", "k_proj")
# What takes the inverse scales -> the matrices whose inputs it makes, in the order of scaling.
_SCALED = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
)


def awq_layer(
    prefix: str,
    weights: Mapping[str, Any],
    statistics: Mapping[str, InputStatistics],
    allocation: Mapping[str, QuantSpec | None],
    dtype: mx.Dtype,
) -> dict[str, np.ndarray]:
    """The parameters of the layer ``prefix`` that AWQ changes, float32 by name, ready to round.

    The changed layer computes what it did, but for the clipping. Inputs are scaled only where all
    the matrices that take them are rounded.
    """
    changed: dict[str, np.ndarray] = {}
    seen = dict(statistics)

    def weight(path: str) -> np.ndarray:
        name = f"{path}.weight"
        return changed[name] if name in changed else np.asarray(weights[name])

    for source, members in _SCALED:
        source, paths = f"{prefix}.{source}", [f"{prefix}.{member}" for member in members]
        specs = {path: spec for path in paths if (spec := allocation.get(path)) is not None}
        feeds_alone = not source.endswith("_proj") or allocation.get(source) is not None
        if len(specs) < len(paths) or not feeds_alone:
            continue
        scales = _best_scales({path: weight(path) for path in paths}, specs, seen[paths[0]], dtype)
        for path in paths:
            changed[f"{path}.weight"] = weight(path) * scales
            seen[path] = _scaled(seen[path], scales)
        inverse = scales[:, None] if source.endswith("_proj") else scales
        changed[f"{source}.weight"] = weight(source) / inverse
        if f"{source}.bias" in weights:
            changed[f"{source}.bias"] = np.asarray(weights[f"{source}.bias"]) / scales
    for path, found in seen.items():
        spec = allocation.get(path)
        if spec is not None and not path.endswith(_NEVER_CLIPPED):
            changed[f"{path}.weight"] = clip(weight(path), found.hessian, spec, dtype)
    return changed


def clip(matrix: np.ndarray, hessian: np.ndarray, spec: QuantSpec, dtype: mx.Dtype) -> np.ndarray:
    """(rows, columns) with each group cut to the range that rounds with the least error.

    The error is that of the group's share of the output: e H eT over the group's own columns.
    """
    rows, columns = matrix.shape
    groups = (rows, columns // spec.group_size, spec.group_size)
    blocks = np.stack(
        [hessian[i : i + groups[2], i : i + groups[2]] for i in range(0, columns, groups[2])]
    )
    grouped = matrix.reshape(groups)
    widest = np.abs(grouped).max(axis=-1, keepdims=True)
    best_error = np.full((*groups[:2], 1), np.inf, np.float32)
    best = grouped
    for step in range(int(_GRID * (1 - _LEAST_RANGE))):
        limit = widest * np.float32(1 - step / _GRID)
        cut = np.clip(grouped, -limit, limit)
        rounded = dequantize(nearest(cut.reshape(matrix.shape), spec, dtype), spec)
        error = (rounded.reshape(groups) - grouped).swapaxes(0, 1)  # (groups, rows, group size)
        loss = ((error @ blocks) * error).sum(axis=-1, keepdims=True).swapaxes(0, 1)
        better = loss < best_error
        best_error, best = np.where(better, loss, best_error), np.where(better, cut, best)
    return best.reshape(matrix.shape)


def _best_scales(
    matrices: Mapping[str, np.ndarray],
    specs: Mapping[str, QuantSpec],
    found: InputStatistics,
    dtype: mx.Dtype,
) -> np.ndarray:
    """(columns,): the power of the inputs' magnitude that rounds with the least error; 1 is one."""
    best, best_loss = np.ones_like(found.magnitude), np.inf
    for step in range(_GRID):
        scales = np.maximum(found.magnitude ** np.float32(step / _GRID), np.float32(1e-4))
        scales = scales / np.sqrt(scales.max() * scales.min())
        loss = 0.0
        for path, matrix in matrices.items():
            rounded = dequantize(nearest(matrix * scales, specs[path], dtype), specs[path]) / scales
            loss += weighted_error(matrix, rounded, found.hessian)
        if loss < best_loss:
            best, best_loss = scales, loss
    return best


def _scaled(found: InputStatistics, scales: np.ndarray) -> InputStatistics:
    hessian = found.hessian / np.outer(scales, scales)
    return InputStatistics(hessian, found.magnitude / scales, found.tokens)
