"""The part of ``husky doctor`` that looks at the machine: chip, memory, folders, hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import psutil

from husky_mlx import chips, device
from husky_mlx.bandwidth import copy_bandwidth
from husky_mlx.device import sysctl
from husky_mlx.doctor_report import Finding, fail, ok, warn
from husky_mlx.memory import megabytes, memory_limit
from husky_mlx.paths import cache_dir, existing, not_writable
from husky_mlx.policy import tuning_name

# Bytes: below the first hardly any model runs, below the second no 8B model at 4 bit.
LEAST_MEMORY, SMALL_MEMORY = 2_000_000_000, 8_000_000_000
LEAST_DISK = 2_000_000_000
# Part of the data sheet's bandwidth that a quiet machine reaches when it copies.
EXPECTED_BANDWIDTH = 0.5
HUB_SECONDS = 5


def chip() -> Iterator[Finding]:
    """The chip, and which row of the tables its kernels are cut by."""
    if device.target() == "cpu":
        yield ok("chip", f"{device.chip()}, no GPU: the native program and plain MLX operations")
        return
    found = chips.detect()
    words = f"{device.chip()}: {found.name}, generation {found.generation}, {tuning_name(found)}"
    if not found.stand_in:
        yield ok("chip", words)
    else:
        yield warn(
            "chip",
            f"{words}; its figures are not in our tables, those of a small chip stand in",
            "results are right, perhaps not the fastest: report husky doctor --json",
        )


def memory() -> Iterator[Finding]:
    """What MLX may use, and what is free now."""
    limit, virtual = memory_limit(), psutil.virtual_memory()
    wired = sysctl("iogpu.wired_limit_mb")
    wired_words = f", wired limit {wired} MiB" if wired and wired != "0" else ""
    host = f"{megabytes(virtual.total)}{wired_words}, {megabytes(virtual.available)} available now"
    found = {
        "metal": f"recommended working set {megabytes(limit)} of {host}",
        "cuda": f"the GPU has {megabytes(limit)}; the host {host}",
        "cpu": f"MLX may use {megabytes(limit)} of {host}",
    }[device.target()]
    if limit < LEAST_MEMORY:
        yield fail("memory", found, f"at least {megabytes(LEAST_MEMORY)} are needed")
    elif limit < SMALL_MEMORY or virtual.available < LEAST_MEMORY:
        yield warn(
            "memory", found, "take a small model (husky plan MODEL says what fits), close programs"
        )
    else:
        yield ok("memory", found)


def bandwidth() -> Iterator[Finding]:
    """Copying now, against the data sheet: what bounds every decode step."""
    speed = copy_bandwidth()
    chip = None if device.target() == "cpu" else chips.detect()
    sheet = None if chip is None or chip.stand_in else chip.bandwidth
    found = f"{speed:.0f} GB/s copying{f' of {sheet:g} on the data sheet' if sheet else ''}"
    if sheet and speed < EXPECTED_BANDWIDTH * sheet:
        yield warn("bandwidth", found, "is the machine busy, hot, or on low power?")
    else:
        yield ok("bandwidth", found)


def folders() -> Iterator[Finding]:
    """Where downloads, programs and verdicts go."""
    hub = Path(huggingface_hub.constants.HF_HUB_CACHE)
    for name, folder, variable, report in (
        ("cache", cache_dir(), "HUSKY_CACHE_DIR", fail),
        ("hub cache", hub, "HF_HOME", warn),
    ):
        if problem := not_writable(folder):
            yield report(name, f"{folder}: {problem}", f"set {variable} to a folder you may write")
            continue
        free = psutil.disk_usage(str(existing(folder))).free
        found = f"{folder}: {megabytes(_size(folder))} used, {megabytes(free)} free"
        if free < LEAST_DISK:
            yield warn(name, found, f"make room, or set {variable} to a folder on another disk")
        else:
            yield ok(name, found)


def hub() -> Iterator[Finding]:
    """Whether models can be fetched by name."""
    address = huggingface_hub.constants.ENDPOINT
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        yield warn("hub", "HF_HUB_OFFLINE is set: nothing is fetched", "unset it to fetch models")
        return
    try:
        reply = huggingface_hub.get_session().head(address, timeout=HUB_SECONDS)
        reply.raise_for_status()
    except Exception as error:  # of whichever HTTP library the client brings
        yield warn(
            "hub",
            f"{address} does not answer ({type(error).__name__})",
            "check the network, or set HF_ENDPOINT to a mirror; models that are here still load",
        )
    else:
        yield ok("hub", f"{address} answers")


def _size(folder: Path) -> int:
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
