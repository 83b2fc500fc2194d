"""The attention kernels, run from their Metal source in the emulator, against numpy in float64."""

from __future__ import annotations

from dataclasses import replace

import gemv_reference
import mlx.core as mx
import numpy as np
import pytest
from gemv_reference import launch

from husky_mlx import chips, emulator
from husky_mlx.kernel_source import kernel_source
from husky_mlx.ops.attention_decode import attention_decode_kernel, ticket_count
from husky_mlx.ops.gemv import Platform
from husky_mlx.policy import policy
from husky_mlx.tiles import AttentionShape, AttentionTile, CombineTile

LIVE = (1, 2, 31, 32, 33, 255, 256, 257)
# Largest error over the largest output: the rounding of the output, and float32 sums.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 6e-4, mx.bfloat16: 4.5e-3}


def expected(queries, keys, values, live, padding):
    """Softmax attention in float64. ``padding`` is None for consecutive rows of one sequence."""
    m, heads, head_dim = queries.shape
    group = heads // keys.shape[1]
    out = np.zeros_like(queries)
    for row in range(m):
        batch, start, end = (0, 0, live + row) if padding is None else (row, padding[row], live)
        for head in range(heads):
            scores = keys[batch, head // group, start:end] @ queries[row, head] / head_dim**0.5
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values[batch, head // group, start:end] / weights.sum()
    return out


def error(scheme, shape, dtype, live, tile, padding=None, seed=0, spread=3.0, slot=None):
    """Runs the kernels as needed; dead and padded rows are NaN, so that none may be looked at.

    ``scheme``: lanes (Metal's text) or mma (CUDA's, its instructions emulated).
    """
    rng = np.random.default_rng(seed)
    kv_shape = (shape.m if shape.batched else 1, shape.kv_heads, shape.rows, shape.head_dim)
    queries, keys, values = (
        mx.array(rng.standard_normal(size) * scale).astype(dtype)
        for size, scale in (
            ((shape.m, shape.heads, shape.head_dim), spread),
            (kv_shape, 1.0),
            (kv_shape, 1.0),
        )
    )
    exact = [np.array(x.astype(mx.float32)).astype(np.float64) for x in (queries, keys, values)]
    for buffer in (keys, values):
        buffer[:, :, live if shape.batched else live + shape.m - 1 :] = float("nan")
        for row, pad in enumerate(padding or []):
            buffer[row, :, :pad] = float("nan")
    place = [live - 1 if slot is None else slot, live, *[0] * 6, *(padding or [])]
    inputs = {
        "queries": queries,
        "keys": keys,
        "values": values,
        "place": mx.array(place + [0] * (16 - len(place)), mx.int32),
    }
    attended = (in_one_launch if scheme == "mma" else in_two_launches)(inputs, shape, tile)
    wanted = expected(*exact, live, padding)
    found = np.array(attended.astype(mx.float32)).astype(np.float64)
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def attention(scheme, inputs, outputs, shape, tile):
    return launch(
        scheme,
        "attention_decode",
        inputs,
        outputs,
        {
            "T": inputs["queries"].dtype,
            "M": shape.m,
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "D": shape.head_dim,
            "BATCHED": shape.batched,
            **tile.template(),
        },
        shape,
        tile,
    )


def in_two_launches(inputs, shape, tile):
    """As on Metal."""
    queries = inputs["queries"]
    result, partials = (queries.shape, queries.dtype), ((tile.partials(shape),), mx.float32)
    split = tile.splits > 1
    (attended,) = attention("lanes", inputs, [partials if split else result], shape, tile)
    if split:
        combine = CombineTile(tile.splits, 2)
        template = {"T": queries.dtype, "VECTORS": shape.m * shape.heads, "D": shape.head_dim}
        (attended,) = launch(
            "lanes",
            "attention_combine",
            {"partials": attended},
            [result],
            {**template, **combine.template()},
            shape,
            combine,
        )
    return attended


def in_one_launch(inputs, shape, tile):
    """As on CUDA: with splits again on the same tickets, which each launch leaves zero.

    The emulator runs a launch twice, its threadgroups one after another in two different orders.
    """
    queries = inputs["queries"]
    split = tile.splits > 1
    tickets = mx.zeros((ticket_count(shape.m, shape.heads),), mx.uint32)
    # Without splits not one partial result may be written.
    partials = (tile.partials(shape) if split else 0,), mx.float32
    outputs = [(queries.shape, queries.dtype), partials]
    results = []
    for _ in range(2 if split else 1):
        made = attention("mma", {**inputs, "tickets": tickets}, outputs, shape, tile)
        assert not mx.any(tickets), f"tickets are left at {tickets.tolist()}"
        results.append(made[0])
    assert mx.array_equal(results[0], results[-1])
    return results[-1]


def check(shape, dtype, live, tile, padding=None, **how):
    schemes = ["lanes"]
    on_matrix_units = dtype != mx.float32 and shape.head_dim <= 128
    if on_matrix_units or tile.splits > 1:
        schemes.append("mma")
    for scheme in schemes:
        found = error(scheme, shape, dtype, live, tile, padding, **how)
        assert found <= TOLERANCE[dtype], (
            f"{scheme} {shape} {dtype} live {live} {tile}: {found:.2e}"
        )


@pytest.mark.parametrize(
    ("head_dim", "dtype", "lanes", "unroll"),
    [
        (64, mx.float16, 8, 2),
        (64, mx.bfloat16, 8, 4),
        (64, mx.float32, 16, 2),
        (80, mx.float16, 8, 1),
        (80, mx.float32, 8, 2),
        (96, mx.bfloat16, 8, 2),
        (128, mx.float16, 16, 4),
        (128, mx.bfloat16, 16, 2),
        (16, mx.float16, 2, 2),
        (256, mx.float32, 32, 1),
    ],
)
def test_every_head_dim_and_live_length(head_dim, dtype, lanes, unroll):
    """The cache has more rows than are live, and what they hold is NaN."""
    for live in LIVE:
        shape = AttentionShape(1, 4, 1, head_dim, rows=live + 7)
        check(shape, dtype, live, AttentionTile(4, lanes, 1, 2, unroll))


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, mx.float16), (80, mx.float32), (128, mx.bfloat16)]
)
def test_splits_of_the_context(splits, head_dim, dtype):
    """Short contexts leave most splits without a row."""
    shape = AttentionShape(1, 6, 2, head_dim, rows=300)
    for live in LIVE:
        check(shape, dtype, live, AttentionTile(3, 8, splits, 2, 2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries"),
    # Groups of 1, 3, 4 and 8; whole groups in a threadgroup, and slices of one.
    [(3, 3, 1), (9, 3, 3), (4, 1, 4), (8, 2, 2), (8, 1, 8), (16, 2, 4)],
)
def test_grouped_heads(heads, kv_heads, queries):
    for live in (1, 33, 256):
        shape = AttentionShape(1, heads, kv_heads, 64, rows=260)
        check(shape, mx.float16, live, AttentionTile(queries, 8, 1, 2, 2))


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize(("splits", "queries"), [(1, 2), (4, 4)])
def test_rows_of_one_sequence_see_what_is_before_them(m, splits, queries):
    """Row m sees the rows of the tokens before it and its own, and not the next one's."""
    shape = AttentionShape(m, 4, 1, 64, rows=264)
    for live in (1, 2, 31, 32, 257):
        check(shape, mx.bfloat16, live, AttentionTile(queries, 8, splits, 2, 2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "simdgroups", "head_dim"),
    # A thread merges 1, 2 or 4 elements, in one round or more; vectors that threads share.
    [(3, 3, 1, 2, 128), (6, 2, 3, 2, 80), (8, 2, 4, 2, 64), (16, 2, 8, 1, 64), (5, 1, 5, 1, 16)],
)
@pytest.mark.parametrize("splits", [2, 16, 17, 40])
def test_more_splits_than_are_read_at_once(heads, kv_heads, queries, simdgroups, head_dim, splits):
    shape = AttentionShape(2, heads, kv_heads, head_dim, rows=400, batched=True)
    tile = AttentionTile(queries, 8, splits, simdgroups, 1)
    check(shape, mx.bfloat16, 333, tile, [0, 100])


_FENCE = "atomic_thread_fence(mem_flags::mem_device, memory_order_acq_rel);\n"
_LAST = "return before[0] == uint(splits - 1)"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("atomic_store_explicit(ticket, 0u, memory_order_relaxed);", "", "tickets are left at"),
        (_LAST, "return before[0] == uint(splits - 2)", "race"),
        (_LAST, "return true", "race"),
        (_LAST, "return false", "unwritten output"),
        (f"{_FENCE}before[0] =", "before[0] =", "race"),
        (f"relaxed);\n{_FENCE}", "relaxed);\n", "race"),
        ("mem_device | mem_flags::mem_threadgroup", "mem_threadgroup", "race"),
        ("threadgroup_barrier(mem_flags::mem_device);", "", "race"),
    ],
)
def test_a_merge_that_is_wrong_is_caught(monkeypatch, old, new, says):
    """Among them a ticket that is not set back, and a threadgroup that merges before the last."""

    def planted(op, **how):
        source = kernel_source(op, **how)
        assert source.header.count(old) == 1
        return replace(source, header=source.header.replace(old, new))

    shape = AttentionShape(1, 4, 2, 64, rows=300)
    case = "mma", shape, mx.float16, 257, AttentionTile(2, 8, 3, 2, 1)
    assert error(*case) <= TOLERANCE[mx.float16]
    monkeypatch.setattr(gemv_reference, "kernel_source", planted)
    with pytest.raises((AssertionError, emulator.EmulatorError), match=says):
        error(*case)


