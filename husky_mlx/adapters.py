"""LoRA and DoRA adapters, mlx-lm's and PEFT's: kept beside a model, or fused into its weights."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters as load_mlx_lm_adapters

from husky_mlx.checkpoint import read_json
from husky_mlx.errors import CheckpointError, UnsupportedModel

CONFIG, WEIGHTS, PEFT_WEIGHTS = (
    "adapter_config.json",
    "adapters.safetensors",
    "adapter_model.safetensors",
)
_LEAVES = ("lora_a", "lora_b", "m")
# PEFT's names of the parts of a module -> mlx-lm's, and whether they are transposed.
_PEFT_LEAVES = {
    "lora_A.weight": ("lora_a", True),
    "lora_B.weight": ("lora_b", True),
    "lora_embedding_A": ("lora_a", True),
    "lora_embedding_B": ("lora_b", True),
    "lora_magnitude_vector.weight": ("m", False),
    "lora_magnitude_vector": ("m", False),
}
_PEFT_PREFIX = "base_model.model."


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """Put an adapter's layers beside those of ``model``, which is returned in evaluation mode.

    PEFT's LoRA and DoRA adapters are converted; a missing dropout is 0. Raises CheckpointError
    naming the file for one that is damaged, does not fit the model or lacks a half of a pair, and
    UnsupportedModel for other kinds of PEFT.
    """
    folder = Path(folder).expanduser()
    config, tensors = _read(folder)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / CONFIG).write_text(json.dumps(config))
        mx.save_safetensors(str(Path(place) / WEIGHTS), tensors)
        try:
            model = load_mlx_lm_adapters(model, place)
            mx.eval([value for _, value in _adapter_parameters(model)])
        except (KeyError, ValueError, AttributeError) as error:
            reason = str(error.args[0] if error.args else error).replace(place, str(folder))
            raise CheckpointError(f"{folder}: the adapter does not fit: {reason}") from error
    model.eval()
    return model


def fuse_adapter(weights: dict[str, mx.array], model: nn.Module, folder: str | Path) -> None:
    """Write an adapter into ``weights``, lazily, at the precision of the model's floats.

    ``model``: built of the same weights, with floats where ``targets`` names a matrix.
    """
    loaded = load_adapter(model, folder)
    changed = {
        f"{path}.weight": module.fuse(dequantize=True).weight
        for path, module in loaded.named_modules()
        if hasattr(module, "fuse")
    }
    if not changed:
        raise CheckpointError(f"{folder}: the adapter changes no matrix of this model")
    weights.update(changed)


def targets(folder: str | Path) -> list[str]:
    """The paths of the matrices that an adapter changes.

    UnsupportedModel for a full fine-tune, which is weights of its own.
    """
    config, tensors = _read(Path(folder).expanduser())
    if config.get("fine_tune_type") == "full":
        raise UnsupportedModel(
            str(folder), ["fine_tune_type is 'full': `husky fuse` makes a model of it"]
        )
    return sorted({name.rpartition(".")[0] for name in tensors if _is_adapter(name)})


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """An adapter's config and tensors, as mlx-lm has them."""
    config = read_json(folder / CONFIG)
    if config is None:
        raise CheckpointError(f"{folder / CONFIG}: no such file, so this is not an adapter")
    if "peft_type" in config:
        tensors = _tensors(folder / PEFT_WEIGHTS)
        return _from_peft(config, tensors, folder)
    tensors = _tensors(folder / WEIGHTS)
    if config.get("fine_tune_type", "lora") == "full":
        return config, tensors
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict) or "num_layers" not in config:
        raise CheckpointError(f"{folder / CONFIG}: num_layers or lora_parameters is missing")
    if "scale" not in parameters:
        hint = ": mlx-lm's scale is alpha / rank" if "alpha" in parameters else ""
        raise CheckpointError(f"{folder / CONFIG}: lora_parameters has no scale{hint}")
    for name, value in (("num_layers", config["num_layers"]), ("scale", parameters["scale"])):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{folder / CONFIG}: {name} is {value!r}, expected a number")
    _check_pairs(tensors, folder)
    return {**config, "lora_parameters": {"dropout": 0.0, **parameters}}, tensors


def _tensors(path: Path) -> dict[str, mx.array]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, expected the adapter's weights")
    try:
        found: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        mx.eval(found)
    except (RuntimeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path}: MLX cannot read it: {error}") from error
    if not found:
        raise CheckpointError(f"{path}: there is nothing in it")
    return found


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in _LEAVES


def _check_pairs(tensors: dict[str, mx.array], folder: Path) -> None:
    alone = sorted(
        name
        for name in tensors
        for leaf, other in (("lora_a", "lora_b"), ("lora_b", "lora_a"))
        if name.endswith(f".{leaf}") and f"{name.removesuffix(leaf)}{other}" not in tensors
    )
    if alone:
        raise CheckpointError(f"{folder}: half a pair: {', '.join(alone)} without the other factor")


def _from_peft(
    config: dict[str, Any], tensors: dict[str, mx.array], folder: Path
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """``y = Wx + alpha / r B A x`` as mlx-lm writes it: factors transposed, scale = alpha / r."""
    differences = [f"peft_type is {config['peft_type']!r}, supported is 'LORA'"]
    if config["peft_type"] == "LORA":
        differences = [
            f"{field} is {config[field]!r}"
            for field in ("rank_pattern", "alpha_pattern", "modules_to_save", "bias", "lora_bias")
            if config.get(field) not in (None, {}, [], "none", False)
        ]
    if differences:
        raise UnsupportedModel(str(folder / CONFIG), differences)
    converted = {}
    for name, value in tensors.items():
        path, leaf = _peft_name(name, folder)
        ours, transposed = _PEFT_LEAVES[leaf]
        converted[f"{path}.{ours}"] = mx.contiguous(value.T) if transposed else value
    _check_pairs(converted, folder)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise CheckpointError(f"{folder / CONFIG}: r is {rank!r} and lora_alpha {alpha!r}")
    parameters = {
        "rank": rank,
        "scale": alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
        "dropout": 0.0,
        "keys": sorted({name.rpartition(".")[0] for name in converted}),
    }
    kind = "dora" if config.get("use_dora") else "lora"
    return {"fine_tune_type": kind, "num_layers": 0, "lora_parameters": parameters}, converted


def _peft_name(name: str, folder: Path) -> tuple[str, str]:
    for leaf in _PEFT_LEAVES:
        if name.startswith(_PEFT_PREFIX) and name.endswith(f".{leaf}"):
            return name.removeprefix(_PEFT_PREFIX).removesuffix(f".{leaf}"), leaf
    raise CheckpointError(f"{folder / PEFT_WEIGHTS}: {name} is no part of a LoRA adapter")


def _adapter_parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    leaves: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return [(name, value) for name, value in leaves if _is_adapter(name)]
