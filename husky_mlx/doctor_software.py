"""The part of ``husky doctor`` that looks at software: Python, system, MLX, mlx-lm, compiler."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from husky_mlx import contract, device, switches
from husky_mlx.device import sysctl
from husky_mlx.doctor_report import Finding, fail, installed, ok, warn
from husky_mlx.native import NativeError, compiler

OLDEST_MACOS = (14, 0)
OLDEST_GLIBC = (2, 35)
# MLX's fences were wrong before it where an index array's buffer was given away (ml-explore/mlx
# issue 4099), mlx-lm's caches and loops are those that contract.py checks.
OLDEST = {"mlx": "0.32.2", "mlx-lm": "0.32.2"}
# (package, version, target, what is wrong with it)
KNOWN_BAD = (
    ("mlx", "0.32.2", "cuda", "its cache of CUDA graphs raises when it is twice as full as meant"),
)
BACKEND_PACKAGES = ("mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13")


def python() -> Iterator[Finding]:
    """Native code for this processor: Rosetta's Python would find neither Metal nor NEON."""
    found = f"Python {platform.python_version()}, {platform.machine()}, {sys.executable}"
    if sysctl("sysctl.proc_translated") == "1":
        yield fail(
            "python",
            f"{found}: x86 code that Rosetta translates",
            "install an arm64 Python, for instance from python.org, and make a new environment",
        )
    else:
        yield ok("python", found)


def system() -> Iterator[Finding]:
    """The versions that MLX's wheels are built for."""
    mac = platform.mac_ver()[0]
    if mac:
        found, oldest, have = f"macOS {mac}", OLDEST_MACOS, _numbers(mac)
    else:
        library, number = platform.libc_ver()
        found = f"{platform.system()} {platform.release()}, {library or 'libc'} {number}"
        oldest, have = OLDEST_GLIBC, _numbers(number)
    if have and have < oldest:
        wanted = ".".join(map(str, oldest))
        yield fail("system", found, f"{wanted} or newer is needed: update the system")
    else:
        yield ok("system", found)


def versions() -> Iterator[Finding]:
    """MLX and mlx-lm: old ones, ones that are known to be bad, and what we build on in mlx-lm."""
    target = device.target()
    for package, oldest in OLDEST.items():
        have = installed(package) or "0"
        bad = [
            why
            for name, number, on, why in KNOWN_BAD
            if (name, number, on) == (package, have, target)
        ]
        if _numbers(have) < _numbers(oldest):
            yield fail(
                package, f"{have} is older than {oldest}", f"pip install -U '{package}>={oldest}'"
            )
        elif bad:
            yield warn(package, f"{have}: {bad[0]}", f"pip install -U {package}")
        else:
            yield ok(package, have)
    if broken := contract.violations():
        yield fail(
            "mlx-lm contract",
            f"husky_mlx does not fit mlx-lm {installed('mlx-lm')}: {'; '.join(broken)}",
            f"pip install 'mlx-lm=={OLDEST['mlx-lm']}'; until then stock mlx-lm runs",
        )


def mlx_build() -> Iterator[Finding]:
    """One backend, of MLX's own version, that fits the hardware."""
    backends = {name: number for name in BACKEND_PACKAGES if (number := installed(name))}
    words = ", ".join(f"{name} {number}" for name, number in backends.items())
    found = f"{device.target()}{f' ({words})' if words else ''}"
    mlx = installed("mlx")
    others = [name for name, number in backends.items() if number != mlx]
    if len(backends) > 1:
        yield fail(
            "mlx build",
            f"{found}: these exclude each other",
            f"pip uninstall -y {' '.join(['mlx', *backends])}, then install husky_mlx with one "
            "of [cpu], [cuda12] and [cuda13]",
        )
    elif others:
        yield fail(
            "mlx build",
            f"{found}, but mlx {mlx}: parts of two releases",
            f"pip install --force-reinstall mlx=={mlx} {others[0]}=={mlx}",
        )
    elif sys.platform == "darwin" and not mx.metal.is_available():
        yield fail(
            "mlx build",
            f"{found}: MLX finds no Metal device",
            "run on the Mac itself, not in a virtual machine, with MLX's arm64 wheel",
        )
    elif device.target() == "cpu" and (gpu := _nvidia_gpu()):
        yield fail(
            "mlx build",
            f"{found}, but there is an {gpu}",
            "pip uninstall -y mlx-cpu, then pip install 'mlx[cuda13]' (or [cuda12] for older "
            "drivers)",
        )
    else:
        yield ok("mlx build", found)


def cpp_compiler() -> Iterator[Finding]:
    """What the native program of the CPU is built with, and MLX's own fused CPU kernels."""
    report = fail if device.target() == "cpu" else warn
    try:
        yield ok("compiler", compiler.find().name)
    except NativeError as error:
        yield report(
            "compiler", str(error), "without it the CPU runs plain MLX, several times slower"
        )
    if problem := device.compile_problem():
        yield warn("mlx compile", problem, "install g++: without it MLX fuses nothing on the CPU")


def variables() -> Iterator[Finding]:
    """Variables that change what runs, and those that are set to what they do not take."""
    problems = switches.problems()
    for problem in problems:
        yield fail("environment", str(problem), "correct or unset it: until then no model loads")
    found = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("HUSKY_", "MLX_"))
    ]
    if found and not problems:
        yield ok("environment", ", ".join(found))


def _nvidia_gpu() -> str | None:
    """The name of an NVIDIA GPU whose driver is loaded."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.removeprefix("Model:").strip()
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    return tuple(int(part) for part in text.split(".")[:3] if part.isdecimal())
