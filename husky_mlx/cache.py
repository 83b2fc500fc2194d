"""The KV cache: mlx-lm's, with buffers whose capacity stays put between rare, small growths.

A fixed capacity is what lets one compiled step serve every token. The classes keep mlx-lm's names
and states, so that saved prompt caches reload in stock mlx-lm and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from husky_mlx.buffers import CacheBuffers, check_layout, check_limit, handles
from husky_mlx.memory import memory_left, require_memory
from husky_mlx.structure import AFFINE_BITS, AFFINE_GROUP_SIZES


def check_growth(caches: Sequence[Any], tokens: int, row_bytes: int) -> None:
    """Raise MemoryLimitError if appending ``tokens`` would grow the caches past the device.

    ``row_bytes`` is the size of one token's keys and values in one layer. All layers are counted
    before any is allocated, with one layer's old buffer alive beside its new one. The message says
    how many tokens would fit.
    """
    growth = largest = most = 0
    for cache in caches:
        rows = cache.capacity_for(tokens)
        most = max(most, rows)  # windows have fewer
        growth += max(rows - cache.capacity(), 0) * row_bytes
        largest = max(largest, cache.capacity() * row_bytes)
    if growth:
        held = sum(cache.capacity() for cache in caches)
        spare = max(memory_left() - largest, 0) // row_bytes
        require_memory(
            growth + largest,
            f"A KV cache of {most:,} tokens",
            f"About {(held + spare) // len(caches):,} tokens would fit.",
        )


class KVCache(CacheBuffers, stock.KVCache):
    """All tokens of one sequence (or of several of equal length)."""

    def __init__(self, limit: int | None = None):
        super().__init__()
        self.limit = limit

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, kv_heads, L, head_dim) keys and values; returns views of the live rows."""
        self.make_room(keys, values, self.offset)
        return super().update_and_fetch(keys, values)

    def rows(self) -> int:
        return self.offset

    def capacity_for(self, tokens: int) -> int:
        """Rows of the buffers once ``tokens`` more are in."""
        rows = max(self.offset + tokens, self.expected)
        return self.next_capacity(rows, self.limit)

    def begin_step(self, tokens: int = 1) -> tuple[int, int]:
        """Make room for ``tokens`` more: the slot of the first and the live rows with it."""
        check_limit(self.offset + tokens, self.limit)
        self.grow(self.offset + tokens, self.offset, self.limit)
        return self.offset, self.offset + 1

    def end_step(self, offset: int, tokens: int = 1) -> None:
        """The step has written its rows: take the new ``offset``."""
        self.offset = offset

    @property
    def state(self) -> tuple[Any, ...]:
        """Keys, values (views of the live rows) and their number."""
        if self.empty():
            return None, None, 0
        return handles((*self.keys_and_values(), self.offset))

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset = handles(state)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> stock.QuantizedKVCache:
        """mlx-lm's quantized cache of the live rows.

        Where ``group_size`` does not divide the head dimension the largest allowed one that does
        is taken. Raises ValueError where none does, or for bits that MLX has not.
        """
        if self.keys is None or self.values is None:
            return stock.QuantizedKVCache(group_size=group_size, bits=bits)
        dims = (self.keys.shape[-1], self.values.shape[-1])
        group_size = quantized_group_size(dims, group_size, bits)
        cache = stock.QuantizedKVCache(group_size=group_size, bits=bits)
        cache.keys, cache.values = (  # type: ignore[assignment]
            mx.quantize(x, group_size=group_size, bits=bits) for x in self.keys_and_values()
        )
        cache.offset = self.offset
        return cache

    @classmethod
    def merge(cls, caches: list[Any]) -> BatchKVCache:
        return BatchKVCache.merge(caches)


