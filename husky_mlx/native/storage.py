"""How a model's tensors are stored, as far as the native program takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from husky_mlx.errors import CheckpointError
from husky_mlx.native.errors import NativeError
from husky_mlx.structure import check_structure

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
# Norms of a layer, those of q's and k's heads only where a model has them. These and the next in
# the order in which the library takes their addresses.
LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)
PARTS = ("weight", "scales", "biases", "bias")


@dataclass(frozen=True)
class MatrixFormat:
    """``bits`` 4 or 8 in affine groups of ``group_size`` with scales of ``dtype``, or None for
    plain ``dtype``. ``bias`` is the dtype of the bias, None without one."""

    dtype: mx.Dtype
    bits: int | None = None
    group_size: int | None = None
    bias: mx.Dtype | None = None


@dataclass(frozen=True)
class LayerFormat:
    """The dtypes of a layer's norms in the order of ``LAYER_NORMS``, None for one that it has not,
    and its matrices in the order of ``PROJECTIONS``."""

    norms: tuple[mx.Dtype | None, ...]
    projections: tuple[MatrixFormat, ...]


@dataclass(frozen=True)
class ModelFormat:
    """How every tensor of a model is stored."""

    embedding: MatrixFormat
    head: MatrixFormat
    final_norm: mx.Dtype
    layers: tuple[LayerFormat, ...]


def matrix_format(module: nn.Module) -> MatrixFormat | str:
    """The format of a linear layer or an embedding, or why the native program does not take it."""
    packed = type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
    if not packed and type(module) not in (nn.Linear, nn.Embedding):
        return f"a {type(module).__name__}"
    stored = module.scales if packed else module.weight
    bias = module.get("bias")
    if packed and module.mode != "affine":
        return f"{module.mode} weights"
    if packed and (module.bits not in BITS or module.group_size not in GROUP_SIZES):
        return f"{module.bits} bit weights in groups of {module.group_size}"
    for array in (stored, *([] if bias is None else [bias])):
        if array.dtype not in DTYPES:
            return f"{array.dtype} values"
    return MatrixFormat(
        dtype=stored.dtype,
        bits=module.bits if packed else None,
        group_size=module.group_size if packed else None,
        bias=None if bias is None else bias.dtype,
    )


def model_format(model: Any) -> ModelFormat:
    """The formats of a model's tensors. NativeError names all that the program does not take, and
    tensors of other sizes than the config's, which are constants of the program."""
    formats: dict[str, MatrixFormat] = {}
    reasons: dict[str, list[str]] = {}
    for name, module in matrices(model):
        found = matrix_format(module)
        if isinstance(found, str):
            reasons.setdefault(found, []).append(name)
        else:
            formats[name] = found
    scales = dict(norms(model))
    for name, norm in scales.items():
        if norm.weight.dtype not in DTYPES:
            reasons.setdefault(f"{norm.weight.dtype} values", []).append(name)
    if reasons:
        raise NativeError(
            [
                f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}"
                for reason, names in reasons.items()
            ]
        )
    try:
        check_structure(model.args, _by_name(model), "the model")
    except CheckpointError as error:
        raise NativeError([str(error)]) from error
    return ModelFormat(
        embedding=formats["embed_tokens"],
        head=formats["lm_head"],
        final_norm=model.model.norm.weight.dtype,
        layers=tuple(
            LayerFormat(
                norms=tuple(
                    None if array is None else array.dtype for array in _norms_of(i, scales)
                ),
                projections=tuple(formats[f"layers.{i}.{name}"] for name in PROJECTIONS),
            )
            for i in range(len(model.layers))
        ),
    )


def matrices(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The embedding, the head (a tied one is the embedding again) and every layer's projections."""
    embedding = model.model.embed_tokens
    yield "embed_tokens", embedding
    yield "lm_head", embedding if model.args.tie_word_embeddings else model.lm_head
    for i, layer in enumerate(model.layers):
        for name in PROJECTIONS:
            holder, projection = name.split(".")
            yield f"layers.{i}.{name}", layer[holder][projection]


def norms(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The final norm, and of each layer those that it has."""
    yield "norm", model.model.norm
    for i, layer in enumerate(model.layers):
        for path in LAYER_NORMS:
            holder, _, name = path.rpartition(".")
            owner = layer[holder] if holder else layer
            if name in owner:
                yield f"layers.{i}.{path}", owner[name]


def _norms_of(layer: int, scales: Mapping[str, nn.Module]) -> list[mx.array | None]:
    """The weights of a layer's norms in the order of ``LAYER_NORMS``, of all ``norms`` by name."""
    found = [scales.get(f"layers.{layer}.{name}") for name in LAYER_NORMS]
    return [None if norm is None else norm.weight for norm in found]


def _by_name(model: Any) -> dict[str, mx.array]:
    """The tensors that the program reads, under mlx-lm's names."""
    modules = dict(matrices(model))
    if model.args.tie_word_embeddings:
        del modules["lm_head"]
    found: dict[str, mx.array] = {}
    for name, module in [*modules.items(), *norms(model)]:
        path = name if name == "lm_head" else f"model.{name}"
        found |= {f"{path}.{part}": module[part] for part in PARTS if module.get(part) is not None}
    return found


def arrays_in_order(model: Any) -> list[mx.array | None]:
    """All tensors in the order of the library's addresses; None where a format has no such part."""
    modules = dict(matrices(model))
    scales = dict(norms(model))

    def parts(name: str) -> list[mx.array | None]:
        return [modules[name].get(part) for part in PARTS]

    arrays = [scales["norm"].weight, *parts("embed_tokens"), *parts("lm_head")]
    for i in range(len(model.layers)):
        arrays += _norms_of(i, scales)
        for name in PROJECTIONS:
            arrays += parts(f"layers.{i}.{name}")
    return arrays


def memory_of(array: mx.array) -> np.ndarray:
    """An evaluated array's own memory, which it keeps alive: nothing is copied.

    numpy has no bfloat16, whose bits come as uint16. ValueError for an array that is not in row
    order.
    """
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    memory = np.asarray(plain)
    if not memory.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not stored in row order")
    return memory
