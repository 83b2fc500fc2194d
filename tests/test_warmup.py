"""What load makes ready: with the kernels of an M1 in the emulator."""

from __future__ import annotations

import pytest
from fixtures import FIX_A
from test_prefill import LONG, emulated, kernels_of, models, theirs, tokens  # noqa: F401

from husky_mlx import device, warmup
from husky_mlx.errors import MemoryLimitError


@pytest.fixture
def gpu(emulated, monkeypatch):  # noqa: F811
    emulated(8)
    monkeypatch.setattr(warmup.device, "target", lambda: "metal")


def test_it_runs_every_way_and_leaves_no_trace(gpu, monkeypatch):
    model, stock = models()
    ran = []
    monkeypatch.setattr(model.plan, "count", ran.append)
    words = warmup.warm_up(model)
    assert set(ran) == {"frozen", "prefill", "traces"}
    monkeypatch.undo()
    assert not any(model.plan.counts.values())
    assert words is not None and int(words.split(" kernels ready in ")[0]) > 5
    assert tokens(model, LONG, 3) == theirs(stock, LONG, 3)


def test_a_limit_below_its_prompts_is_no_error(gpu):
    model, _ = models()
    model.max_context = 4
    warmup.warm_up(model)
    assert not any(model.plan.counts.values())


def test_a_full_device_is_no_error(gpu, monkeypatch):
    model, _ = models()

    def refuse(*arguments, **options):
        raise MemoryLimitError("full")

    monkeypatch.setattr(warmup, "greedy_tokens", refuse)
    warmup.warm_up(model)
    assert not any(model.plan.counts.values())


def test_on_a_cpu_nothing_runs():
    if device.target() != "cpu":
        pytest.skip("MLX's default device is a GPU")
    model, _ = models(FIX_A)
    assert warmup.warm_up(model) is None
    assert not any(model.plan.counts.values())
