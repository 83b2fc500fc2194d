"""GGUF metadata of a Llama or Qwen -> a config.json-style dict, under mlx-lm's names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.gguf_file import GGUFFile

# Values of tokenizer.ggml.token_type. Control tokens steer and are never shown.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# Files made before these had metadata keys name only one stop token, often not the chat's.
CHAT_END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")
STOP_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral files say llama

# Fields that would change the arithmetic, with the values that leave it alone.
ARITHMETIC_FIELDS: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
}

# Metadata that are used as they stand, with the type that each has in a sound file.
METADATA_TYPES: dict[str, type] = {
    "general.architecture": str,
    "split.count": int,
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.ggml.merges": list,
    "tokenizer.ggml.scores": np.ndarray,
    "tokenizer.ggml.add_bos_token": bool,
    "tokenizer.ggml.add_eos_token": bool,
    "tokenizer.ggml.add_space_prefix": bool,
    "tokenizer.chat_template": str,
}
# The same of the fields that begin with the architecture's name.
_FIELD_TYPES: dict[str, type] = {
    "vocab_size": int,
    "rope.scaling.type": str,
    "rope.scaling.factor": float,
    "rope.scaling.original_context_length": int,
    "rope.scale_linear": float,
} | {field: type(plain[0]) for field, plain in ARITHMETIC_FIELDS.items()}

# llama.cpp's converter writes Llama 3.1's scaling as factors made from these two and from the
# original context, and keeps only the factors.
LLAMA3_ORIGINAL_CONTEXT = 8192
LLAMA3_LOW, LLAMA3_HIGH = 1.0, 4.0


def open_gguf(path: Path) -> GGUFFile:
    """The file with its metadata checked; CheckpointError lists those of another type."""
    file = GGUFFile(path)
    fields = {_key(file, field): kind for field, kind in _FIELD_TYPES.items()}
    wrong = [
        f"{key} is {file.metadata[key]!r}, expected {kind.__name__}"
        for key, kind in (METADATA_TYPES | fields).items()
        if key in file.metadata and not _is_a(file.metadata[key], kind)
    ]
    if wrong:
        raise CheckpointError(f"{path}: {'; '.join(wrong)}")
    return file


def _is_a(value: Any, kind: type) -> bool:
    """Whether a value is of a type; numbers may be whole or not, and are no booleans."""
    if kind in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


def check_architecture(file: GGUFFile) -> str:
    """``general.architecture``; UnsupportedModel unless it is one of ``ARCHITECTURES``."""
    architecture = file.metadata.get("general.architecture")
    if architecture is None:
        raise CheckpointError(f"{file.path}: metadata field general.architecture is missing")
    if architecture not in ARCHITECTURES:
        found = f"general.architecture is {architecture!r}; supported: {', '.join(ARCHITECTURES)}"
        raise UnsupportedModel(str(file.path), [found])
    return architecture


def _key(file: GGUFFile, field: str) -> str:
    return f"{file.metadata.get('general.architecture')}.{field}"


def config_from(file: GGUFFile) -> dict[str, Any]:
    """The config of a file; UnsupportedModel lists every field outside its family."""
    architecture = check_architecture(file)
    differences: list[str] = []
    for field, harmless in ARITHMETIC_FIELDS.items():
        key = _key(file, field)
        value = file.metadata.get(key, harmless[0])
        if value not in harmless:
            differences.append(f"{key} is {value}; expected {harmless[-1]} or absent")

    def size(field: str, default: int | None = None) -> int:
        return _size(file, field, default, differences)

    hidden_size, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden_size // heads)
    for field in ("attention.value_length", "rope.dimension_count"):
        if (found := size(field, head_dim)) != head_dim:
            differences.append(f"{_key(file, field)} is {found}; expected the head's {head_dim}")
    rope_theta = float(_metadata(file, _key(file, "rope.freq_base"), float, 10000.0))
    window = size("attention.sliding_window", 0)
    if window and architecture != "llama":
        differences.append(f"{_key(file, 'attention.sliding_window')} is {window}; expected none")
    config = {
        "model_type": "mistral" if window and architecture == "llama" else architecture,
        "hidden_size": hidden_size,
        "num_hidden_layers": size("block_count"),
        "intermediate_size": size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _metadata(file, _key(file, "attention.layer_norm_rms_epsilon"), float),
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": size("context_length"),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(file, head_dim, rope_theta, differences),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    if window:
        config["sliding_window"] = window
    if stop := stop_token_ids(file):
        config["eos_token_id"] = stop
    if (begin := token_id(file, "bos_token_id")) is not None:
        config["bos_token_id"] = begin
    if differences:
        raise UnsupportedModel(str(file.path), differences)
    return config


def stop_token_ids(file: GGUFFile) -> list[int]:
    """The ids that end a reply: end of text, of turn, of message, as far as the file has them."""
    named = [token_id(file, key) for key in STOP_TOKEN_KEYS]
    found = [index for index in named if index is not None]
    tokens, types = token_list(file), token_types(file)
    for token in CHAT_END_TOKENS:
        if token in tokens and types[tokens.index(token)] == CONTROL:
            found.append(tokens.index(token))
    return list(dict.fromkeys(found))


def token_list(file: GGUFFile) -> list[str]:
    """``tokenizer.ggml.tokens``; empty when the file has no tokenizer."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens is not a list of strings")
    return tokens


