"""The one description of a model's shape: read from config.json (or GGUF metadata), then frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.rope import Rope, is_positive, parse_rope


@dataclass(frozen=True)
class _Family:
    """What a model type has besides what its config says.

    ``query_bias``: biases of q, k and v but not of o, whatever the config says. ``theta``: the
    rotary base of a config without one, as in mlx-lm. ``windows``, as in transformers: whether a
    ``sliding_window`` is one of all layers ("always"), never or where ``use_sliding_window`` is
    true, then of the layers from ``max_window_layers`` on ("asked"). ``stock``: mlx-lm's module,
    if it has another name.
    """

    query_bias: bool = False
    qk_norm: bool = False
    theta: float = 10000.0
    windows: str = "never"
    stock: str | None = None


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(windows="always", stock="llama"),
    "qwen2": _Family(query_bias=True, theta=1000000.0, windows="asked"),
    "qwen3": _Family(qk_norm=True, theta=1000000.0, windows="asked"),
}
SUPPORTED_MODEL_TYPES = tuple(_FAMILIES)
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1  # MLX counts a dimension in 32 bits

_SWITCHES = ("attention_bias", "mlp_bias", "tie_word_embeddings", "rope_traditional")

# Fields that change what a llama-typed model computes, with the values that leave it a plain Llama.
# Anything else in one of them is refused by name: ignoring it would answer, but wrongly.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "swish", "silu"),
    "partial_rotary_factor": (None, 1, 1.0),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "clip_qkv": (None,),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "no_rope_layers": (None, []),
    "attention_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantize_activations": (None, False),
    "model_file": (None,),
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of one Llama-family model, under mlx-lm's names.

    It is also ``model.args`` of the drop-in, so it answers to what mlx-lm's tools read there.
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: Rope
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    max_position_embeddings: int | None = None
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False  # of o
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head of q and k before the rotation
    tie_word_embeddings: bool = True

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], source: str = "config.json") -> LlamaConfig:
        """Check a config.json (as a dict) and freeze it.

        Raises CheckpointError for missing or impossible values and UnsupportedModel for a model
        that is sound but not covered; each lists everything that it found, by field.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            found = "is missing" if model_type is None else f"must be a name, found {model_type!r}"
            raise CheckpointError(f"{source}: model_type {found}")
        if model_type not in SUPPORTED_MODEL_TYPES:
            found = f"model_type is {model_type!r}, supported are {SUPPORTED_MODEL_TYPES}"
            raise UnsupportedModel(source, [found])

        family = _FAMILIES[model_type]
        sizes, malformed = _sizes(config)
        rope, rope_malformed, unsupported = parse_rope(config, family.theta)
        malformed += rope_malformed
        unsupported += [
            f"{field} is {config[field]!r}, supported is {plain[-1]!r}"
            for field, plain in _PLAIN_VALUES.items()
            if field in config and config[field] not in plain
        ]
        layer_types, window = _attention_kinds(config, sizes, malformed, unsupported)
        eps = config.get("rms_norm_eps")
        if not is_positive(eps):
            malformed.append(f"rms_norm_eps must be a number above 0, found {eps!r}")
        trained = config.get("max_position_embeddings")
        if trained is not None and not (isinstance(trained, int) and is_positive(trained)):
            malformed.append(
                f"max_position_embeddings must be a whole number above 0, found {trained!r}"
            )
        malformed += [
            f"{field} must be true or false, found {config[field]!r}"
            for field in _SWITCHES
            if not isinstance(config.get(field), bool | None)
        ]
        malformed += _stop_tokens(config.get("eos_token_id"))
        if malformed:
            raise CheckpointError(f"{source}: {'; '.join(malformed)}")
        if unsupported:
            raise UnsupportedModel(source, unsupported)
        assert rope is not None and isinstance(eps, int | float)  # for the type checker
        tied = config.get("tie_word_embeddings")
        return cls(
            model_type=model_type,
            **sizes,
            rms_norm_eps=float(eps),
            rope=rope,
            layer_types=layer_types,
            sliding_window=window,
            max_position_embeddings=trained,
            attention_bias=bool(config.get("attention_bias")) or family.query_bias,
            output_bias=bool(config.get("attention_bias")) and not family.query_bias,
            mlp_bias=bool(config.get("mlp_bias")),
            qk_norm=family.qk_norm,
            tie_word_embeddings=True if tied is None else bool(tied),
        )

    @property
    def stock_module(self) -> str:
        """The module of ``mlx_lm.models`` that has the model's stock class."""
        return _FAMILIES[self.model_type].stock or self.model_type

    @property
    def rope_theta(self) -> float:
        return self.rope.theta

    @property
    def rope_traditional(self) -> bool:
        return self.rope.traditional

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def query_size(self) -> int:
        """Width of the concatenated query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of the concatenated key (or value) heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def kind_of_layer(self) -> list[int]:
        """Numbers each layer by its type: layers of a kind keep the same rows."""
        kinds = list(dict.fromkeys(self.layer_types))
        return [kinds.index(kind) for kind in self.layer_types]

    def window_of(self, layer: int) -> int | None:
        """The number of tokens that a layer sees, its own included; None for all of them."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


