"""What the launches of kernels with a thread for a few values share."""

from __future__ import annotations

from husky_mlx.kernels import Grid

THREADS = 256


def flat(threads: int) -> tuple[Grid, Grid]:
    """Grid and threadgroup for at least ``threads`` threads; the kernel lets the rest go."""
    return (-(-threads // THREADS) * THREADS, 1, 1), (THREADS, 1, 1)
