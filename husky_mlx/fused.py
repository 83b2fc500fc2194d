"""The decode step made of fused kernels: five launches a layer, six with norms of heads, keys and
values written in place.

The same step as ``freeze.StepGraph``, which is its twin in plain ``mx`` code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from husky_mlx.buffers import check_layout
from husky_mlx.config import LlamaConfig
from husky_mlx.matrix import Heads, Matrix, matrix_of
from husky_mlx.ops.attention_decode import attention_decode_kernel, ticket_count
from husky_mlx.ops.down_add import down_add_kernel
from husky_mlx.ops.embed import embed_kernel
from husky_mlx.ops.gemv import Platform
from husky_mlx.ops.o_proj_add import o_proj_add_kernel
from husky_mlx.ops.rms_gate_up_swiglu import rms_gate_up_swiglu_kernel
from husky_mlx.ops.rms_lm_head import rms_lm_head_argmax_kernel, rms_lm_head_kernel
from husky_mlx.ops.rms_qkv_rope_append import rms_qkv_rope_append_kernel
from husky_mlx.pack import FUSIONS, Projections, StepWeights
from husky_mlx.places import LAST, MAX_ROWS, advance
from husky_mlx.plan import Plan

if TYPE_CHECKING:
    from husky_mlx.prefill import Prefill
    from husky_mlx.selftest import SelfTest
    from husky_mlx.single_launch import SingleLaunch

ORDER_SIZE = 8  # smaller inputs are in another address space on Metal


@dataclass(frozen=True)
class FusedLayer:
    """One transformer layer as the kernels take it; ``head_norms`` as in ``LayerWeights``."""

    qkv: Matrix
    o_proj: Matrix
    gate_up: Matrix
    down_proj: Matrix
    head_norms: tuple[mx.array, mx.array] | None = None


@dataclass(frozen=True)
class FusedWeights:
    """Everything that the fused step holds constant, in one dtype."""

    embedding: Matrix
    layers: list[FusedLayer]
    head: Matrix
    heads: Heads


def fused_weights(config: LlamaConfig, weights: StepWeights) -> FusedWeights | str:
    """The step's weights for the kernels, or the first reason for which they cannot take them."""
    found: dict[str, Matrix] = {}

    def matrix(name: str, source: Projections) -> Matrix:
        made = matrix_of(source)
        if isinstance(made, str):
            raise _NoKernel(f"{name}: no kernel for {made}")
        if found and made.dtype != next(iter(found.values())).dtype:
            first, other = next(iter(found.items()))
            raise _NoKernel(f"{name} is {made.dtype}, {first} is {other.dtype}")
        found[name] = made
        return made

    if config.head_dim % 16 or config.head_dim > 256:
        return f"no kernel for head_dim {config.head_dim}"
    try:
        embedding = matrix("embed_tokens", weights.table)
        layers = [
            FusedLayer(
                **{
                    group: matrix(f"layers.{i}.{group}", getattr(layer, group)) for group in FUSIONS
                },
                head_norms=_in_dtype(layer.head_norms, embedding.dtype),
            )
            for i, layer in enumerate(weights.layers)
        ]
        head = matrix("lm_head", weights.head)
    except _NoKernel as reason:
        return str(reason)
    heads = Heads(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        traditional=config.rope.traditional,
        magnitude=config.rope.magnitude,
    )
    return FusedWeights(embedding=embedding, layers=layers, head=head, heads=heads)


def _in_dtype(
    norms: tuple[mx.array, mx.array] | None, dtype: mx.Dtype
) -> tuple[mx.array, mx.array] | None:
    if norms is None:
        return None
    q, k = (norm.astype(dtype) for norm in norms)
    mx.eval(q, k)
    return q, k


class _NoKernel(Exception):
    """A weight that no kernel takes."""


