"""The kernels of a prompt's way through the model, run from their source in the emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gemv_reference import TOLERANCE, check, exact, normal, random_weights
from test_kernels_gemv import rotated

from husky_mlx import chips
from husky_mlx.matrix import Matrix
from husky_mlx.ops.dequantize import dequantize_kernel
from husky_mlx.ops.gemv import Platform
from husky_mlx.ops.rms_qkv_rope_append import Heads
from husky_mlx.ops.rope_append import rope_append_kernel
from husky_mlx.ops.swiglu import swiglu_kernel
from husky_mlx.places import make_place

PLATFORM = Platform(chips.parse("m1")[0], "emulator")
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def matrix(weights, rows, columns, bits, group, dtype, *more, has_bias=False):
    constants = weights.constants(*more)
    return Matrix(constants, None, has_bias, bits, group, rows, columns, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "group", "rows", "columns"),
    # Sizes that fill no whole threadgroup, and SmolLM2's width.
    [(4, 32, 7, 32), (4, 64, 5, 576), (4, 128, 3, 384), (8, 32, 5, 160), (8, 64, 9, 64)],
)
def test_a_matrix_written_out(bits, group, rows, columns, dtype):
    weights = random_weights(np.random.default_rng(rows), rows, columns, bits, group, dtype)
    found = dequantize_kernel(matrix(weights, rows, columns, bits, group, dtype), PLATFORM)
    assert found.dtype == dtype
    check(found, weights.exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim", "traditional", "has_bias"),
    [
        (1, 2, 1, 16, False, False),
        (5, 3, 1, 64, False, True),
        (7, 4, 2, 80, True, False),
        (3, 2, 2, 128, True, True),
    ],
)
def test_rope_and_append(length, heads, kv_heads, head_dim, traditional, has_bias, dtype):
    """Queries, and every row of both caches, also those that must be left alone."""
    rng = np.random.default_rng(head_dim)
    rows, columns = (heads + 2 * kv_heads) * head_dim, 32
    capacity, slot, position = length + 6, 4, 900
    frequencies = (10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    weights = random_weights(rng, rows, columns, 4, 32, dtype)
    bias, norm = normal(rng, (rows,), dtype), normal(rng, (columns,), dtype)
    made = matrix(
        weights, rows, columns, 4, 32, dtype, *[bias] * has_bias, norm, mx.array(frequencies),
        has_bias=has_bias,
    )  # fmt: skip
    qkv = normal(rng, (length, rows), dtype)
    cache_shape = (1, kv_heads, capacity, head_dim)
    keys, values = normal(rng, cache_shape, dtype), normal(rng, cache_shape, dtype)
    wanted_keys, wanted_values = exact(keys), exact(values)
    queries = rope_append_kernel(
        qkv,
        made,
        Heads(heads, kv_heads, head_dim, traditional),
        keys,
        values,
        make_place(slot, 0, position, None),
        PLATFORM,
    )
    y = exact(qkv).reshape(length, -1, head_dim)
    positions = np.arange(position, position + length, dtype=np.float32)
    angles = (positions[:, None] * frequencies).astype(np.float64)
    turned = rotated(y[:, : heads + kv_heads], angles, traditional)
    wanted_keys[0, :, slot : slot + length] = turned[:, heads:].swapaxes(0, 1)
    wanted_values[0, :, slot : slot + length] = y[:, heads + kv_heads :].swapaxes(0, 1)
    assert queries.shape == (1, heads, length, head_dim)
    check(queries, turned[None, :, :heads].swapaxes(1, 2))
    check(keys, wanted_keys)
    np.testing.assert_array_equal(exact(values), wanted_values)
    untouched = np.ones(capacity, bool)
    untouched[slot : slot + length] = False
    assert (exact(keys) == wanted_keys)[:, :, untouched].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "width"), [(1, 32), (5, 96), (3, 1536)])
def test_swiglu(length, width, dtype):
    rng = np.random.default_rng(width)
    gate_up = normal(rng, (length, 2 * width), dtype, 4.0)
    gate, up = np.split(exact(gate_up), 2, axis=1)
    with np.errstate(over="ignore"):
        wanted = gate / (1 + np.exp(-gate)) * up
    check(swiglu_kernel(gate_up, PLATFORM), wanted, tolerance=TOLERANCE[dtype])


def test_a_dense_matrix_is_not_written_out():
    weights = random_weights(np.random.default_rng(0), 8, 32, 16, 32, mx.float16)
    with pytest.raises(ValueError, match="not quantized"):
        dequantize_kernel(matrix(weights, 8, 32, 16, 32, mx.float16), PLATFORM)
