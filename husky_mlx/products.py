"""The products of a prompt's rows with the weights, and what is computed between them.

Where MLX multiplies quantized weights below the rate of plain ones, a matrix is dequantized first
and multiplied as such. The projections of a layer that share an input are one product.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from husky_mlx.config import LlamaConfig
from husky_mlx.fused import FusedWeights
from husky_mlx.kernels import Prepared
from husky_mlx.matrix import Matrix
from husky_mlx.ops.dequantize import alike, prepare_dequantize, prepare_dequantize_four
from husky_mlx.ops.gemv import Platform
from husky_mlx.ops.rope_append import norm_rope_append_kernel, rope_append_kernel
from husky_mlx.ops.swiglu import swiglu_kernel
from husky_mlx.pack import Fused, Projections, StepWeights

# (result, bytes that the dequantized matrices take until it is computed)
HandOver = Callable[[mx.array, int], None]
# Bytes of a layer's dequantized matrices up to which one launch makes all of them: they are there
# at once then, and a larger layer keeps the GPU busy for longer than its launches the host.
TOGETHER = 192 << 20


class Products:
    """A model's weights as functions of many rows, x (L, hidden)."""

    def __init__(
        self,
        config: LlamaConfig,
        platform: Platform,
        weights: StepWeights,
        matrices: FusedWeights,
        dequantize_from: Callable[[int, int], int | None],
    ):
        """``dequantize_from``: rows of x from which a quantized matrix of so many output features
        and bits is dequantized, None for never."""
        self.weights = weights
        self.matrices = matrices
        self.platform = platform
        self.eps = config.rms_norm_eps
        self._dequantize_from = dequantize_from
        # By the identity of matrices that this object holds, and by layer.
        self._prepared: dict[int, Prepared] = {}
        self._prepared_layers: dict[int, Prepared] = {}

    def into_attention(
        self, i: int, x: mx.array, plain: dict[int, mx.array] | None = None
    ) -> mx.array:
        """The residual before layer ``i`` -> its q, k and v side by side (L, rows of qkv).

        ``plain``: matrices that are dequantized already, by their identity; what is used is
        taken out.
        """
        matrix = self.matrices.layers[i].qkv
        return self._multiply(self.weights.layers[i].qkv, matrix, self._norm(x, matrix), plain)

    def rope_append(
        self, i: int, qkv: mx.array, keys: mx.array, values: mx.array, place: mx.array
    ) -> mx.array:
        """q, k and v of layer ``i`` (L, rows of qkv) -> queries (1, heads, L, head_dim); the rest
        goes to ``keys`` and ``values``, see ``ops.rope_append``."""
        layer, heads = self.matrices.layers[i], self.matrices.heads
        where = keys, values, place, self.platform
        if layer.head_norms is None:
            queries = rope_append_kernel(qkv, layer.qkv, heads, *where)
        else:
            queries = norm_rope_append_kernel(
                qkv, layer.qkv, heads, layer.head_norms, self.eps, *where
            )
        # MLX's attention leaves its result as its queries lie, row by row: no copy for o_proj.
        return queries[None].swapaxes(1, 2)

    def after_attention(
        self,
        i: int,
        x: mx.array,
        attended: mx.array,
        hand_over: HandOver,
        plain: dict[int, mx.array] | None = None,
    ) -> mx.array:
        """The residual before layer ``i`` and its attention (L, heads * head_dim) -> after it.

        ``plain`` as for ``into_attention``.
        """
        layer, matrices = self.weights.layers[i], self.matrices.layers[i]
        rows = x.shape[0]
        x = self._multiply_add(layer.o_proj, matrices.o_proj, attended, x, plain)
        hand_over(x, self._dequantized_bytes(rows, matrices.qkv, matrices.o_proj))
        normed = self._norm(x, matrices.gate_up)
        gate_up = self._multiply(layer.gate_up, matrices.gate_up, normed, plain)
        activated = swiglu_kernel(gate_up, self.platform)
        hand_over(activated, self._dequantized_bytes(rows, matrices.gate_up))
        x = self._multiply_add(layer.down_proj, matrices.down_proj, activated, x, plain)
        hand_over(x, self._dequantized_bytes(rows, matrices.down_proj))
        return x

    def between(self, i: int, x: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        """From the attention of layer ``i`` to that of the next: the residual between, and qkv."""
        plain = self._plain(i) if self.one_dequantization(i, x.shape[0]) else None
        x = self.after_attention(i, x, attended, lambda result, held: None, plain)
        return x, self.into_attention(i + 1, x, plain)

    def one_dequantization(self, i: int, rows: int) -> bool:
        """Whether the matrices between the attention of layer ``i`` and that of the next are
        dequantized for ``rows`` rows of x, and one launch for all is possible and worth it."""
        matrices = self._matrices_between(i)
        each = [self._dequantized_bytes(rows, matrix) for matrix in matrices]
        return all(each) and sum(each) <= TOGETHER and alike(matrices)

    def head(self, x: mx.array) -> mx.array:
        """The last residual -> logits (L, vocabulary). Never dequantized: a vocabulary of 128,256
        by 4,096 takes 1 GB."""
        head = self.weights.head
        assert isinstance(head, Fused)
        return head.multiply(self._norm(x, self.matrices.head))

    def row_bytes(self) -> int:
        """Bytes of the activations of one row that may live at once."""
        layer = self.matrices.layers[0]
        parts = (layer.qkv.rows, layer.gate_up.rows, layer.down_proj.columns, 4 * layer.qkv.columns)
        return sum(parts) * self.matrices.embedding.dtype.size

    def layer_bytes(self, i: int, rows: int) -> int:
        """Bytes that the dequantized matrices of layer ``i`` take for ``rows`` rows of x."""
        layer = self.matrices.layers[i]
        return self._dequantized_bytes(
            rows, layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj
        )

    def _norm(self, x: mx.array, matrix: Matrix) -> mx.array:
        """RMS norm by the weights beside a matrix: in its dtype, whatever the checkpoint's is."""
        return mx.fast.rms_norm(x, matrix.norm, self.eps)

    def _matrices_between(self, i: int) -> tuple[Matrix, ...]:
        layer, following = self.matrices.layers[i : i + 2]
        return layer.o_proj, layer.gate_up, layer.down_proj, following.qkv

    def _plain(self, i: int) -> dict[int, mx.array]:
        """Those matrices, dequantized in one launch, by their identity."""
        matrices = self._matrices_between(i)
        prepared = self._prepared_layers.get(i)
        if prepared is None:
            prepared = prepare_dequantize_four(matrices, self.platform)
            self._prepared_layers[i] = prepared
        return {id(matrix): plain for matrix, plain in zip(matrices, prepared(), strict=True)}

    def _multiply(
        self,
        fused: Projections,
        matrix: Matrix,
        x: mx.array,
        plain: dict[int, mx.array] | None,
    ) -> mx.array:
        """x (L, in) times the whole matrix -> (L, out)."""
        assert isinstance(fused, Fused)  # others make no Matrix
        if not self._dequantized_bytes(x.shape[0], matrix):
            return fused.multiply(x)
        y = x @ self._dequantized(matrix, plain).T
        return y if fused.bias is None else y + fused.bias

    def _multiply_add(
        self,
        fused: Projections,
        matrix: Matrix,
        x: mx.array,
        residual: mx.array,
        plain: dict[int, mx.array] | None,
    ) -> mx.array:
        """``residual`` (L, out) + x (L, in) times the matrix."""
        assert isinstance(fused, Fused)
        weight = None
        if self._dequantized_bytes(x.shape[0], matrix):
            weight = self._dequantized(matrix, plain)
        elif fused.scales is None:
            weight = fused.weight
        if weight is None:
            return residual + fused.multiply(x)
        # Summed up in float32, and two launches less.
        y = mx.addmm(residual, x, weight.T)
        return y if fused.bias is None else y + fused.bias

    def _dequantized(self, matrix: Matrix, plain: dict[int, mx.array] | None) -> mx.array:
        if plain:
            return plain.pop(id(matrix))
        prepared = self._prepared.get(id(matrix))
        if prepared is None:
            prepared = self._prepared[id(matrix)] = prepare_dequantize(matrix, self.platform)
        (weight,) = prepared()
        return weight

    def _dequantized_bytes(self, rows: int, *matrices: Matrix) -> int:
        """Bytes that those take which are dequantized for ``rows`` rows of x."""
        held = 0
        for matrix in matrices:
            if matrix.bits == 16:
                continue
            first = self._dequantize_from(matrix.rows, matrix.bits)
            if first is not None and rows >= first:
                held += matrix.rows * matrix.columns * matrix.dtype.size
        return held