class FusedGraph:
    """The step as plain functions of arrays, for ``mx.compile``; see ``freeze.StepGraph``.

    Besides its results each function returns an array that depends on every append: whoever reads
    the KV buffers other than through this graph must evaluate it first.
    """

    in_place = True
    prefill: Prefill | None = None
    single: SingleLaunch | None = None
    longest = MAX_ROWS

    def __init__(
        self,
        config: LlamaConfig,
        weights: FusedWeights,
        plan: Plan,
        platform: Platform,
        self_test: SelfTest | None = None,
    ):
        self.config = config
        self.self_test = self_test
        self.dtype = weights.embedding.dtype
        self.weights = weights
        self.plan = plan
        self.platform = platform
        # The emulator runs a kernel at once and cannot be traced.
        self.compiled = platform.backend != "emulator"
        self.kind_of_layer = config.kind_of_layer
        self.nothing_before = mx.zeros((ORDER_SIZE,), weights.embedding.dtype)
        mx.eval(self.nothing_before)

    def logits(self, tokens: mx.array, *rest: Any) -> tuple:
        """(B, L) tokens -> logits (B, L, vocabulary), the next places, the order of the appends."""
        x, places, ordering = self._residual(tokens, *rest)
        eps = self.config.rms_norm_eps
        logits = rms_lm_head_kernel(x, eps, self.weights.head, self.platform)
        return logits.reshape(*tokens.shape, -1), places, ordering

    def greedy(self, tokens: mx.array, *rest: Any) -> tuple:
        """``logits`` with the most likely tokens (B, L) before them."""
        x, places, ordering = self._residual(tokens, *rest)
        eps = self.config.rms_norm_eps
        logits, best = rms_lm_head_argmax_kernel(x, eps, self.weights.head, self.platform)
        return best.reshape(tokens.shape), logits.reshape(*tokens.shape, -1), places, ordering

    def prompt(self, tokens: mx.array, places: list[mx.array], *rest: Any) -> tuple:
        """``greedy`` of row LAST only: (1, L) tokens -> token (1, 1), logits (1, 1, vocabulary) and
        the order of the appends."""
        x, _, ordering = self._residual(tokens, places, False, *rest)
        row = mx.take(x, places[0][LAST : LAST + 1], axis=0)
        eps = self.config.rms_norm_eps
        logits, best = rms_lm_head_argmax_kernel(row, eps, self.weights.head, self.platform)
        return best[None], logits[None], ordering

    def _residual(
        self,
        tokens: mx.array,
        places: list[mx.array],
        batched: bool,
        keys: list[mx.array],
        values: list[mx.array],
        before: mx.array,
    ) -> tuple[mx.array, list[mx.array], mx.array]:
        """(B, L) tokens -> the last residual (B * L, hidden), the next places, and the order of the
        appends."""
        self.plan.count("traces")
        eps, platform = self.config.rms_norm_eps, self.platform
        rows, length = tokens.shape
        for buffer in (*keys, *values):
            check_layout(buffer, self.config.num_key_value_heads, self.config.head_dim, rows)
        x, following, tickets = embed_kernel(
            tokens.reshape(-1),
            before,
            places[0],
            length,
            self.weights.embedding,
            ticket_count(rows * length, self.config.num_attention_heads),
            platform,
        )
        for i, (kind, layer) in enumerate(
            zip(self.kind_of_layer, self.weights.layers, strict=True)
        ):
            queries = rms_qkv_rope_append_kernel(
                x,
                eps,
                layer.qkv,
                self.weights.heads,
                layer.head_norms,
                keys[i],
                values[i],
                places[kind],
                batched,
                platform,
            )
            attended = attention_decode_kernel(
                queries, keys[i], values[i], places[kind], batched, tickets, platform
            )
            x = o_proj_add_kernel(attended, x, layer.o_proj, platform)
            activated = rms_gate_up_swiglu_kernel(x, eps, layer.gate_up, platform)
            x = down_add_kernel(activated, x, layer.down_proj, platform)
        found = next_places(places, following, length)
        x, ordering = self._ordered(x, found[1:])
        return x, found, ordering

    def _ordered(self, x: mx.array, others: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        return ordered(x, others)


def next_places(places: list[mx.array], following: mx.array, length: int) -> list[mx.array]:
    """``following`` is what the first one has become; the others move on as well."""
    return [following, *(place + mx.array(advance(length)) for place in places[1:])]


def ordered(x: mx.array, others: Sequence[mx.array] = ()) -> tuple[mx.array, mx.array]:
    """The last residual, and a view of it that has one size whatever the number of rows.

    Who evaluates a result of the first evaluates the second too, and ``others``: the next step
    takes them, perhaps in another thread, and what is still to be computed is its own thread's.
    """
    ordering = x.reshape(-1)[:ORDER_SIZE]
    return mx.depends(x, [ordering, *others]), ordering
