"""The frozen decode step: one token a row through a graph whose every size is a constant.

Only small arrays change from call to call (token, position, slot), so ``mx.compile`` traces once
for each capacity, batch, thread and stream. The weights are constants of the trace: whoever changes
them builds a new step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from husky_mlx.cache import BatchKVCache, check_layout
from husky_mlx.config import LlamaConfig
from husky_mlx.ops.attention_decode import attention_decode
from husky_mlx.ops.down_add import down_add
from husky_mlx.ops.embed import embed
from husky_mlx.ops.o_proj_add import o_proj_add
from husky_mlx.ops.rms_gate_up_swiglu import rms_gate_up_swiglu
from husky_mlx.ops.rms_lm_head import rms_lm_head
from husky_mlx.ops.rms_qkv_rope_append import rms_qkv_rope_append
from husky_mlx.ops.rotate import Rotation
from husky_mlx.pack import LayerWeights
from husky_mlx.plan import Plan


@dataclass(frozen=True)
class StepWeights:
    """Everything that the step holds constant."""

    embedding: nn.Module
    layers: list[LayerWeights]
    norm: mx.array
    head: Callable[[mx.array], mx.array]
    rotate: Rotation


class DecodeStep:
    """One decode step over our caches; ``frozen.takes`` says for which calls."""

    def __init__(self, config: LlamaConfig, weights: StepWeights, plan: Plan):
        # A compiled function is opaque to the garbage collector: what it closes over must not lead
        # back here, or replaced weights would never be freed.
        graph = StepGraph(config, weights, plan)
        self._kind_of_layer = graph.kind_of_layer
        self._plan = plan
        self._logits = mx.compile(graph.logits)
        self._greedy = mx.compile(graph.greedy)

    def logits(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """(B, 1) token ids -> logits (B, 1, vocabulary); each cache gains one row."""
        (logits,) = self._run(self._logits, tokens, caches)
        return logits

    def greedy(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """(B, 1) token ids -> the next ones (B, 1) uint32, and the logits that they came from."""
        token, logits = self._run(self._greedy, tokens, caches)
        return token, logits

    def _run(self, step: Callable, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, ...]:
        places = {
            kind: cache.begin_step()
            for kind, cache in zip(self._kind_of_layer, caches, strict=True)
        }
        first = caches[0]
        batched = isinstance(first, BatchKVCache)
        positions = first.offset if batched else mx.array([first.offset], mx.int32)
        # mlx-lm feeds int32 prompts and uint32 samples: two dtypes would be two traces.
        *results, keys, values = step(
            tokens.astype(mx.uint32),
            positions.astype(mx.int32),
            first.left_padding if batched else None,
            [mx.array(place, mx.int32) for place in places.values()],
            [cache.keys for cache in caches],
            [cache.values for cache in caches],
        )
        # One array for all layers: the next step evaluates the first layer's only, and each other
        # one would grow a chain of additions.
        offset = first.offset + 1
        for cache, layer_keys, layer_values in zip(caches, keys, values, strict=True):
            cache.end_step(layer_keys, layer_values, offset)
        self._plan.count("frozen")
        return tuple(results)


class StepGraph:
    """The step as plain functions of arrays; layers, widths, heads and capacity are constants."""

    def __init__(self, config: LlamaConfig, weights: StepWeights, plan: Plan):
        self.config = config
        self.weights = weights
        self.plan = plan
        # Layers of a kind share the slot that they write and the mask of their live rows.
        kinds = list(dict.fromkeys(config.layer_types))
        self.kind_of_layer = [kinds.index(kind) for kind in config.layer_types]

    def greedy(self, *arguments: Any) -> tuple:
        """``logits`` with the most likely tokens (B, 1) before them."""
        logits, keys, values = self.logits(*arguments)
        return mx.argmax(logits, axis=-1), logits, keys, values

    def logits(
        self,
        tokens: mx.array,
        positions: mx.array,
        left_padding: mx.array | None,
        places: list[mx.array],
        keys: list[mx.array],
        values: list[mx.array],
    ) -> tuple:
        """(B, 1) tokens at ``positions`` (B,) -> logits (B, 1, vocabulary), keys, values.

        ``places``: for each kind of layer (2,) int32, the slot to write and the live rows with it.
        ``keys`` and ``values``: a buffer a layer, (B, kv_heads, capacity, head_dim).
        """
        self.plan.count("traces")
        eps, scale = self.config.rms_norm_eps, self.config.attention_scale
        weights = self.weights
        live = [
            _live_rows(keys[self.kind_of_layer.index(kind)].shape[2], place[1:], left_padding)
            for kind, place in enumerate(places)
        ]
        for buffer in (*keys, *values):
            check_layout(buffer, self.config.num_key_value_heads, self.config.head_dim)
        keys, values = list(keys), list(values)
        x = embed(tokens, weights.embedding)
        for i, (kind, layer) in enumerate(zip(self.kind_of_layer, weights.layers, strict=True)):
            queries, keys[i], values[i] = rms_qkv_rope_append(
                x,
                layer.input_norm,
                eps,
                layer.qkv,
                weights.rotate,
                keys[i],
                values[i],
                positions,
                places[kind][:1],
            )
            attended = attention_decode(queries, keys[i], values[i], scale, live[kind])
            x = o_proj_add(attended, x, layer.o_proj)
            activated = rms_gate_up_swiglu(x, layer.post_norm, eps, layer.gate_up)
            x = down_add(activated, x, layer.down_proj)
        return rms_lm_head(x, weights.norm, eps, weights.head), keys, values


def _live_rows(capacity: int, live: mx.array, left_padding: mx.array | None) -> mx.array:
    """Bool of shape (1, 1, 1, capacity) or, with padding, (B, 1, 1, capacity)."""
    rows = mx.arange(capacity)[None, None, None]
    mask = rows < live
    if left_padding is not None:
        mask = mask & (rows >= left_padding[:, None, None, None])
    return mask
