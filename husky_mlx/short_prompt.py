"""A prompt of a few tokens as one frozen step: the decode kernels with more rows.

They read the matrices once, packed, where products for many rows would write them out first. The
step has one of few lengths, so that few kernels are compiled; what the prompt lacks is padding,
whose keys and values lie past the end of the cache, where nobody looks.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from husky_mlx.buffers import CacheBuffers, open_rows
from husky_mlx.compiled import compiled_if
from husky_mlx.fused import FusedGraph
from husky_mlx.places import make_place
from husky_mlx.plan import Plan


class ShortPrompt:
    """Greedy first tokens of prompts up to the longest of ``lengths``, for one sequence."""

    def __init__(self, graph: FusedGraph, plan: Plan, lengths: Sequence[int]):
        self.lengths = tuple(sorted(lengths))
        self._graph = graph
        self._prompt = compiled_if(graph.compiled, graph.prompt)
        self._plan = plan

    def takes(self, length: int, caches: Sequence[CacheBuffers]) -> bool:
        """Whether there is a step for ``length`` tokens, and room for its padding."""
        return length <= self.lengths[-1] and caches[0].has_room_for(self._padded(length))

    def greedy(self, tokens: mx.array, caches: Sequence[CacheBuffers]) -> tuple[mx.array, mx.array]:
        """(1, L) token ids -> the next one (1, 1) uint32, and its logits (1, 1, vocabulary)."""
        graph = self._graph
        length, start = tokens.shape[1], caches[0].rows()
        padded = self._padded(length)
        heads = graph.weights.heads
        slots = open_rows(caches, padded, heads.kv_heads, heads.head_dim, graph.dtype)
        place = make_place(*slots[0], start, None, last=length - 1)
        token, logits, ordering = self._prompt(
            mx.pad(tokens.astype(mx.uint32), [(0, 0), (0, padded - length)]),
            [place] * (max(graph.kind_of_layer) + 1),
            *(list(buffers) for buffers in zip(*(c.buffers() for c in caches), strict=True)),
            graph.nothing_before,
        )
        for cache in caches:
            cache.close_rows(length, ordering)
        self._plan.count("prefill")
        return token, logits

    def _padded(self, length: int) -> int:
        return next(longer for longer in self.lengths if longer >= length)
