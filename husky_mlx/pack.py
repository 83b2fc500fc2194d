"""Fusions as data: which projections share an input, and one buffer for each group of them.

Besides a group's weights its buffer holds what else the kernel that multiplies it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from husky_mlx.layout import join

# group -> (the module that holds it, its projections in the order of the fused rows)
FUSIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "o_proj": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down_proj": ("mlp", ("down_proj",)),
}
_ROW_PARAMETERS = ("weight", "scales", "biases", "bias")
_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)
_MODULES = (nn.Linear, nn.Embedding, *_QUANTIZED)


@dataclass(frozen=True)
class Fused:
    """Projections of one input as a single matrix; the modules keep row views of its buffer.

    ``buffer``: uint32 (words,), in it the parameters that there are, in the order of the fields,
    then ``norm`` in their dtype, then whatever else was given.
    """

    buffer: mx.array
    weight: mx.array
    scales: mx.array | None
    biases: mx.array | None
    bias: mx.array | None
    norm: mx.array | None
    group_size: int | None
    bits: int | None
    mode: str
    rows: tuple[int, ...]

    def __call__(self, x: mx.array) -> list[mx.array]:
        """(..., in) -> one (..., rows[i]) for each projection."""
        borders = [sum(self.rows[: i + 1]) for i in range(len(self.rows) - 1)]
        return list(mx.split(self.multiply(x), borders, axis=-1))

    def multiply(self, x: mx.array) -> mx.array:
        """(..., in) -> (..., all rows)."""
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
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Separate:
    """Projections of one input that cannot share a matrix, and why."""

    modules: tuple[Callable[[mx.array], mx.array], ...]
    reason: str

    def __call__(self, x: mx.array) -> list[mx.array]:
        """(..., in) -> one (..., out) for each projection."""
        return [module(x) for module in self.modules]


Projections = Fused | Separate


def fuse(
    modules: Sequence[nn.Module],
    norm: mx.array | None = None,
    more: Sequence[mx.array] = (),
) -> Projections:
    """One matrix for linear modules of one input, if their storage agrees, or for a table.

    ``norm`` (in,) and ``more`` are copied into its buffer. The modules' parameters become row views
    of that, so nothing is held twice: the peak is the buffer beside the originals of this one
    group. Modules that are not plain linear layers (an adapter, say) or that differ in bits, group
    size, mode or dtype stay as they are.
    """
    reason = _difference(modules)
    if reason is not None:
        return Separate(tuple(modules), reason)
    rows = tuple(module.weight.shape[0] for module in modules)
    first = modules[0]
    names = [name for name in _ROW_PARAMETERS if name in first and first[name] is not None]
    dtype = first.scales.dtype if "scales" in names else first.weight.dtype
    # The scales of the mx formats are bytes, and no kernel takes those.
    fits = norm is not None and mx.issubdtype(dtype, mx.floating)
    norms = [[norm.astype(dtype)]] if fits else []  # type: ignore[union-attr]
    arrays = [[module[name] for module in modules] for name in names]
    buffer, joined = join([*arrays, *norms, *([array] for array in more)])
    parameters: dict[str, mx.array | None] = dict.fromkeys(_ROW_PARAMETERS)
    parameters.update(zip(names, joined[: len(names)], strict=True))
    for name in names:
        whole, start = parameters[name], 0
        views = []
        for count in rows:
            views.append(whole[start : start + count])  # type: ignore[index]
            start += count
        # Before a module has them: another thread could not evaluate this one's arrays.
        mx.eval(views)
        for module, view in zip(modules, views, strict=True):
            module[name] = view
    quantized = "scales" in names
    return Fused(
        buffer=buffer,
        **parameters,  # type: ignore[arg-type]
        norm=joined[len(names)] if norms else None,
        group_size=first.group_size if quantized else None,
        bits=first.bits if quantized else None,
        mode=first.mode if quantized else "affine",
        rows=rows,
    )


def _difference(modules: Sequence[nn.Module]) -> str | None:
    for module in modules:
        if type(module) not in _MODULES:
            return f"{type(module).__name__} among them"
    formats = {_storage(module) for module in modules}
    if len(formats) == 1:
        return None
    return "stored differently: " + ", ".join(sorted(str(f[0]) for f in formats))


def _storage(module: nn.Module) -> tuple[Any, ...]:
    """What two modules must share to be rows of one matrix, the readable part first."""
    names = tuple(name for name in _ROW_PARAMETERS if name in module)
    dtypes = tuple(module[name].dtype for name in names)
    if isinstance(module, _QUANTIZED):
        label = f"{module.bits} bit {module.mode} group {module.group_size}"
        return (label, module.group_size, module.bits, module.mode, names, dtypes)
    return (str(module.weight.dtype), names, dtypes)


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer as the decode step takes it."""

    input_norm: mx.array
    qkv: Projections
    o_proj: Projections
    post_norm: mx.array
    gate_up: Projections
    down_proj: Projections


@dataclass(frozen=True)
class StepWeights:
    """Everything that a decode step holds constant.

    ``table``: the embedding as a matrix (vocabulary, hidden); ``head`` is it where they are tied.
    """

    embedding: nn.Module
    table: Projections
    layers: list[LayerWeights]
    norm: mx.array
    head: Projections


def pack(model: nn.Module, frequencies: mx.array) -> StepWeights:
    """Fuse what can be fused, layer by layer, and gather what the decode step reads.

    ``frequencies``: the rotary embedding's, float32 (head_dim / 2,), which go with each qkv.
    """
    layers = []
    for layer in model.layers:
        norms = {
            "qkv": layer.input_layernorm.weight,
            "gate_up": layer.post_attention_layernorm.weight,
        }
        more = {"qkv": [frequencies]}
        groups = {
            group: fuse(
                [layer[holder][name] for name in names], norms.get(group), more.get(group, ())
            )
            for group, (holder, names) in FUSIONS.items()
        }
        layers.append(LayerWeights(input_norm=norms["qkv"], post_norm=norms["gate_up"], **groups))
    embedding, norm = model.model.embed_tokens, model.model.norm.weight
    table = fuse([embedding], norm if model.args.tie_word_embeddings else None)
    if not model.args.tie_word_embeddings:
        head = fuse([model.lm_head], norm)
    elif isinstance(table, Separate):
        head = Separate((embedding.as_linear,), table.reason)
    else:
        head = table
    mx.clear_cache()
    return StepWeights(embedding, table, layers, norm, head)
