"""How fast this machine copies memory now: the roof that every decode step is measured against."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

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


def copy_bandwidth() -> float:
    """GB/s read and written, the best of a few rounds: MLX's own copy on a GPU, on a CPU a copy by
    all cores at once."""
    if device.target() != "cpu":
        watch = Stopwatch()
        return max(watch.copy_bandwidth() for _ in range(ROUNDS))
    return cpu_copy_bandwidth(COPY_BYTES, available_cores())


def copy_bandwidth_apart() -> float:
    """The same in a process of its own, whose buffers are nobody else's memory.

    Raises HuskyError with its last words where it fails.
    """
    command = [sys.executable, "-m", "husky_mlx.bandwidth"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=child_environment()
    )
    if done.returncode:
        raise HuskyError(f"the bandwidth of copying could not be measured: {done.stderr.strip()}")
    return float(done.stdout.split()[-1])


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
    print(copy_bandwidth())
