"""Buffers that are written behind MLX's back: who may see what, and when it is there.

Kernels are played by a writer that changes the buffers' memory itself, and only when the array that
it handed out as the order of its writes is evaluated. Views, copies and states then share memory
and miss writes exactly as they would with kernels on a GPU.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as stock

from husky_mlx import buffers
from husky_mlx.cache import BatchKVCache, KVCache, RotatingKVCache, adopt
from husky_mlx.errors import ContextLimitError
from husky_mlx.freeze import DecodeStep
from husky_mlx.places import SLOT, advance
from husky_mlx.plan import Plan

HEADS, DIM, LAYERS = 2, 4, 2
evaluate = mx.eval


class Writer:
    """A graph for ``DecodeStep`` that writes token t as rows of t (keys) and -t (values)."""

    in_place, compiled, longest, self_test = True, False, 4, None
    prefill = single = None
    config = SimpleNamespace(num_key_value_heads=HEADS, head_dim=DIM)
    dtype = mx.float32
    kind_of_layer = [0] * LAYERS

    def __init__(self):
        self.nothing_before = mx.zeros((8,))
        self.pending = {}
        self.evaluations = 0

    def logits(self, tokens, places, batched, keys, values, before):
        slot = places[0][SLOT].item()
        order = mx.zeros((8,))
        writes = np.array(tokens), slot, batched, [*keys], [*values]
        self.pending[id(order)] = order, before, writes
        return (
            mx.zeros((*tokens.shape, 1)),
            [p + mx.array(advance(tokens.shape[1])) for p in places],
            order,
        )

    greedy = logits

    def eval(self, *arrays):
        """``mx.eval``: runs the writes that an order stands for, and those before them."""
        self.evaluations += 1
        for array in arrays:
            self.run(array)
        evaluate(*arrays)

    def run(self, order):
        _, before, writes = self.pending.pop(id(order), (None, None, None))
        if writes is not None:
            self.run(before)
            self.write(*writes)

    def write(self, tokens, slot, batched, keys, values):
        rows = tokens[:, None, :, None] if batched else tokens.reshape(1, 1, -1, 1)
        for sign, side in ((1, keys), (-1, values)):
            for buffer in side:
                memory = np.asarray(buffer)
                assert memory.flags.c_contiguous, "a kernel would get a copy and write there"
                memory[:, :, slot : slot + rows.shape[2]] = sign * rows.astype(np.float32)


class Plain(Writer):
    """A graph that returns the buffers instead: what a model falls back to."""

    in_place, nothing_before = False, None

    def __init__(self):
        pass

    def logits(self, tokens, places, batched, keys, values):
        row = tokens.astype(mx.float32)[:, None, :, None] * mx.ones((1, HEADS, 1, DIM))
        slot = places[0][SLOT : SLOT + 1]
        keys, values = (
            [mx.slice_update(buffer, sign * row, slot, axes=(2,)) for buffer in side]
            for sign, side in ((1, keys), (-1, values))
        )
        following = [places[0] + mx.array(advance(1))]
        return mx.stack([*keys, *values]), following, keys, values


@pytest.fixture
def writer(monkeypatch):
    made = Writer()
    monkeypatch.setattr(mx, "eval", made.eval)
    return made


@pytest.fixture
def copies(monkeypatch):
    """Counts real copies of a layer's buffers."""
    made = []
    own = buffers.CacheBuffers._own

    def spy(self, *arguments):
        made.append(self)
        own(self, *arguments)

    monkeypatch.setattr(buffers.CacheBuffers, "_own", spy)
    return made


def step_of(writer):
    return DecodeStep(writer, Plan("", "", "", 4))


def rows_of(tokens):
    keys = mx.array(tokens, mx.float32).reshape(1, 1, -1, 1)
    keys = mx.broadcast_to(keys, (1, HEADS, len(tokens), DIM))
    return keys, -keys


def prefill(caches, tokens):
    """As the reference path appends, and mlx-lm then evaluates and drops the states."""
    for cache in caches:
        cache.update_and_fetch(*rows_of(tokens))
    mx.eval([cache.state for cache in caches])