def test_cuda_refuses_attention_without_tickets():
    queries, cache = mx.zeros((1, 2, 64)), mx.zeros((1, 2, 32, 64))
    place = mx.zeros((16,), mx.int32)
    platform = Platform(chips.parse("sm_90")[0], "cuda")
    with pytest.raises(ValueError, match=r"\[attention_decode\] inputs: missing tickets"):
        attention_decode_kernel(queries, cache, cache, place, False, None, platform)


def test_a_slice_of_vectors_may_span_rows():
    """Three heads of two rows in one threadgroup: not all of its vectors see equally many rows."""
    shape = AttentionShape(2, 3, 1, 64, rows=40)
    for live in (1, 5, 32):
        check(shape, mx.float32, live, AttentionTile(6, 16, 4, 2, 1))


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("splits", [1, 4])
def test_batched_rows_start_after_their_padding(m, splits):
    shape = AttentionShape(m, 4, 2, 64, rows=264, batched=True)
    for live in (32, 33, 257):
        padding = [0, 7, live - 1, 31][:m]
        check(shape, mx.float16, live, AttentionTile(2, 8, splits, 2, 2), padding)


def test_a_ring_is_seen_whole_wherever_its_newest_row_is():
    shape = AttentionShape(1, 4, 1, 64, rows=48)
    for slot in (0, 17, 47):
        check(shape, mx.float16, 48, AttentionTile(4, 8, 1, 2, 2), slot=slot)


def test_scores_far_apart_and_far_from_zero():
    """Weights of 1 and 0, and a maximum that moves from block to block."""
    shape = AttentionShape(1, 4, 1, 64, rows=300)
    for splits in (1, 8):
        check(shape, mx.float16, 257, AttentionTile(4, 8, splits, 2, 2), spread=60.0, seed=3)


@pytest.mark.parametrize("chip", ["m1", "m4max-40c", "sm_90"])
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(1, 9, 3, 64, rows=2048),
        AttentionShape(4, 8, 2, 128, rows=1024, batched=True),
    ],
)
def test_the_policys_own_tiles(chip, shape):
    tile = policy("attention_decode", shape, 16, chips.parse(chip)[0])
    padding = [0, 3, 40, 299] if shape.batched else None
    check(shape, mx.float16, 300, tile, padding)
