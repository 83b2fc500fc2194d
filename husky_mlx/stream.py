"""A checkpoint one tensor at a time, for what is larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from husky_mlx import checkpoint, gguf
from husky_mlx.config import LlamaConfig
from husky_mlx.structure import check_structure, drop_unread, expected_shapes

Read = Callable[[str], dict[str, mx.array]]
_PARTS = ("weight", "scales", "biases", "bias")


@dataclass
class Stream:
    """``config`` as in config.json; ``outline``: parameter name -> an array of its dtype and shape
    that is not in memory, in the order of the model; ``notes`` what a user should be warned of.

    ``take`` reads a parameter, once: whoever has it holds the only copy.
    """

    config: dict[str, Any]
    outline: dict[str, mx.array]
    notes: list[str]
    read: Read
    _ahead: dict[str, mx.array] = field(default_factory=dict)

    @property
    def args(self) -> LlamaConfig:
        return LlamaConfig.from_dict(self.config)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.outline.values())

    def take(self, name: str) -> mx.array:
        """The parameter, evaluated."""
        if name not in self._ahead:
            self._ahead |= self.read(name)
        value = self._ahead.pop(name)
        mx.eval(value)
        return value


def open_stream(path: Path, model_config: Mapping[str, Any] | None = None) -> Stream:
    """Open a folder or a .gguf file.

    Raises CheckpointError, listing every tensor that does not fit the config, and UnsupportedModel.
    """
    if not path.is_file():
        found = checkpoint.read(path, model_config)
        return stream_of(found.config, found.weights, found.notes, str(path))
    parameters = gguf.Parameters(path)
    config = {**gguf.read_config(path), **(model_config or {})}
    outline = checkpoint.one_dtype(parameters.outline(), lambda stored: stored)
    checkpoint.say_tied(config, outline)
    return Stream(
        config, _checked(config, outline, str(path)), [], _gguf_reader(parameters, outline)
    )


def stream_of(
    config: dict[str, Any], weights: dict[str, mx.array], notes: list[str], source: str
) -> Stream:
    """A stream of lazy ``weights``, which is emptied."""
    outline = _checked(config, weights, source)
    left = {name: weights[name] for name in outline}
    weights.clear()
    return Stream(config, outline, notes, lambda name: {name: left.pop(name)})


def in_model_order(args: LlamaConfig, names: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The same parameters from the embedding to the last layer."""
    bases = dict.fromkeys(name.rpartition(".")[0] for name in expected_shapes(args))
    ordered = [f"{base}.{part}" for base in bases for part in _PARTS]
    return {name: names[name] for name in ordered if name in names}


def _checked(
    config: Mapping[str, Any], weights: dict[str, mx.array], source: str
) -> dict[str, mx.array]:
    args = LlamaConfig.from_dict(config, source)
    kept = drop_unread(weights, args.tie_word_embeddings)
    check_structure(args, kept, source)
    # Not the arrays themselves: a folder's stay in memory once they are read.
    outline = {name: mx.zeros(value.shape, value.dtype) for name, value in kept.items()}
    return in_model_order(args, outline)


def _gguf_reader(parameters: gguf.Parameters, outline: Mapping[str, mx.array]) -> Read:
    def read(name: str) -> dict[str, mx.array]:
        module, part = name.rsplit(".", 1)
        parameter = f"{module}.weight" if part in ("scales", "biases") else name
        values = parameters.read(parameter)
        return {each: value.astype(outline[each].dtype) for each, value in values.items()}

    return read
