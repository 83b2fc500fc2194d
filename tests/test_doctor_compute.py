"""``husky doctor`` on what computes: kernels that are broken, and another token."""

from __future__ import annotations

import emulated_kernels
import mlx.core as mx
import pytest
from doctor_findings import one

from husky_mlx import chips, doctor_compute
from husky_mlx.doctor_report import FAIL, OK
from husky_mlx.ops.gemv import Platform

fast_emulator = pytest.fixture(emulated_kernels.fast_emulator)
kernels_of = pytest.fixture(emulated_kernels.kernels_of)
plant = pytest.fixture(emulated_kernels.plant)


@pytest.fixture
def emulated(fast_emulator, kernels_of, plant, monkeypatch):
    """``emulated(op, old, new)``: only this kernel is checked, planted, in the emulator."""

    def choose(op, old, new):
        kernels_of()
        plant(op, old, new)
        monkeypatch.setattr(doctor_compute, "OPS", [op])
        monkeypatch.setattr(doctor_compute, "FORMATS", ((4, 64, "float32"),))
        monkeypatch.setattr(doctor_compute, "_steps", lambda model, platform: ())

    return choose


SCALED = "T(float(code) * scale + bias)"


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ("T(float(code) * nonsense + bias)", "4 bit, float32: compile: "),
        ("T(float(code) * scale * 1.5f + bias)", "the kernel's result differs from MLX's by"),
    ],
)
def test_a_broken_kernel_is_found(emulated, planted, says):
    emulated("embed", SCALED, planted)
    found = one(doctor_compute.kernel_checks, FAIL)
    assert found.name == "kernel embed" and says in found.found
    assert "HUSKY_KERNELS=0" in found.advice


def test_a_broken_norm_of_heads_is_found(emulated, monkeypatch):
    emulated("norm_rope_append", "squares / float(D)", "squares")
    monkeypatch.setattr(doctor_compute, "OPS", ["embed"])
    found = one(doctor_compute.kernel_checks, FAIL)
    assert found.name == "kernel norm_rope_append" and "differs from MLX's by" in found.found


def test_a_right_kernel_is_right(emulated):
    emulated("embed", SCALED, SCALED)
    assert next(iter(doctor_compute.kernel_checks())).state == OK


@pytest.mark.slow
def test_whole_steps_and_prompts_are_right_and_every_kernel_runs(
    fast_emulator, kernels_of, monkeypatch
):
    """In the emulator, where prompts on MLX's CPU build are float32."""
    kernels_of()
    monkeypatch.setattr(doctor_compute, "FORMATS", ((4, 64, "float32"),))
    found = {finding.name: finding for finding in doctor_compute.kernel_checks()}
    assert {"decode step", "prompts", "kernel down_add", "kernels"} <= set(found)
    assert {"kernel norm_rope_append", "decode step with norms of heads"} <= set(found)
    assert [finding for finding in found.values() if finding.state != OK] == []


def test_on_cuda_no_kernel_merges_splits_by_itself():
    chip = chips.parse("sm_90")[0]
    found = {name: doctor_compute.unused(Platform(chip, name)) for name in ("metal", "cuda")}
    assert found["cuda"] - found["metal"] == {"attention_combine"}


def test_parity_sees_another_token():
    """A model with two rows of its head exchanged answers with the wrong one of both."""
    settings = (16, 64, "float32")
    stock, ours = (doctor_compute.tiny_model(*settings, name) for name in ("mlx", "husky"))
    assert doctor_compute.different_token(stock, ours) is None
    tokens = mx.array([[(7919 * i + 1) % 512 for i in range(doctor_compute.PARITY_PROMPT)]])
    best = mx.argmax(stock(tokens)[0, -1]).item()
    rows = mx.arange(512)
    rows[best], rows[0] = 0, best
    ours.lm_head.weight = ours.lm_head.weight[rows]
    assert doctor_compute.different_token(stock, ours) == f"token 1 is 0, mlx-lm's is {best}"
