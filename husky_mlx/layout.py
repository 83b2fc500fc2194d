"""Several arrays in one buffer, so that a kernel takes them as one input.

On CUDA each input of a launch costs the host some 0.7 us, and a quantized layer has fifteen arrays
of constants in four kernels that cost it 4 us each.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

ALIGNMENT = 16  # bytes, the widest load of a kernel


def join(arrays: Sequence[mx.array]) -> tuple[mx.array, list[mx.array]]:
    """One buffer (words,) uint32 with the bytes of ``arrays``, and views of it that equal them.

    Each begins at a multiple of ALIGNMENT bytes. All are evaluated: another thread could not
    evaluate this one's arrays.
    """
    words = [_words(array) for array in arrays]
    buffer = mx.concatenate(words)
    mx.eval(buffer)
    views, start = [], 0
    for array, part in zip(arrays, words, strict=True):
        values = buffer[start : start + part.size].view(array.dtype)[: array.size]
        views.append(values.reshape(array.shape))
        start += part.size
    mx.eval(views)
    return buffer, views


def _words(array: mx.array) -> mx.array:
    """The array's bytes as uint32, up to a multiple of ALIGNMENT."""
    flat = array.reshape(-1)
    missing = -flat.nbytes % ALIGNMENT // flat.itemsize
    return mx.pad(flat, (0, missing)).view(mx.uint32) if missing else flat.view(mx.uint32)
