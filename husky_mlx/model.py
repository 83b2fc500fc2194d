"""The Llama model as mlx-lm's tools know it, with decode through the frozen step.

The classes below are the general forward: any batch and length, any cache, gradients, adapters.
Paths and leaf types of the parameters are mlx-lm's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_linear
from mlx.utils import tree_flatten
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from husky_mlx import device
from husky_mlx.cache import KVCache, RotatingKVCache
from husky_mlx.choices import REFERENCE, Choice
from husky_mlx.config import LlamaConfig
from husky_mlx.freeze import DecodeStep
from husky_mlx.frozen import MAX_ROWS, Frozen, eager_reason
from husky_mlx.native_step import NativeStep
from husky_mlx.ops.embed import embed
from husky_mlx.ops.gemv import TileKey
from husky_mlx.ops.rotate import rotation
from husky_mlx.pack import FUSIONS, Ready
from husky_mlx.plan import Plan
from husky_mlx.prefill import Prefill
from husky_mlx.structure import drop_unread
from husky_mlx.tiles import GemvTile

SINK_TOKENS = 4  # what mlx-lm keeps at the start of a bounded window


class Tracked(nn.Module):
    """A module whose bulk updates are noticed: the frozen step holds the weights as constants.

    LoRA and ``fuse`` update layers, optimizers and ``load_weights`` the whole model.
    """

    def __init__(self, frozen: Frozen):
        super().__init__()
        self._frozen = frozen

    def update(self, *args: Any, **kwargs: Any) -> nn.Module:  # type: ignore[override]
        with self._frozen.changing():
            return super().update(*args, **kwargs)

    def update_modules(self, *args: Any, **kwargs: Any) -> nn.Module:
        with self._frozen.changing():
            return super().update_modules(*args, **kwargs)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.n_heads = config.num_attention_heads
        self.n_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.q_proj = nn.Linear(hidden, config.query_size, bias=bias)
        self.k_proj = nn.Linear(hidden, config.key_value_size, bias=bias)
        self.v_proj = nn.Linear(hidden, config.key_value_size, bias=bias)
        self.o_proj = nn.Linear(config.query_size, hidden, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self._rotate = rotation(config.rope, config.head_dim)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        B, L, _ = x.shape
        q = self.q_proj(x).reshape(B, L, self.n_heads, self.head_dim)
        k = self.k_proj(x).reshape(B, L, self.n_kv_heads, self.head_dim)
        if "q_norm" in self:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
        v = self.v_proj(x).reshape(B, L, self.n_kv_heads, self.head_dim).swapaxes(1, 2)
        offset = 0 if cache is None else cache.offset
        q, k = self._rotate(q, offset=offset), self._rotate(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        y = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(y.swapaxes(1, 2).reshape(B, L, -1))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, wide, bias=bias)
        self.up_proj = nn.Linear(hidden, wide, bias=bias)
        self.down_proj = nn.Linear(wide, hidden, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class TransformerBlock(Tracked):
    def __init__(self, config: LlamaConfig, frozen: Frozen):
        super().__init__(frozen)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(Tracked):
    def __init__(self, config: LlamaConfig, frozen: Frozen):
        super().__init__(frozen)
        self.args = config
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [TransformerBlock(config, frozen) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def activation_dtype(self) -> mx.Dtype:
        """What the residual stream and the KV cache are computed in."""
        # By name, wherever an adapter around the table keeps it.
        table = dict(tree_flatten(self.embed_tokens.parameters()))
        part = "scales" if any(name.endswith("scales") for name in table) else "weight"
        stored = next(value.dtype for name, value in table.items() if name.endswith(part))
        # The scales of the mx formats are bytes; MLX dequantizes those to bfloat16.
        return device.activation_dtype(mx.bfloat16 if stored == mx.uint8 else stored)

    def __call__(
        self,
        inputs: mx.array,
        cache: Sequence[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        x = embed(inputs, self.embed_tokens) if input_embeddings is None else input_embeddings
        caches = cache or [None] * len(self.layers)
        masks: dict[int | None, Any] = {}
        for i, (layer, layer_cache) in enumerate(zip(self.layers, caches, strict=True)):
            window = self.args.window_of(i)
            if window not in masks:
                masks[window] = create_attention_mask(x, layer_cache, window_size=window)
            x = layer(x, masks[window], layer_cache)
        return self.norm(x)


class Model(Tracked):
    """The drop-in: mlx-lm's call, and one-token calls through the frozen step where they fit."""

    def __init__(
        self,
        args: LlamaConfig,
        max_context: int | None = None,
        max_kv_size: int | None = None,
    ):
        self.plan = Plan(
            target=device.target(),
            chip=device.chip(),
            model=f"{args.model_type}, {args.num_hidden_layers} layers of {args.hidden_size}"
            f"{_windows(args, max_kv_size)}",
            max_rows=MAX_ROWS,
            eager_reason=eager_reason(),
        )
        super().__init__(Frozen(args, self.plan))
        self.args = args
        self.model_type = args.model_type
        self.max_context = max_context
        self.max_kv_size = max_kv_size
        self.model = LlamaModel(args, self._frozen)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(
        self,
        inputs: mx.array,
        cache: Sequence[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """(B, L) token ids -> logits (B, L, vocabulary); ``cache`` gains L tokens a row."""
        if cache and input_embeddings is None and not self.training:
            step = self.decode_step(inputs, cache)
            if step is not None:
                return step.logits(inputs, cache)
        self.plan.count("reference")
        return self.head()(self.model(inputs, cache, input_embeddings))

    def decode_step(
        self, inputs: mx.array, cache: Sequence[Any]
    ) -> DecodeStep | Prefill | NativeStep | None:
        """What takes this call instead of the reference path; see ``Frozen.step_for``."""
        return self._frozen.step_for(self, inputs, cache)

    def has_prefill(self) -> bool:
        """Whether prompts may take kernels, which give their last token's logits by themselves."""
        return self._frozen.has_prefill()

    def has_room(self, caches: Sequence[Any]) -> bool:
        """Whether one more token a row fits the device's memory and ``max_context``."""
        return self._frozen.has_room(self, caches)

    def prepare(
        self,
        ready: Mapping[str, Ready] | None = None,
        tiles: Mapping[TileKey, GemvTile] | None = None,
    ) -> None:
        """Fuse and freeze now instead of at the first decode; evaluates the weights.

        ``ready`` and ``tiles``: the buffers and launch choices of a build.
        """
        self._frozen.say_dtype(self)
        self._frozen.tiles = tiles or {}
        if self.plan.eager_reason is None or self._frozen.native_wanted:
            self._frozen.freeze(self, ready)

    def follow(self, choice: Choice) -> None:
        """Run as ``husky doctor`` chose; the plan says so."""
        self.plan.choice = str(choice)
        if choice.way == REFERENCE:
            self._frozen.stay_on_reference("husky doctor timed it as the fastest here")

    def foreign_part(self) -> str | None:
        """What the frozen step does not know: a module or constant that is not ours any more."""
        args = self.args
        if len(self.layers) != args.num_hidden_layers:
            return f"{len(self.layers)} layers instead of {args.num_hidden_layers}"
        modules: dict[str, tuple[Any, type[nn.Module]]] = {"norm": (self.model.norm, nn.RMSNorm)}
        for i, layer in enumerate(self.layers):
            if type(layer) is not TransformerBlock:
                return f"layers.{i} is a {type(layer).__name__}"
            modules |= {
                f"layers.{i}.self_attn": (layer.self_attn, Attention),
                f"layers.{i}.mlp": (layer.mlp, MLP),
                f"layers.{i}.input_layernorm": (layer.input_layernorm, nn.RMSNorm),
                f"layers.{i}.post_attention_layernorm": (
                    layer.post_attention_layernorm,
                    nn.RMSNorm,
                ),
            }
            for name in ("q_norm", "k_norm") if args.qk_norm else ():
                path = f"layers.{i}.self_attn.{name}"
                modules[path] = layer.self_attn.get(name), nn.RMSNorm
        constants = {
            nn.RMSNorm: ("eps", args.rms_norm_eps),
            Attention: ("scale", args.attention_scale),
        }
        for path, (module, expected) in modules.items():
            if type(module) is not expected:
                return f"{path} is a {type(module).__name__}"
            if expected in constants:
                name, value = constants[expected]
                if getattr(module, name) != value:
                    return f"{path}.{name} is {getattr(module, name)}"
        return None

    def head(self) -> Callable[[mx.array], mx.array]:
        """The vocabulary projection: (..., hidden) -> logits (..., vocabulary)."""
        return self.model.embed_tokens.as_linear if self.args.tie_word_embeddings else self.lm_head

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drop what the model does not read: rotary tables, and the head of a tied model."""
        return drop_unread(weights, self.args.tie_word_embeddings)

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Split over a group as mlx-lm does; a sharded model runs on the reference path."""
        group = group or mx.distributed.init()
        for layer in self.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for module, name in [
                *((attention, name) for name in FUSIONS["qkv"][1]),
                *((mlp, name) for name in FUSIONS["gate_up"][1]),
            ]:
                module[name] = shard_linear(module[name], "all-to-sharded", group=group)
            attention.o_proj = shard_linear(attention.o_proj, "sharded-to-all", group=group)
            mlp.down_proj = shard_linear(mlp.down_proj, "sharded-to-all", group=group)
            attention.n_heads //= group.size()
            attention.n_kv_heads //= group.size()
        self._frozen.invalidate()
        self.plan.eager_reason = f"sharded over {group.size()}"

    @property
    def layers(self) -> list[TransformerBlock]:
        return self.model.layers

    def make_cache(self, max_kv_size: int | None = None) -> list[KVCache | RotatingKVCache]:
        """One empty cache a layer, bounded by the layer's window and by ``max_kv_size`` tokens.

        Without an argument the ``max_kv_size`` given to ``load`` bounds it.
        """
        bound = max_kv_size or self.max_kv_size
        return [self._layer_cache(self.args.window_of(i), bound) for i in range(len(self.layers))]

    def _layer_cache(self, window: int | None, bound: int | None) -> KVCache | RotatingKVCache:
        if window is not None and (bound is None or window <= bound):
            return RotatingKVCache(max_size=window)
        if bound is not None:
            return RotatingKVCache(max_size=bound, keep=SINK_TOKENS)
        return KVCache(limit=self.max_context)


def _windows(args: LlamaConfig, max_kv_size: int | None) -> str:
    """The plan's words about caches that drop tokens; empty where all are kept."""
    words = []
    if max_kv_size is not None:
        words.append(
            f", cache of the first {SINK_TOKENS} and last {max_kv_size - SINK_TOKENS} tokens"
        )
    if windows := {args.window_of(i) for i in range(args.num_hidden_layers)} - {None}:
        words.append(f", sliding window of {' and '.join(map(str, windows))} tokens")
    return "".join(words)
