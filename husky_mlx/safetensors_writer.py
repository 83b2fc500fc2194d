"""Weights to disk one tensor at a time, in mlx-lm's files: the peak is one tensor, not one file.

safetensors' own writer takes a whole file's bytes at once, and MLX's orders the tensors as they
fall in memory, so that the same weights make different files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import make_shards

# https://github.com/huggingface/safetensors: names of dtypes in a header.
_DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
}
_HEADER_ALIGNMENT = 8


def write_shards(
    folder: Path,
    outline: Mapping[str, mx.array],
    take: Callable[[str], mx.array],
    stem: str = "model",
    largest: int | None = None,
) -> dict[str, str]:
    """Write tensors into ``STEM.safetensors``, or ``STEM-00001-of-0000N.safetensors`` and so on.

    ``outline`` gives dtypes and shapes in the order of the files, its values are not read; ``take``
    gives each tensor once, in that order. Files end where mlx-lm's do, or at ``largest`` bytes.
    Returns tensor name -> file name.
    """
    shards = make_shards(dict(outline)) if largest is None else _split(outline, largest)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = f"{stem}{part}.safetensors"
        _write_file(folder / name, shard, take)
        files |= dict.fromkeys(shard, name)
    return files


def _split(outline: Mapping[str, mx.array], largest: int) -> list[dict[str, mx.array]]:
    shards: list[dict[str, mx.array]] = [{}]
    size = 0
    for name, value in outline.items():
        if shards[-1] and size + value.nbytes > largest:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    return shards


def _write_file(
    path: Path, outline: Mapping[str, mx.array], take: Callable[[str], mx.array]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, value in outline.items():
        start, end = end, end + value.nbytes
        header[name] = {
            "dtype": _DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, expected in outline.items():
            value = take(name)
            if (value.dtype, value.shape) != (expected.dtype, expected.shape):
                raise ValueError(
                    f"{name}: expected {expected.dtype} {expected.shape}, found {value.dtype} "
                    f"{value.shape}"
                )
            flat = mx.contiguous(value).reshape(-1).view(mx.uint8)
            file.write(np.array(flat, copy=False).data)
            del value
