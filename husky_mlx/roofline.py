"""Predictions from a chip's figures: what its memory and its arithmetic allow at best.

They are roofs, not measurements: a real step also waits between kernels and never quite reaches
the bandwidth on the data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass

from husky_mlx.chips import Chip
from husky_mlx.footprint import Footprint

GB = 1_000_000_000
GIB = 1 << 30
# Metal recommends two thirds of the memory up to 32 GB and three quarters above, as logs of Macs
# show: 10922.67 MiB of 16 GB, 21845.34 of 32 and 73728 of 96 (ggml-org/llama.cpp issues 2011 and
# 3213, ise-uiuc/magicoder issue 19). Newer systems allow more: 107.52 GiB of 128 on macOS 26
# (antirez/ds4 pull request 893).
_SMALL_MEMORY = 32  # GB
_RECOMMENDED = {"small": 2 / 3, "large": 3 / 4}
_LONGEST = 1 << 24  # tokens


@dataclass(frozen=True)
class Roof:
    """Predicted for one model on one chip: tokens a second and seconds, at best.

    ``prompt_seconds`` is None where the chip's arithmetic is not known; ``prompt_bound`` says which
    of the two roofs it is: memory or arithmetic.
    """

    decode_tps: float
    decode_bytes: int
    prompt_seconds: float | None
    prompt_bound: str


def roof(footprint: Footprint, chip: Chip, prompt: int, context: int) -> Roof:
    """The roof of a prompt of ``prompt`` tokens and of decode with ``context`` in the cache."""
    moved = footprint.decode_bytes(context)
    by_memory = footprint.prompt_bytes(prompt) / (chip.bandwidth * GB)
    seconds, bound = None, "unknown"
    if chip.tflops is not None:
        by_arithmetic = footprint.prompt_operations(prompt) / (chip.tflops * 1e12)
        seconds = max(by_memory, by_arithmetic)
        bound = "arithmetic" if by_arithmetic >= by_memory else "memory"
    return Roof(chip.bandwidth * GB / moved, moved, seconds, bound)


def working_set(chip: Chip, memory: int) -> int:
    """Bytes that MLX should keep below on a machine of ``memory`` GB: Metal's recommendation, or
    all of a CUDA GPU's memory."""
    if chip.target != "metal":
        return memory * GB
    return int(memory * GIB * _RECOMMENDED["small" if memory <= _SMALL_MEMORY else "large"])


def needed(footprint: Footprint, context: int) -> int:
    """Bytes in use at most with ``context`` tokens: weights, cache, and a prompt's activations."""
    return (
        footprint.weight_bytes()
        + footprint.allocated_cache_bytes(context)
        + footprint.workspace_bytes(context)
    )


def largest_context(footprint: Footprint, budget: int) -> int | None:
    """The most tokens that fit ``budget`` bytes: 0 where not even one does, None where any number
    does, which is so if every layer has a window."""
    if needed(footprint, _LONGEST) <= budget:
        return None
    low, high = 0, _LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        if needed(footprint, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low