def _sizes(config: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    sizes: dict[str, int] = {}
    malformed = []

    def take(field: str, default: int | None = None, most: int = MAX_SIZE) -> None:
        value = config.get(field)
        if value is None:
            value = default
        if value is None:
            malformed.append(f"{field} is missing")
        elif not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            malformed.append(f"{field} must be a whole number from 1 to {most}, found {value!r}")
        else:
            sizes[field] = value

    take("num_hidden_layers", most=MAX_LAYERS)
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        take(field)
    heads = sizes.get("num_attention_heads")
    if heads or config.get("num_key_value_heads") is not None:
        take("num_key_value_heads", default=heads)
    if config.get("head_dim") is not None:
        take("head_dim")
    elif heads and "hidden_size" in sizes:
        if sizes["hidden_size"] % heads:
            malformed.append(
                f"hidden_size {sizes['hidden_size']} is not a multiple of num_attention_heads "
                f"{heads} and there is no head_dim"
            )
        else:
            sizes["head_dim"] = sizes["hidden_size"] // heads
    kv_heads = sizes.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        malformed.append(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if sizes.get("head_dim", 2) % 2:
        given = config.get("head_dim") is not None
        origin = "" if given else f" (hidden_size {sizes['hidden_size']} / {heads} heads)"
        malformed.append(
            f"head_dim must be even for rotary embedding, found {sizes['head_dim']}{origin}"
        )
    return sizes, malformed


def _stop_tokens(found: Any) -> list[str]:
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        return []
    return [f"eos_token_id must be a token id or a list of them, found {found!r}"]


def _attention_kinds(
    config: Mapping[str, Any],
    sizes: Mapping[str, int],
    malformed: list[str],
    unsupported: list[str],
) -> tuple[tuple[str, ...], int | None]:
    layers = sizes.get("num_hidden_layers", 0)
    window = config.get("sliding_window")
    windows = _FAMILIES[config["model_type"]].windows
    asked = config.get("use_sliding_window")
    if asked is False or (asked is None and windows == "asked"):
        window = None
    kinds = config.get("layer_types")
    if kinds is None:
        # As transformers trains them; mlx-lm has no windows here.
        first = {"always": 0, "never": layers, "asked": config.get("max_window_layers", 28)}[
            windows
        ]
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            malformed.append(f"max_window_layers must be a whole number, found {first!r}")
            first = layers
        first = layers if window is None else min(first, layers)
        kinds = ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        malformed.append(f"layer_types must be a list of names, found {kinds!r}")
        return (), None
    if len(kinds) != layers:
        malformed.append(f"layer_types has {len(kinds)} entries for {layers} layers")
    unknown = sorted({kind for kind in kinds if kind not in LAYER_TYPES})
    if unknown:
        unsupported.append(f"layer_types has {unknown}, supported are {LAYER_TYPES}")
    if "sliding_attention" not in kinds:
        return tuple(kinds), None
    if not isinstance(window, int) or window <= 0:
        malformed.append(f"sliding_window must be a whole number above 0, found {window!r}")
        window = None
    return tuple(kinds), window
