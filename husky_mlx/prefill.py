"""A prompt through the model: products of many rows, our kernels between them, one sequence."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from husky_mlx.buffers import CacheBuffers, check_layout, open_rows
from husky_mlx.compiled import compiled_if
from husky_mlx.config import LlamaConfig
from husky_mlx.fused import ordered
from husky_mlx.ops.embed import embed
from husky_mlx.ops.rms_lm_head import rms_lm_head_argmax_kernel
from husky_mlx.places import make_place
from husky_mlx.plan import Plan
from husky_mlx.products import Products
from husky_mlx.short_prompt import ShortPrompt

# Bytes of dequantized matrices and of activations that may wait for the GPU. MLX allocates when it
# hands work over, and would hold those of ten graphs of a hundred operations.
IN_FLIGHT = 576 << 20
# Bytes of dequantized matrices worth handing over, which costs the host about 0.1 ms each time: a
# third of what may wait, and of a long prompt, whose products take longer, at least this.
LEAST_PIECE = 64 << 20


class Prefill:
    """Prompts of any length for the caches of one sequence; the interface of ``DecodeStep``."""

    def __init__(
        self,
        config: LlamaConfig,
        products: Products,
        plan: Plan,
        short: ShortPrompt | None = None,
        frozen_rows: Sequence[int] = (),
    ):
        """``short`` takes the prompts that it can. ``frozen_rows``: numbers of rows to which
        shorter pieces are padded, for which what lies between two attentions is traced once, and
        at the start of a sequence a layer with its attention."""
        self._scale = config.attention_scale
        self._products = products
        self._plan = plan
        self._short = short
        self._frozen_rows = sorted(frozen_rows)
        compiled = products.platform.backend != "emulator"

        # Of nothing that leads back here: see ``freeze.DecodeStep``.
        def stages(function: Callable, *given: Any) -> list[Callable]:
            made = [functools.partial(function, *given, i) for i in range(len(self._layers) - 1)]
            return [compiled_if(compiled, stage) for stage in made]

        self._between = stages(products.between)
        self._from_nothing = stages(_layer_from_nothing, products, config.attention_scale)

    def logits(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """(1, L) token ids -> logits (1, L, vocabulary); each cache gains L rows."""
        return self._products.head(self._residual(tokens, caches, last=False))[None]

    def greedy(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """(1, L) token ids -> the next one (1, 1) uint32, and its logits (1, 1, vocabulary)."""
        if self._short is not None and self._short.takes(tokens.shape[1], caches):
            return self._short.greedy(tokens, caches)
        x = self._residual(tokens, caches, last=True)
        products = self._products
        logits, best = rms_lm_head_argmax_kernel(
            x, products.eps, products.matrices.head, products.platform
        )
        return best[None], logits[None]

    @property
    def _layers(self) -> list:
        return self._products.matrices.layers

    def _residual(self, tokens: mx.array, caches: Sequence[CacheBuffers], last: bool) -> mx.array:
        """The last residual (L, hidden), or only its ``last`` row (1, hidden)."""
        products = self._products
        matrices = products.matrices
        heads = matrices.heads
        length, start = tokens.shape[1], caches[0].rows()
        rows, frozen = self._padded(length, caches[0])
        shape = (heads.kv_heads, heads.head_dim, matrices.embedding.dtype)
        slots = open_rows(caches, rows, *shape)
        place = make_place(*slots[0], start, None)
        room = IN_FLIGHT - rows * products.row_bytes()
        waiting = _Waiting(room, max(LEAST_PIECE, room // 3))
        # Signed: MLX counts a negative id from the end, and reads outside the table for 2**32 - 1.
        ids = tokens[0].astype(mx.int32)
        x = embed(mx.pad(ids, (0, rows - length)), products.weights.embedding)
        qkv = products.into_attention(0, x)
        for i in range(len(self._layers)):
            keys, values = caches[i].buffers()
            check_layout(keys, heads.kv_heads, heads.head_dim, sequences=1)
            final = i == len(self._layers) - 1
            if frozen and start == 0 and not final:
                x, qkv = self._from_nothing[i](x, qkv, keys, values, place)
                waiting.add(x, products.layer_bytes(i, rows))
                continue
            queries = products.rope_append(i, qkv, keys, values, place)
            end = start + rows
            if final:
                # What padding would become nobody reads, of a prompt's last token only its own row.
                end = start + length
                first = length - 1 if last else 0
                queries, x = queries[:, :, first:length], x[first:length]
            attended = _attend(queries, keys[:, :, :end], values[:, :, :end], self._scale)
            if not final and (frozen or products.one_dequantization(i, rows)):
                between = self._between[i] if frozen else functools.partial(products.between, i)
                x, qkv = between(x, attended)
                waiting.add(x, products.layer_bytes(i, rows))
                continue
            x = products.after_attention(i, x, attended, waiting.add)
            if not final:
                qkv = products.into_attention(i + 1, x)
        x, ordering = ordered(x)
        for cache in caches:
            cache.close_rows(length, ordering)
        self._plan.count("prefill")
        return x

    def _padded(self, length: int, cache: CacheBuffers) -> tuple[int, bool]:
        """Rows to compute for ``length`` tokens, and whether they take the frozen stages."""
        for rows in self._frozen_rows:
            if rows >= length and cache.has_room_for(rows):
                return rows, True
        return length, False


def _layer_from_nothing(
    products: Products,
    scale: float,
    i: int,
    x: mx.array,
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    place: mx.array,
) -> tuple[mx.array, mx.array]:
    """``Products.between`` with the attention before it, of a sequence's first rows."""
    rows = x.shape[0]
    queries = products.rope_append(i, qkv, keys, values, place)
    attended = _attend(queries, keys[:, :, :rows], values[:, :, :rows], scale)
    return products.between(i, x, attended)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """(1, heads, L, head_dim), the last L positions of the keys -> (L, heads * head_dim)."""
    attended = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask="causal" if queries.shape[2] > 1 else None
    )
    return attended.swapaxes(1, 2).reshape(queries.shape[2], -1)


class _Waiting:
    """Hands work over piece by piece and waits for the oldest while too many bytes are with it."""

    def __init__(self, limit: int, piece: int):
        self._limit = limit
        self._piece = piece
        self._collected = 0
        self._held = 0
        self._pieces: deque[tuple[mx.array, int]] = deque()

    def add(self, result: mx.array, held: int) -> None:
        """``result`` needs ``held`` bytes until it is computed."""
        self._collected += held
        if self._collected < self._piece:
            return
        mx.async_eval(result)
        self._pieces.append((result, self._collected))
        self._held += self._collected
        self._collected = 0
        while self._held > self._limit and len(self._pieces) > 1:
            oldest, freed = self._pieces.popleft()
            mx.eval(oldest)
            self._held -= freed