def filled(tokens, make=KVCache):
    caches = [make() for _ in range(LAYERS)]
    prefill(caches, tokens)
    return caches


def tokens_in(keys, values):
    """The tokens whose rows these are, all heads and both sides agreeing."""
    keys, values = np.array(keys), np.array(values)
    assert (keys == keys[:, :1, :, :1]).all() and (values == -keys).all()
    return keys[0, 0, :, 0].astype(int).tolist()


def held(caches):
    return [cache.state for cache in caches]


def contents(states):
    found = [tokens_in(*state[:2]) for state in states]
    assert all(layer == found[0] for layer in found)
    return found[0]


def advance_by(step, caches, *tokens):
    for token in tokens:
        step.logits(mx.array([[token]]), caches)


def test_steps_append_and_nothing_is_evaluated_or_copied_by_them(writer, copies):
    caches, step = filled([1, 2, 3]), step_of(writer)
    before = writer.evaluations
    advance_by(step, caches, *range(4, 24))
    assert writer.evaluations == before, "a step waits for nothing"
    assert len(writer.pending) == 20 and not copies
    assert contents(held(caches)) == list(range(1, 24))
    assert not writer.pending


def begun_together(tokens=3, count=3, make=KVCache):
    caches = [make() for _ in range(count)]
    buffers.allocate_first(caches, tokens, HEADS, DIM, mx.float32)
    return caches


def in_one_array(caches):
    """Whether the buffers, which all are there, lie one after the other."""
    sides = [np.asarray(side) for cache in caches for side in cache.buffers()]
    places = np.array([side.ctypes.data for side in sides])
    return bool((np.diff(places) == [side.nbytes for side in sides[:-1]]).all())


def test_buffers_that_begin_in_one_array_are_written_apart(writer):
    """Each as far as it reaches; growth and copies take nothing from the others."""
    caches = begun_together()
    sides = [side for cache in caches for side in cache.buffers()]
    room = caches[0].capacity()
    assert {side.shape for side in sides} == {(1, HEADS, room, DIM)}
    assert in_one_array(caches)
    for number, side in enumerate(sides):
        memory = np.asarray(side)
        assert memory.flags.c_contiguous and not memory.any()
        memory[...] = number + 1
    for cache in caches:
        cache.end_step(3, 3)
    copied = copy.deepcopy(caches[1])
    np.asarray(copied.buffers()[0])[...] = 9
    caches[0].grow(room + 1, 3)
    for number, cache in enumerate(caches):
        for side, wanted in zip(cache.buffers(), (2 * number + 1, 2 * number + 2), strict=True):
            assert (np.asarray(side)[:, :, :3] == wanted).all()
    assert caches[0].capacity() > room and not np.asarray(caches[0].buffers()[0])[:, :, 3:].any()


def test_steps_on_buffers_that_begin_in_one_array(writer, copies):
    step, caches = step_of(writer), [KVCache() for _ in range(LAYERS)]
    step.allocate(caches)
    advance_by(step, caches, 5, 6, 7)
    assert contents(held(caches)) == [5, 6, 7]
    assert not copies


def test_only_small_buffers_of_one_shape_begin_in_one_array(monkeypatch):
    different = [KVCache(), KVCache()]
    different[1].expect(1000)
    buffers.allocate_first(different, 3, HEADS, DIM, mx.float32)
    assert not in_one_array(different)
    begun = [KVCache(), *begun_together(count=1)]
    kept = begun[1].buffers()
    buffers.allocate_first(begun, 3, HEADS, DIM, mx.float32)
    assert not in_one_array(begun) and all(
        a is b for a, b in zip(begun[1].buffers(), kept, strict=True)
    )
    three = 6 * HEADS * begun[1].capacity() * DIM * 4
    monkeypatch.setattr(buffers, "_TOGETHER", three - 1)
    assert not in_one_array(begun_together())
    assert in_one_array(begun_together(count=2))


