"""The embedding kernel, run from its Metal source in the emulator, against numpy in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gemv_reference import launch

from husky_mlx import chips
from husky_mlx.layout import join
from husky_mlx.policy import policy
from husky_mlx.tiles import EmbedShape

# Half a unit in the last place of the output's type, over its largest value.
TOLERANCE = {mx.float32: 1e-7, mx.float16: 5e-4, mx.bfloat16: 4e-3}


def unpack(words, bits):
    """MLX's packing: the first value of a uint32 is in its lowest bits."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    codes = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(*words.shape[:-1], -1).astype(np.float64)


def exact(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def run(tokens, *parts, width, bits, group, dtype):
    """On Metal's text, and on CUDA's with the same result."""
    embedded, following = launched("lanes", tokens, parts, width, bits, group, dtype)
    # More tickets than threads, and fewer.
    for tickets in (16, 300):
        more = launched("mma", tokens, parts, width, bits, group, dtype, tickets)
        assert mx.array_equal(more[0], embedded) and mx.array_equal(more[1], following)
        assert more[2].tolist() == [0] * tickets
    # Slot and live rows, then the positions, move by LENGTH; the padding stays.
    moved = {0, 1, 4, 5, 6, 7}
    assert following.tolist() == [10 * i + 3 * (i in moved) for i in range(16)]
    return exact(embedded)


def launched(scheme, tokens, parts, width, bits, group, dtype, tickets=0):
    shape = EmbedShape(len(tokens), width)
    tile = policy("embed", shape, bits, chips.parse("m1")[0])
    on_cuda = scheme == "mma"
    return launch(
        scheme,
        "embed",
        {
            "tokens": mx.array(tokens, mx.uint32),
            "before": mx.zeros((8,)),
            "place": mx.arange(16, dtype=mx.int32) * 10,
            "constants": join([[part] for part in parts])[0],
        },
        [
            ((len(tokens), width), dtype),
            ((16,), mx.int32),
            *([((tickets,), mx.uint32)] if on_cuda else []),
        ],
        {
            "T": dtype,
            "N": parts[0].shape[0],
            "D": width,
            "LENGTH": 3,
            "BITS": bits,
            "GROUP": group,
            **({"TICKETS": tickets} if on_cuda else {}),
            **tile.template(),
        },
        shape,
        tile,
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("bits", "group", "width", "vocabulary"),
    # SmolLM2's width of 576, which fills no whole threadgroup, and an odd vocabulary.
    [(4, 32, 576, 101), (4, 64, 64, 40), (8, 128, 256, 33), (8, 64, 576, 101)],
)
def test_quantized_rows(bits, group, width, vocabulary, dtype):
    rng = np.random.default_rng(bits * width)
    words = rng.integers(0, 2**32, (vocabulary, width * bits // 32), dtype=np.uint32)
    scales, biases = (
        mx.array(rng.standard_normal((vocabulary, width // group))).astype(dtype) for _ in range(2)
    )
    tokens = [0, vocabulary - 1, 7, 7]
    table = unpack(words, bits) * np.repeat(exact(scales), group, axis=1)
    wanted = (table + np.repeat(exact(biases), group, axis=1))[tokens]
    found = run(
        tokens, mx.array(words), scales, biases, width=width, bits=bits, group=group, dtype=dtype
    )
    assert np.abs(found - wanted).max() <= TOLERANCE[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_dense_table_is_copied(dtype):
    rng = np.random.default_rng(2)
    table = mx.array(rng.standard_normal((101, 96))).astype(dtype)
    tokens = [100, 0, 55]
    found = run(tokens, table, width=96, bits=16, group=32, dtype=dtype)
    np.testing.assert_array_equal(found, exact(table)[tokens])
