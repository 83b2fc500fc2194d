"""Copies of a model's weights for ``husky bench ops``: enough that no cache holds what is timed.

A copy of a layer has the projections of one group at their size and stand-ins for the others, and
goes through ``pack`` and ``fused_weights`` like a whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from husky_mlx.errors import HuskyError
from husky_mlx.fused import FusedWeights, fused_weights
from husky_mlx.memory import require_memory
from husky_mlx.model import Model
from husky_mlx.pack import FUSIONS, pack

STAND_IN = 32  # width of the projections that are not timed


class Copies:
    """Makes copies of what ``model`` is made of; its own weights stay as they are."""

    def __init__(self, model: Model):
        self.model = model
        self.config = model.args
        self.dtype = dtype_of(model.model.embed_tokens)

    def templates(self, group: str) -> list[nn.Module]:
        """A layer for each way in which the projections of ``group`` are stored."""
        found: dict[tuple[str, ...], nn.Module] = {}
        for layer in self.model.layers:
            found.setdefault(tuple(map(describe, projections(layer, group))), layer)
        return list(found.values())

    def layers(
        self, template: nn.Module, group: str, copies: int
    ) -> tuple[list[nn.Module], FusedWeights]:
        """``copies`` layers with the ``group`` of ``template``, and what the kernels take of them.

        Raises HuskyError where there is no kernel, MemoryLimitError where they do not fit.
        """
        self._require(projections(template, group), copies)
        layers = [self._layer(template, group) for _ in range(copies)]
        return layers, self._fused(layers, self._stand_in(nn.Embedding), None)

    def tables(self, copies: int, head: bool) -> tuple[list[Any], list[FusedWeights]]:
        """``copies`` of the embedding or, for ``head``, of what makes the logits, and what the
        kernels take of each. Raises like ``layers``."""
        untied = head and not self.config.tie_word_embeddings
        source = self.model.lm_head if untied else self.model.model.embed_tokens
        self._require([source], copies)
        modules = [_clone(source) for _ in range(copies)]
        made = [
            self._fused([], self._stand_in(nn.Embedding), module)
            if untied
            else self._fused([], module, None)
            for module in modules
        ]
        return modules, made

    def _layer(self, template: nn.Module, group: str) -> nn.Module:
        layer = nn.Module()
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        norms = [(layer, template, f"{name}_layernorm") for name in ("input", "post_attention")]
        if self.config.qk_norm:
            norms += [(layer.self_attn, template.self_attn, name) for name in ("q_norm", "k_norm")]
        for owner, source, norm in norms:
            owner[norm] = copy.copy(source[norm])
            # Both sides compute in the weights' dtype, whatever the norm is stored in.
            owner[norm].weight = source[norm].weight.astype(self.dtype)
        for name, (holder, members) in FUSIONS.items():
            for member in members:
                kept = name == group
                source = template[holder][member]
                layer[holder][member] = _clone(source) if kept else self._stand_in(nn.Linear)
        mx.eval(layer.parameters())
        return layer

    def _fused(
        self, layers: list[nn.Module], embedding: nn.Module, head: nn.Module | None
    ) -> FusedWeights:
        model = nn.Module()
        model.layers = layers
        model.model = nn.Module()
        model.model.embed_tokens = embedding
        model.model.norm = self.model.model.norm
        model.args = replace(self.config, tie_word_embeddings=head is None)
        if head is not None:
            model.lm_head = head
        frequencies = mx.array(self.config.rope.frequencies(self.config.head_dim))
        made = fused_weights(model.args, pack(model, frequencies))
        if isinstance(made, str):
            raise HuskyError(f"nothing to time: {made}")
        return made

    def _stand_in(self, kind: Any) -> nn.Module:
        module = kind(STAND_IN, STAND_IN)
        module.pop("bias", None)
        module.weight = mx.zeros((STAND_IN, STAND_IN), self.dtype)
        return module

    def _require(self, modules: Sequence[nn.Module], copies: int) -> None:
        # The last copy is there beside the buffer that takes its place.
        needed = nbytes(modules) * (copies + 1)
        require_memory(needed, "Timing on cold weights", "--ops leaves out the larger operations.")


def projections(layer: nn.Module, group: str) -> list[Any]:
    """The linear layers of a group of FUSIONS."""
    holder, names = FUSIONS[group]
    return [layer[holder][name] for name in names]


def describe(module: nn.Module) -> str:
    """How a linear layer or an embedding is stored: ``4 bit g64 bfloat16``."""
    dtype = str(dtype_of(module)).removeprefix("mlx.core.")
    bias = " with bias" if "bias" in module else ""
    if "scales" not in module:
        return f"{dtype}{bias}"
    mode = "" if module.mode == "affine" else f"{module.mode} "
    return f"{module.bits} bit {mode}g{module.group_size} {dtype}{bias}"


def dtype_of(module: nn.Module) -> mx.Dtype:
    """The dtype that the weights stand for."""
    return (module.scales if "scales" in module else module.weight).dtype


def nbytes(modules: Sequence[nn.Module]) -> int:
    """Bytes of the parameters."""
    return sum(value.nbytes for module in modules for value in module.parameters().values())


def own(array: mx.array) -> mx.array:
    """The array in memory of its own: most operations that change nothing share it."""
    flat = array.reshape(-1)
    copied = mx.concatenate([flat[:1], flat[1:]]).reshape(array.shape)
    mx.eval(copied)
    return copied


def _clone(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    for name, value in module.parameters().items():
        copied[name] = own(value)
    return copied
