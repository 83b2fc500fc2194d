"""Where a decode step reads and writes, as one small array that the step itself moves on.

An array made on the host for every token costs more than it looks: MLX keeps those of 8 bytes and
less in memory that CUDA shares with the CPU, where each read stalls a kernel (qkv with RoPE and
append took 21 us on an H200 where the same product alone takes 5). This one has 16 int32 and lives
on the device; the host only keeps track of what it says and makes a new one after a trim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

# Entries: the slot of the first new row, the rows that are live with it, the row whose logits a
# padded prompt is after, then for up to four rows their positions and their left padding. Rows of
# one sequence follow on from the first.
SLOT, LIVE, LAST, POSITIONS, PADDING, SIZE = 0, 1, 2, 4, 8, 16
MAX_ROWS = 4


def advance(length: int) -> list[int]:
    """What a step of ``length`` tokens adds to a place."""
    return [length, length, 0, 0] + [length] * MAX_ROWS + [0] * (SIZE - PADDING)


def make_place(
    slot: int, live: int, start: Any, left_padding: mx.array | None, last: int = 0
) -> mx.array:
    """A place, (16,) int32. ``start``: the first position, an int, or (B,) for a batch."""
    if left_padding is None:
        positions = [start + row for row in range(MAX_ROWS)]
        return mx.array([slot, live, last, 0, *positions, *[0] * (SIZE - PADDING)], mx.int32)
    missing = mx.zeros((MAX_ROWS - left_padding.shape[0],), mx.int32)
    parts = [mx.array([slot, live, 0, 0], mx.int32)]
    for row in (start, left_padding):
        parts += [row.astype(mx.int32), missing]
    return mx.concatenate([*parts, mx.zeros((SIZE - PADDING - MAX_ROWS,), mx.int32)])


@dataclass(frozen=True)
class NextPlace:
    """The place that the last step left behind, and what the cache must look like for it to hold.

    ``start`` and ``left_padding`` of a batch are arrays and compared as objects.
    """

    slot: int
    live: int
    start: Any
    left_padding: mx.array | None
    array: mx.array

    def holds(self, slot: int, live: int, start: Any, left_padding: mx.array | None) -> bool:
        return (
            (slot, live) == (self.slot, self.live)
            and left_padding is self.left_padding
            and (start is self.start or (left_padding is None and start == self.start))
        )
