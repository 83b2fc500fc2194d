"""What ``husky bench ops`` times: every operation of the decode step, ours and mlx-lm's.

A model gives the numbers and the formats. Our side is the kernels as ``fused.FusedGraph`` launches
them, the stock side the modules and calls of mlx-lm's Llama in a step of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from husky_mlx.bench_ops_timing import Side, copies_of, following, launches_of
from husky_mlx.bench_ops_weights import Copies, describe, nbytes, own, projections
from husky_mlx.cache import KVCache
from husky_mlx.launches import GROUP_OF_OP
from husky_mlx.model import Model
from husky_mlx.ops.attention_decode import attention_decode_kernel, ticket_count
from husky_mlx.ops.down_add import down_add_kernel
from husky_mlx.ops.embed import embed_kernel
from husky_mlx.ops.gemv import Platform
from husky_mlx.ops.o_proj_add import o_proj_add_kernel
from husky_mlx.ops.rms_gate_up_swiglu import rms_gate_up_swiglu_kernel
from husky_mlx.ops.rms_lm_head import rms_lm_head_argmax_kernel, rms_lm_head_kernel
from husky_mlx.ops.rms_qkv_rope_append import rms_qkv_rope_append_kernel
from husky_mlx.ops.rotate import rotation
from husky_mlx.places import make_place

OPS = (
    "embed",
    "rms_qkv_rope_append",
    "attention_decode",
    "o_proj_add",
    "rms_gate_up_swiglu",
    "down_add",
    "rms_lm_head",
    "rms_lm_head_argmax",
)
SLOT = 255  # where the append that is timed writes


@dataclass(frozen=True)
class Case:
    """One operation on one shape, both ways.

    ``bytes``: what a launch reads and writes at least, but for a few hundred of place and rotary
    table. ``ordered``: both chains have one small launch more each time, which makes the next
    input wait for the last result.
    """

    op: str
    shape: str
    weights: str
    rows: int
    context: int | None
    bytes: int
    copies: int
    ordered: bool
    ours: Side
    stock: Side


class Cases:
    """Builds a model's cases; ``rows`` consecutive tokens of one sequence make a step.

    Raises, when a case is asked for, HuskyError for weights that no kernel takes and
    MemoryLimitError for copies that do not fit.
    """

    def __init__(self, model: Model, platform: Platform, rows: int, contexts: Sequence[int]):
        self._copies = Copies(model)
        self._config = model.args
        self._platform = platform
        self._rows = rows
        self._contexts = contexts
        self._dtype = self._copies.dtype

    def of(self, op: str) -> Iterator[Case]:
        """The cases of one of OPS: one for each context, or for each format among the layers."""
        if op == "embed":
            yield self._embed(op)
        elif op == "attention_decode":
            for context in self._contexts:
                yield self._attention(op, context)
        elif op in GROUP_OF_OP:
            build = {"qkv": self._qkv, "gate_up": self._gate_up}
            for template in self._copies.templates(GROUP_OF_OP[op]):
                yield build.get(GROUP_OF_OP[op], self._projection_and_sum)(op, template)
        else:
            yield self._head(op)

    def _embed(self, op: str) -> Case:
        config, m = self._config, self._rows
        (embedding,), (made,) = self._copies.tables(1, head=False)
        row = nbytes([embedding]) // config.vocab_size
        size = m * (row + 4) + self._bytes(m * config.hidden_size)
        ids = [
            mx.random.randint(0, config.vocab_size, (m,)).astype(mx.uint32)
            for _ in range(launches_of(size))
        ]
        mx.eval(ids)
        before, place = self._random(m, config.hidden_size), self._place(SLOT + 1)
        tickets = ticket_count(m, config.num_attention_heads)

        def ours(number: int, before: mx.array) -> tuple[mx.array, ...]:
            tokens = following(ids[number % len(ids)], before)
            table = made.embedding
            x, *_ = embed_kernel(tokens, before, place, m, table, tickets, self._platform)
            return (x,)

        def stock(number: int, before: mx.array) -> tuple[mx.array, ...]:
            return (embedding(following(ids[number % len(ids)], before)[None]),)

        shape = f"{config.vocab_size}x{config.hidden_size}"
        sides = Side(ours, (before,)), Side(stock, (before[None],))
        return self._case(op, shape, describe(embedding), size, 1, sides, ordered=True)

    def _qkv(self, op: str, template: nn.Module) -> Case:
        config, m, eps = self._config, self._rows, self._config.rms_norm_eps
        numbers = (1 + m) * config.hidden_size + m * (config.query_size + 2 * config.key_value_size)
        size = nbytes(projections(template, "qkv")) + self._bytes(numbers)
        copies = copies_of(size)
        layers, made = self._copies.layers(template, "qkv", copies)
        x, place = self._random(m, config.hidden_size), self._place(SLOT + 1)
        # Zeros made by mx.zeros would be a single one in memory.
        buffers = [self._random(*self._cache_shape(SLOT + m)) * 0 for _ in range(2)]
        rotate = rotation(config.rope, config.head_dim)

        def ours(number: int, x: mx.array, keys: mx.array, values: mx.array) -> tuple:
            layer = made.layers[number % copies]
            queries = rms_qkv_rope_append_kernel(
                *(x, eps, layer.qkv, made.heads, layer.head_norms),
                *(keys, values, place, False, self._platform),
            )
            return queries, keys, values

        def stock(number: int, x: mx.array, keys: mx.array, values: mx.array) -> tuple:
            layer = layers[number % copies]
            normed = mx.fast.rms_norm(x, layer.input_layernorm.weight, eps)
            q, k, v = (
                project(normed).reshape(1, m, -1, config.head_dim).transpose(0, 2, 1, 3)
                for project in projections(layer, "qkv")
            )
            if config.qk_norm:
                q, k = layer.self_attn.q_norm(q), layer.self_attn.k_norm(k)
            # Other handles: assigning items changes the one that they are assigned to.
            keys, values = keys[...], values[...]
            keys[..., SLOT : SLOT + m, :] = rotate(k, offset=SLOT)
            values[..., SLOT : SLOT + m, :] = v
            return rotate(q, offset=SLOT).transpose(0, 2, 1, 3), keys, values

        sides = (
            Side(ours, (x, *map(own, buffers))),
            Side(stock, (x[None], *map(own, buffers))),
        )
        ordered = config.query_size < config.hidden_size
        return self._layer_case(op, template, size, copies, sides, ordered=ordered)

    def _attention(self, op: str, context: int) -> Case:
        config, m = self._config, self._rows
        # The first row sees ``context`` rows, each further one a row more.
        seen = context + m - 1
        size = self._bytes(2 * seen * config.key_value_size + 2 * m * config.query_size)
        copies = copies_of(size)
        shape = self._cache_shape(seen)
        caches = [(self._random(*shape), self._random(*shape)) for _ in range(copies)]
        place = self._place(context)
        queries = self._random(m, config.num_attention_heads, config.head_dim)
        tickets = own(mx.zeros((ticket_count(m, config.num_attention_heads),), mx.uint32))

        def ours(number: int, queries: mx.array) -> tuple[mx.array, ...]:
            cache = caches[number % copies]
            return (
                attention_decode_kernel(queries, *cache, place, False, tickets, self._platform),
            )

        def stock(number: int, queries: mx.array) -> tuple[mx.array, ...]:
            keys, values = (buffer[..., :seen, :] for buffer in caches[number % copies])
            mask = "causal" if m > 1 else None
            y = mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=config.attention_scale, mask=mask
            )
            return (y.transpose(0, 2, 1, 3).reshape(1, m, -1),)

        heads = f"{config.num_attention_heads}/{config.num_key_value_heads}"
        sides = (
            Side(ours, (queries,)),
            Side(stock, (own(queries[None].transpose(0, 2, 1, 3)),)),
        )
        return self._case(
            op,
            f"{heads} heads of {config.head_dim}, {context} rows",
            str(self._dtype).removeprefix("mlx.core."),
            size,
            copies,
            sides,
            context=context,
        )

    def _projection_and_sum(self, op: str, template: nn.Module) -> Case:
        m, hidden, group = self._rows, self._config.hidden_size, GROUP_OF_OP[op]
        width, kernel = {
            "o_proj": (self._config.query_size, o_proj_add_kernel),
            "down_proj": (self._config.intermediate_size, down_add_kernel),
        }[group]
        size = nbytes(projections(template, group)) + self._bytes(m * (width + 2 * hidden))
        copies = copies_of(size)
        layers, made = self._copies.layers(template, group, copies)
        x, residual = self._random(m, width), self._random(m, hidden)

        def ours(number: int, residual: mx.array) -> tuple[mx.array, ...]:
            matrix = getattr(made.layers[number % copies], group)
            return (kernel(x, residual, matrix, self._platform),)

        # MLX runs at once what does not depend on each other, so not only the sum but the
        # projection must wait: its input is the last sum, repeated until it is as wide.
        repeated = mx.concatenate([residual[None]] * -(-width // hidden))
        mx.eval(repeated)

        def stock(number: int, x: mx.array) -> tuple[mx.array, ...]:
            (project,) = projections(layers[number % copies], group)
            return (repeated + project(x),)

        sides = Side(ours, (residual,)), Side(stock, (x[None],))
        return self._layer_case(op, template, size, copies, sides)

    def _gate_up(self, op: str, template: nn.Module) -> Case:
        config, m, eps = self._config, self._rows, self._config.rms_norm_eps
        numbers = (1 + m) * config.hidden_size + m * config.intermediate_size
        size = nbytes(projections(template, "gate_up")) + self._bytes(numbers)
        copies = copies_of(size)
        layers, made = self._copies.layers(template, "gate_up", copies)
        x = self._random(m, config.hidden_size)

        def ours(number: int, x: mx.array) -> tuple[mx.array, ...]:
            matrix = made.layers[number % copies].gate_up
            return (rms_gate_up_swiglu_kernel(x, eps, matrix, self._platform),)

        def stock(number: int, x: mx.array) -> tuple[mx.array, ...]:
            layer = layers[number % copies]
            normed = mx.fast.rms_norm(x, layer.post_attention_layernorm.weight, eps)
            gate, up = projections(layer, "gate_up")
            return (swiglu(gate(normed), up(normed)),)

        sides = Side(ours, (x,)), Side(stock, (x[None],))
        ordered = config.intermediate_size < config.hidden_size
        return self._layer_case(op, template, size, copies, sides, ordered=ordered)

    def _head(self, op: str) -> Case:
        config, m, eps = self._config, self._rows, self._config.rms_norm_eps
        tied, picks, model = config.tie_word_embeddings, op.endswith("argmax"), self._copies.model
        source = model.model.embed_tokens if tied else model.lm_head
        numbers = (1 + m) * config.hidden_size + m * config.vocab_size
        size = nbytes([source]) + self._bytes(numbers) + (4 * m if picks else 0)
        copies = copies_of(size)
        modules, made = self._copies.tables(copies, head=True)
        norm = model.model.norm.weight.astype(self._dtype)
        x = self._random(m, config.hidden_size)
        mx.eval(norm)

        def ours(number: int, x: mx.array) -> tuple[mx.array, ...]:
            matrix = made[number % copies].head
            if picks:
                return rms_lm_head_argmax_kernel(x, eps, matrix, self._platform)[::-1]
            return (rms_lm_head_kernel(x, eps, matrix, self._platform),)

        def stock(number: int, x: mx.array) -> tuple[mx.array, ...]:
            module = modules[number % copies]
            logits = (module.as_linear if tied else module)(mx.fast.rms_norm(x, norm, eps))
            return (mx.argmax(logits, axis=-1), logits) if picks else (logits,)

        shape = f"{config.vocab_size}x{config.hidden_size}"
        sides = Side(ours, (x,)), Side(stock, (x[None],))
        return self._case(op, shape, describe(source), size, copies, sides, ordered=picks)

    def _layer_case(
        self,
        op: str,
        template: nn.Module,
        size: int,
        copies: int,
        sides: tuple[Side, Side],
        ordered: bool = False,
    ) -> Case:
        modules = projections(template, GROUP_OF_OP[op])
        outputs = sum(module.weight.shape[0] for module in modules)
        inputs = {
            "o_proj": self._config.query_size,
            "down_proj": self._config.intermediate_size,
        }.get(GROUP_OF_OP[op], self._config.hidden_size)
        weights = " + ".join(dict.fromkeys(map(describe, modules)))
        return self._case(op, f"{outputs}x{inputs}", weights, size, copies, sides, ordered=ordered)

    def _case(
        self,
        op: str,
        shape: str,
        weights: str,
        size: int,
        copies: int,
        sides: tuple[Side, Side],
        *,
        context: int | None = None,
        ordered: bool = False,
    ) -> Case:
        rows = self._rows
        return Case(op, shape, weights, rows, context, size, copies, ordered, *sides)

    def _cache_shape(self, rows: int) -> tuple[int, int, int, int]:
        """Of the keys, with the capacity that a cache of ``rows`` tokens has."""
        config = self._config
        return 1, config.num_key_value_heads, KVCache().capacity_for(rows), config.head_dim

    def _place(self, live: int) -> mx.array:
        place = make_place(live - 1, live, live - 1, None)
        mx.eval(place)
        return place

    def _random(self, *shape: int) -> mx.array:
        array = mx.random.normal(shape).astype(self._dtype)
        mx.eval(array)
        return array

    def _bytes(self, numbers: int) -> int:
        return numbers * self._dtype.size
