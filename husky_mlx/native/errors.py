"""The errors of the native program."""

from __future__ import annotations

from collections.abc import Sequence

from husky_mlx.errors import HuskyError


class NativeError(HuskyError):
    """Why there is no native program; the reference path runs in its place.

    ``reasons`` holds one sentence each: a tensor that it does not take, a compiler that is missing.
    """

    def __init__(self, reasons: Sequence[str]):
        self.reasons = list(reasons)
        super().__init__(f"no native program: {'; '.join(self.reasons)}")

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return type(self), (self.reasons,)
