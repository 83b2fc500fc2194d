"""Checkpoints as one thing: a config and weights under mlx-lm's parameter names, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from husky_mlx import artifact, foreign, gguf
from husky_mlx.device import activation_dtype
from husky_mlx.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_OTHER_FORMATS = ("pytorch_model*.bin", "consolidated*.safetensors", "consolidated*.pth", "*.gguf")


@dataclass
class Checkpoint:
    """``config`` as in config.json, ``weights`` by parameter name, ``lazy`` if they are not in
    memory yet, ``notes`` what a user should be warned of."""

    config: dict[str, Any]
    weights: dict[str, mx.array]
    lazy: bool
    notes: list[str]


def read(path: Path, model_config: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a folder, whose weights are read when they are first used, or read a .gguf file.

    ``model_config`` overrides fields of the config. Raises CheckpointError for files that are
    missing, truncated or not what they are named, or not as husky wrote them (every byte is
    compared with ``husky.json``), UnsupportedModel for other kinds of GGUF and of quantization, and
    MemoryLimitError for a .gguf file that does not fit.
    """
    notes: list[str] = []
    if path.is_file():
        config = {**gguf.read_config(path), **(model_config or {})}
        weights = one_dtype(gguf.read_weights(path), activation_dtype)
    elif path.is_dir():
        manifest = artifact.verify(path)
        if manifest is not None and manifest["kind"] == artifact.BUILD:
            raise CheckpointError(
                f"{path}: a build of husky compile, whose weights are packed: load and the "
                "commands that answer take it, others the .hky folder around it"
            )
        config = {**read_config(path), **(model_config or {})}
        weights = _read_safetensors(path, notes)
        foreign.to_mlx(config, weights, str(path))
    else:
        raise CheckpointError(f"{path}: no such file or folder")
    say_tied(config, weights)
    return Checkpoint(config, weights, path.is_dir(), notes)


def say_tied(config: dict[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Write into the config whether the embeddings are tied, where it does not say so."""
    if config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = not any(name.startswith("lm_head.") for name in weights)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, with the stop tokens of generation_config.json where it has any."""
    config = read_json(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder / 'config.json'}: no such file, so this is not a model")
    generation = folder / "generation_config.json"
    try:
        stop = (read_json(generation) or {}).get("eos_token_id")
    except CheckpointError:
        stop = None  # mlx-lm ignores a damaged generation_config.json too
    if stop:
        config["eos_token_id"] = stop
    return config


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None where there is no file; CheckpointError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _read_safetensors(folder: Path, notes: list[str]) -> dict[str, mx.array]:
    files = sorted(folder.glob("model*.safetensors"))
    weight_map = (read_json(folder / INDEX) or {}).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map must give a file name for each tensor")
    absent = sorted({name for name in weight_map.values() if not (folder / name).exists()})
    if not files:
        others = sorted(p.name for pattern in _OTHER_FORMATS for p in folder.glob(pattern))
        found = f"found {', '.join(others)}" if others else "found no weights at all"
        raise CheckpointError(f"{folder}: expected model*.safetensors, {found}")
    weights: dict[str, mx.array] = {}
    for file in files:
        _check_file(file)
        try:
            weights.update(mx.load(str(file)))  # type: ignore[arg-type]
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{file}: MLX cannot read it: {error}") from error
    if absent and not set(weight_map) <= set(weights):
        raise CheckpointError(
            f"{folder}: {INDEX} names {', '.join(absent)}, not there (incomplete download?)"
        )
    if absent:
        notes.append(f"{INDEX} names files that are not there; the others are complete")
    return weights


def _check_file(file: Path) -> None:
    if not file.is_file():
        kind = "a link to nothing" if not file.exists() else "not a regular file"
        raise CheckpointError(f"{file}: {kind}, expected the weights")
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    if start == _LFS_POINTER:
        raise CheckpointError(
            f"{file}: a Git LFS pointer, not the weights; run `git lfs pull` in its repository"
        )
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: truncated or not a safetensors file ({error}); download it again"
        ) from error


def one_dtype(
    weights: dict[str, mx.array], norm_dtype: Callable[[mx.Dtype], mx.Dtype]
) -> dict[str, mx.array]:
    """Norms in ``norm_dtype`` of the embedding's: GGUF keeps them in float32, which would raise
    every sum."""
    name = "model.embed_tokens"
    stored = weights.get(f"{name}.scales", weights[f"{name}.weight"]).dtype
    return {
        key: value.astype(norm_dtype(stored)) if key.endswith("norm.weight") else value
        for key, value in weights.items()
    }
