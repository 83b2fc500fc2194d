"""A quantized matrix as plain values, for products of many rows."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.kernels import Prepared
from husky_mlx.matrix import Matrix
from husky_mlx.ops.elementwise import flat
from husky_mlx.ops.gemv import Platform

# Times eight values a thread.
UNROLL = 4


def dequantize_kernel(matrix: Matrix, platform: Platform) -> mx.array:
    """(rows, columns) in the matrix's dtype, each value rounded once. Of 4 or 8 bits."""
    (weight,) = prepare_dequantize(matrix, platform)()
    return weight


def prepare_dequantize(matrix: Matrix, platform: Platform) -> Prepared:
    """The launch of ``dequantize_kernel``, which is the same every time."""
    if matrix.bits == 16:
        raise ValueError("[dequantize] the matrix is not quantized")
    grid, threadgroup = flat(-(-matrix.rows * matrix.columns // (8 * UNROLL)))
    return Prepared(
        "dequantize",
        {"constants": matrix.constants},
        [((matrix.rows, matrix.columns), matrix.dtype)],
        {**matrix.template, "N": matrix.rows, "K": matrix.columns, "UNROLL": UNROLL},
        grid,
        threadgroup,
        platform.backend,
    )
