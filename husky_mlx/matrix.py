"""A projection's storage as the kernels take it, or why they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from husky_mlx.pack import Fused

KERNEL_BITS = (4, 8, 16)
KERNEL_GROUP_SIZES = (32, 64, 128)
KERNEL_DTYPES = (mx.float16, mx.bfloat16, mx.float32)


@dataclass(frozen=True)
class Matrix:
    """(rows, columns) of 4 or 8 ``bits`` in MLX's affine layout, or 16 for plain ``dtype``.

    ``scales`` and ``biases`` (rows, columns / group_size) and ``bias`` (rows,) are in ``dtype``;
    those that the storage lacks are a stand-in that no kernel reads.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bias: mx.array
    has_bias: bool
    bits: int
    group_size: int
    rows: int
    columns: int
    dtype: mx.Dtype

    @property
    def inputs(self) -> dict[str, mx.array]:
        return {"weight": self.weight, "scales": self.scales, "biases": self.biases}

    @property
    def template(self) -> dict[str, Any]:
        return {"T": self.dtype, "BITS": self.bits, "GROUP": self.group_size}


def matrix_of(source: Any) -> Matrix | str:
    """The Matrix of a fused buffer, a linear layer or an embedding; else the reason why not."""
    plain = type(source) in (nn.Linear, nn.Embedding)
    packed = type(source) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
    if isinstance(source, Fused):
        plain, packed = source.scales is None, source.scales is not None
        bias = source.bias
    elif plain or packed:
        bias = source.get("bias")
    else:
        return getattr(source, "reason", f"a {type(source).__name__}")
    weight = source.weight
    dtype = source.scales.dtype if packed else weight.dtype
    if dtype not in KERNEL_DTYPES:
        return f"{dtype} weights or scales"
    bits, group_size = (source.bits, source.group_size) if packed else (16, 32)
    if packed and source.mode != "affine":
        return f"{source.mode} weights"
    if bits not in KERNEL_BITS or group_size not in KERNEL_GROUP_SIZES:
        return f"{bits} bit weights in groups of {group_size}"
    rows, columns = weight.shape[0], weight.shape[1] * 32 // bits if packed else weight.shape[1]
    if columns % 32:
        return f"a width of {columns}, not a multiple of 32"
    stand_in = mx.zeros((8,), dtype)
    mx.eval(stand_in)
    return Matrix(
        weight=weight,
        scales=source.scales if packed else stand_in,
        biases=source.biases if packed else stand_in,
        bias=stand_in if bias is None else bias,
        has_bias=bias is not None,
        bits=bits,
        group_size=group_size,
        rows=rows,
        columns=columns,
        dtype=dtype,
    )
