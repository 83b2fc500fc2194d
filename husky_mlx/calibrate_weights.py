"""The parameters of a model as float32, dequantized when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil

from husky_mlx.memory import memory_left
from husky_mlx.recipe import QuantSpec
from husky_mlx.requantize import dequantize, tensors_of
from husky_mlx.stream import open_stream


class PackedWeights(Mapping[str, Any]):
    """Parameters in MLX's layout as a mapping of name -> float32 array of ``xp`` (numpy or
    mlx.core); ``specs``: path -> spec of those that are quantized."""

    def __init__(
        self,
        parameters: Mapping[str, mx.array],
        specs: Mapping[str, QuantSpec | None],
        xp: Any = np,
    ):
        self._parameters = parameters
        self._specs = specs
        self._xp = xp

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        base = name.removesuffix(".weight")
        names = [name, f"{base}.scales", f"{base}.biases"]
        parts = [self._parameters[part] for part in names if part in self._parameters]
        spec = self._specs.get(base) if len(parts) > 1 else None
        packed = (mx.uint32, mx.uint8)
        floats = [part if part.dtype in packed else part.astype(mx.float32) for part in parts]
        value = dequantize(floats, spec).astype(mx.float32)
        mx.eval(value)
        return np.array(value) if self._xp is np else value

    def __contains__(self, name: object) -> bool:
        return name in self._parameters and not str(name).endswith((".scales", ".biases"))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._parameters if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class FloatWeights(Mapping[str, Any]):
    """The parameters of a folder or .gguf file, name -> float32 array of ``xp``.

    ``args``, ``tensors`` and ``nbytes`` are the checkpoint's, ``dtype`` that of its floats, or
    float16 for float32; ``vectors`` counts the values outside its matrices. What was read stays in
    memory where the whole model in float32 takes no more than half of what is
    left there; else it is read again each time. Raises what ``open_stream`` does.
    """

    def __init__(self, path: Path, xp: Any = np):
        stream = open_stream(path)
        self.path = path
        self.args = stream.args
        self.tensors = tensors_of(stream)
        self.nbytes = stream.nbytes
        self.specs = {tensor.path: tensor.spec for tensor in self.tensors}
        self.dtype = _float_dtype(stream.outline)
        matrices = {f"{path}.weight" for path in self.specs}
        self._xp = xp
        self._stream = stream
        self._taken: set[str] = set()
        self._packed = PackedWeights(stream.outline, self.specs, xp)
        self.vectors = sum(stream.outline[name].size for name in set(self) - matrices)
        self._held: dict[str, Any] = {}
        room = psutil.virtual_memory().available if xp is np else memory_left()
        self._holds = 4 * sum(tensor.size for tensor in self.tensors) <= room / 2

    def __getitem__(self, name: str) -> Any:
        if name in self._held:
            return self._held[name]
        if name not in self:
            raise KeyError(name)
        if name in self._taken:  # a stream gives each parameter once
            self._stream, self._taken = open_stream(self.path), set()
        self._taken.add(name)
        base = name.removesuffix(".weight")
        names = [name, f"{base}.scales", f"{base}.biases"]
        parts = {part: self._stream.take(part) for part in names if part in self._stream.outline}
        value = PackedWeights(parts, self.specs, self._xp)[name]
        if self._holds:
            self._held[name] = value
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


def _float_dtype(outline: Mapping[str, mx.array]) -> mx.Dtype:
    """The 16-bit dtype that scales and biases take: the embedding's own, else float16."""
    name = "model.embed_tokens"
    stored = outline.get(f"{name}.scales", outline[f"{name}.weight"]).dtype
    return stored if stored in (mx.float16, mx.bfloat16) else mx.float16
