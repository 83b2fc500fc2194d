"""Key and value buffers of fixed capacity that a kernel may write in place, behind MLX's back.

MLX tracks neither such a write nor who else sees the buffer, so three rules stand here:

* order: ``ordering`` is an output of the step that wrote last; it is evaluated before anybody but
  the next step reads the buffers (``keys`` and ``values`` do that);
* ownership: only buffers that were allocated or copied here are written in place, others first
  become a copy;
* exposure: rows that somebody may still see are never overwritten in place: a step that must (after
  a trim, in a ring that went round) writes to a copy.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from husky_mlx.device import growth_step
from husky_mlx.errors import ContextLimitError
from husky_mlx.places import NextPlace


def next_capacity(current: int, needed: int, limit: int | None = None, step: int = 256) -> int:
    """Rows to allocate so that ``needed`` fit: ``step`` more, or an eighth more where that is more.

    256 is mlx-lm's own growth. ``limit`` caps the result but never below ``needed``.
    """
    if needed <= current:
        return current
    grown = current + current // 8 // step * step
    target = max(-(-needed // step) * step, grown)
    return max(needed, target if limit is None else min(target, limit))


def first_capacity(rows: int, limit: int | None = None, step: int = 256) -> int:
    """Rows of the first buffers for ``rows`` tokens: one to spare where ``limit`` allows it.

    A reply's first token would otherwise ask for a growth, and so for a copy.
    """
    spare = rows + 1 if limit is None else max(rows, min(rows + 1, limit))
    return next_capacity(0, spare, limit, step)


def check_limit(rows: int, limit: int | None) -> None:
    """Raise ContextLimitError if ``rows`` tokens are more than the user allowed."""
    if limit is not None and rows > limit:
        raise ContextLimitError(f"{rows} tokens do not fit max_context={limit}")


def check_layout(
    buffer: mx.array, kv_heads: int, head_dim: int, sequences: int | None = None
) -> None:
    """Raise ValueError for a KV buffer (B, kv_heads, capacity, head_dim) of other heads, or of
    another B than ``sequences``."""
    if sequences not in (None, buffer.shape[0]):
        raise ValueError(
            f"the prompt cache holds {buffer.shape[0]} sequences, the call {sequences}"
        )
    found = (buffer.shape[1], buffer.shape[3])
    if found != (kv_heads, head_dim):
        raise ValueError(
            f"the prompt cache holds {found[0]} key/value heads of {found[1]} and the model has "
            f"{kv_heads} of {head_dim}: it was filled by another model"
        )


def handles(state: Sequence[Any]) -> tuple[Any, ...]:
    """The same arrays as other Python objects: mlx-lm's caches assign items in place, and who
    holds a state must not see that."""
    return tuple(value[...] if isinstance(value, mx.array) else value for value in state)


# Bytes of first buffers that may be one array, which stays until all of them have grown.
_TOGETHER = 64 << 20


def allocate_first(
    caches: Sequence[CacheBuffers], tokens: int, kv_heads: int, head_dim: int, dtype: mx.Dtype
) -> None:
    """First buffers for ``tokens`` tokens of those caches that are empty: where all are, and need
    little and the same, in one array, which is one launch instead of two for each layer."""
    empty = [cache for cache in caches if cache.empty()]
    shapes = {(c.sequences(), kv_heads, c.capacity_for(tokens), head_dim) for c in empty}
    count = 2 * len(caches)
    alike = len(empty) == len(caches) and len(shapes) == 1
    if not alike or count * math.prod(*shapes) * dtype.size > _TOGETHER:
        for cache in empty:
            cache.allocate(tokens, kv_heads, head_dim, dtype)
        return
    for cache in caches:
        check_limit(tokens, cache.limit)
    # Views: an index would gather.
    parts = [part.squeeze(0) for part in mx.split(_zeros((count, *shapes.pop()), dtype), count)]
    for cache, keys, values in zip(caches, parts[::2], parts[1::2], strict=True):
        cache._take((keys, values))


def open_rows(
    caches: Sequence[CacheBuffers], tokens: int, kv_heads: int, head_dim: int, dtype: mx.Dtype
) -> list[tuple[int, int]]:
    """``begin_step`` of each cache for kernels that write in place, into empty ones too."""
    for cache in caches:
        cache.settle()
    allocate_first(caches, tokens, kv_heads, head_dim, dtype)
    slots = [cache.begin_step(tokens) for cache in caches]
    for cache, (slot, _) in zip(caches, slots, strict=True):
        cache.allow_writing(slot, dtype)
    return slots


def _zeros(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    # A broadcast row is seen from everywhere until something copies it.
    return mx.contiguous(mx.broadcast_to(_zero_row(shape[-1], dtype), shape))


@functools.cache
def _zero_row(head_dim: int, dtype: mx.Dtype) -> mx.array:
    """Zeros (head_dim,) on the device. MLX keeps a single number in memory that CUDA shares with
    the host: filled from that, a buffer of 5 MB takes 28 us on an H200."""
    row = mx.contiguous(mx.zeros((head_dim,), dtype))
    mx.eval(row)
    return row


class CacheBuffers:
    """Keys and values (B, kv_heads, capacity, head_dim), growth, and the rules for writing them."""

    offset: Any
    limit: int | None = None
    expected: int = 0
    ordering: mx.array | None = None
    next_place: NextPlace | None = None
    _keys: mx.array | None = None
    _values: mx.array | None = None
    # How often somebody was handed the buffers, who may have written them since with MLX: the
    # Python object is the same then, its memory is not.
    shown: int = 0
    _owned: bool = False
    _exposed: int = 0

    def rows(self) -> int:
        """How many rows of the buffers are in use."""
        raise NotImplementedError

    def sequences(self) -> int:
        """How many sequences the first buffers are for."""
        return 1

    def capacity_for(self, tokens: int) -> int:
        """Rows of the buffers once ``tokens`` more are in."""
        raise NotImplementedError

    def begin_step(self, tokens: int = 1) -> tuple[int, int]:
        """Make room for ``tokens`` more: the slot of the first and the rows in use with it."""
        raise NotImplementedError

    def end_step(self, offset: Any, tokens: int = 1) -> None:
        """The step has written its ``tokens`` rows: take the new ``offset``."""
        raise NotImplementedError

    @property
    def keys(self) -> Any:
        """The buffer, None when empty, up to date with every step."""
        self._show()
        return self._keys

    @keys.setter
    def keys(self, buffer: mx.array | None) -> None:
        self._keys, self._owned = buffer, False

    @property
    def values(self) -> Any:
        """The buffer, None when empty, up to date with every step."""
        self._show()
        return self._values

    @values.setter
    def values(self, buffer: mx.array | None) -> None:
        self._values, self._owned = buffer, False

    @property
    def state(self) -> tuple[Any, ...]:
        """What mlx-lm's class of this name saves, in its order."""
        return handles(super().state)  # type: ignore[misc]

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        super(CacheBuffers, type(self)).state.fset(self, handles(state))  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return 0 if self._keys is None else self._keys.nbytes + self._values.nbytes  # type: ignore[union-attr]

    def __copy__(self) -> Any:
        """As deep: two caches must not write one buffer."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict) -> Any:
        """A cache of its own: one real copy."""
        self.settle()
        copied = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy({**self.__dict__, "_keys": None, "_values": None}))
        copied._keys, copied._values = self._keys, self._values
        copied._own()
        return copied

    def empty(self) -> bool:
        """Whether nothing was ever put in."""
        return self._keys is None

    def expect(self, tokens: int) -> None:
        """Say how many tokens a prompt will make, so that its first buffers hold them all."""
        self.expected = tokens

    def capacity(self) -> int:
        return 0 if self._keys is None else self._keys.shape[2]

    def next_capacity(self, rows: int, limit: int | None = None) -> int:
        """What ``rows`` rows make of the present capacity on this device."""
        if self._keys is None:
            return first_capacity(rows, limit, growth_step())
        return next_capacity(self.capacity(), rows, limit, growth_step())

    def make_room(self, keys: mx.array, values: mx.array, used: int) -> None:
        """Allocate or grow so that ``keys`` and ``values`` fit behind the first ``used`` rows."""
        rows = used + keys.shape[2]
        check_limit(rows, self.limit)
        if self._keys is None:
            capacity = self.next_capacity(max(keys.shape[2], self.expected), self.limit)
            shapes = ((*x.shape[:2], capacity, x.shape[3]) for x in (keys, values))
            self._take(mx.zeros(shape, keys.dtype) for shape in shapes)
        else:
            check_layout(self._keys, keys.shape[1], keys.shape[3])
            self.grow(max(rows, self.expected), used, self.limit)

    def grow(self, rows: int, used: int, limit: int | None = None) -> None:
        """Make room for ``rows`` rows, keeping the first ``used``: one copy of the buffers."""
        # Every layer asks at every token: the usual answer costs one comparison.
        if rows > self.capacity():
            capacity = self.next_capacity(rows, limit)
            self.settle()
            padding = [(0, 0), (0, 0), (0, capacity - used), (0, 0)]
            self._take(mx.pad(x[..., :used, :], padding) for x in (self._keys, self._values))  # type: ignore[index]

    def allocate(self, tokens: int, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> None:
        """First buffers for ``tokens`` tokens of each sequence, or for as many as are expected."""
        check_limit(tokens, self.limit)
        shape = (self.sequences(), kv_heads, self.capacity_for(tokens), head_dim)
        self._take(_zeros(shape, dtype) for _ in range(2))

    def close_rows(self, tokens: int, ordering: mx.array) -> None:
        """The kernels that ``ordering`` waits for write ``tokens`` of the rows that were opened."""
        self.ordering = ordering
        self.end_step(self.offset + tokens, tokens)

    def has_room_for(self, padded: int) -> bool:
        """Whether ``padded`` rows, of which some are padding, fit without growing for them."""
        rows = self.rows() + padded
        return rows <= (self.capacity() or self.limit or rows)

    def buffers(self) -> tuple[mx.array, mx.array]:
        """Keys and values for the next step alone: not settled, not counted as shown."""
        assert self._keys is not None and self._values is not None
        return self._keys, self._values

    def replace(self, keys: mx.array, values: mx.array) -> None:
        """Take the buffers that a step made of ours."""
        self._keys, self._values = keys, values

    def allow_writing(self, slot: int, dtype: mx.Dtype) -> None:
        """See to it that a kernel may write ``dtype`` rows from ``slot`` on: copy if need be."""
        free = self._owned and slot >= self._exposed
        # A step that is under way has seen to the dtype, and asking costs time at every token.
        if not free or (self.ordering is None and self._keys.dtype != dtype):  # type: ignore[union-attr]
            self.settle()
            self._own(dtype)

    def settle(self) -> None:
        """Wait for the step that wrote last."""
        if self.ordering is not None:
            mx.eval(self.ordering)
            self.ordering = None

    def _take(self, buffers: Iterable[mx.array]) -> None:
        self._keys, self._values = buffers
        self._owned, self._exposed = True, 0

    def _own(self, dtype: mx.Dtype | None = None) -> None:
        if self._keys is not None and self._values is not None:
            self._take(mx.contiguous(mx.array(x, dtype)) for x in (self._keys, self._values))
            # A copy that is made later would hold what others have written by then.
            mx.eval(self._keys, self._values)

    def _show(self) -> None:
        if self._keys is not None:
            self.settle()
            self._exposed = max(self._exposed, self.rows())
            self.shown += 1
            # Who evaluates what is shown may go on in another thread, and this is not part of it.
            self.next_place = None
