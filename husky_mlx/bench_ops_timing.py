"""Microseconds a launch, from chains of launches that the GPU runs one after another.

A chain is handed over while the GPU is busy with copying, which also leaves the caches cold, so
that the host's time is hidden as long as a launch costs it less than the GPU. What starting and
waiting cost drops out between a long and a short chain.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from husky_mlx import kernels
from husky_mlx.errors import HuskyError
from husky_mlx.ops.gemv import Platform

SHORT = 8  # launches of the short chain
MORE = (8, 64)  # by how many the long one is longer, at least and at most
TIMED_BYTES = 4_000_000_000  # that those move together, where they are between these bounds
COLD_BYTES = 512_000_000  # more than any cache holds, in the copies of what is timed
BUSY_BYTES = 1 << 28
# Copies that are timed: the host may hesitate for as long as a fast GPU copies in one of them, so
# that they are many, and the fewest seconds of a few tries count.
COPY_PASSES = (10, 50)
COPY_TRIES = 3
FLOOR_SIZE = 32

State = tuple[mx.array, ...]


class Side(NamedTuple):
    """One way to compute an operation.

    ``step(number, *state)`` makes launch ``number`` and returns its result, then what the next
    launch gets behind its first array. That one is made of the result, so that it waits for it.
    """

    step: Callable[..., tuple[mx.array, ...]]
    state: State


def launches_of(size: int) -> int:
    """Launches of the long chain for an operation that moves ``size`` bytes."""
    least, most = MORE
    return SHORT + min(max(TIMED_BYTES // size, least), most)


def copies_of(size: int) -> int:
    """Copies of its data that keep an operation of ``size`` bytes on cold memory: COLD_BYTES of
    them or, where each is used once only, as many as there are launches."""
    return min(-(-COLD_BYTES // size), launches_of(size))


def following(x: mx.array, result: mx.array) -> mx.array:
    """An array like ``x`` that waits for ``result``: its first numbers where they are enough, else
    ``x`` out of a small launch that reads it."""
    if result.dtype == x.dtype and result.size >= x.size:
        return result.reshape(-1)[: x.size].reshape(x.shape)
    return x + (0 * result.reshape(-1)[:1]).astype(x.dtype)


def chain(side: Side, launches: int) -> Callable[..., State]:
    """A function of the state that makes ``launches`` launches, each after the one before."""

    def run(*state: mx.array) -> State:
        first, result = state[0], state[0]
        for number in range(launches):
            result, *rest = side.step(number, *state)
            state = following(first, result), *rest[: len(state) - 1]
        return result, *state[1:]

    return run


def floor(platform: Platform) -> Side:
    """The least that a launch of a custom kernel can do: 32 numbers copied."""

    def step(number: int, before: mx.array) -> tuple[mx.array, ...]:
        grid = (FLOOR_SIZE, 1, 1)
        outputs = [((FLOOR_SIZE,), mx.float32)]
        (after,) = kernels.launch(
            "floor", {"before": before}, outputs, {}, grid, grid, platform.backend
        )
        return (after,)

    start = mx.arange(FLOOR_SIZE, dtype=mx.float32)
    mx.eval(start)
    return Side(step, (start,))


class Stopwatch:
    """Keeps the GPU busy and times what waits behind it."""

    def __init__(self) -> None:
        self._array = mx.zeros((BUSY_BYTES // 4,), mx.float32) + 1
        mx.eval(self._array)
        self._seconds_a_pass = 0.0
        self.seconds(lambda: (), 1)  # the first pass loads the kernel
        self.copy_bandwidth()

    def copy_bandwidth(self) -> float:
        """GB/s that MLX reads and writes when it copies."""
        few, many = COPY_PASSES
        shorter, longer = (
            min(self.seconds(lambda: (), passes) for _ in range(COPY_TRIES))
            for passes in COPY_PASSES
        )
        self._seconds_a_pass = _difference(longer, shorter, "copying") / (many - few)
        return 2 * self._array.nbytes / self._seconds_a_pass / 1e9

    def passes(self, seconds: float) -> int:
        """Copies that keep the GPU busy for ``seconds``, and at least one, for the caches."""
        return max(1, math.ceil(seconds / self._seconds_a_pass))

    def seconds(self, run: Callable[[], Any], passes: int) -> float:
        """From an idle GPU to the end of ``passes`` copies and of what ``run`` returns."""
        mx.synchronize()
        started = time.perf_counter()
        y = self._array
        for _ in range(passes):
            y = mx.abs(y)
        mx.async_eval(y)
        del y  # its memory is free for the next one
        mx.async_eval(run())
        mx.synchronize()
        return time.perf_counter() - started


class Chain:
    """The two chains of one side, compiled unless it runs in the emulator, and warm."""

    def __init__(self, name: str, side: Side, launches: int, watch: Stopwatch, compiled: bool):
        self._name, self._state, self._watch = name, side.state, watch
        self._more = launches - SHORT
        self._short, self._long = (
            mx.compile(chain(side, count)) if compiled else chain(side, count)
            for count in (SHORT, launches)
        )
        for _ in range(2):
            mx.eval(self._short(*self._state))
            handing_over = self._handing_over(self._long)
        self._passes = watch.passes(1.5 * handing_over)

    def microseconds(self) -> float:
        """Of a launch on the GPU; of the host where that is slower."""
        short, long = (
            self._watch.seconds(functools.partial(run, *self._state), self._passes)
            for run in (self._short, self._long)
        )
        return _difference(long, short, self._name) / self._more * 1e6

    def host_microseconds(self) -> float:
        """Of handing a launch over, in a short chain on an idle GPU."""
        return self._handing_over(self._short) / SHORT * 1e6

    def _handing_over(self, run: Callable[..., State]) -> float:
        mx.synchronize()
        started = time.perf_counter()
        mx.async_eval(run(*self._state))
        handed_over = time.perf_counter() - started
        mx.synchronize()
        return handed_over


def _difference(longer: float, shorter: float, what: str) -> float:
    if longer <= shorter:
        raise HuskyError(
            f"{what}: more launches took {longer:.2g} s and fewer {shorter:.2g} s: is the machine "
            "busy?"
        )
    return longer - shorter
