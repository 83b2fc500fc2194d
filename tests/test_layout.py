"""Arrays that share a buffer: their values, their places, and that the buffer is really shared."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from husky_mlx.layout import join

DTYPES = [mx.uint32, mx.float32, mx.float16, mx.bfloat16]
shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


def address(array: mx.array) -> int:
    flat = array.view(mx.uint8)
    return np.frombuffer(flat, np.uint8).__array_interface__["data"][0]


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=5))
def test_views_have_the_values_and_lie_in_order(parts):
    arrays = [
        (mx.arange(int(np.prod(shape))) + 3 * i).astype(dtype).reshape(shape)
        for i, (shape, dtype) in enumerate(parts)
    ]
    wanted = [array.tolist() for array in arrays]
    buffer, views = join([[array] for array in arrays])
    assert buffer.dtype == mx.uint32
    start = 0
    for (shape, dtype), view, values in zip(parts, views, wanted, strict=True):
        assert (view.shape, view.dtype) == (shape, dtype)
        assert view.tolist() == values
        if len(parts) > 1:  # one array that fits is its own buffer
            assert address(view) - address(buffer) == start
        start += -(-view.nbytes // 16) * 16
    assert buffer.nbytes == start


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from(DTYPES))
def test_a_part_of_several_arrays_is_one_behind_the_other(rows, dtype):
    pieces = [(mx.arange(n * 3) + 7 * i).astype(dtype).reshape(n, 3) for i, n in enumerate(rows)]
    wanted = [row for piece in pieces for row in piece.tolist()]
    _, (view, after) = join([pieces, [mx.ones((2,), dtype)]])
    assert view.tolist() == wanted and after.tolist() == [1, 1]


def test_the_peak_is_the_buffer_beside_the_arrays():
    arrays = [mx.ones((64, 4096)) + i for i in range(4)]
    mx.eval(arrays)
    size = sum(array.nbytes for array in arrays)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    join([arrays])
    assert mx.get_peak_memory() - before < 1.1 * size
