"""Fusions as data: which projections share an input, and one buffer for each group of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

# group -> (the module that holds it, its projections in the order of the fused rows)
FUSIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
}
_ROW_PARAMETERS = ("weight", "scales", "biases", "bias")


@dataclass(frozen=True)
class Fused:
    """Projections of one input as a single matrix; the modules keep row views of its buffer."""

    weight: mx.array
    scales: mx.array | None
    biases: mx.array | None
    bias: mx.array | None
    group_size: int | None
    bits: int | None
    mode: str
    rows: tuple[int, ...]

    def __call__(self, x: mx.array) -> list[mx.array]:
        """(..., in) -> one (..., rows[i]) for each projection."""
        if self.scales is None:
            y = x @ self.weight.T
        else:
            y = mx.quantized_matmul(
                x,
                self.weight,
                scales=self.scales,
                biases=self.biases,
                transpose=True,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
            )
        if self.bias is not None:
            y = y + self.bias
        borders = [sum(self.rows[: i + 1]) for i in range(len(self.rows) - 1)]
        return list(mx.split(y, borders, axis=-1))


@dataclass(frozen=True)
class Separate:
    """Projections of one input that cannot share a matrix, and why."""

    modules: tuple[Callable[[mx.array], mx.array], ...]
    reason: str

    def __call__(self, x: mx.array) -> list[mx.array]:
        """(..., in) -> one (..., out) for each projection."""
        return [module(x) for module in self.modules]


Projections = Fused | Separate


def fuse(modules: Sequence[nn.Module]) -> Projections:
    """One matrix for linear modules of one input, if their storage agrees.

    The modules' parameters become row views of the fused buffer, so nothing is held twice: the peak
    is the buffer beside the originals of this one group. Modules that are not plain linear layers
    (an adapter, say) or that differ in bits, group size, mode or dtype stay as they are.
    """
    reason = _difference(modules)
    if reason is not None:
        return Separate(tuple(modules), reason)
    rows = tuple(module.weight.shape[0] for module in modules)
    first = modules[0]
    parameters: dict[str, mx.array | None] = dict.fromkeys(_ROW_PARAMETERS)
    for name in _ROW_PARAMETERS:
        if name not in first or first[name] is None:
            continue
        buffer = mx.concatenate([module[name] for module in modules])
        mx.eval(buffer)
        views, start = [], 0
        for count in rows:
            views.append(buffer[start : start + count])
            start += count
        # Before a module has them: another thread could not evaluate this one's arrays.
        mx.eval(views)
        for module, view in zip(modules, views, strict=True):
            module[name] = view
        parameters[name] = buffer
    quantized = isinstance(first, nn.QuantizedLinear)
    return Fused(
        **parameters,  # type: ignore[arg-type]
        group_size=first.group_size if quantized else None,
        bits=first.bits if quantized else None,
        mode=first.mode if quantized else "affine",
        rows=rows,
    )


def _difference(modules: Sequence[nn.Module]) -> str | None:
    for module in modules:
        if type(module) not in (nn.Linear, nn.QuantizedLinear):
            return f"{type(module).__name__} among them"
    formats = {_storage(module) for module in modules}
    if len(formats) == 1:
        return None
    return "stored differently: " + ", ".join(sorted(str(f[0]) for f in formats))


def _storage(module: nn.Module) -> tuple[Any, ...]:
    """What two modules must share to be rows of one matrix, the readable part first."""
    names = tuple(name for name in _ROW_PARAMETERS if name in module)
    dtypes = tuple(module[name].dtype for name in names)
    if isinstance(module, nn.QuantizedLinear):
        label = f"{module.bits} bit {module.mode} group {module.group_size}"
        return (label, module.group_size, module.bits, module.mode, names, dtypes)
    return (str(module.weight.dtype), names, dtypes)


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer as the decode step takes it."""

    input_norm: mx.array
    qkv: Projections
    o_proj: nn.Module
    post_norm: mx.array
    gate_up: Projections
    down_proj: nn.Module


def pack_layers(layers: Sequence[nn.Module]) -> list[LayerWeights]:
    """Fuse what can be fused, layer by layer, and gather what the decode step reads."""
    packed = []
    for layer in layers:
        groups = {
            group: fuse([layer[holder][name] for name in names])
            for group, (holder, names) in FUSIONS.items()
        }
        packed.append(
            LayerWeights(
                input_norm=layer.input_layernorm.weight,
                qkv=groups["qkv"],
                o_proj=layer.self_attn.o_proj,
                post_norm=layer.post_attention_layernorm.weight,
                gate_up=groups["gate_up"],
                down_proj=layer.mlp.down_proj,
            )
        )
    mx.clear_cache()
    return packed


@dataclass(frozen=True)
class StepWeights:
    """Everything that a decode step holds constant."""

    embedding: nn.Module
    layers: list[LayerWeights]
    norm: mx.array
    head: Callable[[mx.array], mx.array]
