"""A matrix in MLX's affine layout: its codes, its words, and rounding to the nearest."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from husky_mlx.recipe import QuantSpec


class Packed(NamedTuple):
    """``weight`` uint32 (rows, columns * bits / 32), ``scales`` and ``biases`` (rows, groups);
    ``biases`` is None in MX formats."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None


def nearest(matrix: np.ndarray, spec: QuantSpec, dtype: mx.Dtype) -> Packed:
    """Float32 (rows, columns) as ``mx.quantize`` rounds it, with scales of ``dtype``."""
    stored = mx.array(matrix).astype(dtype)
    weight, scales, *biases = mx.quantize(stored, spec.group_size, spec.bits, mode=spec.mode)
    return Packed(weight, scales, biases[0] if biases else None)


def dequantize(packed: Packed, spec: QuantSpec) -> np.ndarray:
    """Packed -> float32 (rows, columns): codes times scales plus biases, in float32."""
    scales, biases = packed.scales, packed.biases
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    values = mx.dequantize(
        packed.weight, scales, biases, spec.group_size, spec.bits, mode=spec.mode
    )
    return np.array(values.astype(mx.float32))


def pack(
    codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, dtype: mx.Dtype
) -> Packed:
    """Codes uint8 (rows, columns) below 2**bits, scales and biases (rows, groups) -> MLX's layout.

    A row is one stream of bits, the first code in the lowest ones.
    """
    rows, columns = codes.shape
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    octets = np.packbits(stream.reshape(rows, columns * bits), axis=-1, bitorder="little")
    return Packed(
        mx.array(octets.view("<u4")),
        mx.array(scales.astype(np.float32)).astype(dtype),
        mx.array(biases.astype(np.float32)).astype(dtype),
    )


def as_stored(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Float32 values after a round trip through ``dtype``, one of MLX's three floats.

    In numpy: waiting for MLX takes longer than this, thousands of times.
    """
    if dtype == mx.bfloat16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        to_even = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return (bits + to_even & np.uint32(0xFFFF0000)).view(np.float32)
    stored = np.float16 if dtype == mx.float16 else np.float32
    return values.astype(stored).astype(np.float32)