def token_types(file: GGUFFile) -> list[int]:
    """``tokenizer.ggml.token_type``, one number for every token; all normal when it is absent."""
    count = len(token_list(file))
    types = file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * count
    if not isinstance(types, np.ndarray) or len(types) != count:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.token_type is not {count} numbers")
    return [int(kind) for kind in types]


def token_id(file: GGUFFile, name: str) -> int | None:
    """``tokenizer.ggml.<name>``, or None; CheckpointError if it is outside the token list."""
    key = f"tokenizer.ggml.{name}"
    if key not in file.metadata:
        return None
    value, count = file.metadata[key], len(token_list(file))
    if not isinstance(value, int) or not 0 <= value < count:
        raise CheckpointError(f"{file.path}: {key} is {value}; the file has {count} tokens")
    return value


def _vocab_size(file: GGUFFile) -> int:
    """The embedding's rows; it may be padded past the token list, never the other way."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    rows = embedding.shape[0]
    key = _key(file, "vocab_size")
    declared = file.metadata.get(key, rows)
    tokens = len(token_list(file))
    if declared != rows or tokens > rows:
        raise CheckpointError(
            f"{file.path}: token_embd.weight has {rows} rows, but {key} is {declared} "
            f"and tokenizer.ggml.tokens has {tokens} entries"
        )
    return rows


def _metadata(file: GGUFFile, key: str, kind: type, default: Any = None) -> Any:
    value = file.metadata.get(key, default)
    if value is None:
        raise CheckpointError(f"{file.path}: metadata field {key} is missing")
    if not _is_a(value, kind) or (kind is int and not isinstance(value, int)):
        raise CheckpointError(f"{file.path}: {key} is {value!r}; expected {kind.__name__}")
    return value


def _size(file: GGUFFile, field: str, default: int | None, differences: list[str]) -> int:
    """A whole number; a per-layer array counts when every layer agrees."""
    key = _key(file, field)
    value = file.metadata.get(key)
    if isinstance(value, np.ndarray) and value.size:
        if len(Counter(value.tolist())) > 1:
            differences.append(f"{key} differs from layer to layer: {value.tolist()}")
        value = int(value[0])
    elif value is not None or default is None:
        value = _metadata(file, key, int)
    else:
        return default
    if value < (0 if default == 0 else 1):
        raise CheckpointError(f"{file.path}: {key} is {value}; expected a positive number")
    return value


def _rope_scaling(
    file: GGUFFile, head_dim: int, rope_theta: float, differences: list[str]
) -> dict[str, Any] | None:
    kind = file.metadata.get(_key(file, "rope.scaling.type"))
    factor = file.metadata.get(_key(file, "rope.scaling.factor"))
    legacy = file.metadata.get(_key(file, "rope.scale_linear"), 1)
    if kind is None and legacy != 1:
        kind, factor = "linear", legacy
    if "rope_freqs.weight" in file.tensors:
        scaling = _llama3_scaling(file, head_dim, rope_theta, differences)
        if scaling and kind not in (None, "none"):
            differences.append(
                f"{_key(file, 'rope.scaling.type')} is {kind!r} beside rope_freqs.weight"
            )
        return scaling
    if kind in (None, "none"):
        return None
    if kind == "yarn":
        differences.append(f"{_key(file, 'rope.scaling.type')} is 'yarn'; expected linear or none")
    scaling = {"rope_type": kind, "factor": factor}
    original = file.metadata.get(_key(file, "rope.scaling.original_context_length"))
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(
    file: GGUFFile, head_dim: int, rope_theta: float, differences: list[str]
) -> dict[str, Any] | None:
    """The llama3 scaling whose published formula gives ``rope_freqs.weight``, which divides RoPE's
    frequencies; a difference when no such scaling does."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight is {tensor.type_name} {tensor.shape}; "
            f"expected F32 ({head_dim // 2},)"
        )
    factors = file.rows(tensor).view("<f4")[:, 0].astype(np.float64)
    if np.all(factors == 1):
        return None
    factor = float(factors.max())
    wavelengths = 2 * np.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = LLAMA3_ORIGINAL_CONTEXT / wavelengths
    blend = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if not np.allclose(factors, expected, rtol=1e-4, atol=0):
        differences.append(
            "rope_freqs.weight holds frequency factors that Llama 3's RoPE scaling does not give"
        )
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_CONTEXT,
    }
