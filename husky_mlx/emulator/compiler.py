"""The clang that compiles kernels, and the cache of what it made."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from husky_mlx.emulator.errors import EmulatorError
from husky_mlx.metal_text import kernel_folder
from husky_mlx.paths import cache_dir

OLDEST_CLANG = 16
_HERE = Path(__file__).resolve().parent
_RUNTIME = ("scheduler", "memory", "history", "instrumentation")

_ADDRESS_SPACE = re.compile(r"address.space|\b(?:device|constant|threadgroup)\b")

_COMMON = ("-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti")
_KERNEL = (
    *_COMMON,
    "-gline-tables-only",
    "-Wno-everything",
    "-Werror=vla",
    "-Werror=return-type",
    "-Werror=frame-larger-than=65536",
    "-ferror-limit=20",
    "-ffp-contract=on",
    "-fno-math-errno",
    "-I",
    str(_HERE / "include"),
    "-I",
    str(kernel_folder()),
)
# Each check sees one element's access, so loads must not be merged into wider ones.
_CHECKED = (
    "-O1",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fsanitize=thread",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    "-fsanitize=array-bounds,alignment,integer-divide-by-zero,shift-exponent",
    "-ftrivial-auto-var-init=pattern",
)


@functools.cache
def command() -> tuple[str, ...]:
    """The compiler's command: $HUSKY_CLANG, the ziglang package, or a clang++ of the system.

    Raises EmulatorError that says what to install.
    """
    chosen = os.environ.get("HUSKY_CLANG")
    if chosen:
        if shutil.which(chosen.split()[0]) is None:
            raise EmulatorError("compile", f"HUSKY_CLANG={chosen}: no such program")
        return tuple(chosen.split())
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    for name in (*(f"clang++-{version}" for version in range(30, OLDEST_CLANG - 1, -1)), "clang++"):
        path = shutil.which(name)
        if path is not None and _clang_version(path) >= OLDEST_CLANG:
            return (path,)
    raise EmulatorError(
        "compile",
        f"the emulator needs clang {OLDEST_CLANG} or newer: pip install ziglang (a clang in a "
        "wheel, part of husky_mlx's test extra), or set HUSKY_CLANG to a clang++",
    )


def _clang_version(path: str) -> int:
    reply = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"clang version (\d+)", reply.stdout)
    return int(found[1]) if found else 0


@functools.cache
def _identity() -> str:
    """What a compiled file depends on besides its text: the compiler and the headers."""
    if "ziglang" in command():
        version = importlib.metadata.version("ziglang")
    else:
        version = subprocess.run(
            [*command(), "--version"], capture_output=True, text=True, check=False
        ).stdout
    digest = hashlib.sha256(repr((version, command(), platform.machine())).encode())
    for folder in (_HERE / "include", _HERE / "runtime", kernel_folder() / "prelude"):
        for path in sorted(folder.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _machine_flags() -> list[str]:
    # F16C of this level converts half; without it each conversion calls a library that is not
    # linked here.
    return ["-march=x86-64-v3"] if platform.machine() in ("x86_64", "AMD64") else []


def build(program: str, address_check: str, *, checked: bool) -> Path:
    """The shared library of a kernel, compiled unless the cache has it.

    ``program`` and ``address_check`` are translate's two texts; both must compile, and a library in
    the cache has passed both. ``checked`` compiles in the checks of every access.
    Raises EmulatorError of kind ``compile`` or ``address space`` with the compiler's messages.
    """
    flags = [*_KERNEL, *_machine_flags(), *(_CHECKED if checked else ("-O2",))]
    key = hashlib.sha256(repr((program, address_check, flags, _identity())).encode()).hexdigest()
    folder = cache_dir() / "emulator"
    library = folder / f"{key[:32]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    runtime = _runtime_objects(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as name:
        work = Path(name)
        (work / "kernel.cpp").write_text(program)
        (work / "check.cpp").write_text(address_check)
        check_flags = ["-std=c++17", "-fsyntax-only", "-w", "-I", str(_HERE / "include")]
        output = ["-c", "-o", str(work / "kernel.o")]
        checking = _start(_plain_clang(), [*check_flags, str(work / "check.cpp")])
        compiling = _start(_plain_clang(), [*flags, *output, str(work / "kernel.cpp")])
        compile_problem, address_problem = _problem(compiling), _problem(checking)
        if compile_problem:
            raise EmulatorError("compile", compile_problem)
        if address_problem:
            about_spaces = _ADDRESS_SPACE.search(address_problem)
            raise EmulatorError("address space" if about_spaces else "compile", address_problem)
        _link([work / "kernel.o", *runtime], work / "kernel.so")
        os.replace(work / "kernel.so", library)
    return library


def _runtime_objects(folder: Path) -> list[Path]:
    """The runtime's object files. A second process at the same time makes the same files again."""
    objects = [folder / f"{name}-{_identity()[:32]}.o" for name in _RUNTIME]
    missing = [path for path in objects if not path.exists()]
    if missing:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as name:
            started = []
            for path in missing:
                source = _HERE / "runtime" / f"{path.name.split('-')[0]}.cpp"
                target = Path(name) / path.name
                arguments = [*_COMMON, "-O2", "-c", str(source), "-o", str(target)]
                started.append((_start(command(), arguments), target, path))
            for process, target, path in started:
                problem = _problem(process)
                if problem:
                    raise EmulatorError("compile", f"the emulator's own runtime: {problem}")
                os.replace(target, path)
    return objects


def _link(objects: Sequence[Path], library: Path) -> None:
    # No libraries: the process that loads it has libc and libm.
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    flags = ["-shared", "-nostdlib", *undefined, "-o", str(library)]
    problem = _problem(_start(command(), [*flags, *map(str, objects)]))
    if problem:
        raise EmulatorError("compile", f"linking: {problem}")


def _plain_clang() -> tuple[str, ...]:
    # zig's own c++ command adds a cache and C's headers, which a kernel must not see.
    if "ziglang" in command():
        return (*command()[:-1], "clang", "-x", "c++")
    return command()


def _start(program: Sequence[str], arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache_dir() / "emulator" / "zig")},
    )


def _problem(process: subprocess.Popen[str]) -> str:
    """The compiler's errors with its notes on address spaces, or nothing when it succeeded."""
    _, output = process.communicate()
    if process.returncode == 0:
        return ""
    lines = output.splitlines()
    errors = [line for line in lines if "error:" in line or _ADDRESS_SPACE.search(line)]
    return "\n".join(errors[:8]) or output[-2000:] or f"exit status {process.returncode}"
