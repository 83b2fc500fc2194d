"""What a frozen step was built from, to notice a model that has been changed since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from husky_mlx import device

_CONSTANTS = ("eps", "scale")  # numbers that modules, adapters among them, multiply or add


@dataclass(frozen=True)
class Snapshot:
    """The modules of a model with their classes and constants, and its arrays."""

    modules: list[tuple[Any, ...]]
    arrays: list[mx.array]
    addresses: list[int | None]

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        modules = [
            (path, type(module), *(getattr(module, name, None) for name in _CONSTANTS))
            for path, module in model.named_modules()
        ]
        arrays: list[Any] = [value for _, value in tree_flatten(model.parameters())]  # type: ignore[misc, str-unpack]
        return cls(modules, arrays, [_address(value) for value in arrays])

    def fits(self, model: nn.Module) -> bool:
        """Whether the model still has these modules, and these arrays where they were."""
        now = Snapshot.of(model)
        return (
            now.modules == self.modules
            and now.addresses == self.addresses
            and len(now.arrays) == len(self.arrays)
            and all(a is b for a, b in zip(now.arrays, self.arrays, strict=True))
        )


def _address(value: mx.array) -> int | None:
    """Where an array lies: ``weight *= 2`` keeps the Python object and takes another buffer.

    None on CUDA, where looking would bring the array to the host, and for strided arrays.
    """
    if device.target() == "cuda":
        return None
    buffer: Any = value  # MLX's stubs do not say that arrays have the buffer protocol
    try:
        return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
    except (BufferError, ValueError):
        return None
