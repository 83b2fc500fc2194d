"""Several arrays in one buffer, so that a kernel takes them as one input.

On CUDA each input of a launch costs the host some 0.7 us, and a quantized layer has fifteen arrays
of constants in four kernels that cost it 4 us each.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import mlx.core as mx

ALIGNMENT = 16  # bytes, the widest load of a kernel


Shape = tuple[mx.Dtype, tuple[int, ...]]


def join(parts: Sequence[Sequence[mx.array]]) -> tuple[mx.array, list[mx.array]]:
    """One buffer (words,) uint32 with the bytes of all parts, and for each part a view of it.

    A part is one or more arrays, one after the other along the first axis. Each begins at a
    multiple of ALIGNMENT bytes. The views are evaluated: another thread could not evaluate this
    one's arrays.
    """
    words = [_words(pieces) for pieces in parts]
    buffer = mx.concatenate([piece for pieces in words for piece in pieces])
    mx.eval(buffer)
    return buffer, split(buffer, [joined(pieces) for pieces in parts])


def joined(pieces: Sequence[mx.array]) -> Shape:
    """Dtype and shape of arrays one after the other along the first axis."""
    first = pieces[0]
    return first.dtype, (sum(piece.shape[0] for piece in pieces), *first.shape[1:])


def words_of(dtype: mx.Dtype, shape: tuple[int, ...]) -> int:
    """Words that a part takes in a buffer."""
    return -(-prod(shape) * dtype.size // ALIGNMENT) * ALIGNMENT // 4


def split(buffer: mx.array, parts: Sequence[Shape]) -> list[mx.array]:
    """The views of a buffer's parts, evaluated."""
    views, start = [], 0
    for dtype, shape in parts:
        size = words_of(dtype, shape)
        values = buffer[start : start + size].view(dtype)
        views.append(values[: prod(shape)].reshape(shape))
        start += size
    mx.eval(views)
    return views


def _words(pieces: Sequence[mx.array]) -> list[mx.array]:
    """A part's bytes as uint32, up to a multiple of ALIGNMENT."""
    flat = [piece.reshape(-1) for piece in pieces]
    if any(piece.nbytes % 4 for piece in flat):
        flat = [mx.concatenate(flat)]
    missing = -sum(piece.nbytes for piece in flat) % ALIGNMENT // flat[0].itemsize
    if missing:
        flat[-1] = mx.pad(flat[-1], (0, missing))
    return [piece.view(mx.uint32) for piece in flat]
