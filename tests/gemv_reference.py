"""Random projections in every storage format with what they are worth in float64, and launches of
the GEMV kernels on both of their schemes: lanes (any platform) and mma (CUDA's, its instructions
emulated)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from husky_mlx import emulator, kernels
from husky_mlx.kernel_source import kernel_source
from husky_mlx.tiles import GemvShape, GemvTile

EPS = 1e-5
EPS_BITS = struct.unpack("i", struct.pack("f", EPS))[0]
EMULATED_MMA = Path(__file__).parent / "emulated_mma"


@dataclass
class Weights:
    """A (rows, columns) matrix as the kernels take it, and its float64 values."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    exact: np.ndarray


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def normal(rng, shape, dtype, spread=1.0, center=0.0) -> mx.array:
    return mx.array(rng.standard_normal(shape) * spread + center).astype(dtype)


def random_weights(rng, rows, columns, bits, group, dtype) -> Weights:
    """Codes of all values, in MLX's packing: the first value in a uint32's lowest bits."""
    if bits == 16:
        weight = normal(rng, (rows, columns), dtype, 0.1)
        stand_in = mx.zeros((8,), dtype)
        return Weights(weight, stand_in, stand_in, exact(weight))
    codes = rng.integers(0, 2**bits, (rows, columns), dtype=np.uint32)
    each = 32 // bits
    shifts = np.arange(each, dtype=np.uint32) * bits
    words = (codes.reshape(rows, -1, each) << shifts).sum(axis=-1, dtype=np.uint32)
    step = 0.3 / (2**bits - 1)
    groups = (rows, columns // group)
    # Scales of either sign, and biases that leave values about zero but not quite.
    scales = mx.array(rng.uniform(0.5, 1.5, groups) * rng.choice([-step, step], groups))
    scales = scales.astype(dtype)
    biases = (scales.astype(mx.float32) * (-(2**bits - 1) / 2) + 0.01).astype(dtype)
    values = codes.reshape(*groups, group) * exact(scales)[..., None] + exact(biases)[..., None]
    return Weights(mx.array(words), scales, biases, values.reshape(rows, columns))


def rms_norm(x: mx.array, weight: mx.array, scheme: str) -> np.ndarray:
    """In float64; the mma scheme rounds the normed x to its dtype, as a norm by itself does."""
    values = exact(x)
    scale = 1 / np.sqrt((values**2).mean(axis=-1, keepdims=True) + EPS)
    normed = values * scale * exact(weight)
    if scheme == "mma" and x.dtype != mx.float32:
        return exact(mx.array(normed.astype(np.float32)).astype(x.dtype))
    return normed


def launch(scheme, op, inputs, outputs, template, shape: GemvShape, tile: GemvTile):
    """The outputs of one kernel; inputs written in place are changed."""
    if scheme == "lanes":
        return kernels.launch(
            op, inputs, outputs, template, tile.grid(shape), tile.threadgroup, backend="emulator"
        )
    source = kernel_source(op, cuda=True, overlay=EMULATED_MMA)
    kernel = emulator.metal_kernel(
        op, source.inputs, source.outputs, source.numbered_source, source.header
    )
    made = kernel(
        inputs=[inputs[name] for name in source.inputs],
        template=[(name, template[name]) for name in source.template],
        grid=tile.grid(shape),
        threadgroup=tile.threadgroup,
        output_shapes=[size for size, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
    for name, array in made.updated.items():
        inputs[name][...] = array
    return made
