"""Synthetic checkpoints: FIX-A (tiny Llama), FIX-B (with a byte-level tokenizer), and variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from husky_mlx.loading import build_model

FIX_A: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
FIX_B = {**FIX_A, "vocab_size": 264, "eos_token_id": 261}
# The near relatives: biases of q, k and v; a norm of each head of q and k, heads wider than hidden.
QWEN2 = {**FIX_A, "model_type": "qwen2"}
QWEN3 = {**FIX_A, "model_type": "qwen3", "head_dim": 32}
PROMPT = np.random.default_rng(1).integers(3, 96, 40).tolist()
# Greedy continuation of PROMPT under FIX-A, as published with the cases.
GREEDY = [60, 3, 68, 93, 84, 68, 93, 84, 68, 93, 84, 68]


def numpy_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights in the published drawing order: embedding, head, then layer by layer."""
    rng = np.random.default_rng(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or hidden // heads
    wide = config["intermediate_size"]

    def draw(rows: int, columns: int, scale: float = 0.08) -> np.ndarray:
        return rng.normal(0, scale, (rows, columns)).astype(np.float32)

    weights = {"model.embed_tokens.weight": draw(vocab, hidden, 1.0)}
    if not config.get("tie_word_embeddings", True):
        weights["lm_head.weight"] = draw(vocab, hidden)
    shapes = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = draw(*shape)
    biased = ["self_attn."] * bool(config.get("attention_bias"))
    biased += ["mlp."] * bool(config.get("mlp_bias"))
    if config["model_type"] == "qwen2":
        biased = ["self_attn.q", "self_attn.k", "self_attn.v"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, (rows, _) in shapes.items():
            if name.startswith(tuple(biased)):
                weights[f"{prefix}.{name}.bias"] = draw(1, rows, 0.5)[0]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float32)
        for norm in ("q_norm", "k_norm") if config["model_type"] == "qwen3" else ():
            weights[f"{prefix}.self_attn.{norm}.weight"] = draw(1, dim, 0.5)[0] + 1
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    return weights


def mlx_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    return {name: mx.array(value) for name, value in numpy_weights(config, seed).items()}


def model_of(backend: str = "husky", config: dict = FIX_A, seed: int = 0, **options: Any):
    """A model of synthetic weights; ``backend`` "mlx" is mlx-lm's own class."""
    return build_model(config, mlx_weights(config, seed), backend=backend, **options)


def quantize_weights(
    weights: dict[str, mx.array], bits: int = 4, group_size: int = 64
) -> dict[str, mx.array]:
    """Every matrix whose rows the group size divides, in MLX's affine layout."""
    packed: dict[str, mx.array] = {}
    for name, value in weights.items():
        if value.ndim != 2 or value.shape[1] % group_size:
            packed[name] = value
            continue
        parts = mx.quantize(value, group_size=group_size, bits=bits)
        base = name.removesuffix(".weight")
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[f"{base}.{part}"] = array
    return packed


def write_folder(
    folder: Path,
    config: dict[str, Any] = FIX_A,
    weights: dict[str, mx.array] | None = None,
    tokenizer: bool = False,
    **extra_config: Any,
) -> Path:
    """A checkpoint folder as mlx-lm reads it; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **extra_config}))
    if weights is None:
        weights = mlx_weights(config)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, **settings: Any) -> None:
    """The FIX-B tokenizer: bytes 0..255, four merges, <|bos|> 260, <|eos|> 261, <|eot|> 262."""
    byte_symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = {ord(c): c for c in byte_symbols if 33 <= ord(c) < 127 or 161 <= ord(c) < 256}
    spare = iter(c for c in byte_symbols if ord(c) >= 256)
    vocabulary = {order.get(byte) or next(spare): byte for byte in range(256)}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n")]
    for index, (left, right) in enumerate(merges):
        vocabulary[left + right] = 256 + index
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|bos|>", "<|eos|>", "<|eot|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
