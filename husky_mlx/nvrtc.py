"""NVIDIA's run-time compiler, the one that MLX's CUDA build brings, through its C interface."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path


class NvrtcError(RuntimeError):
    """The compiler refused a source; the message is its log."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiler's library, or None where there is none."""
    names = [f"libnvrtc.so.{major}" for major in (13, 12)]
    files = [str(path) for root in _packages() for path in root.rglob("libnvrtc.so.*")]
    # The one that MLX has loaded, if it has: another one's code may be too new for the driver.
    loaded = [(name, os.RTLD_NOLOAD | os.RTLD_NOW) for name in names]
    for name, mode in [*loaded, *((name, ctypes.DEFAULT_MODE) for name in files + names)]:
        try:
            return ctypes.CDLL(name, mode)
        except OSError:
            continue
    return None


def version() -> str:
    """``13.0``. Raises OSError where there is no compiler."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _loaded().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_cubin(source: str, architecture: str) -> bytes:
    """The machine code of CUDA C++ text for ``architecture`` (``sm_90a``).

    Raises NvrtcError with the compiler's log, OSError where there is no compiler.
    """
    nvrtc = _loaded()
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"husky.cu", 0, None, None
        ),
        "cannot be set up",
    )
    try:
        options = [f"--gpu-architecture={architecture}"]
        options += [f"--include-path={folder}" for folder in include_folders()]
        values = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = nvrtc.nvrtcCompileProgram(program, len(options), values)
        if failed:
            raise NvrtcError(_read(nvrtc.nvrtcGetProgramLog, nvrtc.nvrtcGetProgramLogSize, program))
        return _read_bytes(nvrtc.nvrtcGetCUBIN, nvrtc.nvrtcGetCUBINSize, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _loaded() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise OSError("no libnvrtc.so of CUDA 12 or 13")
    return found


def _check(result: int, what: str) -> None:
    if result:
        raise NvrtcError(f"NVRTC {what} (error {result})")


def _read_bytes(read: ctypes._NamedFuncPointer, size: ctypes._NamedFuncPointer, program) -> bytes:  # type: ignore[no-untyped-def]
    length = ctypes.c_size_t()
    _check(size(program, ctypes.byref(length)), "has no result")
    buffer = ctypes.create_string_buffer(length.value)
    _check(read(program, buffer), "has no result")
    return buffer.raw


def _read(read: ctypes._NamedFuncPointer, size: ctypes._NamedFuncPointer, program) -> str:  # type: ignore[no-untyped-def]
    return _read_bytes(read, size, program).rstrip(b"\0").decode(errors="replace")


def _packages() -> list[Path]:
    """The folders of NVIDIA's Python packages, which MLX's CUDA build requires."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def include_folders() -> list[Path]:
    """Where CUDA's headers are, in MLX's order: its packages, then a toolkit."""
    folders = [root / name / "include" for root in _packages() for name in ("cu13", "cuda_runtime")]
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders += [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    return [folder for folder in folders if (folder / "cuda_fp16.h").is_file()]
