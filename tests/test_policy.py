"""Launch choices: a table by chip, and what every choice must satisfy. No GPU is asked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from husky_mlx import chips, cuda_chain
from husky_mlx.chips import Chip, parse
from husky_mlx.policy import (
    GEMV_OPS,
    MAX_THREADS,
    THREADGROUP_BYTES,
    chain_memory,
    chained_tile,
    policy,
)
from husky_mlx.tiles import ArgmaxShape, AttentionShape, EmbedShape, GemvShape, GemvTile

NEXT_MAC = chips.detect({"device_name": "Apple M9", "architecture": "applegpu_g21g"})
CHIPS = [
    *(parse(name)[0] for name in chips.names()),
    *(parse(f"m{n}max-{c}c")[0] for n, c in ((1, 32), (2, 38), (3, 40), (4, 40), (5, 40))),
    *(parse(f"sm_{n}")[0] for n in (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)),
    chips.detect({"device_name": "NVIDIA H200", "architecture": "sm_90"}),
    Chip("sm_75", "cuda", 75, 40, 300.0),
    NEXT_MAC,
    chips.UNKNOWN,
]
LLAMA_1B = {"heads": 32, "kv_heads": 8, "head_dim": 64}
LLAMA_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128}
H200 = chips.detect({"device_name": "NVIDIA H200", "architecture": "sm_90"})


# Worked out by hand from the rules: a KV head's group of 4 in one threadgroup, 16-byte loads of
# 16-bit values, two threadgroups a core once the context is long, and one launch below. On matrix
# units up to 8 vectors in a threadgroup, and no more threadgroups than the H200's 132 cores.
@pytest.mark.parametrize(
    ("chip", "shape", "template"),
    [
        ("m1", AttentionShape(1, **LLAMA_1B, rows=512), (4, 8, 1, 4, 2)),
        ("m1", AttentionShape(1, **LLAMA_1B, rows=8192), (4, 8, 2, 4, 2)),
        ("m4max-40c", AttentionShape(1, **LLAMA_8B, rows=8192), (4, 16, 16, 8, 4)),
        ("m4max-40c", AttentionShape(4, **LLAMA_8B, rows=512), (4, 16, 1, 8, 4)),
        ("h200", AttentionShape(1, **LLAMA_8B, rows=1024), (4, 16, 1, 8, 2)),
        ("h200", AttentionShape(1, **LLAMA_8B, rows=32768), (4, 16, 16, 8, 2)),
        ("h200", AttentionShape(4, **LLAMA_8B, rows=32768, batched=True), (4, 16, 4, 8, 2)),
        ("h200", AttentionShape(3, **LLAMA_1B, rows=2048), (6, 8, 8, 8, 4)),
        ("h200", AttentionShape(1, **LLAMA_1B, rows=8192, itemsize=4), (4, 16, 64, 8, 4)),
    ],
)
def test_attention_table(chip, shape, template):
    tile = policy("attention_decode", shape, 16, H200 if chip == "h200" else parse(chip)[0])
    found = (tile.queries, tile.lanes, tile.splits, tile.simdgroups, tile.unroll)
    assert found == template
    assert tile.template()["SPLIT"] == (tile.splits > 1)


@pytest.mark.parametrize(
    ("chip", "bits", "shape", "template"),
    [
        # 2,048 rows are 256 threadgroups of 8: enough for any small GPU.
        ("m1", 4, GemvShape(1, 2048, 2048), (4, 2, 1, 1)),
        # 640 rows are 40 threadgroups of 16, as many as the cores: no split of K.
        ("m4max-40c", 4, GemvShape(1, 640, 8192), (4, 4, 1, 2)),
        ("m4max-40c", 4, GemvShape(1, 320, 8192), (4, 4, 2, 2)),
        # K too short to be split.
        ("m4max-40c", 4, GemvShape(1, 320, 1536), (4, 4, 1, 2)),
        ("h200", 4, GemvShape(1, 28672, 4096, norm=True), (32, 8, 2, 2)),
        ("h200", 4, GemvShape(1, 16384, 2048, norm=True), (32, 16, 4, 1)),
        ("h200", 4, GemvShape(1, 6144, 4096, norm=True), (16, 8, 8, 2)),
        ("h200", 4, GemvShape(1, 2048, 2048), (16, 16, 8, 2)),
        ("h200", 4, GemvShape(1, 128256, 2048, norm=True), (16, 4, 1, 4)),
        # 112 chunks: 7 for each of 16 simdgroups.
        ("h200", 4, GemvShape(1, 4096, 14336), (16, 16, 16, 1)),
        ("h200", 4, GemvShape(1, 3072, 2048, norm=True), (32, 8, 8, 2)),
        ("h200", 4, GemvShape(4, 28672, 4096, norm=True), (16, 4, 1, 4)),
        ("h200", 4, GemvShape(4, 6144, 4096, norm=True), (16, 4, 4, 2)),
        ("h200", 8, GemvShape(1, 28672, 4096, norm=True), (16, 8, 8, 4)),
        ("h200", 16, GemvShape(1, 28672, 4096, norm=True), (16, 4, 4, 4)),
        # Four rows of 14,336 as 16-bit integers do not fit; not all chips are fast with those.
        ("h200", 4, GemvShape(4, 4096, 14336), (16, 14, 14, 2)),
        ("sm_103", 4, GemvShape(1, 28672, 4096, norm=True), (32, 4, 4, 2)),
        # Matrix units take no float32.
        ("h200", 4, GemvShape(1, 28672, 4096, itemsize=4), (4, 2, 1, 1)),
    ],
)
def test_gemv_table(chip, bits, shape, template):
    tile = policy("down_add", shape, bits, H200 if chip == "h200" else parse(chip)[0])
    found = tile.template()
    assert tile.integer == (
        chip == "h200" and bits < 16 and shape.itemsize == 2 and tile.k_split != 14
    )
    assert (found["ROWS"], found["SIMDGROUPS"], found["KSPLIT"], found["UNROLL"]) == template


def test_simdgroups_share_rows_evenly_whatever_the_width():
    for m, n, bits, norm in itertools.product((1, 2, 4), (96, 4096, 16384, 131072), (4, 8), (0, 1)):
        for k in range(32, 4129, 32):
            shape = GemvShape(m, n, k, norm=bool(norm))
            for tile in (
                policy("rms_lm_head", shape, bits, H200),
                chained_tile("rms_lm_head", shape, bits, 64, H200),
            ):
                assert tile.simdgroups % tile.k_split == 0, (shape, tile)
                assert tile.rows * tile.simdgroups % (2 * tile.k_split) == 0


@pytest.mark.parametrize("capability", ["sm_80", "sm_86", "sm_90", "sm_120"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64), (8, 128), (16, 32)])
def test_what_a_chain_asks_for_ahead_fits_its_memory(capability, bits, group):
    """The most of a block by the CUDA C++ Programming Guide, less what 80 layers of six kernels
    take: a record of 96 bytes for each, 8 bytes for each array, and the barrier."""
    chip = parse(capability)[0]
    most = {"sm_80": 163, "sm_86": 99, "sm_90": 227, "sm_120": 99}[capability] * 1024
    assert chain_memory(chip) == most
    for n, k, norm in itertools.product(
        (576, 2048, 28672, 128256), (576, 2048, 4096, 14336), (0, 1)
    ):
        shape = GemvShape(1, n, k, norm=bool(norm))
        tile = chained_tile("rms_lm_head", shape, bits, group, chip)
        queue = tile.simdgroups * tile.queue * tile.batch_bytes(bits, group)
        assert tile.queue >= (1 if most > 99 * 1024 else 0)
        kept = (80 * 6 + 3) * 96 + 500 * 8 + cuda_chain.STATE_BYTES
        assert not queue or tile.threadgroup_bytes(shape) + queue <= most - kept, (shape, tile)


@pytest.mark.parametrize(
    ("bits", "group", "rows", "unroll", "batch"),
    [
        # 16 rows of 128 bytes, and 4 scales and 4 biases of 2 bytes for each.
        (4, 64, 16, 2, 16 * (128 + 16)),
        # 32 rows of 64 bytes, and of one scale and one bias the word that each takes.
        (4, 128, 32, 1, 32 * (64 + 8)),
        (16, 32, 16, 2, 16 * 128),
    ],
)
def test_the_bytes_of_a_batch(bits, group, rows, unroll, batch):
    assert GemvTile(rows, 16, 1, unroll).batch_bytes(bits, group) == batch


def test_a_norm_that_would_not_fit_beside_the_sums_is_done_before():
    fits = policy("rms_lm_head", GemvShape(1, 128256, 4096, norm=True), 8, H200)
    assert fits.template()["NORM"] and fits.stages_x
    wide = policy("rms_lm_head", GemvShape(4, 128256, 8192, norm=True), 8, H200)
    assert not wide.template()["NORM"]
    # Metal stages nothing.
    metal = policy("rms_lm_head", GemvShape(4, 128256, 8192, norm=True), 8, parse("m4max")[0])
    assert metal.template()["NORM"]


@pytest.mark.parametrize(
    ("head_dim", "itemsize", "lanes"),
    # The widest loads that divide a lane's share: 8, 12 and 10 values of 16 bit, 4 and 8 of float.
    [(64, 2, 8), (128, 2, 16), (256, 2, 32), (96, 2, 8), (80, 2, 8), (64, 4, 16), (16, 2, 2)],
)
def test_lanes_of_a_head(head_dim, itemsize, lanes):
    shape = AttentionShape(1, 8, 2, head_dim, 256, itemsize=itemsize)
    assert policy("attention_decode", shape, 16, H200).lanes == lanes


def test_an_unknown_chip_gets_the_plainest_tiles():
    assert policy("o_proj_add", GemvShape(1, 4096, 4096), 4, chips.UNKNOWN).unroll == 1
    shape = AttentionShape(1, **LLAMA_8B, rows=2048)
    assert policy("attention_decode", shape, 16, chips.UNKNOWN).splits == 1


def test_a_newer_generation_takes_the_last_known_one():
    for shape in (GemvShape(1, 8192, 2048), GemvShape(2, 320, 8192)):
        newest = Chip("m5", "metal", 17, NEXT_MAC.cores, NEXT_MAC.bandwidth)
        assert policy("o_proj_add", shape, 4, NEXT_MAC) == policy("o_proj_add", shape, 4, newest)


@pytest.mark.parametrize(
    ("op", "shape", "bits", "says"),
    [
        ("o_proj_add", GemvShape(1, 64, 64), 3, "4, 8 or 16 bits, found 3"),
        ("attention_decode", AttentionShape(1, 8, 2, 100, 256), 16, "multiple of 16"),
        ("attention_decode", AttentionShape(1, 8, 2, 512, 256), 16, "up to 256, found 512"),
        ("attention_decode", GemvShape(1, 64, 64), 16, "no kernel of this name takes a GemvShape"),
        ("nonsense", GemvShape(1, 64, 64), 16, "nonsense"),
    ],
)
def test_what_no_kernel_takes_is_refused(op, shape, bits, says):
    with pytest.raises(ValueError, match=r"^\[") as error:
        policy(op, shape, bits, parse("m1")[0])
    assert says in str(error.value)


def check_legal(tile, shape, chip):
    threads = int(np.prod(tile.threadgroup))
    assert threads % 32 == 0 and 32 <= threads <= MAX_THREADS
    assert tile.threadgroup_bytes(shape) <= THREADGROUP_BYTES[chip.target]
    assert all(g % t == 0 and g for g, t in zip(tile.grid(shape), tile.threadgroup, strict=True))
    assert all(isinstance(value, int) and value >= 0 for value in tile.template().values())


@settings(max_examples=300, deadline=None)
@given(
    chip=st.sampled_from(CHIPS),
    op=st.sampled_from(GEMV_OPS),
    bits=st.sampled_from((4, 8, 16)),
    m=st.integers(1, 4),
    rows=st.integers(1, 40).map(lambda n: 8 * n) | st.sampled_from((101, 49152, 32000, 151936)),
    k=st.integers(1, 448).map(lambda n: 32 * n),
    heads=st.integers(0, 6),
    norm=st.booleans(),
    itemsize=st.sampled_from((2, 4)),
)
def test_gemv_tiles_are_legal_and_cover_every_row_once(
    chip, op, bits, m, rows, k, heads, norm, itemsize
):
    block, n = (rows, rows * heads) if heads else (0, rows)
    shape = GemvShape(m, n, k, norm, block, itemsize)
    tile = policy(op, shape, bits, chip)
    check_legal(tile, shape, chip)
    # Both halves of a tile are whole (gemv.h), and simdgroups share K evenly.
    assert tile.rows % 2 == 0 and tile.simdgroups % tile.k_split == 0
    covered = np.zeros(n, int)
    per_block = -(-(block or n) // tile.outputs)
    for index in range(tile.grid(shape)[0] // tile.threadgroup[0]):
        start = index // per_block * (block or n) + index % per_block * tile.outputs
        end = min(start + tile.outputs, (index // per_block + 1) * (block or n))
        covered[start:end] += 1
    assert (covered == 1).all()


@settings(max_examples=300, deadline=None)
@given(
    chip=st.sampled_from(CHIPS),
    m=st.integers(1, 4),
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 16),
    head_dim=st.integers(1, 16).map(lambda n: 16 * n),
    rows=st.integers(1, 131072),
    batched=st.booleans(),
    itemsize=st.sampled_from((2, 4)),
)
def test_attention_tiles_are_legal_and_cover_every_vector_once(
    chip, m, kv_heads, group, head_dim, rows, batched, itemsize
):
    shape = AttentionShape(m, kv_heads * group, kv_heads, head_dim, rows, batched, itemsize)
    tile = policy("attention_decode", shape, 16, chip)
    check_legal(tile, shape, chip)
    # A lane's share is whole, and its loads are whole 32-bit words.
    share, rest = divmod(head_dim, tile.lanes)
    assert rest == 0 and 32 % tile.lanes == 0 and (share * itemsize) % 4 == 0
    covered = np.zeros((m, kv_heads * group), int)
    slices = shape.vectors // tile.queries
    groups = tile.grid(shape)[0] // tile.threadgroup[0]
    for batch in range(tile.grid(shape)[2]):
        for index in range(groups):
            for j in range(tile.queries):
                vector = index % slices * tile.queries + j
                row = batch if batched else vector // group
                covered[row, index // slices * group + vector % group] += 1
    assert (covered == 1).all()
    assert tile.grid(shape)[1] == tile.splits

    combine = policy("attention_combine", shape, 16, chip)
    check_legal(combine, shape, chip)
    assert combine.splits == tile.splits
    assert combine.grid(shape)[0] // combine.threadgroup[0] == m * kv_heads * group


@settings(max_examples=100, deadline=None)
@given(
    chip=st.sampled_from(CHIPS),
    bits=st.sampled_from((4, 8, 16)),
    m=st.integers(1, 4),
    width=st.integers(1, 512).map(lambda n: 32 * n),
)
def test_embed_and_argmax_tiles_are_legal_and_cover(chip, bits, m, width):
    tile = policy("embed", EmbedShape(m, width), bits, chip)
    check_legal(tile, EmbedShape(m, width), chip)
    values = 1 if bits == 16 else 32 // bits
    words, rows, _ = tile.grid(EmbedShape(m, width))
    assert rows == m and 0 <= words * values - width < tile.threads * values
    argmax = policy("argmax_combine", ArgmaxShape(m, width), bits, chip)
    check_legal(argmax, ArgmaxShape(m, width), chip)
    assert argmax.grid(ArgmaxShape(m, width))[0] // argmax.threadgroup[0] == m
