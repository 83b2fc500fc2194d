"""Writes small GGUF files for the tests, with the `gguf` package as the independent writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

Types = gguf.GGMLQuantizationType

# Fixture FIX-A of the case list, in config.json's words.
FIX_A = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
} | {
    f"model.layers.{layer}.{ours}.weight": f"blk.{layer}.{theirs}.weight"
    for layer in range(2)
    for ours, theirs in {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }.items()
}
METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def fix_a_weights() -> dict[str, np.ndarray]:
    """FIX-A's float32 weights under mlx-lm's names, drawn in the order that the cases give."""
    rng = np.random.default_rng(0)
    draw = lambda scale, *shape: rng.normal(0, scale, shape).astype(np.float32)  # noqa: E731
    weights = {"model.embed_tokens.weight": draw(1, 96, 64), "lm_head.weight": draw(0.08, 96, 64)}
    shapes = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (128, 64),
        "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128),
    }
    for layer in range(2):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = draw(0.08, *shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = np.ones(64, np.float32)
    weights["model.norm.weight"] = np.ones(64, np.float32)
    return weights


def llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """q or k as llama.cpp's converter stores it: rows i and i + half a head become neighbours."""
    half = len(rows) // heads // 2
    order = [
        head * 2 * half + half * part + i
        for head in range(heads)
        for i in range(half)
        for part in (0, 1)
    ]
    return rows[order]


def write(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, Types]],
    metadata: dict[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """``tensors`` maps a GGUF name to floats and the type to store them in, or to ready uint8 rows.

    A metadata value None leaves the key of METADATA out.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**METADATA, **(metadata or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, (array, kind) in tensors.items():
        data = array if array.dtype == np.uint8 else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fix_a_tensors(kinds: dict[str, Types] | None = None) -> dict[str, tuple[np.ndarray, Types]]:
    """FIX-A as llama.cpp would store it: F32, or the type of the last key that ends the name."""
    tensors = {}
    for name, array in fix_a_weights().items():
        stored = GGUF_NAMES[name]
        if "attn_q" in stored or "attn_k" in stored:
            array = llama_cpp_order(array, 4 if "attn_q" in stored else 2)
        stem = stored.removesuffix(".weight")
        wanted = [kind for end, kind in (kinds or {}).items() if stem.endswith(end)]
        tensors[stored] = (array, wanted[-1] if wanted else Types.F32)
    return tensors


def write_qwen(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    sliding_window: int | None = None,
) -> Path:
    """A tiny Qwen as llama.cpp's converter stores it: rows as they are, F32, with a tokenizer whose
    tokens are words, so that llama.cpp loads it too."""
    architecture = config["model_type"]
    names = {
        **{name.removesuffix(".weight"): stored for name, stored in GGUF_NAMES.items()},
        **{
            f"model.layers.{layer}.self_attn.{part}_norm": f"blk.{layer}.attn_{part}_norm.weight"
            for layer in range(2)
            for part in "qk"
        },
    }
    tensors = {}
    for name, array in weights.items():
        module, kind = name.rsplit(".", 1)
        tensors[f"{names[module].removesuffix('.weight')}.{kind}"] = (array, Types.F32)
    head_dim = config.get("head_dim", 16)
    fields = {key.removeprefix("llama."): value for key, value in METADATA.items()}
    fields |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    fields |= {"rope.dimension_count": head_dim, "attention.sliding_window": sliding_window}
    tokens = ["w", "0", *(f"w{i}" for i in range(config["vocab_size"] - 2))]
    metadata: dict[str, Any] = dict.fromkeys(METADATA)
    metadata |= {f"{architecture}.{field}": value for field, value in fields.items()}
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": ["w 0"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    return write(path, tensors, metadata, architecture)


def write_tokenizer(path: Path, tokens: list[str], metadata: dict[str, Any]) -> Path:
    """A whole tiny model, which llama.cpp loads too, with this many tokens and these metadata."""
    tensors = fix_a_tensors()
    del tensors["output.weight"]
    tensors["token_embd.weight"] = (np.zeros((len(tokens), 64), np.float32), Types.F32)
    return write(path, tensors, {"tokenizer.ggml.tokens": tokens, **metadata})
