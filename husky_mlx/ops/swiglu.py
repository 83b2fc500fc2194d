"""The MLP's activation for a prompt."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.kernels import launch
from husky_mlx.ops.elementwise import flat
from husky_mlx.ops.gemv import Platform


def swiglu_kernel(gate_up: mx.array, platform: Platform) -> mx.array:
    """(L, 2 N), in each row gate's values and then up's -> silu(gate) * up, (L, N)."""
    length, width = gate_up.shape[0], gate_up.shape[1] // 2
    grid, threadgroup = flat(length * width // 4)
    (activated,) = launch(
        "swiglu",
        {"gate_up": gate_up},
        [((length, width), gate_up.dtype)],
        {"T": gate_up.dtype, "N": width},
        grid,
        threadgroup,
        platform.backend,
    )
    return activated
