"""The frozen decode step: one token a row through a graph whose every size is a constant.

Only small arrays change from call to call (token, position, slot), so ``mx.compile`` traces once
for each capacity, batch, thread and stream. The weights are constants of the trace: whoever changes
them builds a new step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from husky_mlx.buffers import allocate_first
from husky_mlx.cache import BatchKVCache, KVCache, check_layout
from husky_mlx.chain import ChainError
from husky_mlx.compiled import compiled_if
from husky_mlx.config import LlamaConfig
from husky_mlx.fused import FusedGraph
from husky_mlx.ops.attention_decode import attention_decode
from husky_mlx.ops.down_add import down_add
from husky_mlx.ops.embed import embed
from husky_mlx.ops.o_proj_add import o_proj_add
from husky_mlx.ops.rms_gate_up_swiglu import rms_gate_up_swiglu
from husky_mlx.ops.rms_lm_head import rms_lm_head
from husky_mlx.ops.rms_qkv_rope_append import rms_qkv_rope_append
from husky_mlx.ops.rotate import rotation
from husky_mlx.pack import StepWeights
from husky_mlx.places import (
    LIVE,
    PADDING,
    POSITIONS,
    SLOT,
    NextPlace,
    advance,
    make_place,
)
from husky_mlx.plan import Plan
from husky_mlx.policy import CHAIN_LONGEST
from husky_mlx.turns import TURNS


class DecodeStep:
    """One decode step over our caches; ``frozen.takes`` says for which calls."""

    def __init__(self, graph: StepGraph | FusedGraph, plan: Plan):
        # A compiled function is opaque to the garbage collector: what it closes over must not lead
        # back here, or replaced weights would never be freed.
        self._kind_of_layer = graph.kind_of_layer
        self._in_place = graph.in_place
        self._self_test = graph.self_test
        self.prefill = graph.prefill
        self.longest = graph.longest
        self._dtype = graph.dtype
        self._kv_heads = graph.config.num_key_value_heads, graph.config.head_dim
        self._nothing = graph.nothing_before
        self._plan = plan
        ready = functools.partial(compiled_if, graph.compiled)
        self._logits, self._greedy = ready(graph.logits), ready(graph.greedy)
        self._single: dict[Callable, Callable] = {}
        if graph.single is not None:
            single = graph.single
            self._single = {
                self._logits: ready(single.logits),
                self._greedy: ready(single.greedy),
            }

    def proven(self, rows: int, batched: bool) -> DecodeStep:
        """This step if its kernels are right for ``rows`` rows, else one that has none."""
        if self._self_test is None or self._self_test.passes(rows, batched):
            return self
        return DecodeStep(self._self_test.twin, self._plan)

    def allocate(self, caches: Sequence[KVCache]) -> None:
        """Give empty caches of one sequence their first buffers."""
        assert self._dtype is not None  # a step that writes in place knows it
        allocate_first(caches, self.longest, *self._kv_heads, self._dtype)

    def logits(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """(B, L) token ids -> logits (B, L, vocabulary); each cache gains L rows."""
        (logits,) = self._run(self._logits, tokens, caches)
        return logits

    def greedy(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """(B, L) token ids -> the next ones (B, L) uint32, and the logits that they came from."""
        token, logits = self._run(self._greedy, tokens, caches)
        return token, logits

    def _run(self, step: Callable, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, ...]:
        length = tokens.shape[1]
        slots: dict[int, tuple[int, int]] = {
            kind: cache.begin_step(length)
            for kind, cache in zip(self._kind_of_layer, caches, strict=True)
        }
        first = caches[0]
        padding = first.left_padding if isinstance(first, BatchKVCache) else None
        start = first.offset
        leaders = [caches[self._kind_of_layer.index(kind)] for kind in slots]
        places = [
            cache.next_place.array
            if cache.next_place is not None and cache.next_place.holds(*slot, start, padding)
            else make_place(*slot, start, padding)
            for cache, slot in zip(leaders, slots.values(), strict=True)
        ]
        # mlx-lm feeds int32 prompts and uint32 samples: two dtypes would be two traces.
        inputs = (tokens.astype(mx.uint32), places, padding is not None)
        if self._in_place:
            for kind, cache in zip(self._kind_of_layer, caches, strict=True):
                cache.allow_writing(slots[kind][0], self._dtype)
            *results, following = self._write_in_place(step, inputs, caches)
        else:
            *results, following = self._replace(step, inputs, caches)
        # A batch counts on the device. One array for all layers, taken from what the step computes
        # anyway: added up on the host side, each would grow a chain of additions.
        rows = tokens.shape[0]
        offset = start + length if padding is None else following[0][POSITIONS : POSITIONS + rows]
        for cache in caches:
            cache.end_step(offset, length)
        for cache, (slot, live), place in zip(leaders, slots.values(), following, strict=True):
            cache.next_place = NextPlace(slot + length, live + length, offset, padding, place)
        self._plan.count("frozen")
        return tuple(results)

    def _replace(
        self, step: Callable, inputs: tuple, caches: Sequence[Any]
    ) -> tuple[mx.array, ...]:
        """The step returns the buffers; MLX writes in place where nothing else holds them."""
        for cache in caches:
            cache.settle()
        keys, values = zip(*(cache.buffers() for cache in caches), strict=True)
        *results, keys, values = step(*inputs, list(keys), list(values))
        for cache, *buffers in zip(caches, keys, values, strict=True):
            cache.replace(*buffers)
        return tuple(results)

    def _write_in_place(
        self, step: Callable, inputs: tuple, caches: Sequence[Any]
    ) -> tuple[mx.array, ...]:
        """The step writes the buffers itself and returns the order of that."""
        before = caches[0].ordering
        for cache in caches:
            # Put in from another list.
            if cache.ordering is not before:
                cache.settle()
        keys, values = zip(*(cache.buffers() for cache in caches), strict=True)
        before = self._nothing if before is None else before
        arguments = (*inputs, list(keys), list(values), before)
        tokens, _, batched = inputs
        many = batched or tokens.size > 1 or keys[0].shape[2] > CHAIN_LONGEST
        made = None if many else self._one_launch(step, arguments)
        *results, ordering = step(*arguments) if made is None else made
        for cache in caches:
            cache.ordering = ordering
        return tuple(results)

    def _one_launch(self, step: Callable, arguments: tuple) -> tuple[mx.array, ...] | None:
        """What ``step`` returns, by one launch; None where it must be several."""
        single = self._single.get(step)
        turn = None if single is None else TURNS.take()
        if single is None or turn is None:
            return None
        after = None
        try:
            *results, after = single(*arguments, turn)
            # Nobody may take over from a launch that is still to be made.
            mx.async_eval(after)
            return tuple(results)
        except (ChainError, OSError) as error:
            self._single = {}
            self._plan.notes += [f"steps of one launch are off: {error}"]
            warnings.warn(self._plan.notes[-1], stacklevel=2)
            return None
        finally:
            TURNS.leave(after)


class StepGraph:
    """The step as plain functions of arrays; layers, widths, heads and capacity are constants."""

    in_place = False
    compiled = True
    nothing_before = None
    prefill = None
    dtype = None
    longest = 1
    self_test = None
    single = None

    def __init__(self, config: LlamaConfig, weights: StepWeights, plan: Plan):
        self.config = config
        self.weights = weights
        self.plan = plan
        self.rotate = rotation(config.rope, config.head_dim)
        self.kind_of_layer = config.kind_of_layer

    def greedy(self, *arguments: Any) -> tuple:
        """``logits`` with the most likely tokens (B, 1) before them."""
        logits, *rest = self.logits(*arguments)
        return mx.argmax(logits, axis=-1), logits, *rest

    def logits(
        self,
        tokens: mx.array,
        places: list[mx.array],
        batched: bool,
        keys: list[mx.array],
        values: list[mx.array],
    ) -> tuple:
        """(B, 1) tokens -> logits (B, 1, vocabulary), the next places, keys, values.

        ``places``: for each kind of layer where to read and write, see ``places.py``.
        ``keys`` and ``values``: a buffer a layer, (B, kv_heads, capacity, head_dim).
        """
        self.plan.count("traces")
        eps, scale = self.config.rms_norm_eps, self.config.attention_scale
        weights = self.weights
        rows = tokens.shape[0]
        positions = places[0][POSITIONS : POSITIONS + rows]
        left_padding = places[0][PADDING : PADDING + rows] if batched else None
        # Layers of a kind have as many live rows, in buffers that may have been grown apart.
        shapes = [(kind, x.shape[2]) for kind, x in zip(self.kind_of_layer, keys, strict=True)]
        live = {
            (kind, capacity): _live_rows(capacity, places[kind][LIVE], left_padding)
            for kind, capacity in dict.fromkeys(shapes)
        }
        for buffer in (*keys, *values):
            check_layout(buffer, self.config.num_key_value_heads, self.config.head_dim)
        keys, values = list(keys), list(values)
        # Signed: MLX counts a negative id from the end, and reads outside the table for 2**32 - 1.
        x = embed(tokens.astype(mx.int32), weights.embedding)
        for i, (kind, layer) in enumerate(zip(self.kind_of_layer, weights.layers, strict=True)):
            queries, keys[i], values[i] = rms_qkv_rope_append(
                x,
                layer.input_norm,
                eps,
                layer.qkv,
                layer.head_norms,
                self.rotate,
                keys[i],
                values[i],
                positions,
                places[kind][SLOT : SLOT + 1],
            )
            attended = attention_decode(queries, keys[i], values[i], scale, live[shapes[i]])
            x = o_proj_add(attended, x, layer.o_proj)
            activated = rms_gate_up_swiglu(x, layer.post_norm, eps, layer.gate_up)
            x = down_add(activated, x, layer.down_proj)
        following = [place + mx.array(advance(1)) for place in places]
        # With the result: the next step, which takes them, may be another thread's, and what is
        # still to be computed is its own thread's.
        x = mx.depends(x, following)
        return rms_lm_head(x, weights.norm, eps, weights.head), following, keys, values


def _live_rows(capacity: int, live: mx.array, left_padding: mx.array | None) -> mx.array:
    """Bool of shape (1, 1, 1, capacity) or, with padding, (B, 1, 1, capacity)."""
    rows = mx.arange(capacity)[None, None, None]
    mask = rows < live
    if left_padding is not None:
        mask = mask & (rows >= left_padding[:, None, None, None])
    return mask
