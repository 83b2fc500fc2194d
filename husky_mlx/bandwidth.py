"""How fast this machine copies memory and multiplies matrices: the roofs of decode and prefill."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import mlx.core as mx
import numpy as np

from husky_mlx import device
from husky_mlx.bench_ops_timing import Stopwatch
from husky_mlx.errors import HuskyError
from husky_mlx.native.cores import available_cores
from husky_mlx.paths import child_environment

# Of each of two buffers: far more than the caches of most CPUs hold. Where an L3 is larger than
# both (1,152 MB in an AMD EPYC 9684X) the figure is in part the cache's.
COPY_BYTES = 256_000_000
ROUNDS = 3
# Tokens, inputs and outputs of the products: the MLP of Llama-3.1-8B, where a prompt's time goes.
MATMUL_SHAPE = (4096, 4096, 14336)
MATMULS = 8


def copy_bandwidth() -> float:
    """GB/s read and written: MLX's own copy on a GPU, on a CPU a copy by all cores at once."""
    if device.target() != "cpu":
        return Stopwatch().copy_bandwidth()
    return cpu_copy_bandwidth(COPY_BYTES, available_cores())


def matmul_rate() -> float | None:
    """TFLOP/s of MLX's product of bfloat16 matrices, the best of a few rounds; None on a CPU, whose
    programs here do not multiply that way."""
    if device.target() == "cpu":
        return None
    rows, inputs, outputs = MATMUL_SHAPE
    x = mx.random.normal((rows, inputs)).astype(mx.bfloat16)
    weight = mx.random.normal((outputs, inputs)).astype(mx.bfloat16)

    def seconds() -> float:
        mx.eval(x, weight)
        mx.synchronize()
        started = time.perf_counter()
        for _ in range(MATMULS):
            mx.async_eval(x @ weight.T)
        mx.synchronize()
        return time.perf_counter() - started

    seconds()  # chooses and loads the kernel
    best = min(seconds() for _ in range(ROUNDS))
    return 2 * rows * inputs * outputs * MATMULS / best / 1e12


def roofs_apart() -> tuple[float, float | None]:
    """Both in a process of its own, whose buffers are nobody else's memory.

    Raises HuskyError with its last words where it fails.
    """
    command = [sys.executable, "-m", "husky_mlx.bandwidth"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=child_environment()
    )
    if done.returncode:
        raise HuskyError(
            f"the rates of copying and multiplying could not be measured: {done.stderr.strip()}"
        )
    copy, matmul = json.loads(done.stdout.splitlines()[-1])
    return copy, matmul


def cpu_copy_bandwidth(size: int, threads: int) -> float:
    """GB/s of copying ``size`` bytes with so many threads; numpy lets go of Python's lock."""
    source = np.ones(size, np.uint8)
    target = np.zeros(size, np.uint8)
    pieces = list(
        zip(np.array_split(source, threads), np.array_split(target, threads), strict=True)
    )

    def seconds() -> float:
        workers = [threading.Thread(target=np.copyto, args=(to, of)) for of, to in pieces]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - started

    return 2 * size / min(seconds() for _ in range(ROUNDS)) / 1e9


if __name__ == "__main__":
    print(json.dumps([copy_bandwidth(), matmul_rate()]))
