"""Functions compiled for each thread: none of their traces outlives them."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from husky_mlx.compiled import Compiled


@pytest.fixture
def other_thread():
    """Calls a function in a thread that lives as long as the test."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def multiply_by(number):
    return lambda x: x * number


def test_a_new_function_is_not_taken_for_a_dropped_one_that_two_threads_called(other_thread):
    x = mx.ones(3)
    mx.eval(x)
    for number in range(50):
        function = Compiled(multiply_by(number))
        assert function(x).tolist() == [number] * 3
        assert other_thread(lambda f=function: f(x).tolist()) == [number] * 3


@pytest.mark.parametrize("dropped_by", ["the first thread", "the last one"])
def test_what_two_threads_traced_is_freed_with_the_function(dropped_by, other_thread):
    def held():
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory()

    before = held()
    weights, x = mx.zeros((256, 256)) + 1, mx.ones((1, 256))
    mx.eval(weights, x)
    functions = [Compiled(lambda x, weights=weights: x @ weights)]
    del weights
    for run in (lambda call: call(), other_thread):
        assert run(lambda: functions[0](x).sum().item()) == 256 * 256
    (
        functions.clear
        if dropped_by == "the first thread"
        else lambda: other_thread(functions.clear)
    )()
    del run
    assert held() - before < 8192
