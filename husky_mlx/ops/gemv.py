"""What the launches of the matrix-vector kernels share."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from husky_mlx.chips import Chip
from husky_mlx.kernels import ArraySpec, launch
from husky_mlx.matrix import Matrix
from husky_mlx.policy import chained_tile, policy
from husky_mlx.tiles import GemvShape, GemvTile

# Operation, shape and bits of a product.
TileKey = tuple[str, GemvShape, int]


@dataclass(frozen=True)
class Platform:
    """Where kernels are launched: the chip for the policy, the backend for the launch, and
    ``tiles`` that are taken instead of the policy's. ``chained``: in one launch with others."""

    chip: Chip
    backend: str
    tiles: Mapping[TileKey, GemvTile] = field(default_factory=dict, hash=False)
    chained: bool = False


def float_bits(number: float) -> int:
    """The bits of a float32 as the integer that a kernel's template takes."""
    return struct.unpack("<i", struct.pack("<f", number))[0]


def normed(
    op: str, x: mx.array, eps: float, matrix: Matrix, platform: Platform
) -> tuple[mx.array, GemvTile]:
    """x (M, K), normed here unless the kernel does it, and the tile for the projection."""
    tile = gemv_tile(op, x.shape[0], matrix, platform, norm=True)
    return (x if tile.norm else mx.fast.rms_norm(x, matrix.norm, eps)), tile


def gemv_tile(
    op: str, rows: int, matrix: Matrix, platform: Platform, norm: bool = False
) -> GemvTile:
    """The tile for ``rows`` rows of x against ``matrix``: the platform's own, or the policy's."""
    shape = GemvShape(
        m=rows, n=matrix.rows, k=matrix.columns, norm=norm, itemsize=matrix.dtype.size
    )
    if (chosen := platform.tiles.get((op, shape, matrix.bits))) is not None:
        return chosen
    if platform.chained:
        return chained_tile(op, shape, matrix.bits, matrix.group_size, platform.chip)
    tile = policy(op, shape, matrix.bits, platform.chip)
    assert isinstance(tile, GemvTile)
    return tile


def launch_gemv(
    op: str,
    matrix: Matrix,
    tile: GemvTile,
    threadgroups: int,
    inputs: Mapping[str, mx.array],
    outputs: Sequence[ArraySpec],
    template: Mapping[str, Any],
    platform: Platform,
) -> list[mx.array]:
    """Launch ``op`` over ``threadgroups`` tiles of ``matrix``."""
    cut = tile.template()
    if "EPS_BITS" not in template:
        del cut["NORM"]
    return launch(
        op,
        {**inputs, "constants": matrix.constants},
        outputs,
        {**matrix.template, "K": matrix.columns, **cut, **template},
        (threadgroups * tile.threadgroup[0], 1, 1),
        tile.threadgroup,
        platform.backend,
    )
