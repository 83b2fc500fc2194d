"""Several arrays in one buffer, so that a kernel takes them as one input.

On CUDA each input of a launch costs the host some 0.7 us, and a quantized layer has fifteen arrays
of constants in four kernels that cost it 4 us each.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

ALIGNMENT = 16  # bytes, the widest load of a kernel


def join(parts: Sequence[Sequence[mx.array]]) -> tuple[mx.array, list[mx.array]]:
    """One buffer (words,) uint32 with the bytes of all parts, and for each part a view of it.

    A part is one or more arrays, one after the other along the first axis. Each begins at a
    multiple of ALIGNMENT bytes. The views are evaluated: another thread could not evaluate this
    one's arrays.
    """
    words = [_words(pieces) for pieces in parts]
    buffer = mx.concatenate([piece for pieces in words for piece in pieces])
    mx.eval(buffer)
    views, start = [], 0
    for pieces, words_of_part in zip(parts, words, strict=True):
        first, rows = pieces[0], sum(piece.shape[0] for piece in pieces)
        size = sum(piece.size for piece in words_of_part)
        values = buffer[start : start + size].view(first.dtype)
        values = values[: sum(piece.size for piece in pieces)]
        views.append(values.reshape(rows, *first.shape[1:]))
        start += size
    mx.eval(views)
    return buffer, views


def _words(pieces: Sequence[mx.array]) -> list[mx.array]:
    """A part's bytes as uint32, up to a multiple of ALIGNMENT."""
    flat = [piece.reshape(-1) for piece in pieces]
    if any(piece.nbytes % 4 for piece in flat):
        flat = [mx.concatenate(flat)]
    missing = -sum(piece.nbytes for piece in flat) % ALIGNMENT // flat[0].itemsize
    if missing:
        flat[-1] = mx.pad(flat[-1], (0, missing))
    return [piece.view(mx.uint32) for piece in flat]
