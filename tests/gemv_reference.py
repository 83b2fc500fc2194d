"""Random projections in every storage format with what they are worth in float64, and launches of
the GEMV kernels on all of their schemes: lanes (any platform), mma and integer (CUDA's, their
instructions emulated)."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from husky_mlx import emulator, kernels
from husky_mlx.kernel_source import kernel_source
from husky_mlx.layout import join
from husky_mlx.tiles import GemvShape, GemvTile

EPS = 1e-5
EPS_BITS = struct.unpack("i", struct.pack("f", EPS))[0]
EMULATED_MMA = Path(__file__).parent / "emulated_mma"


# Largest error over the largest output: half a unit in the output's last place, and float32 sums.
TOLERANCE = {mx.float32: 3e-6, mx.float16: 5.5e-4, mx.bfloat16: 4.2e-3}
FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (16, 32)]
# ROWS, SIMDGROUPS, KSPLIT, UNROLL. K is split by more simdgroups than there are steps in the last.
TILES = {
    "lanes": [
        GemvTile(4, 2, 1, 1),
        GemvTile(2, 4, 2, 2),
        GemvTile(8, 2, 2, 1),
        GemvTile(2, 8, 8, 1),
    ],
    "mma": [
        GemvTile(16, 2, 1, 1),
        GemvTile(16, 4, 2, 2),
        GemvTile(32, 2, 2, 1),
        GemvTile(16, 8, 8, 2),
    ],
}
TILES["integer"] = [replace(tile, integer=True) for tile in TILES["mma"]]
# Widths with and without a tail, for every group size; SmolLM2's are 576 and 1536.
WIDTHS = {32: (96, 160, 576, 1536), 64: (192, 320, 576, 1536), 128: (128, 384, 640, 1536)}
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


@dataclass
class Weights:
    """A (rows, columns) matrix as the kernels take it, and its float64 values."""

    parts: list[mx.array]
    exact: np.ndarray

    def constants(self, *more: mx.array) -> mx.array:
        return join([[array] for array in (*self.parts, *more)])[0]


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def normal(rng, shape, dtype, spread=1.0, center=0.0) -> mx.array:
    return mx.array(rng.standard_normal(shape) * spread + center).astype(dtype)


def random_weights(rng, rows, columns, bits, group, dtype) -> Weights:
    """Codes of all values, in MLX's packing: the first value in a uint32's lowest bits."""
    if bits == 16:
        weight = normal(rng, (rows, columns), dtype, 0.1)
        return Weights([weight], exact(weight))
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
    return Weights([mx.array(words), scales, biases], values.reshape(rows, columns))


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
        threadgroup_memory=99 * 1024,  # the least that a GPU of NVIDIA's has
    )
    for name, array in made.updated.items():
        inputs[name][...] = array
    return made


def check(found: mx.array, wanted: np.ndarray, case: str = "", tolerance: float = 0.0) -> None:
    tolerance = tolerance or TOLERANCE[found.dtype]
    error = np.abs(exact(found) - wanted).max() / np.abs(wanted).max()
    assert error <= tolerance, f"{case} {found.dtype}: {error:.2e} > {tolerance:.2e}"


def cases(scheme: str, shift: int, queue: int = 0):
    """Every format, with rows of x, widths, dtypes and tiles that go round as the formats do."""
    packed = [(bits, group) for bits, group in FORMATS if bits < 16]
    for i, (bits, group) in enumerate(packed if scheme == "integer" else FORMATS):
        turn = i + shift
        dtype = DTYPES[turn % (3 if scheme == "lanes" else 2)]
        columns = WIDTHS[group][turn % 4]
        tile = replace(TILES[scheme][(turn // 2) % 4], queue=queue)
        name = f"{scheme}-queue" if queue else scheme
        yield pytest.param(
            scheme, bits, group, dtype, turn % 4 + 1, columns, tile, id=f"{name}-{bits}-{group}"
        )


def all_cases(shift: int):
    return pytest.mark.parametrize(
        ("scheme", "bits", "group", "dtype", "m", "columns", "tile"),
        [
            *cases("lanes", shift),
            *cases("mma", shift + 1),
            *cases("integer", shift + 2),
            *cases("mma", shift + 2, queue=shift % 3 + 1),
            *cases("integer", shift + 3, queue=(shift + 1) % 3 + 1),
        ],
    )


def template_of(bits, group, dtype, m, columns, tile, **more):
    template = {"T": dtype, "BITS": bits, "GROUP": group, "K": columns, "M": m, **tile.template()}
    if "NORM" not in more:
        template.pop("NORM")
    return {**template, **more}
