"""The C++ compiler of this machine, and exactly what it will compile for."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from husky_mlx.native.errors import NativeError

OLDEST_GCC = 9
OLDEST_CLANG = 12
_PROBE_SECONDS = 60
_BUILD_SECONDS = 600

_HERE = Path(__file__).resolve().parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wno-psabi",
)
# zig would build a C++ library for a minute. None is needed: no code of it is outside its headers,
# and the process that loads the program has libc and libm.
_LINK_FLAGS = ("-shared", "-pthread")
_ZIG_LINK_FLAGS = ("-shared", "-nostdlib")


@dataclass(frozen=True)
class Compiler:
    """A compiler's command, its flags with the one for this CPU, and what they amount to.

    ``identity`` changes with the compiler's version and with the instructions that it may use:
    its predefined macros name both.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]
    name: str
    identity: str

    def build(self, source: Path, library: Path) -> None:
        """Compile one translation unit to a shared library. NativeError with what went wrong."""
        objects = library.with_suffix(".o")
        self._run([*self.flags, "-I", str(_HERE), "-c", str(source), "-o", str(objects)], library)
        link_flags = _ZIG_LINK_FLAGS if "ziglang" in self.command else _LINK_FLAGS
        self._run([*link_flags, str(objects), "-o", str(library)], library)

    def _run(self, arguments: Sequence[str], library: Path) -> None:
        try:
            done = _run([*self.command, *arguments], _BUILD_SECONDS, library.parent)
        except subprocess.TimeoutExpired:
            raise NativeError([f"{self.name} took more than {_BUILD_SECONDS} seconds"]) from None
        if done.returncode != 0:
            lines = done.stderr.splitlines()
            errors = [line for line in lines if "error" in line][:3] or lines[-3:]
            raise NativeError([f"{self.name} failed: {' | '.join(errors) or done.returncode}"])


@functools.cache
def find() -> Compiler:
    """$CXX, the system's C++ compiler, or the one in the package ``ziglang``.

    NativeError says what was tried and what to install.
    """
    refused = []
    for command in _candidates():
        found = _probe(command)
        if isinstance(found, Compiler):
            return found
        refused.append(f"{shlex.join(command)}: {found}")
    tried = f" (tried {'; '.join(refused)})" if refused else ""
    raise NativeError(
        [
            f"no C++ compiler{tried}: install g++ {OLDEST_GCC} or clang++ {OLDEST_CLANG} or newer, "
            "or the one that pip brings: pip install ziglang"
        ]
    )


def headers() -> dict[str, bytes]:
    """The text of the headers that every program includes, by name."""
    return {path.name: path.read_bytes() for path in sorted(_HERE.glob("*.h"))}


def _candidates() -> list[tuple[str, ...]]:
    if chosen := os.environ.get("CXX"):
        return [tuple(shlex.split(chosen))]
    found: list[tuple[str, ...]] = [
        (path,) for name in ("c++", "g++", "clang++") if (path := shutil.which(name))
    ]
    if importlib.util.find_spec("ziglang") is not None:
        found.append((sys.executable, "-m", "ziglang", "c++"))
    return found


def _probe(command: tuple[str, ...]) -> Compiler | str:
    """The compiler behind a command, or why it cannot be used."""
    names_architecture = platform.machine() in ("x86_64", "AMD64") and "ziglang" not in command
    flags = (*_FLAGS, "-march=native" if names_architecture else "-mcpu=native")
    try:
        with tempfile.TemporaryDirectory(prefix="husky-") as work:
            probe = Path(work) / "probe.cpp"
            probe.touch()
            arguments = [*command, *flags, "-dM", "-E", str(probe)]
            done = _run(arguments, _PROBE_SECONDS, Path(work))
    except FileNotFoundError:
        return "no such program"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
    macros = dict(re.findall(r"^#define (\w+) (.*)$", done.stdout, re.MULTILINE))
    problem = _too_old(macros)
    if problem is not None:
        return problem
    version = macros.get("__VERSION__", "").strip('"')
    name = f"{Path(command[0]).name if 'ziglang' not in command else 'ziglang'} ({version})"
    facts = (command, flags, _LINK_FLAGS, _ZIG_LINK_FLAGS, sorted(macros.items()))
    digest = hashlib.sha256(repr(facts).encode())
    return Compiler(command, flags, name, digest.hexdigest())


def _too_old(macros: Mapping[str, str]) -> str | None:
    clang = "__clang__" in macros
    found = int(macros.get("__clang_major__" if clang else "__GNUC__", 0))
    name, oldest = ("clang", OLDEST_CLANG) if clang else ("gcc", OLDEST_GCC)
    return None if found >= oldest else f"{name} {found} is older than {oldest}"


def _run(command: Sequence[str], seconds: int, work: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
        # zig keeps caches; what it compiles here once it need not keep.
        env={
            **os.environ,
            "LC_ALL": "C",
            "ZIG_GLOBAL_CACHE_DIR": str(work / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(work / "zig"),
        },
    )