class RotatingKVCache(CacheBuffers, stock.RotatingKVCache):
    """``max_size`` tokens: the first ``keep`` and the last ones, overwritten in a ring."""

    def __init__(self, max_size: int, keep: int = 0):
        if max_size <= keep:
            raise ValueError(
                f"a window of {max_size} tokens has no room beside the first {keep}, which it keeps"
            )
        super().__init__(max_size, keep)

    def rows(self) -> int:
        return self.capacity()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, kv_heads, L, head_dim) keys and values; returns what a query may see."""
        if self._keys is not None:
            check_layout(self._keys, keys.shape[1], keys.shape[3])
        return super().update_and_fetch(keys, values)

    @property
    def merge(self) -> Callable[[list[Any]], Any]:  # type: ignore[override]
        """mlx-lm's batch of rings. It would lose the first ``keep`` tokens: a ring that keeps some
        has no such attribute, and mlx-lm's server then decodes its requests one by one."""
        if self.keep:
            raise AttributeError(f"a window that keeps its first {self.keep} tokens has no batch")
        return stock.RotatingKVCache.merge

    def capacity_for(self, tokens: int) -> int:
        """Rows of the buffers once ``tokens`` more are in; a prefill keeps a whole window a row."""
        if tokens > 1:
            return min(self.offset, self.max_size) + tokens
        return self.next_capacity(min(self.offset + 1, self.max_size), self.max_size)

    def begin_step(self, tokens: int = 1) -> tuple[int, int]:
        """Make room for one more row: returns its slot and the number of live rows with it."""
        if self.capacity() > self.max_size:
            surplus = self.capacity() - self.max_size
            self._take(self._trim(surplus, x) for x in (self.keys, self.values))
            self._idx = self.max_size
        elif self.offset >= self.capacity() < self.max_size:
            self.grow(self.offset + 1, self.capacity(), self.max_size)
            self._idx = self.offset
        if self._idx == self.max_size:
            self._idx = self.keep
        return self._idx, min(self.offset + 1, self.capacity())

    def end_step(self, offset: int, tokens: int = 1) -> None:
        """The step has written its row: take the new ``offset``."""
        self.offset = offset
        self._idx += tokens


class BatchKVCache(CacheBuffers, stock.BatchKVCache):
    """Several left-padded sequences that share the next slot; ``offset`` has one entry a row."""

    # mlx-lm's from_state leaves it out.
    _right_padding: mx.array | None = None  # type: ignore[assignment]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, kv_heads, L, head_dim) keys and values; returns views of the used rows."""
        self.make_room(keys, values, self._idx)
        return super().update_and_fetch(keys, values)

    def capacity_for(self, tokens: int) -> int:
        """Rows of the buffers once ``tokens`` more are in."""
        return self.next_capacity(self._idx + tokens, self.limit)

    def rows(self) -> int:
        return self._idx

    def sequences(self) -> int:
        return self.left_padding.shape[0]

    def begin_step(self, tokens: int = 1) -> tuple[int, int]:
        """Make room for ``tokens`` more: the slot of the first and the used rows with it."""
        check_limit(self._idx + tokens, self.limit)
        self.grow(self._idx + tokens, self._idx, self.limit)
        return self._idx, self._idx + 1

    def end_step(self, offset: mx.array, tokens: int = 1) -> None:
        """The step has written its rows: take the new ``offset`` (B,)."""
        self.offset = offset
        self._idx += tokens

    def is_one_sequence(self) -> bool:
        """Whether the rows in use are those of a single sequence, all of them."""
        return self.sequences() == 1 and self.left_padding.item() == 0

    @classmethod
    def merge(cls, caches: list[Any]) -> BatchKVCache:
        empty = all(cache.size() == 0 for cache in caches)
        merged = cls([0] * len(caches)) if empty else super().merge(caches)
        merged.limit = getattr(caches[0], "limit", None)
        return merged

    def extract(self, idx: int) -> KVCache:
        """One row as a cache of its own, without its padding (a copy)."""
        cache = super().extract(idx)
        adopt([cache])
        cache.limit = self.limit
        return cache


_OURS: dict[type, type] = {
    stock.KVCache: KVCache,
    stock.RotatingKVCache: RotatingKVCache,
    stock.BatchKVCache: BatchKVCache,
}


def adopt(caches: Sequence[Any]) -> None:
    """Turn mlx-lm's caches into ours where they stand.

    The objects change class instead of being replaced: mlx-lm slices the list (speculative
    decoding) and its caller keeps the caches that it passed.
    """
    for cache in caches:
        ours = _OURS.get(type(cache))
        if ours is not None:
            buffers = cache.__dict__.pop("keys"), cache.__dict__.pop("values")
            cache.__class__ = ours
            cache.keys, cache.values = buffers


def quantized_group_size(dims: tuple[int, ...], group_size: int, bits: int) -> int:
    """The KV group size to use for heads of ``dims``: the asked one, or the largest that divides.

    Raises ValueError naming head_dim, group size or bits where none fits.
    """
    if bits not in AFFINE_BITS or not isinstance(bits, int):
        raise ValueError(f"kv_bits must be one of {AFFINE_BITS}, found {bits!r}")
    for candidate in (group_size, *reversed(AFFINE_GROUP_SIZES)):
        if candidate in AFFINE_GROUP_SIZES and all(dim % candidate == 0 for dim in dims):
            return candidate
    raise ValueError(
        f"a KV cache of head_dim {dims[0]} cannot be quantized: kv_group_size {group_size} does "
        f"not divide it and neither does any of {AFFINE_GROUP_SIZES}"
    )
