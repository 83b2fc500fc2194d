"""What a frozen step was built from, to notice a model that has been changed since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from husky_mlx import device

_CONSTANTS = ("eps", "scale")  # numbers that modules, adapters among them, multiply or add


@dataclass(frozen=True, slots=True)
class _Container:
    """A module, or a dict or list in one: what it is, and what is in it, containers as this."""

    kind: type
    constants: tuple[Any, ...]
    values: list[Any]


@dataclass(frozen=True)
class Snapshot:
    """The modules of a model with their classes and constants, and its arrays.

    It holds the arrays and none of the modules: a model that nobody else holds is freed at once.
    """

    root: _Container
    addresses: list[int | None]

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        root = _record(model)
        return cls(root, _addresses(root))

    def fits(self, model: nn.Module) -> bool:
        """Whether the model still has these modules, and these arrays where they were.

        Every prompt asks, so this does without MLX's own walks over a model: those took most of a
        short prompt's time.
        """
        return _same(model, self.root) and _addresses(self.root) == self.addresses


def _record(value: Any) -> Any:
    if not isinstance(value, dict | list | tuple):
        return value
    values = [_record(child) for child in _values(value)]
    # Not getattr: for what a module has not it asks MLX's own look-up.
    attributes = vars(value) if isinstance(value, nn.Module) else {}
    return _Container(type(value), tuple(map(attributes.get, _CONSTANTS)), values)


def _same(value: Any, recorded: _Container) -> bool:
    if type(value) is not recorded.kind:
        return False
    if isinstance(value, nn.Module) and (
        tuple(map(vars(value).get, _CONSTANTS)) != recorded.constants
    ):
        return False
    values = _values(value)
    if len(values) != len(recorded.values):
        return False
    for child, was in zip(values, recorded.values, strict=True):
        if type(was) is _Container:
            if not _same(child, was):
                return False
        elif child is not was:
            return False
    return True


def _values(value: Any) -> Any:
    return dict.values(value) if isinstance(value, dict) else value


def _addresses(container: _Container) -> list[int | None]:
    """Where the arrays lie: ``weight *= 2`` keeps the Python object and takes another buffer.

    Nothing on CUDA, where looking would bring the arrays to the host; None for strided ones.
    """
    return [] if device.target() == "cuda" else [_address(array) for array in _arrays(container)]


def _arrays(container: _Container) -> Iterator[mx.array]:
    for value in container.values:
        if isinstance(value, _Container):
            yield from _arrays(value)
        elif isinstance(value, mx.array):
            yield value


def _address(value: mx.array) -> int | None:
    buffer: Any = value  # MLX's stubs do not say that arrays have the buffer protocol
    try:
        return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
    except (BufferError, ValueError):
        return None