def test_a_limit_holds_where_buffers_begin_in_one_array():
    def limited():
        cache = KVCache()
        cache.limit = 2
        return cache

    with pytest.raises(ContextLimitError, match="3 tokens do not fit max_context=2"):
        begun_together(make=limited)


def test_several_tokens_in_one_step(writer):
    caches, step = filled([1, 2, 3]), step_of(writer)
    step.logits(mx.array([[4, 5, 6, 7]]), caches)
    advance_by(step, caches, 8)
    step.logits(mx.array([[9, 10]]), caches)
    assert contents(held(caches)) == list(range(1, 11))


def test_a_held_state_stays_as_it_was(writer):
    caches, step = filled([1, 2, 3]), step_of(writer)
    advance_by(step, caches, 4, 5)
    lazy, done = held(caches), held(caches)
    assert contents(done) == [1, 2, 3, 4, 5]
    advance_by(step, caches, 6)
    for cache in caches:
        cache.trim(3)
    advance_by(step, caches, 7, 8, 9)
    assert contents(held(caches)) == [1, 2, 3, 7, 8, 9]
    assert contents(done) == contents(lazy) == [1, 2, 3, 4, 5]


def test_a_held_state_of_a_ring_stays_as_it_was(writer, copies):
    caches, step = filled([1, 2, 3, 4], lambda: RotatingKVCache(6, keep=1)), step_of(writer)
    advance_by(step, caches, 5, 6, 7, 8)
    first = held(caches)
    assert contents(first) == [1, 7, 8, 4, 5, 6]
    del copies[:]
    advance_by(step, caches, 9, 10, 11, 12, 13)
    assert len(copies) == LAYERS, "one copy for the state that was shown, none for each step"
    second = held(caches)
    assert contents(second) == [1, 12, 13, 9, 10, 11]
    advance_by(step, caches, 14, 15)
    assert contents(held(caches)) == [1, 12, 13, 14, 15, 11]
    assert contents(first) == [1, 7, 8, 4, 5, 6] and contents(second) == [1, 12, 13, 9, 10, 11]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_go_their_own_way(writer, duplicate):
    caches, step = filled([1, 2, 3]), step_of(writer)
    advance_by(step, caches, 4, 5)
    others = [duplicate(cache) for cache in caches]
    for cache in caches:
        cache.trim(2)
    advance_by(step, caches, 6, 7, 8)
    evaluate(writer.nothing_before)
    mx.eval(caches[0].ordering)
    assert contents(held(others)) == [1, 2, 3, 4, 5], "not what was written before it was read"
    advance_by(step, others, 9)
    assert contents(held(caches)) == [1, 2, 3, 6, 7, 8]
    assert contents(held(others)) == [1, 2, 3, 4, 5, 9]


def test_two_caches_made_from_one_state(writer):
    caches, step = filled([1, 2, 3]), step_of(writer)
    state = held(caches)
    pairs = [[KVCache.from_state(s) for s in state] for _ in range(2)]
    advance_by(step, pairs[0], 4, 5)
    advance_by(step, pairs[1], 6)
    advance_by(step, caches, 7, 8, 9)
    assert contents(held(pairs[0])) == [1, 2, 3, 4, 5]
    assert contents(held(pairs[1])) == [1, 2, 3, 6]
    assert contents(held(caches)) == [1, 2, 3, 7, 8, 9]
    assert contents(state) == [1, 2, 3]


@pytest.mark.parametrize("adopted", [False, True])
def test_buffers_with_room_that_others_hold_are_not_written(writer, adopted):
    """mlx-lm's own caches and states: whole buffers, which its copies share."""
    stock_caches = [stock.KVCache() for _ in range(LAYERS)]
    prefill(stock_caches, [1, 2, 3])
    states = held(stock_caches)
    assert states[0][0].shape[2] == 256
    if adopted:
        pairs = [stock_caches, copy.deepcopy(stock_caches)]
        adopt(pairs[0])
        adopt(pairs[1])
    else:
        pairs = [[KVCache.from_state(s) for s in states] for _ in range(2)]
    step = step_of(writer)
    advance_by(step, pairs[0], 4, 5)
    advance_by(step, pairs[1], 6)
    assert contents(held(pairs[0])) == [1, 2, 3, 4, 5]
    assert contents(held(pairs[1])) == [1, 2, 3, 6]
    assert contents(states) == [1, 2, 3] + [0] * 253


