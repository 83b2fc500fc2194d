"""Who may have a single launch in flight: one thread of the process, and there one after another.

A persistent kernel waits for threadgroups of its own that have not begun. Two of them at once could
each hold the multiprocessors that the other one needs, for ever. Launches of a thread are ordered
through an array that each takes from the one before; a thread whose turn it is not takes launches
that end by themselves.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import mlx.core as mx

# Seconds without a single launch after which another thread may take over.
IDLE = 1.0
SIZE = 16  # MLX keeps arrays of 8 bytes and less in memory that the CPU shares


def _synchronize() -> bool:
    """Wait for all that runs on the GPU, whichever thread's it is; false where that is unknown."""
    for name in ("libcudart.so.13", "libcudart.so.12"):
        try:
            runtime = ctypes.CDLL(name, os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        return int(runtime.cudaDeviceSynchronize()) == 0
    return False


class Turns:
    """The turns of one device; ``wait_for_device`` ends when nothing runs there, false: unknown."""

    def __init__(self, wait_for_device: Callable[[], bool] = _synchronize):
        self._wait_for_device = wait_for_device
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None
        self._used = 0.0
        self._last: mx.array | None = None
        self._counter: mx.array | None = None

    def take(self) -> mx.array | None:
        """What the calling thread's next single launch has to wait for, an array (SIZE,) uint32;
        None where it must not make one now."""
        thread, now = threading.current_thread(), time.monotonic()
        with self._lock:
            if self._owner is not thread:
                busy = self._owner is not None and now - self._used < IDLE
                if busy or (self._owner is not None and not self._wait_for_device()):
                    return None
                self._owner, self._last = thread, None
            self._used = now
            if self._last is None:
                self._last = mx.zeros((SIZE,), mx.uint32)
                mx.eval(self._last)
            return self._last

    def leave(self, after: mx.array) -> None:
        """``after``, an output of the launch, is what the thread's next one waits for."""
        with self._lock:
            if self._owner is threading.current_thread():
                self._last = after

    def counter(self) -> mx.array:
        """What the barriers of all launches count on, (SIZE,) uint32; kernels write it."""
        with self._lock:
            if self._counter is None:
                self._counter = mx.zeros((SIZE,), mx.uint32)
                mx.eval(self._counter)
            return self._counter


TURNS = Turns()
