"""Public reports about what generation leaves in memory, each under its id."""

from __future__ import annotations

import contextlib
import gc
import sys

import mlx.core as mx
import pytest
from fixtures import FIX_A, PROMPT, model_of
from mlx.utils import tree_reduce
from mlx_lm.generate import generate_step, wired_limit
from mlx_lm.models.cache import make_prompt_cache

from husky_mlx import cache as our_cache
from husky_mlx.generation import stream_generate

MLX_LM_GENERATE = sys.modules["mlx_lm.generate"]


def live_arrays() -> int:
    gc.collect()
    return sum(isinstance(o, mx.array) for o in gc.get_objects())


@pytest.mark.slow
def test_5000_tokens_leave_nothing_behind_C135(plain_tokenizer):
    model = model_of(config={**FIX_A, "max_position_embeddings": 8192})
    for _ in range(3):
        list(stream_generate(model, plain_tokenizer, PROMPT, 200))
    mx.clear_cache()
    before = mx.get_active_memory()
    caches = model.make_cache()
    counts, pending = {}, {}
    for response in stream_generate(model, plain_tokenizer, PROMPT, 5000, prompt_cache=caches):
        if response.generation_tokens in (1000, 4990):
            counts[response.generation_tokens] = live_arrays()
            mx.clear_cache()
            held = sum(cache.nbytes for cache in caches)
            pending[response.generation_tokens] = mx.get_active_memory() - before - held
    assert counts[4990] <= counts[1000]
    assert pending[4990] - pending[1000] < 4096
    del response, caches
    mx.clear_cache()
    assert mx.get_active_memory() - before < 4096


def pending_operations(array: mx.array, tmp_path) -> int:
    """Nodes of the graph that evaluating the array would run."""
    file = tmp_path / "graph.dot"
    mx.export_to_dot(str(file), array)
    return file.read_text().count("rectangle")


def test_batches_build_no_chain_from_token_to_token_C135(ours, tmp_path):
    """Each layer's cache counts its offset as an array: all must be computed as the steps are."""
    single = [make_prompt_cache(ours), make_prompt_cache(ours)]
    for row, caches in enumerate(single):
        ours(mx.array([PROMPT[: 10 + row]]), cache=caches)
    batch = [type(a).merge([a, b]) for a, b in zip(*single, strict=True)]
    for _ in range(50):
        mx.eval(ours(mx.array([[7], [9]]), cache=batch))
    assert ours.plan.counts["frozen"] == 50
    for cache in batch:
        assert type(cache) is our_cache.BatchKVCache
        assert cache.offset.tolist() == [60, 61]
    for _ in range(50):
        mx.eval(ours(mx.array([[7], [9]]), cache=batch))
    assert max(pending_operations(cache.offset, tmp_path) for cache in batch) < 5


def test_prompts_of_every_length_trace_once_a_capacity_C136(ours):
    """The bound on traces is the number of capacities, whatever the lengths."""
    prompt = PROMPT * 5
    capacities = set()
    for length in range(1, 201):
        caches = make_prompt_cache(ours)
        for _ in generate_step(mx.array(prompt[:length]), ours, max_tokens=2, prompt_cache=caches):
            capacities.add(caches[0].capacity())
    assert ours.plan.counts["traces"] == len(capacities)
    mx.clear_cache()
    active = mx.get_active_memory()
    for length in range(1, 201):
        list(generate_step(mx.array(prompt[:length]), ours, max_tokens=2))
    mx.clear_cache()
    assert ours.plan.counts["traces"] == len(capacities)
    assert mx.get_active_memory() - active < 4096


@pytest.fixture
def pretend_metal(monkeypatch):
    """mlx-lm's wired limit as on a Mac: what it sets, in order, with 1,000 bytes recommended."""
    limits = [123]

    def recommended():
        old = limits[-1]
        limits.append(1000)
        return old

    monkeypatch.setattr(MLX_LM_GENERATE, "maybe_set_recommended_wired_limit", recommended)
    monkeypatch.setattr(
        mx, "device_info", lambda *_: {"max_recommended_working_set_size": 1000, "device_name": "x"}
    )
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    monkeypatch.setattr("husky_mlx.memory.memory_limit", lambda: 1 << 40)
    return limits


def test_the_wired_limit_is_put_back_C139(pretend_metal, plain_tokenizer, capsys):
    model = model_of()
    responses = stream_generate(model, plain_tokenizer, PROMPT, 12)
    next(responses)
    assert pretend_metal == [123, 1000]
    responses.close()
    assert pretend_metal == [123, 1000, 123]
    assert "WARNING" in capsys.readouterr().out, "mlx-lm's notice about a model near the limit"
    with contextlib.suppress(ZeroDivisionError):
        for _ in stream_generate(model, plain_tokenizer, PROMPT, 12):
            raise ZeroDivisionError
    gc.collect()
    assert pretend_metal == [123, 1000, 123, 1000, 123]
    with wired_limit(model):
        list(stream_generate(model, plain_tokenizer, PROMPT, 2))
    assert pretend_metal[5:] == [1000, 1000, 1000, 123]
    assert max(pretend_metal) <= 1000


def test_the_wired_limit_counts_the_weights_once_C139(ours, stock):
    """Fused buffers live beside the modules and their parameters are views of them."""

    def size(model):
        def add(total, leaf):
            return total + (leaf.nbytes if isinstance(leaf, mx.array) else 0)

        return tree_reduce(add, model, 0)

    list(generate_step(mx.array(PROMPT), ours, max_tokens=2))
    assert size(ours) == size(stock)


def test_no_wired_limit_off_metal_C139(ours, plain_tokenizer, monkeypatch):
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    calls = []
    monkeypatch.setattr(mx, "set_wired_limit", calls.append)
    assert len(list(stream_generate(ours, plain_tokenizer, PROMPT, 2))) == 2
    assert calls == []
