"""Keeps one model's frozen step in line with its weights, and decides which calls it takes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from husky_mlx import device, graphs, native_step, switches
from husky_mlx.cache import BatchKVCache, KVCache, RotatingKVCache, adopt, check_growth
from husky_mlx.config import LlamaConfig
from husky_mlx.errors import MemoryLimitError
from husky_mlx.freeze import DecodeStep
from husky_mlx.graphs import choose_graph
from husky_mlx.native import NativeError
from husky_mlx.native_step import NativeStep
from husky_mlx.ops.gemv import TileKey
from husky_mlx.pack import FUSIONS, Ready, Separate, StepWeights, pack
from husky_mlx.places import MAX_ROWS
from husky_mlx.plan import Plan
from husky_mlx.prefill import Prefill
from husky_mlx.snapshot import Snapshot
from husky_mlx.tiles import GemvTile


class Frozen:
    """The frozen step of a model: built at the first decode, rebuilt when the weights change.

    A plain object beside the modules: what it holds are neither parameters nor counted as such.
    """

    def __init__(self, config: LlamaConfig, plan: Plan):
        self.config = config
        self.plan = plan
        self.tiles: Mapping[TileKey, GemvTile] = {}  # of a build, instead of the policy's
        self._step: DecodeStep | None = None
        self._native: NativeStep | None = None
        self.native_wanted = native_step.wanted()
        self._built_from: Snapshot | None = None
        self._stale = True
        # Held while the weights change and while a step is built of them: two threads' first tokens
        # would fuse the same weights, and what was fused would be put back over what is new.
        self._lock = threading.RLock()
        kinds = config.layer_types
        self._one_of_each_kind = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        windows = [config.window_of(i) for i in range(len(kinds))]
        self._first_of_kind = [self._one_of_each_kind[kind] for kind in config.kind_of_layer]
        self._windows = {i: window for i, window in enumerate(windows) if window is not None}

    def __deepcopy__(self, memo: dict) -> Frozen:
        """A copied model freezes its own step: compiled functions cannot be copied."""
        return Frozen(self.config, copy.deepcopy(self.plan, memo))

    def __reduce__(self) -> tuple[type, tuple[LlamaConfig, Plan]]:
        """Pickled like copied: another process freezes its own step."""
        return Frozen, (self.config, self.plan)

    def invalidate(self) -> None:
        """The weights changed: let go of the step, and with it of the fused buffers."""
        with self._lock:
            self._stale = True
            self._step, self._native, self._built_from = None, None, None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While the weights change: other threads' steps end with those that they hold, and new
        ones wait."""
        with self._lock:
            self.invalidate()
            yield

    def stay_on_reference(self, reason: str) -> None:
        """Neither freeze a step nor build a native program for this model."""
        self.plan.eager_reason, self.native_wanted = reason, False

    def step_for(
        self, model: Any, tokens: mx.array, caches: Sequence[Any]
    ) -> DecodeStep | Prefill | NativeStep | None:
        """What takes a call with (B, L) tokens: the native program, the step, for longer calls with
        one sequence the prefill, or None where the reference path must run.

        mlx-lm's caches are adopted. Raises MemoryLimitError where the caches would outgrow the
        device, ValueError for a cache of another number of layers.
        """
        if len(caches) != len(model.layers):
            raise ValueError(
                f"the prompt cache has {len(caches)} layers and the model has "
                f"{len(model.layers)}: it was filled by another model"
            )
        taken = takes(tokens, caches)
        if not taken:
            adopt(caches)
            taken = takes(tokens, caches)
        rows, length = tokens.shape
        self._check_memory(model, rows, length, caches)
        # A model without a program must not wait for tokens that are still computed.
        native = None
        if self._may_be_native() and native_step.takes(tokens, caches, self._windows):
            native = self._native_for(model, length > 1 or caches[0].empty())
        if native is not None:
            return native
        prompt = not taken and self._step_has_prefill() and takes_prompt(tokens, caches)
        fits = prompt or (taken and self._fit(caches))
        # Asked for last: to look at the keys is to wait for the step that is under way.
        if prompt or (not fits and (length > 1 or getattr(caches[0], "keys", None) is None)):
            self._sweep(model)
        if self.plan.eager_reason or not fits:
            return None
        self._renew(model)
        step = self._step
        if step is None:
            return None
        # Before it was built nobody knew whether it takes prompts: the reference path does.
        without = step.prefill is None
        if prompt and (without or length > step.longest or type(caches[0]) is BatchKVCache):
            return step.prefill
        if prompt:
            step.allocate(caches)
        proven = step.proven(rows * length, type(caches[0]) is BatchKVCache)
        if proven is not step:
            # Unless somebody changed the weights meanwhile.
            with self._lock:
                self._step = proven if self._step is step else self._step
        if length > proven.longest:
            self._sweep(model)
            return None
        return proven

    def _native_for(self, model: Any, begins: bool) -> NativeStep | None:
        """The native program of the weights as they are; ``begins``: with a prompt."""
        if begins:
            self._sweep(model)
        self._renew(model)
        return self._native

    def _renew(self, model: Any) -> None:
        if self._stale:
            with self._lock:
                if self._stale:
                    self.freeze(model)

    def has_prefill(self) -> bool:
        """Whether a prompt's last token comes with the rest, as far as can be said before the step
        is built."""
        return self._may_be_native() if self.native_wanted else self._step_has_prefill()

    def _may_be_native(self) -> bool:
        """Whether there is a native program, as far as can be said before it is built."""
        return self.native_wanted and (self._native is not None or self._stale)

    def _step_has_prefill(self) -> bool:
        if self.plan.eager_reason is not None:
            return False
        step = self._step
        if step is None:
            return graphs.kernel_platform() is not None
        return step.prefill is not None

    def _fit(self, caches: Sequence[Any]) -> bool:
        """Whether layers of a kind write the same row, and the caches of sliding layers drop what
        is outside the window: the step has one row a kind and masks dead rows only. Callers may
        pass others, which the reference path takes."""
        for cache, first in zip(caches, self._first_of_kind, strict=False):
            if type(cache) is not type(caches[first]):
                return False
            if type(cache) is RotatingKVCache and _ring(cache) != _ring(caches[first]):
                return False
        return all(
            type(caches[i]) is RotatingKVCache and caches[i].max_size <= window
            for i, window in self._windows.items()
            if i < len(caches)
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
        built_from = self._built_from
        if built_from is not None and not built_from.fits(model):
            with self._lock:
                # Unless another thread has seen it too.
                if self._built_from is built_from:
                    self.invalidate()

    def say_dtype(self, model: Any) -> None:
        """Write into the plan what the model as it is now computes in."""
        self.plan.activations = str(model.model.activation_dtype()).removeprefix("mlx.core.")

    def freeze(self, model: Any, ready: Mapping[str, Ready] | None = None) -> None:
        """Fuse the projections and build the step for the weights as they are now.

        ``ready``: buffers that came with the weights. There is no step for a model that somebody
        built into: its modules then run themselves.
        """
        with self._lock:
            self._freeze(model, ready)

    def _freeze(self, model: Any, ready: Mapping[str, Ready] | None) -> None:
        self.invalidate()
        self.plan.native = None
        # A constant that is not evaluated yet would be computed again at every call.
        mx.eval(model.parameters())
        self.say_dtype(model)
        if (part := model.foreign_part()) is not None:
            self.plan.foreign_part, self.plan.notes = part, []
            self._built_from, self._stale = Snapshot.of(model), False
            return
        frequencies = mx.array(self.config.rope.frequencies(self.config.head_dim))
        weights = pack(model, frequencies, ready)
        # Of what was packed: the rest takes seconds, in which somebody may assign a weight.
        built_from = Snapshot.of(model)
        self.plan.foreign_part, self.plan.notes = None, _unfused(weights)
        graph = choose_graph(self.config, weights, self.plan, self.tiles)
        self._step = DecodeStep(graph, self.plan)
        if self.native_wanted:
            try:
                self._native = NativeStep.of(model, weights.head, self.plan)
            except (NativeError, ValueError) as error:
                self.plan.notes += [str(error)]
        self._built_from, self._stale = built_from, False


def takes(tokens: mx.array, caches: Sequence[Any]) -> bool:
    """Whether a call is one decode step: one token a row, at most four rows, caches of ours that
    hold something already and agree on where they are. Two to four tokens of one sequence are one
    too where the step is that long and no row of theirs overwrites another."""
    rows, length = tokens.shape
    if not 1 <= rows * length <= MAX_ROWS:
        return False
    first = caches[0]
    if length > 1 and any(type(c) is not KVCache for c in caches):
        return False
    if type(first) is BatchKVCache:
        return all(type(c) is BatchKVCache and not c.empty() for c in caches) and (
            first.left_padding.shape[0] == rows
        )
    offset = first.offset
    return rows == 1 and all(
        type(c) in (KVCache, RotatingKVCache) and not c.empty() and c.offset == offset
        for c in caches
    )


def takes_prompt(tokens: mx.array, caches: Sequence[Any]) -> bool:
    """Whether a call is a prompt, or a piece of one, for caches of ours that keep every token: also
    those of a batch of one, in which mlx-lm's server reads."""
    kind = type(caches[0])
    if tokens.shape[0] != 1 or kind not in (KVCache, BatchKVCache):
        return False
    return all(
        type(c) is kind
        and c.rows() == caches[0].rows()
        and (kind is KVCache or c.is_one_sequence())
        for c in caches
    )


def eager_reason() -> str | None:
    """Why the frozen step is off in this process, or None."""
    if switches.EAGER.read():
        return "HUSKY_EAGER is set"
    return device.compile_problem()


def _ring(cache: RotatingKVCache) -> tuple[int, int, int]:
    return cache._idx, cache.max_size, cache.keep


def _unfused(weights: StepWeights) -> list[str]:
    """A line for each reason for which projections stay separate."""
    reasons: dict[str, list[str]] = {}
    for i, layer in enumerate(weights.layers):
        for group, (_, names) in FUSIONS.items():
            projections = getattr(layer, group)
            if isinstance(projections, Separate) and len(names) > 1:
                reasons.setdefault(projections.reason, []).append(f"layers.{i}.{group}")
    return [
        f"not fused: {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} ({reason})"
        for reason, names in reasons.items()
    ]
