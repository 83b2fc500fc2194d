"""Who may have a single launch in flight."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from husky_mlx import turns


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(turns.time, "monotonic", lambda: now[0])
    return now


def in_another_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_launches_of_a_thread_wait_for_one_another(clock):
    of = turns.Turns()
    first = of.take()
    assert first.shape == (turns.SIZE,) and first.dtype == mx.uint32
    after = mx.ones((turns.SIZE,), mx.uint32)
    of.leave(after)
    assert of.take() is after


def test_another_thread_gets_no_turn_while_the_first_one_goes_on(clock):
    of = turns.Turns(lambda array: pytest.fail("nobody takes over"))
    for _ in range(3):
        assert of.take() is not None
        of.leave(None)
        clock[0] += 0.9 * turns.IDLE
        assert in_another_thread(of.take) is None


def test_nobody_takes_over_from_a_launch_that_is_being_made(clock):
    """However long that takes: its kernel may have to be compiled."""
    of = turns.Turns(lambda array: pytest.fail("nobody takes over"))
    of.take()
    clock[0] += 100 * turns.IDLE
    assert in_another_thread(of.take) is None
    of.leave(mx.ones((turns.SIZE,), mx.uint32))
    assert in_another_thread(of.take) is None


def test_an_idle_thread_loses_its_turn_once_its_last_launch_is_over(clock):
    waited = []
    of = turns.Turns(waited.append)
    of.take()
    after = mx.ones((turns.SIZE,), mx.uint32)
    of.leave(after)
    clock[0] += 1.1 * turns.IDLE
    theirs = in_another_thread(of.take)
    assert [array is after for array in waited] == [True]
    assert theirs is not None and theirs is not after
    of.leave(None)
    assert of.take() is None
    clock[0] += 1.1 * turns.IDLE
    assert of.take() is not None


def test_all_launches_count_on_one_array():
    of = turns.Turns()
    counter = of.counter()
    assert of.counter() is counter and not mx.any(counter).item()
    # Eight bytes and less would lie in memory that the CPU shares.
    assert counter.nbytes > 8
