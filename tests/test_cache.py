"""The caches against mlx-lm's own, under random sequences of what mlx-lm does with them."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as stock

from husky_mlx import cache as ours
from husky_mlx.buffers import next_capacity
from husky_mlx.errors import ContextLimitError

KV_HEADS, HEAD_DIM = 2, 4
quick = settings(max_examples=200, deadline=None)
lengths = st.sampled_from([1, 2, 7, 100, 255, 256, 257, 300])


@pytest.mark.parametrize(
    ("current", "needed", "limit", "expected"),
    [
        (0, 1, None, 256),
        (0, 256, None, 256),
        (0, 257, None, 512),
        (256, 256, None, 256),
        (256, 257, None, 512),
        (1792, 1793, None, 2048),
        (2048, 2049, None, 2304),
        (4096, 4097, None, 4608),
        (8192, 8193, None, 9216),
        (2048, 4000, None, 4096),
        (0, 4100, None, 4352),
        (256, 257, 300, 300),
        (256, 300, 280, 300),
        (0, 10, 100, 100),
    ],
)
def test_next_capacity_by_hand(current, needed, limit, expected):
    assert next_capacity(current, needed, limit) == expected


@pytest.mark.parametrize(
    ("current", "needed", "expected"),
    [(0, 1, 64), (64, 65, 128), (512, 513, 576), (1024, 1025, 1152), (2048, 2049, 2304)],
)
def test_next_capacity_in_smaller_steps_by_hand(current, needed, expected):
    assert next_capacity(current, needed, step=64) == expected


steps = st.sampled_from([64, 256])


@given(st.integers(0, 60_000), st.integers(1, 80_000), st.none() | st.integers(1, 80_000), steps)
def test_next_capacity_holds_what_is_needed_and_grows_by_little(current, needed, limit, step):
    rows = next_capacity(current, needed, limit, step)
    assert rows >= needed and rows >= current
    if needed <= current:
        assert rows == current
        return
    if limit is not None:
        assert rows <= max(needed, limit)
    assert rows < needed + step or rows <= current * 1.125
    if current < 8 * step:
        assert rows < needed + step


@given(st.integers(0, 30_000), st.integers(100, 20_000), steps)
def test_growth_token_by_token_stops_at_the_limit(start, limit, step):
    """Each of the growths of a reply is small, and the last one lands on the limit."""
    capacity = min(start, limit)
    while capacity < limit:
        grown = next_capacity(capacity, capacity + 1, limit, step)
        assert capacity < grown <= min(limit, max(capacity + step, capacity * 1.125))
        capacity = grown
    assert capacity == limit


class Rows:
    """Distinct numbers for every row appended, the same to both caches."""

    def __init__(self):
        self.count = 0

    def draw(self, length: int, rows: int = 1) -> tuple[mx.array, mx.array]:
        shape = (rows, KV_HEADS, length, HEAD_DIM)
        start = self.count
        self.count += rows * KV_HEADS * length * HEAD_DIM
        keys = mx.arange(start, self.count).reshape(shape).astype(mx.float32)
        return keys, -keys - 1


def step(cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """One row written as the frozen step writes it; returns the live rows."""
    slot, live = cache.begin_step()
    buffers = zip(cache.buffers(), (keys, values), strict=True)
    cache.replace(*(mx.slice_update(x, row, mx.array([slot]), axes=(2,)) for x, row in buffers))
    cache.end_step(cache.offset + 1)
    return cache.keys[..., :live, :], cache.values[..., :live, :]


def same(found, expected) -> bool:
    return all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))


kv_operations = st.lists(
    st.tuples(st.just("append"), lengths)
    | st.tuples(st.sampled_from(["step", "state", "copy", "merge"]), st.just(1))
    | st.tuples(st.just("trim"), st.integers(0, 320)),
    max_size=10,
)


@quick
@given(kv_operations)
def test_kv_cache_follows_mlx_lms(operations):
    rows, our, their = Rows(), ours.KVCache(), stock.KVCache()
    for name, size in [("append", 3), *operations]:
        if name in ("append", "step"):
            keys, values = rows.draw(size)
            expected = their.update_and_fetch(keys, values)
            append = step if name == "step" else ours.KVCache.update_and_fetch
            assert same(append(our, keys, values), expected)
        elif name == "trim":
            assert our.trim(size) == their.trim(size)
        elif name == "state":
            our = ours.KVCache.from_state(our.state)
        elif name == "copy":
            our = copy.deepcopy(our)
        elif their.size():
            our, their = our.merge([our]).extract(0), their.merge([their]).extract(0)
            assert type(our) is ours.KVCache
        assert (our.offset, our.size(), our.empty()) == (their.offset, their.size(), their.empty())
        assert our.is_trimmable()
        assert same(our.keys_and_values(), their.keys_and_values())
        assert our.nbytes == our.keys.nbytes + our.values.nbytes
    for length in (1, 5):
        for window in (None, 3):
            arguments = {"return_array": True, "window_size": window}
            masks = [c.make_mask(length, **arguments) for c in (our, their)]
            assert masks[1] is None if masks[0] is None else mx.array_equal(*masks)


@pytest.mark.parametrize("length", [5, 300])
def test_to_quantized_is_mlx_lms_for_the_live_rows(length):
    keys = mx.random.normal((1, KV_HEADS, length, 64), key=mx.random.key(0))
    our, their = ours.KVCache(), stock.KVCache()
    for cache in (our, their):
        cache.update_and_fetch(keys, 2 * keys)
    our, their = (c.to_quantized(group_size=32, bits=8) for c in (our, their))
    assert type(our) is type(their) is stock.QuantizedKVCache
    assert (our.offset, our.bits, our.group_size) == (length, 8, 32)
    more = mx.random.normal((1, KV_HEADS, 2, 64), key=mx.random.key(1))
    for part, expected in zip(
        our.update_and_fetch(more, more), their.update_and_fetch(more, more), strict=True
    ):
        assert same(part, expected)


def test_an_empty_cache_quantizes_to_an_empty_one():
    cache = ours.KVCache().to_quantized(group_size=32, bits=8)
    assert cache.empty() and cache.offset == 0 and (cache.group_size, cache.bits) == (32, 8)


rotating_operations = st.lists(
    st.tuples(st.just("append"), st.sampled_from([1, 2, 7, 20, 300]))
    | st.tuples(st.just("step"), st.just(1))
    | st.tuples(st.sampled_from(["state", "copy"]), st.just(0))
    | st.tuples(st.just("trim"), st.integers(0, 20)),
    max_size=14,
)


@quick
@given(
    rotating_operations,
    st.sampled_from([(1, 0), (5, 4), (16, 0), (16, 4), (300, 4)]),
    st.integers(1, 40),
)
def test_rotating_cache_follows_mlx_lms(operations, window, first):
    rows, our, their = Rows(), ours.RotatingKVCache(*window), stock.RotatingKVCache(*window)
    for name, size in [("append", first), *operations]:
        if name in ("append", "step"):
            keys, values = rows.draw(size)
            expected = their.update_and_fetch(keys, values)
            append = step if name == "step" else ours.RotatingKVCache.update_and_fetch
            assert same(append(our, keys, values), expected)
        elif name == "trim" and their.is_trimmable():
            assert our.trim(size) == their.trim(size)
        elif name == "state":
            our = ours.RotatingKVCache.from_state(our.state)
        elif name == "copy":
            our = copy.deepcopy(our)
        assert (our.offset, our.size()) == (their.offset, their.size())
        assert our.is_trimmable() == their.is_trimmable()
        if name == "step":
            assert our.capacity() <= window[0], "no row above the limit after a decode step"


@pytest.mark.parametrize(("size", "keep"), [(4, 4), (3, 4), (0, 0)])
def test_a_window_without_a_free_row_is_refused(size, keep):
    """mlx-lm would write its next row behind the buffer."""
    with pytest.raises(ValueError, match=f"window of {size} tokens .* first {keep}"):
        ours.RotatingKVCache(size, keep)


def filled(kind, length: int, rows: Rows):
    cache = kind()
    if length:
        cache.update_and_fetch(*rows.draw(length))
    return cache


def live_rows(cache) -> list[np.ndarray]:
    """What each row of a batch holds, without its padding; nothing once it was trimmed away."""
    starts = cache.left_padding.tolist()
    return [
        np.array(part[row : row + 1, :, start : cache._idx])
        for part in (cache.keys, cache.values)
        for row, start in enumerate(starts)
    ]


batch_operations = st.lists(
    st.tuples(st.just("append"), st.sampled_from([1, 2, 200, 256]))
    | st.tuples(st.sampled_from(["step", "state", "copy", "finalize"]), st.just(1))
    | st.tuples(st.just("trim"), st.integers(0, 3))
    | st.tuples(st.just("filter"), st.integers(0, 3))
    | st.tuples(st.just("extend"), st.integers(1, 300)),
    max_size=8,
)


@quick
@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), batch_operations)
def test_batch_cache_follows_mlx_lms(prompts, operations):
    rows = Rows()
    singles = [filled(ours.KVCache, length, rows) for length in prompts]
    rows.count = 0
    twins = [filled(stock.KVCache, length, rows) for length in prompts]
    our, their = ours.KVCache.merge(singles), stock.KVCache.merge(twins)
    assert type(our) is ours.BatchKVCache
    for name, size in [("append", 4), *operations]:
        batch = their.left_padding.shape[0]
        if name in ("append", "step"):
            keys, values = rows.draw(size, batch)
            expected = their.update_and_fetch(keys, values)
            append = step if name == "step" else ours.BatchKVCache.update_and_fetch
            found = append(our, keys, values)
            assert [x.shape for x in found] == [x.shape for x in expected]
        elif name == "finalize":
            keys, values = rows.draw(5, batch)
            padding = [row % 3 for row in range(batch)]
            for cache in (our, their):
                cache.prepare(right_padding=padding, lengths=[5 - p for p in padding])
                cache.update_and_fetch(keys, values)
                cache.finalize()
        elif name == "trim":
            # Never into the padding of a row: mlx-lm then filters to a negative number of rows.
            size = min(size, *their.offset.tolist())
            assert our.trim(size) == their.trim(size)
        elif name == "filter":
            kept = mx.array(sorted({size % batch, batch - 1}))
            our.filter(kept)
            their.filter(kept)
        elif name == "extend":
            count = rows.count
            for cache, kind in ((our, ours.KVCache), (their, stock.KVCache)):
                rows.count = count
                cache.extend(kind.merge([filled(kind, size, rows)]))
        elif name == "state":
            our = ours.BatchKVCache.from_state(our.state)
        else:
            our = copy.deepcopy(our)
        assert our.offset.tolist() == their.offset.tolist()
        assert our.left_padding.tolist() == their.left_padding.tolist()
        assert our.size() == their.size()
        for found, expected in zip(live_rows(our), live_rows(their), strict=True):
            assert np.array_equal(found, expected)
    for row in range(their.left_padding.shape[0]):
        found, expected = our.extract(row), their.extract(row)
        assert type(found) is ours.KVCache and found.offset == expected.offset
        assert same(found.keys_and_values(), expected.keys_and_values())


def test_merged_empty_caches_are_empty_and_ours():
    merged = ours.KVCache.merge([ours.KVCache(), ours.KVCache()])
    assert type(merged) is ours.BatchKVCache
    assert merged.empty() and merged.offset.tolist() == [0, 0]


def make(kind: str, rows: Rows):
    """A cache of each kind with a few rows, and how many rows a batch has."""
    if kind == "kv":
        return filled(ours.KVCache, 256, rows), 1
    if kind == "rotating":
        return filled(lambda: ours.RotatingKVCache(8, 2), 8, rows), 1
    merged = ours.KVCache.merge([filled(ours.KVCache, n, rows) for n in (256, 3)])
    return merged, 2


def values_of(state) -> list:
    return [np.array(part) if isinstance(part, mx.array) else part for part in state]


def changes(cache, batch: int, rows: Rows) -> None:
    """Everything that rewrites rows in place, on both paths."""
    if cache.is_trimmable():
        cache.trim(3)
    cache.update_and_fetch(*rows.draw(1, batch))
    step(cache, *rows.draw(1, batch))
    cache.update_and_fetch(*rows.draw(1, batch))
    if batch > 1:
        cache.prepare(right_padding=[0, 1], lengths=[2, 1])
        cache.update_and_fetch(*rows.draw(2, batch))
        cache.finalize()


@pytest.mark.parametrize("kind", ["kv", "rotating", "batch"])
def test_a_held_state_does_not_change_under_later_steps(kind):
    """mlx-lm's own caches assign rows in place, into arrays that a state may share."""
    rows = Rows()
    cache, batch = make(kind, rows)
    held = cache.state
    snapshot = values_of(held)
    changes(cache, batch, rows)
    mx.eval(cache.state)
    for found, expected in zip(values_of(held), snapshot, strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", ["kv", "rotating", "batch"])
def test_a_cache_does_not_write_into_the_state_it_came_from(kind):
    rows = Rows()
    first, batch = make(kind, rows)
    state = first.state
    snapshot = values_of(state)
    second = type(first).from_state(state)
    changes(second, batch, rows)
    mx.eval(second.state)
    for found, expected in zip(values_of(state), snapshot, strict=True):
        assert np.array_equal(found, expected)
    for found, expected in zip(values_of(first.state), snapshot, strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", ["kv", "rotating", "batch"])
def test_deep_copies_are_independent_both_ways(kind):
    rows = Rows()
    original, batch = make(kind, rows)
    duplicate = copy.deepcopy(original)
    before = values_of(original.state)
    changes(duplicate, batch, rows)
    assert all(map(np.array_equal, values_of(original.state), before))
    after = values_of(duplicate.state)
    changes(original, batch, rows)
    assert all(map(np.array_equal, values_of(duplicate.state), after))
    assert type(duplicate) is type(original)


def test_adopt_keeps_the_objects_and_what_they_hold():
    rows = Rows()
    caches = [
        filled(stock.KVCache, 5, rows),
        filled(lambda: stock.RotatingKVCache(8, 2), 5, rows),
        stock.KVCache.merge([filled(stock.KVCache, n, rows) for n in (2, 5)]),
        stock.QuantizedKVCache(),
    ]
    identities = [id(cache) for cache in caches]
    before = [values_of(cache.state) for cache in caches[:3]]
    ours.adopt(caches)
    assert [id(cache) for cache in caches] == identities
    assert [type(cache) for cache in caches] == [
        ours.KVCache,
        ours.RotatingKVCache,
        ours.BatchKVCache,
        stock.QuantizedKVCache,
    ]
    live = caches[0].state
    assert np.array_equal(live[0], before[0][0][..., :5, :]) and live[2] == 5
    for cache, state in zip(caches[1:3], before[1:], strict=True):
        assert all(map(np.array_equal, values_of(cache.state), state))
    assert caches[0].limit is None, "a stock cache knows no max_context"


def test_the_limit_holds_on_every_way_in():
    cache, rows = ours.KVCache(limit=10), Rows()
    cache.update_and_fetch(*rows.draw(8))
    assert cache.capacity() == 10
    step(cache, *rows.draw(1))
    with pytest.raises(ContextLimitError, match="11 tokens do not fit max_context=10"):
        cache.update_and_fetch(*rows.draw(2))
    step(cache, *rows.draw(1))
    with pytest.raises(ContextLimitError, match="11 tokens"):
        cache.begin_step()
    assert cache.offset == 10
    batch = ours.KVCache.merge([cache])
    with pytest.raises(ContextLimitError, match="11 tokens"):
        batch.begin_step()
    assert batch.extract(0).limit == 10
