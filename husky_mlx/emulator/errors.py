"""The one error of the emulator."""

from __future__ import annotations

from husky_mlx.errors import HuskyError


class EmulatorError(HuskyError):
    """Something a kernel must not do, or that keeps it from running.

    ``kind`` is one of: ``compile``, ``address space``, ``arguments``, ``grid``,
    ``threadgroup size``, ``threadgroup memory``, ``out of bounds``, ``misaligned access``,
    ``write to input``, ``race``, ``uninitialised read``, ``unwritten output``,
    ``divergent barrier``, ``divergent simd operation``, ``undefined arithmetic``,
    ``unstable output``, ``memory``.
    Lines count from 1 in the kernel's body or header, whichever the message names.
    """

    def __init__(self, kind: str, message: str):
        self.kind = kind
        self.message = message
        super().__init__(f"{kind}: {message}")
