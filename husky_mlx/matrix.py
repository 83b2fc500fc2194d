"""A projection's storage as the kernels take it, or why they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from husky_mlx.pack import Fused, Projections

KERNEL_BITS = (4, 8, 16)
KERNEL_GROUP_SIZES = (32, 64, 128)
KERNEL_DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def kernels_take(bits: int, group_size: int, mode: str = "affine") -> bool:
    """Whether there are kernels for weights of a format; 16 bits are plain floats."""
    return mode == "affine" and bits in KERNEL_BITS and group_size in KERNEL_GROUP_SIZES


@dataclass(frozen=True)
class Matrix:
    """(rows, columns) of 4 or 8 ``bits`` in MLX's affine layout, or 16 for plain ``dtype``.

    ``constants``: uint32 (words,), the buffer of ``pack.Fused``, everything in ``dtype``. ``norm``:
    a view of the norm's weights (columns,) in it, where there is one.
    """

    constants: mx.array
    norm: mx.array | None
    has_bias: bool
    bits: int
    group_size: int
    rows: int
    columns: int
    dtype: mx.Dtype

    @property
    def template(self) -> dict[str, Any]:
        return {"T": self.dtype, "BITS": self.bits, "GROUP": self.group_size}


@dataclass(frozen=True)
class Heads:
    """How the rows of a fused qkv matrix make heads, which elements are rotated together, and what
    the rotated ones are multiplied by."""

    heads: int
    kv_heads: int
    head_dim: int
    traditional: bool
    magnitude: float = 1.0


def matrix_of(source: Projections) -> Matrix | str:
    """The Matrix of a fused buffer; else the reason why there is none."""
    if not isinstance(source, Fused):
        return source.reason
    quantized = source.scales is not None
    dtype = source.weight.dtype if source.scales is None else source.scales.dtype
    if dtype not in KERNEL_DTYPES:
        return f"{dtype} weights or scales"
    bits, group_size = source.bits or 16, source.group_size or 32
    if source.mode != "affine":
        return f"{source.mode} weights"
    if not kernels_take(bits, group_size):
        return f"{bits} bit weights in groups of {group_size}"
    if source.bias is not None and source.bias.dtype != dtype:
        return f"a bias of {source.bias.dtype} beside {dtype}"
    rows, words = source.weight.shape
    columns = words * 32 // bits if quantized else words
    if columns % 32:
        return f"a width of {columns}, not a multiple of 32"
    return Matrix(
        constants=source.buffer,
        norm=source.norm,
        has_bias=source.bias is not None,
        bits=bits,
        group_size=group_size,
        rows=rows,
        columns=columns,
        dtype=dtype,
    )
