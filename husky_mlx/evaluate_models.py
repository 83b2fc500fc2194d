"""What ``husky eval`` compares: one model, rounded by recipes, and models that come from it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from husky_mlx import recipe
from husky_mlx.calibrate_forward import FloatLlama
from husky_mlx.calibrate_sensitivity import auto
from husky_mlx.calibrate_weights import FloatWeights, PackedWeights
from husky_mlx.divergence import Divergence, compare_states, final_states
from husky_mlx.loading import load
from husky_mlx.progress import count_bar
from husky_mlx.recipe import Allocation, QuantSpec, Tensor
from husky_mlx.rounding_model import round_model


@dataclass
class Row:
    """One model of the table. ``domains``: domain -> its divergence from the reference."""

    name: str
    rounding: str
    nbytes: int
    bits_per_weight: float
    domains: dict[str, Divergence]
    decode_tps: float | None = None

    @property
    def total(self) -> Divergence:
        return sum(self.domains.values(), start=Divergence())


class Evaluation:
    """Models against one reference, on the same tokens: domain -> (sequences, length)."""

    def __init__(self, source: FloatWeights, texts: Mapping[str, np.ndarray], xp: Any):
        self.source = source
        self.texts = texts
        self.xp = xp
        self.reference = FloatLlama(source.args, source, xp)
        self._floats: Allocation = dict.fromkeys(tensor.path for tensor in source.tensors)
        self._allocations: dict[tuple[str, int | None, float], Allocation] = {}
        self.states = {name: final_states(self.reference, ids) for name, ids in texts.items()}

    def unquantized(self) -> Row:
        """The reference itself; its size is that in 16 bit."""
        return Row("unquantized", "", *self._size(self._floats), self._of_reference())

    def by_recipe(
        self,
        name: str,
        method: str,
        calibration: np.ndarray | None,
        *,
        group_size: int | None = None,
        budget_bpw: float | None = None,
    ) -> Row:
        """The unquantized matrices by a recipe and a method of rounding.

        ``calibration``: tokens (sequences, length) for "gptq", "awq" and "auto". ValueError for
        names that there are not, and for "auto" without a budget.
        """
        if name == "keep":
            bits = recipe.bits_per_weight(self.source.tensors, self.source.specs)
            return Row(name, "", self.source.nbytes, bits, self._of_reference())
        if name in recipe.FLOAT_RECIPES:
            dtype = getattr(mx, recipe.FLOAT_RECIPES[name])
            cast = {each: mx.array(value).astype(dtype) for each, value in self.source.items()}
            weights = PackedWeights(cast, self._floats, self.xp)
            return Row(name, "", *self._size(self._floats), self._domains(weights))
        tensors = [replace(tensor, spec=None) for tensor in self.source.tensors]
        if name == "auto":
            allocation = self._auto(tensors, method, calibration, group_size, budget_bpw)
        else:
            allocation = recipe.resolve(name, tensors, group_size=group_size)
        return self._rounded(name, method, allocation, calibration)

    def _auto(
        self,
        tensors: list[Tensor],
        method: str,
        calibration: np.ndarray | None,
        group_size: int | None,
        budget_bpw: float | None,
    ) -> Allocation:
        """Measured once for "rtn" and "awq", which ``auto`` takes for the same."""
        if budget_bpw is None or calibration is None:
            raise ValueError("the recipe 'auto' needs calibration text and a budget")
        measured = "gptq" if method == "gptq" else "rtn"
        key = measured, group_size, budget_bpw
        if key not in self._allocations:
            dtype, llama = self.source.dtype, self.reference
            self._allocations[key] = auto(
                llama, tensors, budget_bpw, measured, calibration, dtype, group_size
            )
        return self._allocations[key]

    def stored(self, name: str, path: Path) -> Row:
        """A row for a model on disk, as ``load`` takes it. ValueError where its matrices are not
        the reference's."""
        model = load(str(path), lazy=True)[0]
        parameters = dict(tree_flatten(model.parameters()))
        specs = {
            module: QuantSpec(leaf.bits, leaf.group_size, leaf.mode)
            for module, leaf in model.named_modules()
            if isinstance(leaf, nn.QuantizedLinear | nn.QuantizedEmbedding)
        }
        shapes = {
            matrix: (value.shape[0], value.shape[1] * 32 // specs[matrix].bits)
            if matrix in specs
            else tuple(value.shape)
            for matrix, _, part in (each.rpartition(".") for each in parameters)
            if part == "weight" and (value := parameters[f"{matrix}.weight"]).ndim == 2
        }
        tensors = self.source.tensors
        if shapes != {tensor.path: tensor.shape for tensor in tensors}:
            raise ValueError(f"{name}: its matrices are not those of {self.source.path}")
        nbytes = sum(value.nbytes for value in parameters.values())
        bits = recipe.bits_per_weight(tensors, {**dict.fromkeys(shapes), **specs})
        weights = PackedWeights(parameters, specs, self.xp)
        return Row(name, "stored", nbytes, bits, self._domains(weights))

    def _rounded(
        self, name: str, method: str, allocation: Allocation, calibration: np.ndarray | None
    ) -> Row:
        parameters: dict[str, Any] = {}
        parts = round_model(self.reference, allocation, method, calibration, self.source.dtype)
        ends = 1 if self.source.args.tie_word_embeddings else 2
        with count_bar("rounding", self.source.args.num_hidden_layers + ends) as advance:
            for part in parts:
                parameters |= part
                advance(1)
        packed = PackedWeights(parameters, allocation, self.xp)
        weights: Mapping[str, Any] = ChainMap(packed, self.source)  # type: ignore[arg-type]
        return Row(name, method, *self._size(allocation), self._domains(weights))

    def _domains(self, weights: Mapping[str, Any]) -> dict[str, Divergence]:
        llama = FloatLlama(self.source.args, weights, self.xp)
        return {
            name: self._compare(name, llama, final_states(llama, ids))
            for name, ids in self.texts.items()
        }

    def _of_reference(self) -> dict[str, Divergence]:
        llama = self.reference
        return {name: self._compare(name, llama, states) for name, states in self.states.items()}

    def _compare(self, name: str, llama: FloatLlama, states: Any) -> Divergence:
        expected = self.states[name]
        return compare_states(
            lambda rows: self.reference.logits(expected[rows]), llama, states, self.texts[name]
        )

    def _size(self, allocation: Allocation) -> tuple[int, float]:
        """Bytes and bits per weight, with 16 bit for each value that is not quantized."""
        tensors = self.source.tensors
        bits = recipe.bits_per_weight(tensors, allocation)
        matrices = round(bits * sum(tensor.size for tensor in tensors) / 8)
        return matrices + 2 * self.source.vectors, bits
