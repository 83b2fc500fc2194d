"""How much memory the device has for MLX, and the refusal of what would not fit."""

from __future__ import annotations

import functools

import mlx.core as mx
import psutil

from husky_mlx.errors import MemoryLimitError


@functools.cache
def memory_limit() -> int:
    """Bytes that MLX should keep below: Metal's recommended working set, else the memory there is.

    Off Metal MLX reports no recommendation: the limit is then the memory of the GPU, or of the
    machine for the CPU build.
    """
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if info.get(key):
            return int(info[key])
    return psutil.virtual_memory().total


def memory_left() -> int:
    """Bytes below ``memory_limit()`` that MLX does not hold yet."""
    return max(memory_limit() - mx.get_active_memory(), 0)


def require_memory(needed: int, purpose: str, advice: str) -> None:
    """Raise MemoryLimitError if ``needed`` more bytes would pass ``memory_limit()``.

    ``advice`` is a sentence on what would fit.
    """
    left = memory_left()
    if needed <= left:
        return
    raise MemoryLimitError(
        f"{purpose} needs {megabytes(needed)}, but {megabytes(left)} of this device's "
        f"{megabytes(memory_limit())} are left. {advice}"
    )


def megabytes(size: int) -> str:
    """A size in bytes for people, in units of 10^6 bytes."""
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size:,} bytes"
