"""What the kernels' ways through a model differ in from their twin in plain ``mx`` code."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from husky_mlx.cache import BatchKVCache, KVCache
from husky_mlx.combination import layer_format
from husky_mlx.config import LlamaConfig
from husky_mlx.freeze import DecodeStep, StepGraph
from husky_mlx.fused import FusedGraph, FusedWeights
from husky_mlx.ops.gemv import Platform
from husky_mlx.pace import ROWS as PACE_ROWS
from husky_mlx.pace import microseconds
from husky_mlx.pack import StepWeights
from husky_mlx.plan import Plan
from husky_mlx.policy import policy
from husky_mlx.prefill import Prefill
from husky_mlx.products import Products
from husky_mlx.short_prompt import ShortPrompt
from husky_mlx.single_launch import SingleLaunch
from husky_mlx.tiles import AttentionShape

STEPS = 8
PADDING = 3  # of a short prompt
START = 2  # rows that are there before
LONGEST = 16384  # capacity up to which a split of the context is looked for

CHAIN = 12  # layers, one after the other
# Error over size, in Euclidean norms. It has to sit between what two right computations differ by
# and what one wrong row of the eight does, sqrt(1/8) = 0.35. By itself a layer in bfloat16 differs
# by 0.004 on an H200 (Llama-3.2-1B's shapes, 4 bit, random weights). float16 rounds to an eighth of
# that; so do float32 products where they pass through TF32.
TOLERANCE = {mx.float32: 0.03, mx.float16: 0.03, mx.bfloat16: 0.05}
# Of layers one after the other, where the stock 4-bit product adds up in bfloat16: SmolLM2's values
# differ by 0.11 in layer 12.
CHAIN_TOLERANCE = {mx.float32: 0.1, mx.float16: 0.1, mx.bfloat16: 0.25}


_WRONG_TOKEN = "the token picked is not the most likely one"


class Differences:
    """Runs a few layers both ways; each method yields what is wrong in a case, None where nothing.

    A case is a layer of each format by itself, held to a tight tolerance, and some in a chain.
    """

    def __init__(
        self, config: LlamaConfig, weights: FusedWeights, twin: StepGraph, platform: Platform
    ):
        self._config = config
        self._weights = weights
        self._twin_graph = twin
        self._platform = platform

    def of_steps(self, rows: int, batched: bool) -> Iterator[str | None]:
        """Of steps with ``rows`` consecutive tokens or, ``batched``, a token of each sequence."""
        for layers, start in self._cases(rows, batched):
            yield self._difference(rows, batched, layers, start)

    def of_prompts(self) -> Iterator[str | None]:
        """Of prompts, on packed matrices and on dequantized ones, and of padded pieces."""
        for threshold in (None, 1):
            for layer in self._one_of_each_format():
                yield self._prompt_difference([layer], threshold)
        if len(self._weights.layers) > 1:
            for start in (START, 0):
                yield self._prompt_difference([0, 1], 1, padded_to=STEPS, start=start)

    def of_short_prompts(self, lengths: Sequence[int]) -> Iterator[str | None]:
        """Of prompts in steps of ``lengths`` rows, some of them padding."""
        for length in lengths:
            for layer in self._one_of_each_format():
                yield self._short_difference([layer], length)

    def of_single_launch(self) -> Iterator[str | None]:
        """Of a model's one-token steps as one launch, against those of several: at the start of a
        context, and where it is split."""
        layers = list(range(len(self._weights.layers)))
        for start in (START, self._start_of_splits(1, False)):
            if start is not None:
                steps = self.single_and_several()
                yield self._steps_difference(1, False, layers, start, *steps)

    def single_and_several(self) -> tuple[DecodeStep, DecodeStep]:
        """The whole model's steps of one launch where they are of one token, and of several."""
        plan = copy.deepcopy(self._twin_graph.plan)
        layers = list(range(len(self._weights.layers)))
        single, several = self._fused(layers, plan), self._fused(layers, plan)
        single.single = SingleLaunch(single)
        return DecodeStep(single, plan), DecodeStep(several, plan)

    def pace(self, step: DecodeStep) -> float:
        """Microseconds of a one-token step of the whole model at the start of a context."""
        caches = self._caches(1, False, START, len(self._weights.layers), room=PACE_ROWS)
        return microseconds(step, caches, self._tokens(1)[None])

    def _one_of_each_format(self) -> list[int]:
        formats = [layer_format(layer) for layer in self._weights.layers]
        return [formats.index(found) for found in dict.fromkeys(formats)]

    def _cases(self, rows: int, batched: bool) -> Iterator[tuple[list[int], int]]:
        """Layers to run and rows that are there before: a layer of each format by itself, some
        more one after the other, and one where the context is split."""
        one_of_each = self._one_of_each_format()
        for layer in one_of_each:
            yield [layer], START
        if (rows, batched) == (1, False):
            others = [i for i in range(len(self._weights.layers)) if i not in one_of_each]
            yield sorted(one_of_each[:CHAIN] + others[: max(CHAIN - len(one_of_each), 0)]), START
        start = self._start_of_splits(rows, batched)
        if start is not None:
            yield one_of_each[:1], start

    def _start_of_splits(self, rows: int, batched: bool) -> int | None:
        """Rows that are there before steps in the smallest cache whose context is split."""
        heads = self._weights.heads
        shape = AttentionShape(
            rows,
            heads.heads,
            heads.kv_heads,
            heads.head_dim,
            START,
            batched,
            self._weights.embedding.dtype.size,
        )
        capacity = 256
        while capacity <= LONGEST:
            split = replace(shape, rows=capacity)
            if policy("attention_decode", split, 16, self._platform.chip).splits > 1:
                return capacity - STEPS * rows
            capacity *= 2
        return None

    def _difference(self, rows: int, batched: bool, layers: list[int], start: int) -> str | None:
        """What the steps differ in by more than the tolerance."""
        return self._steps_difference(rows, batched, layers, start, *self._graphs(layers))

    def _steps_difference(
        self,
        rows: int,
        batched: bool,
        layers: list[int],
        start: int,
        fused: DecodeStep,
        twin: DecodeStep,
    ) -> str | None:
        length = 1 if batched else rows
        caches = [self._caches(rows, batched, start, len(layers)) for _ in range(2)]
        steps = self._tokens(STEPS * rows).reshape(STEPS, rows // length, length)
        picked, found = [], []
        for i in range(STEPS):
            if i < STEPS // 2:
                token, logits = fused.greedy(steps[i], caches[0])
                best = mx.take_along_axis(logits, token[..., None], axis=-1)
                picked.append(best == logits.max(-1, keepdims=True))
            else:
                logits = fused.logits(steps[i], caches[0])
            found.append(logits)
        # All at once: what one step leaves to the next is not waited for in a reply either.
        mx.eval(found, picked)
        expected = [
            twin.logits(steps[i, :, j : j + 1], caches[1])
            for i in range(STEPS)
            for j in range(length)
        ]
        both = (mx.concatenate(found, axis=1), mx.concatenate(expected, axis=1))
        problem = self._compare(layers, caches, start, *both)
        if problem is None and not all(mx.all(right).item() for right in picked):
            problem = _WRONG_TOKEN
        return problem

    def _prompt_difference(
        self,
        layers: list[int],
        threshold: int | None,
        padded_to: int | None = None,
        start: int = START,
    ) -> str | None:
        """The same for a prompt after ``start`` rows, against the twin's steps."""
        plan = copy.deepcopy(self._twin_graph.plan)
        weights = self._only(layers)
        products = Products(self._config, self._platform, *weights, lambda rows, bits: threshold)
        frozen = [] if padded_to is None else [padded_to]
        prefill = Prefill(self._config, products, plan, frozen_rows=frozen)
        twin = self._twin(layers, plan)
        caches = [self._caches(1, False, START, len(layers)) for _ in range(2)]
        for cache in itertools.chain(*caches):
            cache.trim(START - start)
        tokens = self._tokens(STEPS)[None]
        first = prefill.logits(tokens[:, : STEPS // 2], caches[0])
        last, picked = prefill.greedy(tokens[:, STEPS // 2 :], caches[0])[::-1]
        expected = mx.concatenate(
            [twin.logits(tokens[:, j : j + 1], caches[1]) for j in range(STEPS)], axis=1
        )
        best = mx.take_along_axis(last, picked[..., None], axis=-1) == last.max(-1, keepdims=True)
        rows = mx.concatenate([expected[:, : STEPS // 2], expected[:, -1:]], axis=1)
        found = mx.concatenate([first, last], axis=1)
        problem = self._compare(layers, caches, start, found, rows)
        if problem is None and not best.item():
            problem = _WRONG_TOKEN
        return problem

    def _short_difference(self, layers: list[int], length: int) -> str | None:
        """The same for a short prompt in a step of ``length`` rows, some of them padding."""
        plan = copy.deepcopy(self._twin_graph.plan)
        fused, twin = self._fused(layers, plan), self._twin(layers, plan)
        caches = [self._caches(1, False, START, len(layers)) for _ in range(2)]
        tokens = self._tokens(length - PADDING)[None]
        picked, found = ShortPrompt(fused, plan, [length]).greedy(tokens, caches[0])
        steps = [twin.logits(tokens[:, j : j + 1], caches[1]) for j in range(tokens.size)]
        problem = self._compare(layers, caches, START, found, steps[-1])
        best = mx.take_along_axis(found, picked[..., None], axis=-1) == found.max(-1)
        if problem is None and not best.item():
            problem = _WRONG_TOKEN
        return problem

    def _tokens(self, count: int) -> mx.array:
        """Token ids (count,) spread over the vocabulary, special ones included."""
        return mx.array([(7919 * i + 1) % self._config.vocab_size for i in range(count)], mx.uint32)

    def _compare(
        self,
        layers: list[int],
        caches: list[list[Any]],
        start: int,
        found: mx.array,
        expected: mx.array,
    ) -> str | None:
        """What of two runs' caches and logits (B, L, vocabulary) differs too much."""
        pairs: list[tuple[str, mx.array, mx.array, tuple[int, ...]]] = []
        for layer, ours, theirs in zip(layers, *caches, strict=True):
            for name, a, b in zip(("keys", "values"), ours.state, theirs.state, strict=False):
                new = (a[..., start:, :], b[..., start:, :])
                pairs.append((f"the {name} of layer {layer}", *new, (-2, -1)))
        pairs.append(("the logits", found, expected, (-1,)))
        tolerances = TOLERANCE if len(layers) == 1 else CHAIN_TOLERANCE
        tolerance = tolerances[self._weights.embedding.dtype]
        errors = [_error(a, b, axes) for _, a, b, axes in pairs]
        mx.eval(errors)
        for (name, *_), error in zip(pairs, errors, strict=True):
            size = float(error.item())  # type: ignore[arg-type]
            # Not the other way round: NaN is an error.
            if not size <= tolerance:
                return f"{name} differ by {size:.2g} of their size, {tolerance} is allowed"
        return None

    def _graphs(self, layers: list[int]) -> tuple[DecodeStep, DecodeStep]:
        """Both steps over these layers only, with a plan of their own."""
        plan = copy.deepcopy(self._twin_graph.plan)
        return DecodeStep(self._fused(layers, plan), plan), self._twin(layers, plan)

    def _fused(self, layers: list[int], plan: Plan) -> FusedGraph:
        fused = FusedGraph(self._config, self._only(layers)[1], plan, self._platform)
        fused.kind_of_layer = [0] * len(layers)
        return fused

    def _twin(self, layers: list[int], plan: Plan) -> DecodeStep:
        """The twin over these layers, not compiled, which would cost seconds."""
        twin = StepGraph(self._config, self._only(layers)[0], plan)
        twin.compiled = False
        twin.kind_of_layer = [0] * len(layers)
        return DecodeStep(twin, plan)

    def _only(self, layers: list[int]) -> tuple[StepWeights, FusedWeights]:
        """The weights of these layers, for the twin and for the kernels."""
        plain, fused = self._twin_graph.weights, self._weights
        return (
            replace(plain, layers=[plain.layers[i] for i in layers]),
            replace(fused, layers=[fused.layers[i] for i in layers]),
        )

    def _caches(
        self, rows: int, batched: bool, start: int, layers: int, room: int | None = None
    ) -> list[Any]:
        """A cache a layer with ``start`` random rows and ``room`` for steps, equal every time."""
        heads, dtype = self._weights.heads, self._weights.embedding.dtype
        capacity = start + (STEPS * (1 if batched else rows) if room is None else room)
        shape = (rows if batched else 1, heads.kv_heads, capacity, heads.head_dim)
        caches: list[Any] = []
        for layer in range(layers):
            keys, values = (
                mx.random.normal(shape, dtype, key=mx.random.key(2 * layer + i)) for i in range(2)
            )
            if batched:
                padding = [i % START for i in range(rows)]
                caches.append(BatchKVCache(padding))
                offset = mx.array([start - pad for pad in padding])
                caches[-1].state = (keys, values, offset, mx.array(padding), start)
            else:
                caches.append(KVCache())
                caches[-1].state = (keys, values, start)
        if batched:
            for cache in caches[1:]:
                cache.offset, cache.left_padding = caches[0].offset, caches[0].left_padding
        return caches


def _error(a: mx.array, b: mx.array, axes: tuple[int, ...]) -> mx.array:
    """The largest error of ``a`` over the size of ``b``, both as norms over ``axes``."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    # A logit that all tokens share changes nothing.
    size = mx.square(b - b.mean(axes, keepdims=True) if axes == (-1,) else b).sum(axes)
    return mx.sqrt(mx.square(a - b).sum(axes) / mx.maximum(size, 1e-30)).max()