def test_a_prompt_that_fills_a_ring(writer):
    """The reference path leaves arrays in it whose rows do not follow each other in memory."""
    caches, step = filled([1, 2, 3, 4, 5, 6], lambda: RotatingKVCache(6)), step_of(writer)
    advance_by(step, caches, 7, 8)
    assert contents(held(caches)) == [7, 8, 3, 4, 5, 6]


def test_a_state_that_is_evaluated_and_dropped_costs_no_copy(writer, copies):
    """What mlx-lm does after every chunk of a prompt."""
    caches, step = filled([1, 2, 3]), step_of(writer)
    for token in range(4, 10):
        advance_by(step, caches, token)
        mx.eval([cache.state for cache in caches])
    prefill(caches, [10, 11])
    advance_by(step, caches, 12)
    assert not copies
    assert contents(held(caches)) == list(range(1, 13))


def test_no_memory_is_gained_by_states_and_steps(writer):
    caches, step = filled([1] * 2950), step_of(writer)
    advance_by(step, caches, 2)
    held(caches)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for token in range(20):
        advance_by(step, caches, token)
        mx.eval([cache.state for cache in caches])
    assert mx.get_peak_memory() - before < caches[0].nbytes // 4


READERS = {
    "state": lambda cache: cache.state,
    "keys": lambda cache: cache.keys,
    "values": lambda cache: cache.values,
    "growth": lambda cache: cache.grow(500, cache.offset),
    "to_quantized": lambda cache: KVCache.to_quantized(cache, group_size=32),
    "merge": lambda cache: KVCache.merge([cache, cache]),
    "deepcopy": copy.deepcopy,
    "update_and_fetch": lambda cache: cache.update_and_fetch(*rows_of([9])),
}


@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_waits_for_the_last_step(writer, monkeypatch, name):
    monkeypatch.setattr("test_buffers.DIM", 32)
    caches, step = filled([1, 2, 3]), step_of(writer)
    advance_by(step, caches, 4, 5)
    for cache in caches:
        READERS[name](cache)
        assert cache.ordering is None and not writer.pending
    assert contents(held(caches))[:5] == [1, 2, 3, 4, 5]


def batch(writer, *prompts):
    merged = [BatchKVCache.merge(list(layer)) for layer in zip(*map(filled, prompts), strict=True)]
    return merged, step_of(writer)


def batch_contents(caches):
    found = []
    for cache in caches:
        keys, values, _, padding, used = cache.state
        found.append(
            [
                tokens_in(keys[row : row + 1, :, pad:used], values[row : row + 1, :, pad:used])
                for row, pad in enumerate(padding.tolist())
            ]
        )
    assert all(layer == found[0] for layer in found)
    return found[0]


def test_rows_of_a_batch(writer, copies):
    caches, step = batch(writer, [1, 2], [11, 12, 13, 14], [21])
    step.logits(mx.array([[3], [15], [22]]), caches)
    assert not copies, "what merge made is full: growing it was the copy"
    step.logits(mx.array([[4], [16], [23]]), caches)
    assert caches[0].offset.tolist() == [4, 6, 3]
    assert batch_contents(caches) == [[1, 2, 3, 4], [*range(11, 17)], [21, 22, 23]]
    assert not copies


def test_an_extracted_row_is_a_cache_of_its_own(writer):
    caches, step = batch(writer, [1, 2], [11, 12, 13])
    step.logits(mx.array([[3], [14]]), caches)
    rows = [cache.extract(0) for cache in caches]
    step.logits(mx.array([[4], [15]]), caches)
    advance_by(step, rows, 99)
    assert contents(held(rows)) == [1, 2, 3, 99]
    assert batch_contents(caches) == [[1, 2, 3, 4], [11, 12, 13, 14, 15]]


