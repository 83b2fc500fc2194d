"""``mx.compile`` for functions that several threads call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx


class Compiled:
    """A function compiled for each thread that calls it.

    MLX keeps traces in a cache of the thread, under the function's address, and a compiled function
    that is dropped takes them out of the cache of the thread that called it last. What it left in
    another's would hold the weights that it closed over, and be called by the next function at that
    address.
    """

    def __init__(self, function: Callable):
        self._function = function
        self._of_thread = threading.local()

    def __call__(self, *arguments: Any) -> Any:
        compiled = getattr(self._of_thread, "compiled", None)
        if compiled is None:
            compiled = self._of_thread.compiled = mx.compile(self._function)
        return compiled(*arguments)


def compiled_if(wanted: bool, function: Callable) -> Callable:
    """``function``, compiled if ``wanted``: what runs in the emulator cannot be traced."""
    return Compiled(function) if wanted else function
