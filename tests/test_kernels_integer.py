"""Products in whole numbers: what x becomes, the largest operands, infinities and NaN."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from gemv_reference import (
    EMULATED_MMA,
    EPS_BITS,
    TILES,
    Weights,
    check,
    exact,
    launch,
    normal,
    random_weights,
    template_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from husky_mlx import emulator
from husky_mlx.emulator.errors import EmulatorError
from husky_mlx.kernel_source import kernel_source
from husky_mlx.tiles import GemvShape, GemvTile

TILE = TILES["integer"][1]


def packed(codes, bits, group, scale=1.0, bias=0.0, dtype=mx.bfloat16) -> Weights:
    rows, columns = codes.shape
    each = 32 // bits
    shifts = np.arange(each, dtype=np.uint32) * bits
    words = (codes.reshape(rows, -1, each) << shifts).sum(axis=-1, dtype=np.uint32)
    entries = [mx.full((rows, columns // group), value, dtype) for value in (scale, bias)]
    return Weights([mx.array(words), *entries], codes * scale + bias)


def product(x: mx.array, weights: Weights, bits, group, tile: GemvTile = TILE) -> mx.array:
    """x (M, K) times the matrix, in float32, through the head's kernel without its norm."""
    (m, columns), rows = x.shape, len(weights.exact)
    template = template_of(
        bits,
        group,
        x.dtype,
        m,
        columns,
        tile,
        N=rows,
        OUT=mx.float32,
        NORM=False,
        EPS_BITS=EPS_BITS,
    )
    constants = weights.constants(mx.zeros((columns,), x.dtype))
    shape = GemvShape(m, rows, columns)
    outputs = [((m, rows), mx.float32)]
    (y,) = launch(
        "mma", "rms_lm_head", {"x": x, "constants": constants}, outputs, template, shape, tile
    )
    return y


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64), (8, 128)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_each_value_of_x_arrives_within_half_a_step(bits, group, dtype):
    """A matrix with a single one in a row picks the values out. Groups of very different size, a
    value far above its group, a group of zeros, numbers at the end of the type's range."""
    rng = np.random.default_rng(bits + group)
    columns = 256
    values = rng.standard_normal((2, columns)) * np.repeat([1e-3, 1.0, 30.0, 1e-3], 64)
    values[0, 70], values[1, 64:128], values[1, 200] = 900.0, 0.0, 60000.0
    x = mx.array(values).astype(dtype)
    picked = product(
        x, packed(np.eye(columns, dtype=np.uint32), bits, group, dtype=dtype), bits, group
    )
    shared = min(group, 512 // bits)
    largest = np.abs(exact(x)).reshape(2, -1, shared).max(axis=-1).repeat(shared, axis=-1)
    assert (np.abs(exact(picked) - exact(x)) <= largest / 65024 * 1.001).all()


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 128)])
def test_the_largest_sums_fit(bits, group):
    """Every code and every value of x at its largest, of either sign."""
    codes = np.full((32, 256), 2**bits - 1, np.uint32)
    x = mx.concatenate([mx.ones((1, 256)), -mx.ones((1, 256))]).astype(mx.bfloat16)
    y = product(x, packed(codes, bits, group), bits, group)
    assert exact(y).tolist() == [[256.0 * (2**bits - 1)] * 32, [-256.0 * (2**bits - 1)] * 32]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_is_none_afterwards(value):
    """In the row of x that has it only."""
    weights = random_weights(np.random.default_rng(0), 32, 256, 4, 64, mx.bfloat16)
    x = np.ones((2, 256))
    x[1, 100] = value
    y = exact(product(mx.array(x).astype(mx.bfloat16), weights, 4, 64))
    assert np.isfinite(y[0]).all() and not np.isfinite(y[1]).any()


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_of_a_wide_matrix(bits):
    """More columns than threads stage at once, and more blocks of columns than one."""
    rng = np.random.default_rng(bits)
    weights = random_weights(rng, 33, 2080, bits, 32, mx.float16)
    x = normal(rng, (4, 2080), mx.float16, 2.0)
    for tile in TILES["integer"]:
        y = product(x, weights, bits, 32, tile)
        check(y, exact(x) @ weights.exact.T, tolerance=2e-4)


def test_a_tile_knows_what_threadgroup_memory_its_kernel_declares():
    """Groups of 32; of wider ones it declares less."""
    cases = list(itertools.product(TILES["integer"], (1, 2, 3, 4), (32, 96, 160, 2048, 4064)))
    declared = [
        f"sizes[{i}] = 16 * gemv_staged<bfloat16_t, 4, 32, {columns}, {m}, {tile.simdgroups}, true,"
        f" true>() + 4 * gemv_partial<{m}, {tile.rows}, {tile.simdgroups}, {tile.k_split}>();"
        for i, (tile, m, columns) in enumerate(cases)
    ]
    kernel = emulator.metal_kernel(
        "declared",
        ["x"],
        ["sizes"],
        "\n".join(["if (thread_position_in_grid.x == 0) {", *declared, "}"]),
        kernel_source("rms_qkv", cuda=True, overlay=EMULATED_MMA).header,
    )
    (sizes,) = kernel(
        inputs=[mx.zeros(8)],
        template=[],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(len(cases),)],
        output_dtypes=[mx.int32],
    )
    known = [tile.threadgroup_bytes(GemvShape(m, 64, columns)) for tile, m, columns in cases]
    assert sizes.tolist() == known


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    format_=st.sampled_from([(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)]),
    m=st.integers(1, 4),
    groups=st.integers(1, 6),
    rows=st.integers(1, 40),
    tile=st.sampled_from(TILES["integer"]),
)
def test_any_matrix(seed, format_, m, groups, rows, tile):
    bits, group = format_
    rng = np.random.default_rng(seed)
    weights = random_weights(rng, rows, groups * group, bits, group, mx.bfloat16)
    x = normal(rng, (m, groups * group), mx.bfloat16)
    wanted = exact(x) @ weights.exact.T
    # Each value of x is off by half a step at most.
    bound = np.abs(weights.exact).sum(axis=-1) * np.abs(exact(x)).max() / 65024
    found = exact(product(x, weights, bits, group, tile))
    assert (np.abs(found - wanted) <= bound * 1.01 + 1e-6 * np.abs(wanted).max()).all()


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("wait_for_copies<QUEUE - 1>", "wait_for_copies<QUEUE>", "uninitialised read"),
        ("end_copies(queue.copies);", "", "uninitialised read"),
        # The scales come from other lanes.
        (
            "(queue.copies);\nsimdgroup_barrier(mem_flags::mem_threadgroup);",
            "(queue.copies);",
            "race",
        ),
    ],
)
def test_what_a_queue_does_not_wait_for_is_found(monkeypatch, old, new, found):
    def planted(op, **how):
        source = kernel_source(op, **how)
        assert source.header.count(old) == 1
        return replace(source, header=source.header.replace(old, new))

    rng = np.random.default_rng(3)
    weights = random_weights(rng, 32, 512, 4, 64, mx.bfloat16)
    x = normal(rng, (1, 512), mx.bfloat16)
    tile = GemvTile(16, 2, 1, 2, integer=True, queue=1)
    check(product(x, weights, 4, 64, tile), exact(x) @ weights.exact.T, tolerance=1e-4)
    monkeypatch.setattr("gemv_reference.kernel_source", planted)
    with pytest.raises(EmulatorError, match=found):
        product(x, weights, 4, 64, tile)
