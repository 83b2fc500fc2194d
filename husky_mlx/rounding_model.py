"""A whole model rounded, one layer after another, by one of three methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import mlx.core as mx
import numpy as np

from husky_mlx.calibrate import Statistics, head_statistics, layer_statistics
from husky_mlx.calibrate_forward import EMBEDDING, FloatLlama
from husky_mlx.recipe import QuantSpec
from husky_mlx.rounding import Packed, as_stored, nearest
from husky_mlx.rounding_awq import awq_layer, clip
from husky_mlx.rounding_gptq import gptq

METHODS: Mapping[str, str] = {
    "rtn": "round to the nearest, as mlx-lm converts",
    "gptq": "later columns make up for the errors of earlier ones",
    "awq": "inputs scaled and ranges clipped for the least error",
}


def round_model(
    llama: FloatLlama,
    allocation: Mapping[str, QuantSpec | None],
    method: str,
    tokens: np.ndarray | None,
    dtype: mx.Dtype,
) -> Iterator[dict[str, mx.array]]:
    """The parameters that replace the source's, under mlx-lm's names: those of the embedding and
    the head in the first and last part, those of a layer in each between.

    ``allocation``: path -> spec; matrices with None or without an entry stay as they are.
    ``tokens``: (sequences, length) of calibration text, needed by "gptq" and "awq".
    ``dtype``: of scales, biases and whatever else changes. The statistics are those of the
    unquantized model, so parts do not depend on each other. Raises ValueError for another method,
    or one that lacks its text.
    """
    if method not in METHODS:
        raise ValueError(f"unknown rounding {method!r}, expected one of {', '.join(METHODS)}")
    measures = method != "rtn"
    if measures and tokens is None:
        raise ValueError(f"the rounding {method!r} needs calibration text")
    x = llama.embed(tokens) if measures and tokens is not None else None

    def stored(path: str) -> np.ndarray:
        return np.asarray(llama.weights[f"{path}.weight"])

    def parameters(path: str, matrix: np.ndarray, found: Statistics) -> dict[str, mx.array]:
        spec = allocation.get(path)
        if spec is None:
            return {}
        # mlx_lm rounds the embedding plainly too: its rows are looked up, nothing multiplies them.
        if method == "gptq" and path in found:
            packed = gptq(matrix, found[path].hessian, spec, dtype)
        else:
            packed = nearest(matrix, spec, dtype)
        return _named(path, packed)

    if llama.head != EMBEDDING:
        yield parameters(EMBEDDING, stored(EMBEDDING), {})
    for index in range(llama.config.num_hidden_layers):
        prefix = f"model.layers.{index}"
        found: Statistics = {}
        if measures:
            x, found = layer_statistics(llama, index, x)
        changed = {}
        if method == "awq":
            changed = awq_layer(prefix, llama.weights, found, allocation, dtype)
        part = {
            name: mx.array(as_stored(value, dtype)).astype(dtype) for name, value in changed.items()
        }
        for path in [path for path in allocation if path.startswith(f"{prefix}.")]:
            name = f"{path}.weight"
            part |= parameters(path, changed[name] if name in changed else stored(path), found)
        yield part
    found = head_statistics(llama, x) if measures else {}
    matrix, spec = stored(llama.head), allocation.get(llama.head)
    if method == "awq" and spec is not None:
        matrix = clip(matrix, found[llama.head].hessian, spec, dtype)
    yield parameters(llama.head, matrix, found)


def _named(path: str, packed: Packed) -> dict[str, mx.array]:
    parts = {"weight": packed.weight, "scales": packed.scales, "biases": packed.biases}
    return {f"{path}.{name}": value for name, value in parts.items() if value is not None}
