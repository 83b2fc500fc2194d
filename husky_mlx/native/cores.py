"""How many threads compute at the same time here."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may run on, and no more than its container's share of time buys.

    Threads beyond that share would spend it on waiting for each other.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, math.floor(min(cores, _quota(cgroup))))


def _quota(cgroup: Path) -> float:
    """Cores' worth of time that the container has, infinity where nothing limits it."""
    with contextlib.suppress(OSError, ValueError):
        share, every = (cgroup / "cpu.max").read_text().split()
        return math.inf if share == "max" else int(share) / int(every)
    with contextlib.suppress(OSError, ValueError):
        quota = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        period = int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
        return math.inf if quota < 0 else quota / period
    return math.inf