def test_filter_and_extend_then_one_copy(writer, copies):
    caches, step = batch(writer, [1, 2], [11, 12, 13, 14], [21])
    step.logits(mx.array([[3], [15], [22]]), caches)
    states = batch_contents(caches)
    for cache in caches:
        cache.filter(mx.array([0, 2]))
    del copies[:]
    step.logits(mx.array([[4], [23]]), caches)
    step.logits(mx.array([[5], [24]]), caches)
    assert len(copies) == LAYERS
    assert batch_contents(caches) == [[1, 2, 3, 4, 5], [21, 22, 23, 24]]
    others, _ = batch(writer, [31, 32], [41])
    step.logits(mx.array([[33], [42]]), others)
    for cache, other in zip(caches, others, strict=True):
        cache.extend(other)
    del copies[:]
    step.logits(mx.array([[6], [25], [34], [43]]), caches)
    step.logits(mx.array([[35], [44]]), others)
    assert batch_contents(caches) == [
        [*range(1, 7)],
        [21, 22, 23, 24, 25],
        [31, 32, 33, 34],
        [41, 42, 43],
    ]
    assert batch_contents(others) == [[31, 32, 33, 35], [41, 42, 44]]
    assert states == [[1, 2, 3], [11, 12, 13, 14, 15], [21, 22]]


def test_a_layer_from_another_list_brings_its_own_order(writer):
    """mlx-lm keeps a list of caches, and anybody may put another one in its place."""
    first, second, step = filled([1, 2, 3]), filled([11, 12, 13]), step_of(writer)
    advance_by(step, first, 4)
    advance_by(step, second, 14)
    mixed = [first[0], second[1]]
    advance_by(step, mixed, 5)
    assert second[1].ordering is first[0].ordering
    assert tokens_in(*mixed[0].state[:2]) == [1, 2, 3, 4, 5]
    assert tokens_in(*mixed[1].state[:2]) == [11, 12, 13, 14, 5]


def test_a_step_of_plain_operations_goes_on_where_kernels_stopped(writer):
    caches, step = filled([1, 2, 3]), step_of(writer)
    advance_by(step, caches, 4, 5)
    plain = step_of(Plain())
    for token in (6, 7):
        evaluate(plain.logits(mx.array([[token]]), caches))
    shown = held(caches)
    assert contents(shown) == [1, 2, 3, 4, 5, 6, 7]
    advance_by(step, caches, 8)
    assert contents(held(caches)) == [*range(1, 9)]
    assert contents(shown) == [*range(1, 8)]


OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("prefill"), st.integers(1, 70)),
    st.tuples(st.just("trim"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["hold", "duplicate", "restore", "grow", "switch"]), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=14))
def test_any_order_of_operations_leaves_what_a_plain_list_would(operations):
    """Caches, their copies and the states that somebody holds, against Python lists."""
    writer, count = Writer(), 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "eval", writer.eval)
        step = step_of(writer)
        pairs = [(filled([1, 2, 3]), [1, 2, 3])]
        states = []
        for name, size in operations:
            caches, tokens = pairs[-1]
            fresh = [*range(count, count + size)]
            count += size
            if name == "step":
                step.logits(mx.array([fresh]), caches)
                tokens += fresh
            elif name == "prefill":
                prefill(caches, fresh)
                tokens += fresh
            elif name == "trim" and size < len(tokens):
                assert [cache.trim(size) for cache in caches] == [size] * LAYERS
                del tokens[-size:]
            elif name == "hold":
                states.append((held(caches), tokens[:]))
            elif name == "duplicate":
                pairs.append((copy.deepcopy(caches), tokens[:]))
            elif name == "restore":
                pairs.append(([KVCache.from_state(s) for s in held(caches)], tokens[:]))
            elif name == "grow":
                for cache in caches:
                    cache.grow(cache.capacity() + 1, cache.offset)
            elif name == "switch":
                pairs.insert(0, pairs.pop())
        for caches, tokens in pairs:
            assert contents(held(caches)) == tokens
        for state, tokens in states:
            assert contents(state) == tokens
