"""A Llama forward in numpy float64, written from the architecture: the judge of the tests."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np


def inverse_frequencies(dims: int, theta: float, scaling: dict[str, Any] | None) -> list[float]:
    """Radians per position of each pair, one pair at a time."""
    result = []
    for pair in range(dims // 2):
        frequency = theta ** (-2 * pair / dims)
        if scaling and scaling["rope_type"] == "linear":
            frequency /= scaling["factor"]
        if scaling and scaling["rope_type"] == "llama3":
            frequency = _llama3(frequency, scaling)
        result.append(frequency)
    return result


def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
    context = scaling.get("original_max_position_embeddings", 8192)
    low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / scaling["factor"]
    blend = (context / wavelength - low) / (high - low)
    return (1 - blend) * frequency / scaling["factor"] + blend * frequency


def logits(
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    tokens: list[int],
    *,
    scaling: dict[str, Any] | None = None,
    window: int | None = None,
    visible: np.ndarray | None = None,
) -> np.ndarray:
    """(L,) token ids -> logits (L, vocabulary) without any cache.

    ``scaling`` has "rope_type" and its constants; ``window`` is the number of tokens that each
    token sees, itself included; ``visible``, bool (L, L), is used in its place.
    """
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dims = config.get("head_dim") or config["hidden_size"] // heads
    length = len(tokens)
    distance = np.subtract.outer(np.arange(length), np.arange(length))
    if visible is None:
        visible = (distance >= 0) & (distance < (window or length))
    frequencies = inverse_frequencies(dims, config.get("rope_theta") or 10000.0, scaling)
    angles = np.outer(np.arange(length), frequencies)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        sine, cosine = np.sin(angles)[:, None], np.cos(angles)[:, None]
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)

    def heads_of(x: np.ndarray, name: str, count: int) -> np.ndarray:
        y = linear(x, f"{name}_proj").reshape(length, count, dims)
        return norm(y, f"{name}_norm") if f"{name}_norm.weight" in w else y

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        y = norm(x, f"{prefix}.input_layernorm")
        q = rotate(heads_of(y, f"{prefix}.self_attn.q", heads))
        k = rotate(heads_of(y, f"{prefix}.self_attn.k", kv_heads))
        v = heads_of(y, f"{prefix}.self_attn.v", kv_heads)
        k, v = (np.repeat(each, heads // kv_heads, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * dims**-0.5
        scores = np.where(visible, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", scores, v).reshape(length, -1)
        x = x + linear(attended, f"{prefix}.self_attn.o_proj")
        y = norm(x, f"{prefix}.post_attention_layernorm")
        gate = linear(y, f"{prefix}.mlp.gate_proj")
        gated = gate / (1 + np.exp(-gate)) * linear(y, f"{prefix}.mlp.up_proj")
        x = x + linear(gated, f"{prefix}.mlp.down_proj")
    x = norm(x, "model.norm")
    tied = config.get("tie_word_embeddings", True)
    return x @ w["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def stepwise_logits(model: Any, tokens: list[int], prompt: int) -> np.ndarray:
    """Logits (L, vocabulary) of a model that gets ``prompt`` tokens at once, then one a call."""
    cache = model.make_cache()
    calls = [tokens[:prompt], *([token] for token in tokens[prompt:])]
    results = [model(mx.array([call]), cache=cache)[0] for call in calls]
    return np.array(mx.concatenate(results).astype(mx.float32))
