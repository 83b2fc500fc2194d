"""A checkpoint whose matrices are rounded with calibration text, as a stream."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from husky_mlx.calibrate_forward import EMBEDDING, FloatLlama
from husky_mlx.requantize import (
    Allocation,
    Change,
    dequantize,
    kept_or,
    outline_of,
    quantized_config,
    relative,
    requantize,
    squares_of,
    tensors_of,
)
from husky_mlx.rounding_model import round_model
from husky_mlx.stream import Stream, in_model_order


def round_stream(
    stream: Stream,
    allocation: Allocation,
    llama: FloatLlama,
    method: str,
    tokens: np.ndarray,
    dtype: mx.Dtype,
    *,
    report: Callable[[Change], None] = lambda change: None,
) -> Stream:
    """As ``requantize``, but rounding by "gptq" or "awq" on ``tokens`` (sequences, length).

    ``llama`` has the same weights in float32. The layers must be taken in their order; what is
    rounded of one is in memory together.
    """
    tensors = {tensor.path: tensor for tensor in tensors_of(stream)}
    specs = kept_or(tensors, allocation)
    changed = {
        path: spec
        for path, spec in specs.items()
        if spec is not None and spec != tensors[path].spec
    }
    parts = round_model(llama, changed, method, tokens, dtype)
    kept = requantize(
        stream,
        {path: tensors[path].spec if path in changed else specs[path] for path in tensors},
        dtype,
    )
    first_layer = 0 if llama.head == EMBEDDING else 1
    last = first_layer + llama.config.num_hidden_layers
    pulled = 0
    done: dict[str, mx.array] = {}

    def read(name: str) -> dict[str, mx.array]:
        nonlocal pulled
        path = name.rpartition(".")[0]
        if name.startswith("model.layers."):
            part = first_layer + int(name.split(".")[2])
        else:
            part = 0 if path == EMBEDDING and first_layer else last
        while pulled <= part:
            done.update(next(parts))
            pulled += 1
        if name not in done:
            return {name: kept.take(name)}
        if path in changed and name.endswith(".weight"):
            names = [f"{path}.{each}" for each in ("weight", "scales", "biases")]
            values = [done[each] for each in names if each in done]
            report(Change(tensors[path], specs[path], sum(v.nbytes for v in values), error(path)))
        return {name: done.pop(name)}

    def error(path: str) -> float | None:
        if method == "awq":
            return None  # its matrices are those of other inputs
        source = mx.array(llama.weights[f"{path}.weight"])
        values = [done[f"{path}.{each}"] for each in ("weight", "scales", "biases")]
        return relative(squares_of(source, dequantize(values, specs[path])))

    dtypes: dict[str, mx.Dtype | None] = dict.fromkeys(tensors, dtype)
    outline = outline_of(stream, tensors, specs, dtypes, dtype)
    config = quantized_config(kept.config, specs)
    return Stream(config, in_model_order(stream.args, outline), stream.notes, read)
