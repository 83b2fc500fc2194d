"""Fusions as data: which projections share an input, and one buffer for each group of them.

Besides a group's weights its buffer holds what else the kernel that multiplies it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from husky_mlx.layout import Shape, join, joined, split, words_of

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


@dataclass(frozen=True)
class Layout:
    """What a fused buffer holds. ``parts``: name -> dtype and shape, in order; the parameters of
    the joined rows, then "norm" and whatever else. The rest as in ``Fused``."""

    parts: dict[str, Shape]
    rows: tuple[int, ...]
    group_size: int | None
    bits: int | None
    mode: str

    @property
    def words(self) -> int:
        return sum(words_of(*shape) for shape in self.parts.values())

    def fused(self, buffer: mx.array) -> Fused:
        """The matrix that a buffer of this layout holds."""
        views = dict(zip(self.parts, split(buffer, list(self.parts.values())), strict=True))
        return Fused(
            buffer=buffer,
            weight=views["weight"],
            scales=views.get("scales"),
            biases=views.get("biases"),
            bias=views.get("bias"),
            norm=views.get("norm"),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            rows=self.rows,
        )


def layout_of(
    modules: Sequence[nn.Module], norm: mx.array | None, more: Mapping[str, mx.array]
) -> Layout | str:
    """How modules share a buffer, from dtypes and shapes alone; else why they cannot."""
    reason = _difference(modules)
    if reason is not None:
        return reason
    first = modules[0]
    pieces = {name: [module[name] for module in modules] for name in _names(first)}
    return Layout(
        parts={
            name: joined(arrays) for name, arrays in (pieces | _beside(first, norm, more)).items()
        },
        rows=tuple(module.weight.shape[0] for module in modules),
        group_size=first.group_size if "scales" in pieces else None,
        bits=first.bits if "scales" in pieces else None,
        mode=first.mode if "scales" in pieces else "affine",
    )


def _names(module: nn.Module) -> list[str]:
    return [name for name in _ROW_PARAMETERS if name in module and module[name] is not None]


def _beside(
    first: nn.Module, norm: mx.array | None, more: Mapping[str, mx.array]
) -> dict[str, list[mx.array]]:
    """What a buffer holds besides its rows."""
    dtype = first.scales.dtype if "scales" in first else first.weight.dtype
    # The scales of the mx formats are bytes, and no kernel takes those.
    fits = norm is not None and mx.issubdtype(dtype, mx.floating)
    norms = {"norm": [norm.astype(dtype)]} if fits else {}  # type: ignore[union-attr]
    return norms | {name: [array] for name, array in more.items()}


@dataclass(frozen=True)
class Ready:
    """A fused matrix that was there before its modules. ``views``: their parameters, module by
    module."""

    fused: Fused
    views: list[dict[str, mx.array]]

    @classmethod
    def of(cls, fused: Fused) -> Ready:
        views: list[dict[str, mx.array]] = [{} for _ in fused.rows]
        for name in _ROW_PARAMETERS:
            whole, start = getattr(fused, name), 0
            if whole is None:
                continue
            for view, count in zip(views, fused.rows, strict=True):
                view[name] = whole[start : start + count]
                start += count
        # Before a module has them: another thread could not evaluate this one's arrays.
        mx.eval(views)
        return cls(fused, views)

    def is_of(self, modules: Sequence[nn.Module], norm: mx.array | None) -> bool:
        """Whether modules and norm are still what the buffer holds."""
        return (
            len(modules) == len(self.views)
            and all(type(module) in _MODULES for module in modules)
            and all(
                _names(module) == list(view) and all(module[name] is view[name] for name in view)
                for module, view in zip(modules, self.views, strict=True)
            )
            and (self.fused.norm is None or norm is self.fused.norm)
        )


def fuse(
    modules: Sequence[nn.Module],
    norm: mx.array | None = None,
    more: Mapping[str, mx.array] | None = None,
    ready: Ready | None = None,
) -> Projections:
    """One matrix for linear modules of one input, if their storage agrees, or for a table.

    ``norm`` (in,) and ``more`` are copied into its buffer. The modules' parameters become row views
    of that, so nothing is held twice: the peak is the buffer beside the originals of this one
    group. Modules that are not plain linear layers (an adapter, say) or that differ in bits, group
    size, mode or dtype stay as they are. ``ready`` is taken where it is what they hold already.
    What another thread assigns meanwhile stays, and is fused.
    """
    if ready is not None and ready.is_of(modules, norm):
        return ready.fused
    more = more or {}
    layout = layout_of(modules, norm, more)
    if isinstance(layout, str):
        return Separate(tuple(modules), layout)
    arrays = {name: [module[name] for module in modules] for name in _names(modules[0])}
    buffer, _ = join([*arrays.values(), *_beside(modules[0], norm, more).values()])
    fused = layout.fused(buffer)
    made = Ready.of(fused)
    if any(
        module.get(name) is not array
        for name, of_modules in arrays.items()
        for module, array in zip(modules, of_modules, strict=True)
    ):
        return fuse(modules, norm, more)
    for module, views in zip(modules, made.views, strict=True):
        for name, view in views.items():
            module[name] = view
    return fused


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
    """One transformer layer as the decode step takes it.

    ``head_norms``: weights (head_dim,) of the norms of q's and k's heads, where there are any.
    """

    input_norm: mx.array
    qkv: Projections
    head_norms: tuple[mx.array, mx.array] | None
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


def pack(
    model: nn.Module, frequencies: mx.array, ready: Mapping[str, Ready] | None = None
) -> StepWeights:
    """Fuse what can be fused, layer by layer, and gather what the decode step reads.

    ``frequencies``: the rotary embedding's, float32 (head_dim / 2,), which go with each qkv.
    ``ready``: name of a group as ``groups`` has it -> its buffer, where there is one already.
    """
    ready = ready or {}
    made = {
        name: fuse(modules, norm, more, ready.get(name))
        for name, modules, norm, more in groups(model, frequencies)
    }
    layers = [
        LayerWeights(
            input_norm=layer.input_layernorm.weight,
            post_norm=layer.post_attention_layernorm.weight,
            head_norms=_head_norms(layer.self_attn),
            **{group: made[f"layers.{i}.{group}"] for group in FUSIONS},
        )
        for i, layer in enumerate(model.layers)
    ]
    table = made["embed_tokens"]
    if "lm_head" in made:
        head = made["lm_head"]
    elif isinstance(table, Separate):
        head = Separate((model.model.embed_tokens.as_linear,), table.reason)
    else:
        head = table
    mx.clear_cache()
    return StepWeights(model.model.embed_tokens, table, layers, model.model.norm.weight, head)


def _head_norms(attention: nn.Module) -> tuple[mx.array, mx.array] | None:
    if "q_norm" not in attention:
        return None
    return attention.q_norm.weight, attention.k_norm.weight


Group = tuple[str, list[nn.Module], mx.array | None, dict[str, mx.array]]


def groups(model: nn.Module, frequencies: mx.array) -> Iterator[Group]:
    """What is fused, in order: name, modules, the norm and what else goes with them."""
    for i, layer in enumerate(model.layers):
        norms = {
            "qkv": layer.input_layernorm.weight,
            "gate_up": layer.post_attention_layernorm.weight,
        }
        for group, (holder, names) in FUSIONS.items():
            more = {"frequencies": frequencies} if group == "qkv" else {}
            modules = [layer[holder][name] for name in names]
            yield f"layers.{i}.{group}", modules, norms.get(group), more
    embedding, norm = model.model.embed_tokens, model.model.norm.weight
    if model.args.tie_word_embeddings:
        yield "embed_tokens", [embedding], norm, {}
    else:
        yield "embed_tokens", [embedding], None, {}
        yield "lm_head", [model.lm_head], norm, {}
