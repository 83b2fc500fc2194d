"""Proves the fused step on the machine in front of it, against its twin in plain ``mx`` code.

In-place writes are no promise of MLX's, and a kernel that is right on one chip may not compile on
another. So before the kernels serve a reply on a new combination of chip, system, versions, kernel
sources and model shapes, a few steps run both ways, and the verdict is remembered.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import platform as machine
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from husky_mlx import __version__, device, verdicts
from husky_mlx.cache import BatchKVCache, KVCache
from husky_mlx.config import LlamaConfig
from husky_mlx.freeze import DecodeStep, StepGraph
from husky_mlx.fused import FusedGraph, FusedLayer, FusedWeights
from husky_mlx.metal_text import kernel_folder
from husky_mlx.ops.gemv import Platform
from husky_mlx.pack import StepWeights
from husky_mlx.plan import Plan
from husky_mlx.policy import policy
from husky_mlx.prefill import Prefill
from husky_mlx.products import Products
from husky_mlx.short_prompt import ShortPrompt
from husky_mlx.tiles import AttentionShape

STEPS = 8
PADDING = 3  # of a short prompt
START = 2  # rows that are there before
LONGEST = 16384  # capacity up to which a split of the context is looked for

CHAIN = 12  # layers, one after the other
_TESTED_MODULES = (
    *("policy", "tiles", "layout", "pack", "matrix", "places", "fused"),
    *("prefill", "products", "short_prompt"),
    *("kernels", "kernel_source", "cuda_source", "cuda_binary"),
)

# Error over size, in Euclidean norms. It has to sit between what two right computations differ by
# and what one wrong row of the eight does, sqrt(1/8) = 0.35. By itself a layer in bfloat16 differs
# by 0.004 on an H200 (Llama-3.2-1B's shapes, 4 bit, random weights). float16 rounds to an eighth of
# that; so do float32 products where they pass through TF32.
TOLERANCE = {mx.float32: 0.03, mx.float16: 0.03, mx.bfloat16: 0.05}
# Of layers one after the other, where the stock 4-bit product adds up in bfloat16: SmolLM2's values
# differ by 0.11 in layer 12.
CHAIN_TOLERANCE = {mx.float32: 0.1, mx.float16: 0.1, mx.bfloat16: 0.25}


class SelfTest:
    """The tests of one model's fused step: one for each number of rows, batched or not."""

    def __init__(
        self, config: LlamaConfig, weights: FusedWeights, twin: StepGraph, platform: Platform
    ):
        self.twin = twin
        self._config = config
        self._weights = weights
        self._platform = platform
        self._passed: set[tuple[int, bool]] = set()

    def passes(self, rows: int, batched: bool) -> bool:
        """Whether steps of ``rows`` rows may run on the kernels; else the twin's plan says why.

        ``rows``: consecutive tokens of one sequence or, ``batched``, a token of each sequence.
        Tests what neither this process nor an earlier one has: a failure there is one warning.
        """
        if (rows, batched) in self._passed:
            return True
        of = f"{rows} rows{' batched' if batched else ''}"
        problem = self._verdict(
            of,
            "the fused kernels are off, replies are slower",
            functools.partial(self.problem, rows, batched),
        )
        if problem is not None:
            self.twin.plan.kernels = f"plain MLX operations (self-test: {problem})"
            self.twin.plan.launches, self.twin.plan.prefill = [], "plain MLX operations"
            return False
        self._passed.add((rows, batched))
        return True

    def prompts_pass(self) -> bool:
        """Whether prompts may take the kernels."""
        off = "the kernels for prompts are off, first tokens are slower"
        return self._verdict("prompts", off, self.prompt_problem) is None

    def short_prompts_pass(self, lengths: Sequence[int]) -> bool:
        """Whether steps of ``lengths`` rows may take short prompts."""
        off = "the kernels for short prompts are off, their first tokens are slower"
        of = f"prompts of up to {max(lengths)}"
        return self._verdict(of, off, functools.partial(self.short_prompt_problem, lengths)) is None

    def problem(self, rows: int, batched: bool) -> str | None:
        """What is wrong with such steps here and now; None where they are right."""
        return _first(
            self._difference(rows, batched, layers, start)
            for layers, start in self._cases(rows, batched)
        )

    def prompt_problem(self) -> str | None:
        """What is wrong with prompts here and now; None where they are right."""
        return _first(
            self._prompt_difference([layer], first_row)
            for first_row in (None, 1)
            for layer in self._one_of_each_format()
        )

    def short_prompt_problem(self, lengths: Sequence[int]) -> str | None:
        """What is wrong with short prompts here and now; None where they are right."""
        return _first(
            self._short_difference([layer], length)
            for length in lengths
            for layer in self._one_of_each_format()
        )

    def _verdict(self, of: str, off: str, test: Callable[[], str | None]) -> str | None:
        """The remembered problem of this combination, or what ``test`` finds: one warning."""
        combination = self._combination(of)
        known = verdicts.remembered()
        if combination in known:
            return known[combination]
        problem = test()
        verdicts.remember(combination, problem)
        if problem is not None:
            warnings.warn(
                f"{off}: {problem} (self-test of {of}; {verdicts.path()} keeps the verdict)",
                stacklevel=3,
            )
        return problem

    def _one_of_each_format(self) -> list[int]:
        formats = [_layer_format(layer) for layer in self._weights.layers]
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
                yield one_of_each[:1], capacity - STEPS * rows
                return
            capacity *= 2

    def _difference(self, rows: int, batched: bool, layers: list[int], start: int) -> str | None:
        """What the steps differ in by more than the tolerance."""
        fused, twin = self._graphs(layers)
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
            problem = "the token picked is not the most likely one"
        return problem

    def _prompt_difference(self, layers: list[int], first_row: int | None) -> str | None:
        """The same for a prompt that goes on after a few rows, against the twin's steps."""
        plan = copy.deepcopy(self.twin.plan)
        weights = self._only(layers)
        products = Products(self._config, self._platform, *weights, lambda rows, bits: first_row)
        prefill = Prefill(self._config, products, plan)
        twin = self._twin(layers, plan)
        caches = [self._caches(1, False, START, len(layers)) for _ in range(2)]
        tokens = self._tokens(STEPS)[None]
        first = prefill.logits(tokens[:, : STEPS // 2], caches[0])
        last, picked = prefill.greedy(tokens[:, STEPS // 2 :], caches[0])[::-1]
        expected = mx.concatenate(
            [twin.logits(tokens[:, j : j + 1], caches[1]) for j in range(STEPS)], axis=1
        )
        best = mx.take_along_axis(last, picked[..., None], axis=-1) == last.max(-1, keepdims=True)
        rows = mx.concatenate([expected[:, : STEPS // 2], expected[:, -1:]], axis=1)
        problem = self._compare(layers, caches, START, mx.concatenate([first, last], axis=1), rows)
        if problem is None and not best.item():
            problem = "the token picked is not the most likely one"
        return problem

    def _short_difference(self, layers: list[int], length: int) -> str | None:
        """The same for a short prompt in a step of ``length`` rows, some of them padding."""
        plan = copy.deepcopy(self.twin.plan)
        fused, twin = self._fused(layers, plan), self._twin(layers, plan)
        caches = [self._caches(1, False, START, len(layers)) for _ in range(2)]
        tokens = self._tokens(length - PADDING)[None]
        picked, found = ShortPrompt(fused, plan, [length]).greedy(tokens, caches[0])
        steps = [twin.logits(tokens[:, j : j + 1], caches[1]) for j in range(tokens.size)]
        problem = self._compare(layers, caches, START, found, steps[-1])
        best = mx.take_along_axis(found, picked[..., None], axis=-1) == found.max(-1)
        if problem is None and not best.item():
            problem = "the token picked is not the most likely one"
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
        plan = copy.deepcopy(self.twin.plan)
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
        plain, fused = self.twin.weights, self._weights
        return (
            replace(plain, layers=[plain.layers[i] for i in layers]),
            replace(fused, layers=[fused.layers[i] for i in layers]),
        )

    def _caches(self, rows: int, batched: bool, start: int, layers: int) -> list[Any]:
        """A cache a layer with ``start`` random rows and room for the steps, equal every time."""
        heads, dtype = self._weights.heads, self._weights.embedding.dtype
        capacity = start + STEPS * (1 if batched else rows)
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

    def _combination(self, of: str) -> str:
        """Everything that the verdict on ``of`` depends on, readable."""
        weights = self._weights
        formats = [_matrix_format(weights.embedding), _matrix_format(weights.head)]
        formats += [_layer_format(layer) for layer in weights.layers]
        shapes = (formats, weights.heads.heads, weights.heads.kv_heads, weights.heads.head_dim)
        tuned = sorted(map(repr, self._platform.tiles.items()))
        facts = (self._config.rms_norm_eps, weights.heads.traditional, *tuned)
        return ", ".join(
            (
                f"{self._platform.backend} on {device.chip()} ({self._platform.chip.name})",
                _system(),
                "mlx " + version("mlx"),
                f"husky_mlx {__version__}",
                f"kernels {_source_digest()}",
                f"model {_digest(repr((shapes, facts)))}",
                of,
            )
        )


def _first(problems: Iterable[str | None]) -> str | None:
    """The first problem; whatever a compiler, a driver or a check of ours raises is one."""
    try:
        return next((found for found in problems if found is not None), None)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return " | ".join(lines[:4]) or type(error).__name__


def _error(a: mx.array, b: mx.array, axes: tuple[int, ...]) -> mx.array:
    """The largest error of ``a`` over the size of ``b``, both as norms over ``axes``."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    # A logit that all tokens share changes nothing.
    size = mx.square(b - b.mean(axes, keepdims=True) if axes == (-1,) else b).sum(axes)
    return mx.sqrt(mx.square(a - b).sum(axes) / mx.maximum(size, 1e-30)).max()


def _matrix_format(matrix: Any) -> tuple:
    return (
        matrix.bits,
        matrix.group_size,
        matrix.rows,
        matrix.columns,
        matrix.has_bias,
        str(matrix.dtype),
    )


def _layer_format(layer: FusedLayer) -> tuple:
    parts = (layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj)
    return tuple(_matrix_format(part) for part in parts)


def _system() -> str:
    mac = machine.mac_ver()[0]
    return f"macOS {mac}" if mac else f"{machine.system()} {machine.release()}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source_digest() -> str:
    """Of the kernels, and of the Python that lays out, launches and cuts what they read."""
    package = Path(__file__).parent
    files = [*kernel_folder().rglob("*.metal"), *kernel_folder().rglob("*.h")]
    files += [package / f"{name}.py" for name in _TESTED_MODULES]
    files += (package / "ops").glob("*.py")
    return _digest("".join(f"{path.name}\n{path.read_text()}" for path in sorted(files)))
