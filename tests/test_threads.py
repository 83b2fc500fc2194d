"""One model in several threads: caches and replies that are handed on, weights that change.

What is right is what mlx-lm's own class answers in one thread.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Thread

import mlx.core as mx
import mlx.nn as nn
import pytest
from fixtures import FIX_A, FIX_B, PROMPT, mlx_weights, model_of
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.generate import stream_generate as stock_stream_generate
from mlx_lm.models import cache as stock_cache

from husky_mlx import pack, stream_generate
from husky_mlx.greedy import greedy_tokens
from husky_mlx.native import program

WAYS = {
    "frozen": {"HUSKY_NATIVE": "0"},
    "native": {"HUSKY_NATIVE": "1"},
    "eager": {"HUSKY_EAGER": "1"},
}
PATIENCE = 0.2  # seconds, for a thread that must wait until the one it was started by goes on


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    for name, value in WAYS[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param


@pytest.fixture
def frozen(monkeypatch):
    """Models of which no program is built."""
    monkeypatch.setenv("HUSKY_NATIVE", "0")


@pytest.fixture
def threads():
    """Two threads that live as long as the test: each calls a function."""
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        yield [
            lambda function, *arguments, pool=pool: pool.submit(function, *arguments).result()
            for pool in (first, second)
        ]


def stock_loop(model, prompt, count, cache):
    found = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache)
    return [int(token) for token, _ in found]


def our_loop(model, prompt, count, cache):
    stream = {"stream": generation_stream, "prompt_cache": cache}
    return [token for token, _ in greedy_tokens(model, mx.array(prompt), count, **stream)]


def mlx_lms(count, prompt=PROMPT, **options):
    model = model_of("mlx", **options)
    return stock_loop(model, prompt, count, stock_cache.make_prompt_cache(model))


@pytest.mark.parametrize("size", [None, 60], ids=["full", "ring"])
@pytest.mark.parametrize("loop", [stock_loop, our_loop])
def test_a_cache_goes_on_in_another_thread(way, threads, loop, size):
    first, second = threads
    model, expected = model_of(), mlx_lms(20)
    cache = model.make_cache(size)
    assert first(loop, model, PROMPT, 5, cache) == expected[:5]
    assert second(loop, model, expected[5:6], 5, cache) == expected[6:11]
    assert first(loop, model, expected[11:12], 3, cache) == expected[12:15]


def test_a_cache_of_which_only_the_state_was_evaluated_goes_on_in_another_thread(way, threads):
    """As after mlx-lm's prefill, which drops the logits."""
    first, second = threads
    model, expected = model_of(), mlx_lms(5)
    cache = model.make_cache()

    def read(tokens):
        model(mx.array([tokens]), cache=cache)
        mx.eval([layer.state for layer in cache])

    first(read, PROMPT[:-2])
    first(read, PROMPT[-2:-1])
    assert second(our_loop, model, PROMPT[-1:], 5, cache) == expected


def test_a_thread_that_has_ended_leaves_its_cache(way, threads):
    model, expected = model_of(), mlx_lms(11)
    cache = model.make_cache()
    ended = Thread(target=our_loop, args=(model, PROMPT, 5, cache))
    ended.start()
    ended.join()
    assert threads[0](our_loop, model, expected[5:6], 5, cache) == expected[6:]


# mlx-lm's loop keeps the stream of the thread that began it: it cannot be closed in another.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("generate", [stream_generate, stock_stream_generate])
def test_a_reply_goes_on_in_another_thread(way, threads, plain_tokenizer, generate):
    model, expected = model_of(config=FIX_B), mlx_lms(8, config=FIX_B)
    reply = generate(model, plain_tokenizer, PROMPT, max_tokens=12)

    def four_tokens():
        return [response.token for response in islice(reply, 4)]

    assert [token for thread in threads for token in thread(four_tokens)] == expected


@pytest.fixture
def unraisable(monkeypatch):
    """What was raised where nobody could catch it."""
    found: list = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: found.append(problem.exc_value))
    return found


