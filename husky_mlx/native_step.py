"""Prompts and decode steps of the CPU build through the model's native program.

The program works at once and writes keys and values into the caches' own memory; it takes one
sequence, so that the rows of a batch go one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from husky_mlx import device, switches
from husky_mlx.buffers import check_layout
from husky_mlx.cache import BatchKVCache, KVCache, RotatingKVCache
from husky_mlx.native import Program
from husky_mlx.native.buffers import Buffers
from husky_mlx.pack import Projections
from husky_mlx.plan import Plan

# What the program writes and reads: what the CPU build computes in.
KV_DTYPE = mx.float32
# From how many tokens on the logits of every position are left to MLX, which computes them only for
# who reads them: mlx-lm's loop does not read a prompt's, and they would take 200 KB a token.
LAZY_FROM = 17


def wanted() -> bool:
    """Whether calls may take a native program here at all; HUSKY_NATIVE=0 says no."""
    on = switches.NATIVE.read() != "off" and not switches.EAGER.read()
    return device.target() == "cpu" and on


def takes(tokens: mx.array, caches: Sequence[Any], windows: Mapping[int, int]) -> bool:
    """Whether a call is one for the program: (B, L) tokens behind caches of ours that keep all, or
    (1, 1) behind rings that hold something, no wider than the ``windows`` of their layers. Its
    tokens must be numbers already, not those of a function that is traced."""
    rows, length = tokens.shape
    first = caches[0]
    if type(first) is BatchKVCache:
        fits = all(
            type(c) is BatchKVCache and c._idx == first._idx and c.left_padding.shape[0] == rows
            for c in caches
        )
    else:
        fits = rows == 1 and all(
            c.offset == first.offset
            and (
                type(c) is KVCache or (type(c) is RotatingKVCache and length == 1 and not c.empty())
            )
            for c in caches
        )
        fits = fits and not any(
            type(caches[i]) is RotatingKVCache and caches[i].max_size > window
            for i, window in windows.items()
        )
    numbers = mx.issubdtype(tokens.dtype, mx.integer)
    return fits and length > 0 and numbers and _evaluated(tokens)


class _View(NamedTuple):
    """Buffers, and what they were made of."""

    arrays: list[mx.array]
    padding: list[int]
    shown: int
    buffers: list[Buffers]

    def fits(self, arrays: list[mx.array], padding: list[int], shown: int) -> bool:
        same = self.padding == padding and self.shown == shown and len(self.arrays) == len(arrays)
        return same and all(a is b for a, b in zip(self.arrays, arrays, strict=True))


class NativeStep:
    """One model's program behind the interface of ``DecodeStep``, for calls of any length."""

    def __init__(self, program: Program, head: Projections, plan: Plan):
        self._program = program
        self._head = head
        self._plan = plan
        self._heads = program.config.num_key_value_heads, program.config.head_dim
        # By the first layer's cache: who lets go of it frees the memory.
        self._views: WeakKeyDictionary[Any, _View] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: Any, head: Projections, plan: Plan) -> NativeStep:
        """Compile or find the program. NativeError says why there is none."""
        exact = switches.NATIVE.read() == "exact"
        program = Program.of(model, kv_dtype=KV_DTYPE, exact=exact)
        threads = f"{program.threads} thread{'s' if program.threads > 1 else ''}"
        arithmetic = "float activations" if exact else "16-bit integer activations in groups of 32"
        plan.native = f"native program, {threads}, {arithmetic}"
        return cls(program, head, plan)

    def logits(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """(B, L) token ids -> logits (B, L, vocabulary) float32; each cache gains L rows."""
        if tokens.shape[1] < LAZY_FROM:
            return self._run(tokens, caches, "all")
        (logits,) = self._head(self._run(tokens, caches, "hidden"))
        return logits

    def greedy(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """(B, L) token ids -> the next ones (B, 1) uint32, and their logits (B, 1, vocabulary)."""
        logits = self._run(tokens, caches, "last")
        best = np.argmax(np.asarray(logits), axis=-1)
        return mx.array(best.astype(np.uint32)), logits

    def _run(self, tokens: mx.array, caches: Sequence[Any], result: str) -> mx.array:
        # A number that is no int32 must not become one that is a token.
        ids = np.array(tokens).astype(np.int64).clip(-1, 2**31 - 1).astype(np.int32)
        rows, length = ids.shape
        first = caches[0]
        batched = type(first) is BatchKVCache
        starts = np.array(first.offset).tolist() if batched else [first.offset]
        padding = np.array(first.left_padding).tolist() if batched else [0]
        for cache in caches:
            if cache.empty():
                cache.allocate(length, *self._heads, KV_DTYPE)
        places = [self._begin(cache, length, first) for cache in caches]
        for cache, (slot, _) in zip(caches, places, strict=True):
            cache.settle()
            cache.allow_writing(slot, KV_DTYPE)
        found = []
        for row, buffers in enumerate(self._buffers(caches, padding)):
            slots = [slot - padding[row] for slot, _ in places]
            lives = [live - padding[row] for _, live in places]
            if length > 1 or starts[row] < 0:
                found.append(self._read(ids[row], buffers, starts[row], slots[0], result))
            else:
                token = ids[row, 0]
                found.append(
                    self._program.decode(token, buffers, starts[row], row=slots, live=lives)
                )
        offset = first.offset + length
        for cache in caches:
            cache.end_step(offset, length)
        self._plan.count("native")
        return found[0][None] if rows == 1 else mx.stack(found)

    def _read(
        self, ids: np.ndarray, buffers: Buffers, start: int, slot: int, wanted: str
    ) -> mx.array:
        """``Program.prefill`` of tokens of which those at negative positions are padding: nothing
        is done for them, and their results are zeros, which nobody reads."""
        before = min(max(-start, 0), len(ids))
        config = self._program.config
        width = config.hidden_size if wanted == "hidden" else config.vocab_size
        padding = mx.zeros((before, width), mx.float32)
        if before == len(ids):
            return padding[-1:] if wanted == "last" else padding
        read = self._program.prefill(
            ids[before:], buffers, start + before, row=slot + before, wanted=wanted
        )
        assert read is not None
        return mx.concatenate([padding, read]) if before and wanted != "last" else read

    def _begin(self, cache: Any, length: int, first: Any) -> tuple[int, int]:
        capacity = cache.capacity()
        place = cache.begin_step(length)
        if cache.capacity() != capacity:
            # Layer by layer: MLX would make many copies before it lets go of what was copied.
            self._views.pop(first, None)
            mx.eval(cache.buffers())
        return place

    def _buffers(self, caches: Sequence[Any], padding: list[int]) -> list[Buffers]:
        """The program's view of each row's keys and values, made anew when an array is another."""
        pairs = [cache.buffers() for cache in caches]
        arrays = [array for pair in pairs for array in pair]
        shown = sum(cache.shown for cache in caches)
        view = self._views.pop(caches[0], None)
        if view is None or not view.fits(arrays, padding, shown):
            for keys, _ in pairs:
                check_layout(keys, *self._heads, len(padding))
            made = [
                self._program.buffers(pairs, sequence=row, skip=skip)
                for row, skip in enumerate(padding)
            ]
            view = _View(arrays, padding, shown, made)
        self._views[caches[0]] = view
        return view.buffers


def _evaluated(tokens: mx.array) -> bool:
    try:
        mx.eval(tokens)
    except (RuntimeError, ValueError):
        return False
    return True
