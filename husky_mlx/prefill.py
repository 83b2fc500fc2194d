"""A prompt through the model: MLX's matrix products, our kernels between them, one sequence.

Where MLX multiplies quantized weights below the rate of plain ones, a matrix is written out first
and multiplied as such. The projections of a layer that share an input are one product.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from husky_mlx.buffers import check_layout
from husky_mlx.cache import KVCache
from husky_mlx.config import LlamaConfig
from husky_mlx.fused import ORDER_SIZE, FusedWeights
from husky_mlx.kernels import Prepared
from husky_mlx.matrix import Matrix
from husky_mlx.ops.dequantize import prepare_dequantize
from husky_mlx.ops.embed import embed
from husky_mlx.ops.gemv import Platform
from husky_mlx.ops.rms_lm_head import rms_lm_head_argmax_kernel
from husky_mlx.ops.rope_append import rope_append_kernel
from husky_mlx.ops.swiglu import swiglu_kernel
from husky_mlx.pack import Fused, Projections, StepWeights
from husky_mlx.places import make_place
from husky_mlx.plan import Plan
from husky_mlx.short_prompt import ShortPrompt

# Bytes of written out matrices and of activations that may wait for the GPU. MLX allocates when it
# hands work over, and would hold those of ten graphs of a hundred operations.
IN_FLIGHT = 576 << 20
# Bytes of written out matrices worth handing over: each time costs the host about 0.1 ms.
PIECE = 192 << 20


class Prefill:
    """Prompts of any length for the caches of one sequence; the interface of ``DecodeStep``."""

    def __init__(
        self,
        config: LlamaConfig,
        platform: Platform,
        weights: StepWeights,
        matrices: FusedWeights,
        plan: Plan,
        written_out_from: Callable[[int, int], int | None],
        short: ShortPrompt | None = None,
    ):
        """``written_out_from``: rows of x from which a quantized matrix of so many rows and bits
        is written out, None for never. ``short`` takes the prompts that it can."""
        self._config = config
        self._weights = weights
        self._matrices = matrices
        self._plan = plan
        self._platform = platform
        self._written_out_from = written_out_from
        self._short = short
        # By the identity of matrices that this object holds.
        self._prepared: dict[int, Prepared] = {}

    def logits(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """(1, L) token ids -> logits (1, L, vocabulary); each cache gains L rows."""
        x = self._residual(tokens, caches, last=False)
        normed = self._norm(x, self._matrices.head)
        return self._multiply(self._weights.head, self._matrices.head, normed)[None]

    def greedy(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """(1, L) token ids -> the next one (1, 1) uint32, and its logits (1, 1, vocabulary)."""
        if self._short is not None and self._short.takes(tokens.shape[1], caches):
            return self._short.greedy(tokens, caches)
        x = self._residual(tokens, caches, last=True)
        logits, best = rms_lm_head_argmax_kernel(
            x, self._config.rms_norm_eps, self._matrices.head, self._platform
        )
        return best[None], logits[None]

    def _residual(self, tokens: mx.array, caches: Sequence[KVCache], last: bool) -> mx.array:
        """The last residual (L, hidden), or only its ``last`` row (1, hidden)."""
        config, heads = self._config, self._matrices.heads
        length, start = tokens.shape[1], caches[0].offset
        end = start + length
        shape = (heads.kv_heads, heads.head_dim, self._matrices.embedding.dtype)
        slots = [cache.open_rows(length, *shape) for cache in caches]
        place = make_place(*slots[0], start, None)
        waiting = _Waiting(IN_FLIGHT - length * self._row_bytes())
        # Signed: MLX counts a negative id from the end, and reads outside the table for 2**32 - 1.
        x = embed(tokens[0].astype(mx.int32), self._weights.embedding)
        for i, (layer, matrices) in enumerate(
            zip(self._weights.layers, self._matrices.layers, strict=True)
        ):
            keys, values = caches[i].buffers()
            check_layout(keys, heads.kv_heads, heads.head_dim, sequences=1)
            normed = self._norm(x, matrices.qkv)
            qkv = self._multiply(layer.qkv, matrices.qkv, normed)
            queries = rope_append_kernel(
                qkv, matrices.qkv, heads, keys, values, place, self._platform
            )
            if last and i == len(caches) - 1:
                # What the others would become nobody reads.
                queries, x = queries[:, :, -1:], x[-1:]
            attended = mx.fast.scaled_dot_product_attention(
                queries,
                keys[:, :, :end],
                values[:, :, :end],
                scale=config.attention_scale,
                mask="causal" if queries.shape[2] > 1 else None,
            )
            attended = attended.swapaxes(1, 2).reshape(x.shape[0], -1)
            x = self._multiply_add(layer.o_proj, matrices.o_proj, attended, x)
            waiting.add(x, self._written_out(length, matrices.qkv, matrices.o_proj))
            normed = self._norm(x, matrices.gate_up)
            gate_up = self._multiply(layer.gate_up, matrices.gate_up, normed)
            activated = swiglu_kernel(gate_up, self._platform)
            waiting.add(activated, self._written_out(x.shape[0], matrices.gate_up))
            x = self._multiply_add(layer.down_proj, matrices.down_proj, activated, x)
            waiting.add(x, self._written_out(x.shape[0], matrices.down_proj))
        ordering = x.reshape(-1)[:ORDER_SIZE]
        for cache in caches:
            cache.ordering = ordering
            cache.end_step(end)
        self._plan.count("prefill")
        return x

    def _norm(self, x: mx.array, matrix: Matrix) -> mx.array:
        """RMS norm by the weights beside a matrix: in its dtype, whatever the checkpoint's is."""
        return mx.fast.rms_norm(x, matrix.norm, self._config.rms_norm_eps)

    def _multiply(self, fused: Projections, matrix: Matrix, x: mx.array) -> mx.array:
        """x (L, in) times the whole matrix -> (L, out)."""
        assert isinstance(fused, Fused)  # others make no Matrix
        if not self._written_out(x.shape[0], matrix):
            return fused.multiply(x)
        y = x @ self._write_out(matrix).T
        return y if fused.bias is None else y + fused.bias

    def _multiply_add(
        self, fused: Projections, matrix: Matrix, x: mx.array, residual: mx.array
    ) -> mx.array:
        """``residual`` (L, out) + x (L, in) times the matrix."""
        assert isinstance(fused, Fused)
        weight = None
        if self._written_out(x.shape[0], matrix):
            weight = self._write_out(matrix)
        elif fused.scales is None:
            weight = fused.weight
        if weight is None:
            return residual + fused.multiply(x)
        # Summed up in float32, and two launches less.
        y = mx.addmm(residual, x, weight.T)
        return y if fused.bias is None else y + fused.bias

    def _write_out(self, matrix: Matrix) -> mx.array:
        prepared = self._prepared.get(id(matrix))
        if prepared is None:
            prepared = self._prepared[id(matrix)] = prepare_dequantize(matrix, self._platform)
        (weight,) = prepared()
        return weight

    def _row_bytes(self) -> int:
        """Bytes of the activations of one row that may live at once."""
        layer = self._matrices.layers[0]
        parts = (layer.qkv.rows, layer.gate_up.rows, layer.down_proj.columns, 4 * layer.qkv.columns)
        return sum(parts) * self._matrices.embedding.dtype.size

    def _written_out(self, rows: int, *matrices: Matrix) -> int:
        """Bytes that the matrices take written out for ``rows`` rows of x; 0 where they are not."""
        held = 0
        for matrix in matrices:
            if matrix.bits == 16:
                continue
            first = self._written_out_from(matrix.rows, matrix.bits)
            if first is not None and rows >= first:
                held += matrix.rows * matrix.columns * matrix.dtype.size
        return held


class _Waiting:
    """Hands work over piece by piece and waits for the oldest while too many bytes are with it."""

    def __init__(self, limit: int):
        self._limit = limit
        self._collected = 0
        self._held = 0
        self._pieces: deque[tuple[mx.array, int]] = deque()

    def add(self, result: mx.array, held: int) -> None:
        """``result`` needs ``held`` bytes until it is computed."""
        self._collected += held
        if self._collected < PIECE:
            return
        mx.async_eval(result)
        self._pieces.append((result, self._collected))
        self._held += self._collected
        self._collected = 0
        while self._held > self._limit and len(self._pieces) > 1:
            oldest, freed = self._pieces.popleft()
            mx.eval(oldest)
            self._held -= freed