@pytest.mark.parametrize("way_to_end", ["close", "drop"])
def test_a_reply_ends_in_another_thread(way, threads, plain_tokenizer, unraisable, way_to_end):
    if way == "eager":
        pytest.skip("mlx-lm's own loop runs")
    first, second = threads
    model = model_of(config=FIX_B)
    replies = [stream_generate(model, plain_tokenizer, PROMPT, max_tokens=12)]
    first(lambda: next(replies[0]))
    second((lambda: replies[0].close()) if way_to_end == "close" else replies.clear)
    second(replies.clear)
    assert unraisable == []


def test_between_two_tokens_the_consumers_stream_is_its_own(way, plain_tokenizer):
    """Two replies in turns, of which the first one to begin is also the first to end."""
    if way == "eager":
        pytest.skip("mlx-lm's own loop runs")
    model = model_of(config=FIX_B)
    own = mx.default_stream(mx.default_device())
    replies = [stream_generate(model, plain_tokenizer, PROMPT, max_tokens=6) for _ in range(2)]
    for reply in replies:
        next(reply)
        assert mx.default_stream(mx.default_device()) == own
    assert [len(list(reply)) for reply in replies] == [5, 5]
    assert mx.default_stream(mx.default_device()) == own


def once_in_another_thread(work):
    """A function that starts ``work`` in a thread when it is first called and gives it a moment,
    and one that waits for its end."""
    started: list[Thread] = []

    def start():
        if not started:
            started.append(Thread(target=work))
            started[0].start()
            started[0].join(PATIENCE)

    return start, lambda: started[0].join()


def other_weights():
    weights = mlx_weights(FIX_A, seed=1)
    mx.eval(weights)
    return weights


def load(model):
    model.load_weights(list(other_weights().items()))


def assign(model):
    weight = other_weights()["model.layers.0.self_attn.k_proj.weight"]
    model.layers[0].self_attn.k_proj.weight = weight


def replies_of(model):
    return our_loop(model, PROMPT, 8, model.make_cache())


@pytest.mark.parametrize("change", [load, assign])
def test_weights_that_change_while_others_are_fused_stay(frozen, monkeypatch, change):
    model, stock = model_of(), model_of("mlx")
    change(stock)
    start, wait = once_in_another_thread(lambda: change(model))

    def joining(parts, join=pack.join):
        start()
        return join(parts)

    monkeypatch.setattr(pack, "join", joining)
    model.update({})
    replies_of(model)
    wait()
    expected = dict(tree_flatten(stock.parameters()))
    for name, value in tree_flatten(model.parameters()):
        assert mx.array_equal(value, expected[name]), name
    assert replies_of(model) == stock_loop(stock, PROMPT, 8, stock_cache.make_prompt_cache(stock))


def test_no_step_is_built_of_weights_of_which_half_are_new(way, monkeypatch):
    model, stock = model_of(), model_of("mlx", seed=1)
    cache, theirs = model.make_cache(), stock_cache.make_prompt_cache(stock)
    our_loop(model, PROMPT, 1, cache)
    for layer, read in zip(theirs, cache, strict=True):
        layer.state = read.state
    start, wait = once_in_another_thread(lambda: replies_of(model))

    def halfway(self, parameters, *arguments, update=nn.Module.update, **options):
        update(self, {"lm_head": parameters["lm_head"]}, *arguments, **options)
        start()
        return update(self, parameters, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "update", halfway)
        load(model)
    wait()
    logits, expected = (m(mx.array([[7]]), cache=c) for m, c in ((model, cache), (stock, theirs)))
    assert mx.allclose(logits, expected, atol=2e-3)


def test_a_weight_that_is_assigned_while_the_program_is_compiled_is_the_next_replys(monkeypatch):
    """Half as long as the one that the program is compiled for, which must read that one."""
    monkeypatch.setenv("HUSKY_NATIVE", "1")
    model, stock = model_of(), model_of("mlx")
    half = stock.layers[0].self_attn.k_proj.weight.astype(mx.float16) * 3
    mx.eval(half)

    def assign_half(model):
        model.layers[0].self_attn.k_proj.weight = half

    def compiling(*arguments, library=program.library):
        start()
        return library(*arguments)

    start, wait = once_in_another_thread(lambda: assign_half(model))
    monkeypatch.setattr(program, "library", compiling)
    model.update({})
    assert replies_of(model) == mlx_lms(8)
    wait()
    assign_half(stock)
    assert replies_of(model) == stock_loop(stock, PROMPT, 8, stock_cache.make_prompt_cache(stock))
    assert model.plan.native is not None
