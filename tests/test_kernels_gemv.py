"""The layers' projection kernels, run from their source in the emulator, against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gemv_reference import (
    EPS_BITS,
    TILES,
    all_cases,
    check,
    exact,
    launch,
    normal,
    random_weights,
    rms_norm,
    template_of,
)

from husky_mlx.ops.gemv import float_bits
from husky_mlx.tiles import GemvShape


@pytest.mark.parametrize("op", ["o_proj_add", "down_add"])
@all_cases(0)
def test_projection_and_residual(op, scheme, bits, group, dtype, m, columns, tile):
    """Rows that are no multiple of the tile, and a bias in every other case."""
    rows = 40 if op == "o_proj_add" else 72
    has_bias = (bits + m + rows // 8) % 2 == 0
    rng = np.random.default_rng(columns + m)
    weights = random_weights(rng, rows, columns, bits, group, dtype)
    x, residual = normal(rng, (m, columns), dtype, 2.0), normal(rng, (m, rows), dtype)
    bias = normal(rng, (rows,), dtype)
    (y,) = launch(
        scheme,
        op,
        {
            "attended" if op == "o_proj_add" else "activated": x,
            "residual": residual,
            "constants": weights.constants(*[bias] * has_bias),
        },
        [((m, rows), dtype)],
        template_of(bits, group, dtype, m, columns, tile, N=rows, HAS_BIAS=has_bias),
        GemvShape(m, rows, columns),
        tile,
    )
    wanted = exact(residual) + exact(x) @ weights.exact.T + has_bias * exact(bias)
    check(y, wanted)


@all_cases(1)
def test_gate_and_up(scheme, bits, group, dtype, m, columns, tile):
    width = 36
    has_bias, norm = m % 2 == 0, bits != 8
    rng = np.random.default_rng(columns + m)
    weights = random_weights(rng, 2 * width, columns, bits, group, dtype)
    x, factors = normal(rng, (m, columns), dtype, 3.0), normal(rng, (columns,), dtype, 0.2, 0.5)
    bias = normal(rng, (2 * width,), dtype)
    (activated,) = launch(
        scheme,
        "rms_gate_up_swiglu",
        {"x": x, "constants": weights.constants(*[bias] * has_bias, factors)},
        [((m, width), dtype)],
        template_of(
            bits,
            group,
            dtype,
            m,
            columns,
            tile,
            N=width,
            NORM=norm,
            EPS_BITS=EPS_BITS,
            HAS_BIAS=has_bias,
        ),
        GemvShape(m, 2 * width, columns),
        tile,
    )
    normed = rms_norm(x, factors, scheme) if norm else exact(x)
    gate, up = np.split(normed @ weights.exact.T + has_bias * exact(bias), 2, axis=1)
    check(activated, gate / (1 + np.exp(-gate)) * up)


def rotated(x: np.ndarray, angles: np.ndarray, traditional: bool) -> np.ndarray:
    """x (M, heads, D) by angles (M, D / 2)."""
    pairs = x.reshape(*x.shape[:2], -1, 2) if traditional else x.reshape(*x.shape[:2], 2, -1)
    a, b = np.moveaxis(pairs, -1 if traditional else -2, 0)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    turned = np.stack([a * cosine - b * sine, a * sine + b * cosine], -1 if traditional else -2)
    return turned.reshape(x.shape)


def run_qkv(
    scheme,
    bits,
    group,
    dtype,
    m,
    columns,
    tile,
    *,
    heads=3,
    kv_heads=1,
    head_dim=64,
    traditional=False,
    batched=False,
    has_bias=False,
    norm=True,
    magnitude=1.0,
):
    """Runs the kernel, and compares the queries and every row of both caches, also those that it
    must leave alone."""
    rng = np.random.default_rng(columns + m)
    rows, capacity, slot = (heads + 2 * kv_heads) * head_dim, 9, 4
    weights = random_weights(rng, rows, columns, bits, group, dtype)
    x, factors = normal(rng, (m, columns), dtype, 3.0), normal(rng, (columns,), dtype, 0.2, 0.5)
    bias = normal(rng, (rows,), dtype)
    frequencies = (10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    positions = [7, 0, 1000, 31][:m] if batched else [slot + i for i in range(m)]
    cache_shape = (m if batched else 1, kv_heads, capacity, head_dim)
    keys, values = normal(rng, cache_shape, dtype), normal(rng, cache_shape, dtype)
    wanted_keys, wanted_values = exact(keys), exact(values)
    (queries,) = launch(
        scheme,
        "rms_qkv_rope_append",
        {
            "x": x,
            "constants": weights.constants(*[bias] * has_bias, factors, mx.array(frequencies)),
            "place": mx.array([slot, 0, 0, 0, *positions, *[0] * (12 - m)], mx.int32),
            "keys": keys,
            "values": values,
        },
        [((m, heads, head_dim), dtype)],
        template_of(
            bits,
            group,
            dtype,
            m,
            columns,
            tile,
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=head_dim,
            NORM=norm,
            EPS_BITS=EPS_BITS,
            HAS_BIAS=has_bias,
            TRADITIONAL=traditional,
            MAGNITUDE_BITS=float_bits(magnitude),
            BATCHED=batched,
        ),
        GemvShape(m, rows, columns, block=head_dim),
        tile,
    )
    normed = rms_norm(x, factors, scheme) if norm else exact(x)
    y = (normed @ weights.exact.T + has_bias * exact(bias)).reshape(m, -1, head_dim)
    # The kernel's angle is a float32 product, as in mx.fast.rope.
    angles = (np.array(positions, np.float32)[:, None] * frequencies).astype(np.float64)
    turned = magnitude * rotated(y[:, : heads + kv_heads], angles, traditional)
    for row in range(m):
        place = (row, slice(None), slot) if batched else (0, slice(None), slot + row)
        wanted_keys[place] = turned[row, heads:]
        wanted_values[place] = y[row, heads + kv_heads :]
    check(queries, turned[:, :heads], "queries")
    check(keys, wanted_keys, "keys")
    check(values, wanted_values, "values")
    untouched = np.ones(cache_shape, bool)
    untouched[:, :, slot : slot + (1 if batched else m)] = False
    assert (exact(keys) == wanted_keys)[untouched].all()
    assert (exact(values) == wanted_values)[untouched].all()


@all_cases(2)
def test_qkv_rope_and_append(scheme, bits, group, dtype, m, columns, tile):
    run_qkv(scheme, bits, group, dtype, m, columns, tile, batched=bits == 8)


@pytest.mark.parametrize("scheme", list(TILES))
@pytest.mark.parametrize(
    ("head_dim", "traditional", "batched", "has_bias", "norm", "tile"),
    # Head sizes of which a tile has all, a part or, at 80, a part that does not divide it.
    [
        (64, True, False, True, True, 0),
        (80, False, True, False, False, 1),
        (96, True, True, False, True, 1),
        (80, True, False, True, True, 2),
        (128, False, False, True, False, 3),
    ],
)
def test_heads_and_rope_kinds(scheme, head_dim, traditional, batched, has_bias, norm, tile):
    run_qkv(
        scheme,
        4,
        32,
        mx.float16,
        2,
        160,
        TILES[scheme][tile],
        heads=2,
        head_dim=head_dim,
        traditional=traditional,
        batched=batched,
        has_bias=has_bias,
        norm=norm,
        magnitude=1.25 if traditional else 1.0,
    )


@all_cases(3)
def test_qkv_before_norms_of_heads(scheme, bits, group, dtype, m, columns, tile):
    """In rows that tiles do not divide; one of two times with a bias."""
    rng = np.random.default_rng(columns + m)
    rows, has_bias = 88, columns % 128 == 0
    weights = random_weights(rng, rows, columns, bits, group, dtype)
    x, factors = normal(rng, (m, columns), dtype, 3.0), normal(rng, (columns,), dtype, 0.2, 0.5)
    bias = normal(rng, (rows,), dtype)
    (qkv,) = launch(
        scheme,
        "rms_qkv",
        {"x": x, "constants": weights.constants(*[bias] * has_bias, factors)},
        [((m, rows), dtype)],
        template_of(
            bits,
            group,
            dtype,
            m,
            columns,
            tile,
            N=rows,
            NORM=True,
            EPS_BITS=EPS_BITS,
            HAS_BIAS=has_bias,
        ),
        GemvShape(m, rows, columns),
        tile,
    )
    check(qkv, rms_norm(x, factors, scheme) @ weights.exact.T + has_bias * exact(bias))
