"""Runs a compiled kernel: the buffers in, the buffers or the first failure out."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from husky_mlx.emulator import lines
from husky_mlx.emulator.errors import EmulatorError

_ROLES = {"input": 0, "output": 1, "shape": 2}


@dataclass
class Buffer:
    """Memory that a kernel gets: ``data`` is a contiguous array, read or written in place.

    ``role`` is ``input``, ``output`` or ``shape``; ``element_size`` counts bytes, for messages.
    """

    name: str
    role: str
    data: np.ndarray
    element_size: int
    written: bool = False


# The fields of runtime/state.h, in its order.
class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("element_size", ctypes.c_uint32),
        ("role", ctypes.c_uint32),
        ("written", ctypes.c_uint32),
    )


class _Failure(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 1536),
        ("code", ctypes.c_int64 * 2),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("threadgroups", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("seed", ctypes.c_uint32),
        ("fill", ctypes.c_uint32),
        ("check", ctypes.c_uint32),
        ("track_inputs", ctypes.c_uint32),
        ("threadgroup_memory", ctypes.c_uint32),
        ("buffer_count", ctypes.c_uint32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("failure", _Failure),
    )


@functools.cache
def _library(path: Path) -> tuple[ctypes.CDLL, threading.Lock]:
    math = ctypes.util.find_library("m")
    if math is not None:
        ctypes.CDLL(math, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path)), threading.Lock()


def run(
    library: Path,
    buffers: Sequence[Buffer],
    threadgroups: Sequence[int],
    threads: Sequence[int],
    *,
    seed: int,
    fill: int,
    checked: bool,
    track_inputs: bool,
    threadgroup_memory: int,
) -> None:
    """Runs the kernel once, in the order of lanes and threadgroups that ``seed`` gives.

    A threadgroup may have ``threadgroup_memory`` bytes of it. Outputs and threadgroup memory start
    filled with the byte ``fill``. Outputs, and inputs that the body updated in place (their
    ``written`` is set), are written back into ``buffers``. Raises EmulatorError.
    """
    described = (_Buffer * len(buffers))(
        *(
            _Buffer(
                buffer.name.encode(),
                buffer.data.ctypes.data,
                buffer.data.nbytes,
                buffer.element_size,
                _ROLES[buffer.role],
                0,
            )
            for buffer in buffers
        )
    )
    launch = _Launch(
        (ctypes.c_uint32 * 3)(*threadgroups),
        (ctypes.c_uint32 * 3)(*threads),
        seed,
        fill,
        checked,
        track_inputs,
        threadgroup_memory,
        len(buffers),
        described,
    )
    loaded, lock = _library(library)
    with lock:
        failed = loaded.emulator_launch(ctypes.byref(launch))
    if failed:
        failure = launch.failure
        message = failure.message.decode(errors="replace")
        for index, code in enumerate(failure.code):
            mark = f"{{{index}}}"
            if mark in message:
                message = message.replace(mark, lines.find(library, code))
        raise EmulatorError(failure.kind.decode(), message)
    for buffer, description in zip(buffers, described, strict=True):
        buffer.written = bool(description.written)
