"""The kernels of a prompt's way through the model, run from their source in the emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gemv_reference import EPS, TOLERANCE, check, exact, normal, random_weights
from test_kernels_gemv import rotated

from husky_mlx import chips
from husky_mlx.matrix import Heads, Matrix
from husky_mlx.ops.dequantize import dequantize_kernel, prepare_dequantize_four
from husky_mlx.ops.gemv import Platform
from husky_mlx.ops.rope_append import norm_rope_append_kernel, rope_append_kernel
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
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 64)])
def test_four_matrices_written_out_at_once(bits, group, dtype):
    """Of several threadgroups, of a part of one, of exactly one."""
    rng = np.random.default_rng(bits)
    sizes = [(150, 192), (3, 64), (128, 64), (65, 128)]
    weights = [random_weights(rng, *size, bits, group, dtype) for size in sizes]
    made = [
        matrix(each, *size, bits, group, dtype) for each, size in zip(weights, sizes, strict=True)
    ]
    for found, each in zip(prepare_dequantize_four(made, PLATFORM)(), weights, strict=True):
        assert found.dtype == dtype
        check(found, each.exact)


def test_matrices_that_differ_are_not_written_out_at_once():
    rng = np.random.default_rng(0)
    made = [
        matrix(random_weights(rng, 8, 64, bits, 32, mx.float16), 8, 64, bits, 32, mx.float16)
        for bits in (4, 4, 8, 4)
    ]
    for matrices in (made, made[:2]):
        with pytest.raises(ValueError, match="takes four matrices quantized alike"):
            prepare_dequantize_four(matrices, PLATFORM)


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
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norms"])
def test_rope_and_append(length, heads, kv_heads, head_dim, traditional, has_bias, normed, dtype):
    """Queries, and every row of both caches, also those that must be left alone; ``normed``: after
    a norm of each head."""
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
    described = Heads(heads, kv_heads, head_dim, traditional)
    where = keys, values, make_place(slot, 0, position, None), PLATFORM
    y = exact(qkv).reshape(length, -1, head_dim)
    if normed:
        norms = normal(rng, (head_dim,), dtype, 0.3, 1.0), normal(rng, (head_dim,), dtype)
        queries = norm_rope_append_kernel(qkv, made, described, norms, EPS, *where)
        y = normed_heads(y, heads, norms)
    else:
        queries = rope_append_kernel(qkv, made, described, *where)
    positions = np.arange(position, position + length, dtype=np.float32)
    angles = (positions[:, None] * frequencies).astype(np.float64)
    turned = rotated(y[:, : heads + kv_heads], angles, traditional)
    wanted_keys[0, :, slot : slot + length] = turned[:, heads:].swapaxes(0, 1)
    wanted_values[0, :, slot : slot + length] = y[:, heads + kv_heads :].swapaxes(0, 1)
    assert queries.shape == (length, heads, head_dim)
    check(queries, turned[:, :heads])
    check(keys, wanted_keys)
    np.testing.assert_array_equal(exact(values), wanted_values)
    untouched = np.ones(capacity, bool)
    untouched[slot : slot + length] = False
    assert (exact(keys) == wanted_keys)[:, :, untouched].all()


def normed_heads(y, heads, norms):
    """(rows, all heads, head_dim) with each head of q and k after its RMS norm."""
    q_norm, k_norm = map(exact, norms)
    kv_heads = (y.shape[1] - heads) // 2
    scaled = y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + EPS)
    return np.concatenate(
        [scaled[:, :heads] * q_norm, scaled[:, heads:-kv_heads] * k_norm, y[:, -kv_heads:]], axis=1
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batched", [False, True], ids=["one sequence", "a batch"])
def test_norm_rope_and_append_of_a_decode_step(batched, dtype):
    rng = np.random.default_rng(7)
    rows, heads, kv_heads, head_dim, capacity, slot = 3, 4, 2, 48, 9, 5
    all_heads = heads + 2 * kv_heads
    frequencies = (10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    weights = random_weights(rng, all_heads * head_dim, 32, 8, 32, dtype)
    norm = normal(rng, (32,), dtype)
    made = matrix(weights, all_heads * head_dim, 32, 8, 32, dtype, norm, mx.array(frequencies))
    qkv = normal(rng, (rows, all_heads * head_dim), dtype)
    norms = normal(rng, (head_dim,), dtype, 0.3, 1.0), normal(rng, (head_dim,), dtype)
    cache_shape = (rows if batched else 1, kv_heads, capacity, head_dim)
    keys, values = normal(rng, cache_shape, dtype), normal(rng, cache_shape, dtype)
    wanted_keys, wanted_values = exact(keys), exact(values)
    positions = [40, 3, 7] if batched else [slot, slot + 1, slot + 2]
    place = mx.array([slot, 0, 0, 0, *positions, *[0] * 9], mx.int32)
    queries = norm_rope_append_kernel(
        qkv,
        made,
        Heads(heads, kv_heads, head_dim, False),
        norms,
        EPS,
        keys,
        values,
        place,
        PLATFORM,
        batched=batched,
    )
    y = normed_heads(exact(qkv).reshape(rows, all_heads, head_dim), heads, norms)
    angles = (np.array(positions, np.float32)[:, None] * frequencies).astype(np.float64)
    turned = rotated(y[:, : heads + kv_heads], angles, False)
    for row in range(rows):
        at = (row, slice(None), slot) if batched else (0, slice(None), slot + row)
        wanted_keys[at], wanted_values[at] = turned[row, heads:], y[row, -kv_heads:]
    assert queries.shape == (rows, heads, head_dim)
    check(queries, turned[:, :heads])
    check(keys, wanted_keys)
    np.testing.assert_array_equal(exact(values), wanted_values)


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
