"""Who may have a single launch in flight: one thread of the process, and there one after another.

A persistent kernel waits for threadgroups of its own that have not begun. Two of them at once could
each hold the multiprocessors that the other one needs, for ever. Launches of a thread are ordered
through an array that each takes from the one before; a thread whose turn it is not takes launches
that end by themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import mlx.core as mx

# Seconds without a single launch after which another thread may take over.
IDLE = 1.0
SIZE = 16  # MLX keeps arrays of 8 bytes and less in memory that the CPU shares


class Turns:
    """The turns of one device; ``wait`` returns when an array has been computed."""

    def __init__(self, wait: Callable[[mx.array], None] = mx.eval):
        self._wait = wait
        # A collector may run another generator's step while one holds it.
        self._lock = threading.RLock()
        self._owner: threading.Thread | None = None
        self._pending = False
        self._used = 0.0
        self._last: mx.array | None = None
        self._counter: mx.array | None = None

    def take(self) -> mx.array | None:
        """What the calling thread's next single launch has to wait for, an array (SIZE,) uint32;
        None where it must not make one now. Who got a turn must ``leave`` it."""
        thread, now = threading.current_thread(), time.monotonic()
        with self._lock:
            if self._owner is not thread:
                if self._owner is not None and (self._pending or now - self._used < IDLE):
                    return None
                if self._last is not None:
                    self._wait(self._last)
                self._owner, self._last = thread, None
            self._pending = True
            if self._last is None:
                self._last = mx.zeros((SIZE,), mx.uint32)
                mx.eval(self._last)
            return self._last

    def leave(self, after: mx.array | None) -> None:
        """End a turn. ``after``: an output of its launch, which has been handed over; None where
        there was none."""
        with self._lock:
            self._pending, self._used = False, time.monotonic()
            if after is not None:
                self._last = after

    def counter(self) -> mx.array:
        """What the barriers of all launches count on, (SIZE,) uint32; kernels write it."""
        with self._lock:
            if self._counter is None:
                self._counter = mx.zeros((SIZE,), mx.uint32)
                mx.eval(self._counter)
            return self._counter


TURNS = Turns()
