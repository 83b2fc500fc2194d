"""Keeps one model's frozen step in line with its weights, and decides which calls it takes."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from husky_mlx import device
from husky_mlx.cache import BatchKVCache, KVCache, RotatingKVCache, adopt, check_growth
from husky_mlx.config import LlamaConfig
from husky_mlx.errors import MemoryLimitError
from husky_mlx.freeze import DecodeStep, StepWeights
from husky_mlx.ops.rotate import rotation
from husky_mlx.pack import FUSIONS, Separate, pack_layers
from husky_mlx.plan import Plan

MAX_ROWS = 4


class Frozen:
    """The frozen step of a model: built at the first decode, rebuilt when the weights change.

    A plain object beside the modules: what it holds are neither parameters nor counted as such.
    """

    def __init__(self, config: LlamaConfig, plan: Plan):
        self.config = config
        self.plan = plan
        self.revision = 0
        self._step: DecodeStep | None = None
        self._step_revision = -1
        self._parameters: list[mx.array] = []
        self._lock = threading.Lock()  # two threads' first tokens would fuse the same weights
        kinds = config.layer_types
        self._one_of_each_kind = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        windows = [config.window_of(i) for i in range(len(kinds))]
        self._windows = {i: window for i, window in enumerate(windows) if window is not None}

    def __deepcopy__(self, memo: dict) -> Frozen:
        """A copied model freezes its own step: compiled functions cannot be copied."""
        return Frozen(self.config, copy.deepcopy(self.plan, memo))

    def invalidate(self) -> None:
        """The weights changed: let go of the step, and with it of the fused buffers."""
        self.revision += 1
        self._step, self._parameters = None, []

    def step_for(self, model: Any, tokens: mx.array, caches: Sequence[Any]) -> DecodeStep | None:
        """The step for a call with (B, L) tokens, or None where the reference path must run.

        mlx-lm's caches are adopted. Raises MemoryLimitError where the caches would outgrow the
        device, ValueError for a cache of another number of layers.
        """
        if len(caches) != len(self.config.layer_types):
            raise ValueError(
                f"the prompt cache has {len(caches)} layers and the model has "
                f"{len(self.config.layer_types)}: it was filled by another model"
            )
        if not takes(tokens, caches):
            adopt(caches)
        rows, length = tokens.shape
        self._check_memory(model, rows, length, caches)
        if self.plan.eager_reason or not (takes(tokens, caches) and self._slide(caches)):
            if length > 1 or getattr(caches[0], "keys", None) is None:
                self._sweep(model)
            return None
        if self._stale():
            with self._lock:
                if self._stale():
                    self.freeze(model)
        return self._step

    def _stale(self) -> bool:
        return self._step is None or self._step_revision != self.revision

    def _slide(self, caches: Sequence[Any]) -> bool:
        """Whether the caches of sliding layers drop what is outside the window: the step masks
        dead rows only. Callers may pass others, which the reference path masks."""
        return all(
            type(caches[i]) is RotatingKVCache and caches[i].max_size <= window
            for i, window in self._windows.items()
        )

    def has_room(self, model: Any, caches: Sequence[Any]) -> bool:
        """Whether one more token a row fits the device's memory and the caches' limit."""
        if any(isinstance(c, KVCache) and c.limit == c.offset for c in caches[:1]):
            return False
        try:
            self._check_memory(model, 1, 1, caches)
        except MemoryLimitError:
            return False
        return True

    def _check_memory(self, model: Any, rows: int, length: int, caches: Sequence[Any]) -> None:
        ours = (KVCache, RotatingKVCache, BatchKVCache)
        samples = [caches[i] for i in self._one_of_each_kind if i < len(caches)]
        if all(isinstance(c, ours) and c.capacity_for(length) <= c.capacity() for c in samples):
            return
        itemsize = model.model.activation_dtype().size
        row_bytes = 2 * rows * self.config.key_value_size * itemsize
        check_growth([c for c in caches if isinstance(c, ours)], length, row_bytes)

    def _sweep(self, model: Any) -> None:
        """Notice weights that were assigned one by one: dearer than a token, so when a prompt
        begins only."""
        if self._step is None:
            return
        now = _parameters(model)
        if len(now) != len(self._parameters) or any(
            a is not b for a, b in zip(now, self._parameters, strict=True)
        ):
            self.invalidate()

    def freeze(self, model: Any) -> None:
        """Fuse the projections and build the step for the weights as they are now."""
        self._step, self._parameters = None, []
        # A constant that is not evaluated yet would be computed again at every call.
        mx.eval(model.parameters())
        layers = pack_layers(model.layers)
        weights = StepWeights(
            embedding=model.model.embed_tokens,
            layers=layers,
            norm=model.model.norm.weight,
            head=model.head(),
            rotate=rotation(self.config.rope, self.config.head_dim),
        )
        self.plan.activations = str(model.model.activation_dtype()).removeprefix("mlx.core.")
        self.plan.notes = _unfused(layers)
        self._step = DecodeStep(self.config, weights, self.plan)
        self._parameters = _parameters(model)
        self._step_revision = self.revision


def takes(tokens: mx.array, caches: Sequence[Any]) -> bool:
    """Whether a call is one decode step: one token a row, at most four rows, caches of ours that
    hold something already and agree on where they are."""
    rows, length = tokens.shape
    if length != 1 or rows > MAX_ROWS:
        return False
    first = caches[0]
    if type(first) is BatchKVCache:
        return all(type(c) is BatchKVCache and c.keys is not None for c in caches) and (
            first.left_padding.shape[0] == rows
        )
    offset = first.offset
    return rows == 1 and all(
        type(c) in (KVCache, RotatingKVCache) and c.keys is not None and c.offset == offset
        for c in caches
    )


def eager_reason() -> str | None:
    """Why the frozen step is off in this process, or None."""
    if os.environ.get("HUSKY_EAGER", "0") not in ("", "0"):
        return "HUSKY_EAGER is set"
    return device.compile_problem()


def _parameters(model: Any) -> list[mx.array]:
    return [value for _, value in tree_flatten(model.parameters())]  # type: ignore[misc, str-unpack]


def _unfused(layers: Sequence[Any]) -> list[str]:
    """A line for each reason for which projections stay separate."""
    reasons: dict[str, list[str]] = {}
    for i, layer in enumerate(layers):
        for group in FUSIONS:
            projections = getattr(layer, group)
            if isinstance(projections, Separate):
                reasons.setdefault(projections.reason, []).append(f"layers.{i}.{group}")
    return [
        f"not fused: {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} ({reason})"
        for reason, names in reasons.items()
    ]
