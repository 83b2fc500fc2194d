"""``--tune``: which figures of a tile are tried, and taken. The kernels run in the emulator."""

from __future__ import annotations

import sys

import mlx.core as mx
import pytest
from emulated_kernels import fast_emulator
from fixtures import FIX_B, mlx_weights, quantize_weights

from husky_mlx import chips, device, loading, tuning
from husky_mlx.loading import build_model
from husky_mlx.ops import embed, gemv
from husky_mlx.policy import policy

M1, H100 = (chips.parse(name)[0] for name in ("m1", "sm_90"))
CONFIG = {**FIX_B, "head_dim": 16, "num_hidden_layers": 1}

fast_emulator = pytest.fixture(fast_emulator)


@pytest.fixture
def tiles_tried(fast_emulator, monkeypatch):
    """The tiles of all launches, the last at the end."""
    used: list = []
    launched = gemv.launch_gemv

    def launch(op, matrix, tile, *rest, **options):
        used.append(tile)
        return launched(op, matrix, tile, *rest, **options)

    for module in list(sys.modules.values()):
        if getattr(module, "launch_gemv", None) is launched:
            monkeypatch.setattr(module, "launch_gemv", launch)
    monkeypatch.setattr(tuning, "OPS", ("o_proj_add",))
    return used


@pytest.fixture
def as_on_cuda(monkeypatch):
    """As on a GPU 16-bit weights stay so. Fewer tiles: each is a kernel to compile."""
    for module in (device, embed, loading):
        monkeypatch.setattr(module, "activation_dtype", lambda stored: stored)
    monkeypatch.setattr(tuning, "_SIMDGROUPS", (2, 4))
    monkeypatch.setattr(tuning, "_UNROLLS", (1, 2))


def test_what_is_faster_right_and_fits_is_taken(tiles_tried):
    """With figures of its own: fewer simdgroups and more unrolling win."""
    model = build_model(CONFIG, quantize_weights(mlx_weights(CONFIG), 4, 32))

    def measure(case):
        case.ours.step(0, *case.ours.state)
        return tiles_tried[-1].simdgroups * 10 - tiles_tried[-1].unroll

    found = tuning.tune(model, M1, "emulator", measure)
    ((op, shape, bits), tile), *_ = found.items()
    assert (op, shape.n, shape.k, bits) == ("o_proj_add", 64, 64, 4)
    assert tile.simdgroups == 2 and tile != policy(op, shape, bits, M1)
    assert tuning.tune(model, M1, "emulator", lambda case: 1.0) == {}


def model_in_16_bit(bits: int | None):
    weights = mlx_weights(CONFIG)
    if bits:
        weights = quantize_weights(weights, bits, 32)
    halves = {
        name: value if value.dtype == mx.uint32 else value.astype(mx.bfloat16)
        for name, value in weights.items()
    }
    return build_model(CONFIG, halves)


@pytest.mark.parametrize("bits", [4, 8])
def test_floats_are_taken_where_they_are_faster_than_whole_numbers(bits, tiles_tried, as_on_cuda):
    def measure(case):
        case.ours.step(0, *case.ours.state)
        return 2.0 if tiles_tried[-1].integer else 1.0

    ((key, tile),) = tuning.tune(model_in_16_bit(bits), H100, "emulator", measure).items()
    assert policy(*key, H100).integer
    assert key[2] == bits and not tile.integer
    assert {16, 32, 64} <= {tried.rows for tried in tiles_tried}
    measured_alike = tuning.tune(model_in_16_bit(bits), H100, "emulator", lambda case: 1.0)
    assert measured_alike == {}


def test_the_other_numbers_may_need_other_figures(tiles_tried, as_on_cuda):
    """At the policy's figures floats are slower."""

    def measure(case):
        case.ours.step(0, *case.ours.state)
        tile = tiles_tried[-1]
        return 2.0 if tile.integer else (1.0 if tile.rows == 64 else 3.0)

    ((_, tile),) = tuning.tune(model_in_16_bit(4), H100, "emulator", measure).items()
    assert not tile.integer and tile.rows == 64


def test_plain_weights_have_no_whole_numbers(tiles_tried, as_on_cuda):
    tuning.tune(model_in_16_bit(None), H100, "emulator", lambda case: 1.0)
    assert tiles_tried and not any(tile.integer for tile in tiles_tried)
