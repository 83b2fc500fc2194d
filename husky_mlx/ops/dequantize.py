"""A quantized matrix as plain values, for products of many rows."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from husky_mlx.kernels import Prepared
from husky_mlx.matrix import Matrix
from husky_mlx.ops.elementwise import THREADS, flat
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


def alike(matrices: Sequence[Matrix]) -> bool:
    """Whether the matrices are quantized in one format, so that one launch can take them."""
    formats = {(each.bits, each.group_size, each.dtype) for each in matrices}
    return len(formats) == 1 and matrices[0].bits < 16


def prepare_dequantize_four(matrices: Sequence[Matrix], platform: Platform) -> Prepared:
    """``dequantize_kernel`` of four matrices that are ``alike``, in one launch."""
    if len(matrices) != 4 or not alike(matrices):
        raise ValueError("[dequantize_four] takes four matrices quantized alike")
    share = 8 * UNROLL * THREADS
    threadgroups = sum(-(-each.rows * each.columns // share) for each in matrices)
    sizes = {f"N_{i}": each.rows for i, each in enumerate(matrices)}
    sizes |= {f"K_{i}": each.columns for i, each in enumerate(matrices)}
    return Prepared(
        "dequantize_four",
        {f"constants_{i}": each.constants for i, each in enumerate(matrices)},
        [((each.rows, each.columns), each.dtype) for each in matrices],
        {**matrices[0].template, **sizes, "UNROLL": UNROLL, "THREADS": THREADS},
        *flat(threadgroups * THREADS),
        platform.backend,
    )
