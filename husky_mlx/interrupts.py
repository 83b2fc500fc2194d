"""Signals that end a command."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """SIGTERM, which ``timeout`` sends, ends a command like Ctrl-C: what it had begun to write is
    removed, and its processes end with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
