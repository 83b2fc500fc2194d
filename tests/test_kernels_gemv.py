"""The projection kernels, run from their source in the emulator, against numpy in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gemv_reference import EPS_BITS, Weights, exact, launch, normal, random_weights, rms_norm

from husky_mlx import chips, kernels
from husky_mlx.policy import policy
from husky_mlx.tiles import ArgmaxShape, ArgmaxTile, GemvShape, GemvTile

# Largest error over the largest output: half a unit in the output's last place, and float32 sums.
TOLERANCE = {mx.float32: 3e-6, mx.float16: 5.5e-4, mx.bfloat16: 4.2e-3}
FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (16, 32)]
# ROWS, SIMDGROUPS, KSPLIT, UNROLL. K is split by more simdgroups than there are steps in the last.
TILES = {
    "lanes": [
        GemvTile(4, 2, 1, 1),
        GemvTile(2, 4, 2, 2),
        GemvTile(8, 2, 2, 1),
        GemvTile(2, 8, 8, 1),
    ],
    "mma": [
        GemvTile(16, 2, 1, 1),
        GemvTile(16, 4, 2, 2),
        GemvTile(32, 2, 2, 1),
        GemvTile(16, 8, 8, 2),
    ],
}
# Widths with and without a tail, for every group size; SmolLM2's are 576 and 1536.
WIDTHS = {32: (96, 160, 576, 1536), 64: (192, 320, 576, 1536), 128: (128, 384, 640, 1536)}
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def check(found: mx.array, wanted: np.ndarray, case: str = "") -> None:
    error = np.abs(exact(found) - wanted).max() / np.abs(wanted).max()
    assert error <= TOLERANCE[found.dtype], f"{case} {found.dtype}: {error:.2e}"


def cases(scheme: str, shift: int):
    """Every format, with rows of x, widths, dtypes and tiles that go round as the formats do."""
    for i, (bits, group) in enumerate(FORMATS):
        turn = i + shift
        dtype = DTYPES[turn % (3 if scheme == "lanes" else 2)]
        columns = WIDTHS[group][turn % 4]
        tile = TILES[scheme][(turn // 2) % 4]
        yield pytest.param(
            scheme, bits, group, dtype, turn % 4 + 1, columns, tile, id=f"{scheme}-{bits}-{group}"
        )


def all_cases(shift: int):
    return pytest.mark.parametrize(
        ("scheme", "bits", "group", "dtype", "m", "columns", "tile"),
        [*cases("lanes", shift), *cases("mma", shift + 1)],
    )


def template_of(bits, group, dtype, m, columns, tile, **more):
    template = {"T": dtype, "BITS": bits, "GROUP": group, "K": columns, "M": m, **tile.template()}
    if "NORM" not in more:
        template.pop("NORM")
    return {**template, **more}


def matrix_inputs(weights: Weights, dtype, bias=None):
    given = mx.zeros((8,), dtype) if bias is None else bias
    return {
        "weight": weights.weight,
        "scales": weights.scales,
        "biases": weights.biases,
        "bias": given,
    }


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
            **matrix_inputs(weights, dtype, bias),
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
        {"x": x, "norm": factors, **matrix_inputs(weights, dtype, bias)},
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
            "norm": factors,
            **matrix_inputs(weights, dtype, bias),
            "frequencies": mx.array(frequencies),
            "positions": mx.array(positions, mx.int32),
            "slot": mx.array([slot], mx.int32),
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
            BATCHED=batched,
        ),
        GemvShape(m, rows, columns, block=head_dim),
        tile,
    )
    normed = rms_norm(x, factors, scheme) if norm else exact(x)
    y = (normed @ weights.exact.T + has_bias * exact(bias)).reshape(m, -1, head_dim)
    angles = np.array(positions)[:, None] * frequencies.astype(np.float64)
    turned = rotated(y[:, : heads + kv_heads], angles, traditional)
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


@pytest.mark.parametrize("scheme", ["lanes", "mma"])
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
    )


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
    inputs = {"x": x, "norm": factors, **matrix_inputs(weights, dtype)}
    inputs.pop("bias")
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
    (logits,), wanted = run_head(scheme, "rms_lm_head", bits, group, dtype, m, columns, tile)
    check(logits, wanted)


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


@pytest.mark.parametrize("scheme", ["lanes", "mma"])
@pytest.mark.parametrize(("bits", "m", "out"), [(4, 1, mx.float16), (8, 4, mx.float32)])
def test_argmax_is_that_of_the_stored_logits(scheme, bits, m, out):
    tile = TILES[scheme][1]
    (logits, values, indices), wanted = run_head(
        scheme, "rms_lm_head_argmax", bits, 64, mx.float16, m, 320, tile, out=out
    )
    check(logits, wanted)
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
        stand_in = mx.zeros((8,), mx.float16)
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
            weights=Weights(weight * positive_side(96), stand_in, stand_in, exact(weight)),
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
    tile = policy("rms_lm_head", GemvShape(1, 101, 576, norm=True), bits, chips.parse(chip))
    (logits,), wanted = run_head(
        "lanes", "rms_lm_head", bits, 64, mx.bfloat16, 1, 576, tile, norm=tile.norm
    )
    check(logits, wanted)
