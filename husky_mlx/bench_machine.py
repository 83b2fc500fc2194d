"""The machine as ``husky bench`` records it: what it is, and what else it did meanwhile."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

import husky_mlx
from husky_mlx import device

MEGABYTE = 1e6
# Of all cores: what other processes may take before the run counts as disturbed.
BUSY_SHARE = 0.10


def describe_machine() -> dict[str, Any]:
    """Target (cpu, metal, cuda), device, processor, memory, power source, system and versions."""
    memory = psutil.virtual_memory()
    return {
        "target": device.target(),
        "machine": {
            "device": device.chip(),
            "chip": _processor(),
            "cores": os.cpu_count(),
            "memory_mb": memory.total / MEGABYTE,
            "available_mb": memory.available / MEGABYTE,
            "power": power_source(),
            "os": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {
            "husky_mlx": husky_mlx.__version__,
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
        },
    }


def power_source() -> str:
    """``battery``, ``mains``, or ``unknown`` where there is no battery to ask."""
    # Not on every system psutil has this.
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is None:
        return "unknown"
    return "mains" if battery.power_plugged else "battery"


def _processor() -> str:
    if sys.platform == "darwin":
        return device.sysctl("machdep.cpu.brand_string") or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class Bystanders:
    """How much of the CPU other processes use, from now until ``share`` is asked for."""

    def __init__(self, pids: Iterable[int]):
        self._pids = [os.getpid(), *pids]
        self._started = time.monotonic()
        self._busy, self._own = _busy_seconds(), self._own_seconds()

    def share(self) -> float:
        """From 0 to 1 of all cores; what the system itself did for our processes is not counted."""
        seconds = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        others = (_busy_seconds() - self._busy) - (self._own_seconds() - self._own)
        return min(max(others / max(seconds, 1e-9), 0.0), 1.0)

    def _own_seconds(self) -> float:
        total = 0.0
        for pid in self._pids:
            with contextlib.suppress(psutil.Error):  # one that ended
                # What a process of ours has compiled counts as ours, where the system says so.
                times = psutil.Process(pid).cpu_times()._asdict()
                names = ("user", "system", "children_user", "children_system")
                total += sum(times.get(name, 0.0) for name in names)
        return total


def _busy_seconds() -> float:
    """Seconds of all cores in which anything ran, those stolen from a virtual machine included."""
    times = psutil.cpu_times()._asdict()
    # Linux counts the time of guests as a part of user time.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return sum(value for name, value in times.items() if name not in idle)
