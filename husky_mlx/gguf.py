"""Reads a Llama's or Qwen's GGUF file under mlx-lm's parameter names, every tensor at its own bits.

llama.cpp stores the rows of a Llama's q and k in the order of interleaved RoPE pairs. They are put
back to the half-split order as whole rows of bytes, so that scales and biases move along.
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from husky_mlx.device import activation_dtype
from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.gguf_blocks import BITS, FLOATS, GROUP_SIZE, unpack
from husky_mlx.gguf_config import check_architecture, config_from, open_gguf
from husky_mlx.gguf_file import BLOCK_TYPES, GGUFFile, Tensor
from husky_mlx.memory import require_memory

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Of tables that are not quantized; the scales of those that are become float16.
_DTYPES = {"F32": "float32", "BF16": "bfloat16"}
# RoPE tables: the first one becomes rope_scaling, the other repeats what rope_theta says.
NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")


def read_config(path: Path) -> dict[str, Any]:
    """The file's metadata as a config.json-style dict, ``quantization`` and dtype included.

    UnsupportedModel for another architecture, field or tensor type, each listed by name;
    CheckpointError for a damaged file. Nothing is allocated for tensors.
    """
    file = open_gguf(path)
    config = config_from(file)
    parameters = _parameters(file)
    table = parameters.get("model.embed_tokens.weight")
    config["torch_dtype"] = _DTYPES.get(table.type_name if table else "", "float16")
    bits = {
        parameter.removesuffix(".weight"): BITS[tensor.type_name]
        for parameter, tensor in parameters.items()
        if tensor.type_name in BITS
    }
    if bits:
        common = Counter(bits.values()).most_common(1)[0][0]
        exceptions = {
            module: {"group_size": GROUP_SIZE, "bits": own}
            for module, own in bits.items()
            if own != common
        }
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": common, **exceptions}
    return config


def read_weights(path: Path) -> dict[str, mx.array]:
    """All parameters under mlx-lm's names, in the file's types; they are read now, not lazily.

    Errors as for ``read_config``, and MemoryLimitError before the first tensor is read where the
    loaded model would not fit.
    """
    weights = Parameters(path)
    require_memory(
        sum(map(_loaded_bytes, weights.tensors.values())),
        f"Loading {path}",
        "A smaller model or fewer bits would fit.",
    )
    found: dict[str, mx.array] = {}
    for parameter in weights.tensors:
        found |= weights.read(parameter)
    return found


class Parameters:
    """A file's parameters under mlx-lm's names, one tensor at a time; errors as ``read_config``.

    Floats keep their type and shape; Q4_0, Q4_1 and Q8_0 become ``.weight`` uint32, ``.scales``
    and ``.biases`` float16 in groups of 32.
    """

    def __init__(self, path: Path):
        self._file = open_gguf(path)
        config = config_from(self._file)
        self._heads = {}
        # A Qwen's rows are in half-split order already.
        if check_architecture(self._file) == "llama":
            self._heads = {
                "q_proj": config["num_attention_heads"],
                "k_proj": config["num_key_value_heads"],
            }
        self.tensors = _parameters(self._file)
        for parameter, tensor in self.tensors.items():
            if tensor.type_name in BITS and not parameter.endswith(".weight"):
                raise CheckpointError(
                    f"{path}: tensor {tensor.name} is {tensor.type_name}; a bias must be a float "
                    "type"
                )

    def outline(self) -> dict[str, mx.array]:
        """Zeros of each parameter's dtype and shape, which take no memory before they are read."""
        shapes: dict[str, mx.array] = {}
        for parameter, tensor in self.tensors.items():
            if tensor.type_name not in BITS:
                shapes[parameter] = mx.zeros(tensor.shape, FLOATS[tensor.type_name])
                continue
            rows, columns = prod(tensor.shape[:-1]), tensor.shape[-1]
            module = parameter.removesuffix(".weight")
            words = columns * BITS[tensor.type_name] // 32
            shapes[parameter] = mx.zeros((rows, words), mx.uint32)
            for part in ("scales", "biases"):
                shapes[f"{module}.{part}"] = mx.zeros((rows, columns // GROUP_SIZE), mx.float16)
        return shapes

    def read(self, parameter: str) -> dict[str, mx.array]:
        """A tensor as ``parameter``, with its scales and biases where it is quantized."""
        tensor = self.tensors[parameter]
        rows = self._file.rows(tensor)
        module = parameter.rpartition(".")[0]
        if count := self._heads.get(module.rsplit(".", 1)[-1]):
            rows = _half_split(rows, count, f"{self._file.path}: tensor {tensor.name}")
        parts = unpack(tensor.type_name, rows)
        if tensor.type_name not in BITS:
            return {parameter: parts["weight"].reshape(tensor.shape)}
        return {f"{module}.{part}": array for part, array in parts.items()}


def _loaded_bytes(tensor: Tensor) -> int:
    """What a tensor takes in the finished model, whose scales are in the activation dtype."""
    if tensor.type_name not in BITS:
        return tensor.nbytes
    scale_bytes = activation_dtype(mx.float16).size
    values = prod(tensor.shape)
    return values * BITS[tensor.type_name] // 8 + values // GROUP_SIZE * 2 * scale_bytes


def _parameters(file: GGUFFile) -> dict[str, Tensor]:
    """Parameter name -> tensor; every unknown name, and every type not read yet, in one error."""
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedModel(
            str(file.path), [f"one of {file.metadata['split.count']} parts of a split GGUF"]
        )
    parameters: dict[str, Tensor] = {}
    unknown, unsupported = [], []
    for name, tensor in file.tensors.items():
        if NOT_WEIGHTS.fullmatch(name):
            continue
        parameter = parameter_name(name)
        if parameter is None:
            unknown.append(name)
        elif tensor.supported:
            parameters[parameter] = tensor
        else:
            unsupported.append(f"{name} is {tensor.type_name}")
    if unknown:
        raise CheckpointError(
            f"{file.path}: tensors that the model does not have: {', '.join(unknown)}"
        )
    if unsupported:
        supported = ", ".join(name for name, _, _ in BLOCK_TYPES.values())
        raise UnsupportedModel(
            str(file.path), [f"tensor types other than {supported}: {', '.join(unsupported)}"]
        )
    return parameters


def parameter_name(name: str) -> str | None:
    """llama.cpp's tensor name -> mlx-lm's parameter name; None if the family has no such one."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return None
    layer, module, kind = match.groups()
    if layer is None:
        return f"{TOP_NAMES[module]}.{kind}" if module in TOP_NAMES else None
    if module not in LAYER_NAMES:
        return None
    return f"model.layers.{layer}.{LAYER_NAMES[module]}.{kind}"


def _half_split(rows: np.ndarray, heads: int, tensor: str) -> np.ndarray:
    """Within each head, rows 0, 2, 4, ... first and then rows 1, 3, 5, ..."""
    if len(rows) % (2 * heads):
        raise CheckpointError(
            f"{tensor} has {len(rows)} rows; a multiple of 2 x {heads} heads was expected"
        )
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
