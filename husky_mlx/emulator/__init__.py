"""Runs kernels written for ``mx.fast.metal_kernel`` on the CPU, from the same Metal text.

It checks what no GPU checks: bounds, races, barriers, unwritten memory, address spaces.

    kernel = emulator.metal_kernel("twice", ["x"], ["y"], "...")
    (y,) = kernel(inputs=[x], grid=(64, 1, 1), threadgroup=(32, 1, 1),
                  output_shapes=[(64,)], output_dtypes=[np.float32])
"""

from __future__ import annotations

from husky_mlx.emulator.errors import EmulatorError
from husky_mlx.emulator.kernel import MetalKernel, Outputs, metal_kernel

__all__ = ["EmulatorError", "MetalKernel", "Outputs", "metal_kernel"]
