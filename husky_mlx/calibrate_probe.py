"""The divergence of a model with one group of matrices changed, or with all of them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from husky_mlx.calibrate_forward import FloatLlama
from husky_mlx.calibrate_weights import PackedWeights
from husky_mlx.divergence import compare_states, final_states
from husky_mlx.recipe import Allocation, Tensor
from husky_mlx.rounding_model import round_model

# Of the calibration text, what goes through the model for each group of matrices, and for each of
# two whole models.
PROBE_SEQUENCES, PROBE_LENGTH = 4, 128
TRIAL_SEQUENCES = 16


class Probe:
    """The divergence of a model with some matrices changed, on a few sequences of text."""

    def __init__(self, llama: FloatLlama, tokens: np.ndarray):
        self.tokens = _spread(tokens, PROBE_SEQUENCES)[:, :PROBE_LENGTH]
        self.llama = llama
        self.inputs = [llama.embed(self.tokens)]  # of each layer, then of the final norm
        for index in range(llama.config.num_hidden_layers):
            self.inputs.append(llama.layer(index, self.inputs[-1]))
        self.logits = llama.logits(self._states(llama, self.inputs[-1]))

    def divergence(self, changed: Mapping[str, Any], first: int | None) -> float:
        """KL in nats a token; ``changed``: name -> matrix, none of them read before the layer
        ``first``, or None for the embedding."""
        arrays = {name: self.llama.xp.array(value) for name, value in changed.items()}
        weights = ChainMap(arrays, self.llama.weights)  # type: ignore[arg-type]
        other = FloatLlama(self.llama.config, weights, self.llama.xp)
        x = other.embed(self.tokens) if first is None else self.inputs[first]
        for index in range(first or 0, self.llama.config.num_hidden_layers):
            x = other.layer(index, x)
        states = self._states(other, x)
        return compare_states(lambda rows: self.logits[rows], other, states, self.tokens).kl

    @staticmethod
    def _states(llama: FloatLlama, x: Any) -> Any:
        return llama.final_norm(x)[:, :-1].reshape(-1, x.shape[-1])


class Trial:
    """The divergence of a whole model by one allocation and another: calibrated and measured on a
    part of the text, which is unfair to neither."""

    def __init__(
        self,
        llama: FloatLlama,
        tensors: Sequence[Tensor],
        method: str,
        tokens: np.ndarray,
        dtype: mx.Dtype,
    ):
        self.llama, self.tensors, self.method = llama, tensors, method
        self.tokens, self.dtype = _spread(tokens, TRIAL_SEQUENCES), dtype
        self.states = final_states(llama, self.tokens)

    def divergence(self, allocation: Allocation) -> float:
        """KL in nats a token."""
        changed = {
            tensor.path: spec
            for tensor in self.tensors
            if (spec := allocation[tensor.path]) != tensor.spec
        }
        parameters: dict[str, mx.array] = {}
        for part in round_model(self.llama, changed, self.method, self.tokens, self.dtype):
            parameters |= part
        packed = PackedWeights(parameters, changed, self.llama.xp)
        weights: Mapping[str, Any] = ChainMap(packed, self.llama.weights)  # type: ignore[arg-type]
        other = FloatLlama(self.llama.config, weights, self.llama.xp)
        return compare_states(
            lambda rows: self.llama.logits(self.states[rows]),
            other,
            final_states(other, self.tokens),
            self.tokens,
        ).kl


def _spread(tokens: np.ndarray, count: int) -> np.ndarray:
    """So many sequences, evenly out of all."""
    return tokens[:: max(len(tokens) // count, 1)][:count]
