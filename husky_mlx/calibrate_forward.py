"""A Llama in float32, layer by layer over whole sequences: what calibration and eval run on.

Written over numpy's names, which MLX shares: numpy on a CPU, where MLX's float32 product of many
rows is slow, and MLX on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from husky_mlx.config import LlamaConfig
from husky_mlx.device import target
from husky_mlx.structure import expected_shapes

Array = Any  # np.ndarray or mx.array
# Called with the paths of the projections that share an input, and that input, (tokens, columns).
Observe = Callable[[tuple[str, ...], Array], None]
HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"
# Tokens whose activations inside a layer are in memory together.
_TOKENS = 2048


def array_module() -> Any:
    """``mlx.core`` where it computes on a GPU, else numpy."""
    return np if target() == "cpu" else mx


class FloatLlama:
    """The forward pass of a Llama over float32 weights under mlx-lm's names, without a cache.

    ``weights`` is asked for each name when a layer needs it, so it may read or dequantize then.
    ``xp`` is numpy or mlx.core.
    """

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Array], xp: Any = np):
        self.config = config
        self.weights = weights
        self.xp = xp

    @property
    def head(self) -> str:
        """The path of the matrix that makes the logits."""
        return EMBEDDING if self.config.tie_word_embeddings else HEAD

    def embed(self, tokens: np.ndarray) -> Array:
        """(sequences, length) token ids -> (sequences, length, hidden)."""
        table = self.weights[f"{EMBEDDING}.weight"]
        return table[self._array(tokens)]

    def layer(self, index: int, x: Array, observe: Observe | None = None) -> Array:
        """(sequences, length, hidden) before a layer -> after it, its weights read once."""
        prefix = f"model.layers.{index}."
        names = expected_shapes(self.config, [index])
        own = {name: self.weights[name] for name in names if name.startswith(prefix)}
        step = max(_TOKENS // x.shape[1], 1)
        parts = [self._layer(own, index, x[i : i + step], observe) for i in range(0, len(x), step)]
        return self.xp.concatenate(parts)

    def _layer(
        self, weights: Mapping[str, Array], index: int, x: Array, observe: Observe | None
    ) -> Array:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

        def linear(x: Array, *paths: str) -> list[Array]:
            rows = x.reshape(-1, x.shape[-1])
            if observe is not None:
                observe(paths, rows)
            results = []
            for path in paths:
                y = rows @ weights[f"{path}.weight"].T
                if f"{path}.bias" in weights:
                    y = y + weights[f"{path}.bias"]
                results.append(y.reshape(*x.shape[:-1], -1))
            return results

        y = self._norm(x, weights[f"{prefix}.input_layernorm.weight"])
        q, k, v = linear(y, *(f"{attention}.{name}_proj" for name in "qkv"))
        if self.config.qk_norm:
            q, k = (
                self._norm_heads(part, weights[f"{attention}.{name}_norm.weight"])
                for part, name in ((q, "q"), (k, "k"))
            )
        x = x + linear(self._attend(index, q, k, v), f"{attention}.o_proj")[0]
        y = self._norm(x, weights[f"{prefix}.post_attention_layernorm.weight"])
        gate, up = linear(y, f"{mlp}.gate_proj", f"{mlp}.up_proj")
        # Capped where exp would overflow: the quotient is 0 there all the same.
        gated = gate / (1 + self.xp.exp(self.xp.minimum(-gate, 80.0))) * up
        x = x + linear(gated, f"{mlp}.down_proj")[0]
        if self.xp is mx:
            mx.eval(x)
        return x

    def final_norm(self, x: Array) -> Array:
        """What the head multiplies, of the shape of ``x``."""
        return self._norm(x, self.weights["model.norm.weight"])

    def hidden(self, tokens: np.ndarray) -> Array:
        """(sequences, length) token ids -> what the head multiplies, one vector a token."""
        x = self.embed(tokens)
        for index in range(self.config.num_hidden_layers):
            x = self.layer(index, x)
        return self.final_norm(x)

    def logits(self, normed: Array) -> Array:
        """(..., hidden) out of the final norm -> (..., vocabulary)."""
        return normed @ self.weights[f"{self.head}.weight"].T

    def _array(self, values: np.ndarray) -> Array:
        return values if self.xp is np else mx.array(values)

    def _norm(self, x: Array, weight: Array) -> Array:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / self.xp.sqrt(mean + self.config.rms_norm_eps) * weight

    def _norm_heads(self, x: Array, weight: Array) -> Array:
        """RMS norm of each head of (sequences, length, heads * dims)."""
        heads = x.reshape(*x.shape[:2], -1, self.config.head_dim)
        return self._norm(heads, weight).reshape(x.shape)

    def _attend(self, index: int, q: Array, k: Array, v: Array) -> Array:
        """Queries, keys and values (sequences, length, heads * dims) -> the queries' shape."""
        config, xp = self.config, self.xp
        sequences, length, _ = q.shape

        def heads(y: Array) -> Array:  # (sequences, kv heads, heads each, length, dims)
            kv_heads = config.num_key_value_heads
            y = y.reshape(sequences, length, kv_heads, -1, config.head_dim)
            return y.transpose(0, 2, 3, 1, 4)

        scores = self._rotate(heads(q)) @ self._rotate(heads(k)).swapaxes(-1, -2)
        distance = np.subtract.outer(np.arange(length), np.arange(length))
        visible = (distance >= 0) & (distance < (config.window_of(index) or length))
        hidden = np.where(visible, np.float32(0), np.float32(-np.inf))
        scores = scores * config.attention_scale + self._array(hidden)
        scores = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        scores = scores / scores.sum(axis=-1, keepdims=True)
        attended = (scores @ heads(v)).transpose(0, 3, 1, 2, 4)
        return attended.reshape(sequences, length, config.query_size)

    def _rotate(self, x: Array) -> Array:
        """Turn the pairs of (..., length, dims) by their positions."""
        xp, rope = self.xp, self.config.rope
        angles = np.outer(np.arange(x.shape[-2]), rope.frequencies(x.shape[-1]))
        sine, cosine = (
            self._array((f(angles) * rope.magnitude).astype(np.float32)) for f in (np.sin, np.cos)
        )
        half = x.shape[-1] // 2
        if rope.traditional:
            a, b = x[..., ::2], x[..., 1::2]
        else:
            a, b = x[..., :half], x[..., half:]
        turned = [a * cosine - b * sine, b * cosine + a * sine]
        if rope.traditional:
            return xp.stack(turned, axis=-1).reshape(x.shape)
        return xp.concatenate(turned, axis=-1)
