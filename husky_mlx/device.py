"""What this process computes on: the target, its name, its fastest activation dtype."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys

import mlx.core as mx


def target() -> str:
    """``metal``, ``cuda`` or ``cpu``, by MLX's default device."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def chip() -> str:
    """The device's own name, as MLX reports it."""
    return str(mx.device_info().get("device_name", "unknown device"))


def sysctl(name: str) -> str | None:
    """A value of macOS; None elsewhere and where it does not know the name."""
    if sys.platform != "darwin":
        return None
    done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def activation_dtype(stored: mx.Dtype) -> mx.Dtype:
    """The dtype that activations and the KV cache take for weights stored as ``stored``.

    float32 on the CPU build: its 16-bit quantized matmul is several times slower there and off by
    up to 6 % of the largest output (bfloat16).
    """
    if target() == "cpu" and stored in (mx.float16, mx.bfloat16):
        return mx.float32
    return stored


def growth_step() -> int:
    """Tokens by which a KV cache grows at least.

    mlx-lm's 256 on GPUs. On the CPU build attention over rows that hold no token yet costs 21 us a
    row for SmolLM2's 30 layers (measured, 2 x86 cores). A trace for a new capacity takes 20 ms, but
    beside the step before it: 32.
    """
    return 32 if target() == "cpu" else 256


@functools.cache
def compile_problem() -> str | None:
    """Why ``mx.compile`` cannot run here, or None; where it cannot, it is turned off.

    MLX's CPU backend builds fused kernels with g++ in the temporary folder; without either, the
    first compiled call would end the process's reply with an error.
    """
    problem = _probe_compile()
    if problem is not None:
        # mlx-lm's samplers and MLX's activations are compiled functions too.
        mx.disable_compile()
    return problem


def _probe_compile() -> str | None:
    if target() != "cpu":
        return None
    if shutil.which("g++") is None:
        return "MLX's CPU build compiles with g++, which is not installed"
    try:
        probe = mx.compile(lambda x: mx.exp(x) * x)
        mx.eval(probe(mx.ones((2,))))
    except (RuntimeError, ValueError, OSError) as error:
        return f"MLX could not compile here: {str(error).strip().splitlines()[0]}"
    return None
