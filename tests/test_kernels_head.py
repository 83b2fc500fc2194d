"""The head's kernels with their argmax, run from their source in the emulator, against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gemv_reference import (
    EPS_BITS,
    TILES,
    TOLERANCE,
    Weights,
    all_cases,
    check,
    exact,
    launch,
    normal,
    random_weights,
    rms_norm,
    template_of,
)

from husky_mlx import chips, kernels
from husky_mlx.policy import policy
from husky_mlx.tiles import ArgmaxShape, ArgmaxTile, GemvShape


def run_head(
    scheme,
    op,
    bits,
    group,
    dtype,
    m,
    columns,
    tile,
    *,
    vocabulary=101,
    out=mx.float32,
    weights=None,
    norm=True,
):
    """The outputs of one of the head's kernels, and the logits in float64."""
    rng = np.random.default_rng(columns + m)
    if weights is None:
        weights = random_weights(rng, vocabulary, columns, bits, group, dtype)
    x, factors = normal(rng, (m, columns), dtype, 3.0), normal(rng, (columns,), dtype, 0.2, 0.5)
    shape = GemvShape(m, vocabulary, columns)
    best = [((m, tile.threadgroups(shape)), kind) for kind in (mx.float32, mx.uint32)]
    inputs = {"x": x, "constants": weights.constants(factors)}
    outputs = launch(
        scheme,
        op,
        inputs,
        [((m, vocabulary), out), *(best if op == "rms_lm_head_argmax" else [])],
        template_of(
            bits,
            group,
            dtype,
            m,
            columns,
            tile,
            N=vocabulary,
            OUT=out,
            NORM=norm,
            EPS_BITS=EPS_BITS,
        ),
        shape,
        tile,
    )
    normed = rms_norm(x, factors, scheme) if norm else exact(x)
    return outputs, normed @ weights.exact.T


@all_cases(3)
def test_head_in_float32(scheme, bits, group, dtype, m, columns, tile):
    """An odd vocabulary. Without the output's rounding the sums are seen to be float32."""
    norm = scheme == "lanes" or m % 2 == 0
    (logits,), wanted = run_head(
        scheme, "rms_lm_head", bits, group, dtype, m, columns, tile, norm=norm
    )
    check(logits, wanted, tolerance=head_tolerance(scheme, dtype, norm))


def head_tolerance(scheme, dtype, norm) -> float:
    """For logits in float32. The mma scheme rounds the normed x, and a value half way between two
    neighbours may fall to either; the integer scheme's x is off by a 65,024th of its group's
    largest at most, see test_kernels_integer.py."""
    if scheme == "integer":
        return 2e-4
    return TOLERANCE[dtype] / 4 if scheme == "mma" and norm else TOLERANCE[mx.float32]


def combined(values: mx.array, indices: mx.array, simdgroups: int) -> list[int]:
    m, count = values.shape
    tile = ArgmaxTile(simdgroups)
    (tokens,) = kernels.launch(
        "argmax_combine",
        {"best_values": values, "best_indices": indices},
        [((m,), mx.uint32)],
        {"COUNT": count, **tile.template()},
        tile.grid(ArgmaxShape(m, count)),
        tile.threadgroup,
        backend="emulator",
    )
    return tokens.tolist()


@pytest.mark.parametrize("scheme", list(TILES))
@pytest.mark.parametrize(("bits", "m", "out"), [(4, 1, mx.float16), (8, 4, mx.float32)])
def test_argmax_is_that_of_the_stored_logits(scheme, bits, m, out):
    tile = TILES[scheme][1]
    (logits, values, indices), wanted = run_head(
        scheme, "rms_lm_head_argmax", bits, 64, mx.float16, m, 320, tile, out=out
    )
    rounded = head_tolerance(scheme, mx.float16, True)
    check(logits, wanted, tolerance=max(rounded, TOLERANCE[out]))
    assert combined(values, indices, 2) == exact(logits).argmax(axis=-1).tolist()


@pytest.mark.parametrize("scheme", ["lanes", "mma"])
def test_argmax_takes_the_first_of_equal_logits(scheme):
    """Rows that are copies of one another: in one tile, in others, in both runs of a tile."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((101, 96)) * 0.01
    for copy in (9, 10, 14, 33, 60, 100):
        rows[copy] = np.abs(rows[0]) + 1
    for copies, first in (((9, 10, 14, 33, 60, 100), 9), ((14, 33, 60, 100), 14), ((60, 100), 60)):
        kept = rows.copy()
        for row in {9, 10, 14, 33, 60, 100} - set(copies):
            kept[row] = -np.abs(kept[row])
        weight = mx.array(kept).astype(mx.float16)
        # Positive x, so that the copies win.
        outputs, _ = run_head(
            scheme,
            "rms_lm_head_argmax",
            16,
            32,
            mx.float16,
            1,
            96,
            TILES[scheme][0],
            weights=Weights([weight * positive_side(96)], exact(weight)),
        )
        logits, values, indices = outputs
        assert len(set(exact(logits)[0, list(copies)])) == 1
        assert combined(values, indices, 1) == [first]


def positive_side(columns: int) -> mx.array:
    """Signs of the x that run_head makes for one row, so that a product with them is positive."""
    rng = np.random.default_rng(columns + 1)
    x = rng.standard_normal((1, columns))
    factors = rng.standard_normal((columns,)) * 0.2 + 0.5
    return mx.array(np.sign(x[0] * factors)).astype(mx.float16)


@pytest.mark.parametrize("simdgroups", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 31, 300])
def test_combine_finds_the_first_of_the_largest(simdgroups, count):
    rng = np.random.default_rng(count)
    # Few values, so that most of them are shared; and rows of nothing but -inf.
    values = rng.integers(-3, 3, (4, count)).astype(np.float32)
    values[1] = -np.inf
    values[2, : count // 2] = -np.inf
    indices = np.arange(count, dtype=np.uint32) * 7 + 2
    found = combined(mx.array(values), mx.array(np.tile(indices, (4, 1))), simdgroups)
    assert found == [int(indices[row.argmax()]) for row in values]


@pytest.mark.parametrize("chip", ["m1", "m4max-40c"])
@pytest.mark.parametrize("bits", [4, 16])
def test_the_policys_own_tiles(chip, bits):
    tile = policy("rms_lm_head", GemvShape(1, 101, 576, norm=True), bits, chips.parse(chip)[0])
    (logits,), wanted = run_head(
        "lanes", "rms_lm_head", bits, 64, mx.bfloat16, 1, 576, tile, norm=tile.norm
    )
    check(logits, wanted)
