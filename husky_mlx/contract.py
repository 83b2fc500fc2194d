"""What we rely on in the installed mlx-lm, checked before our classes are built on it."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

# (module, attribute, parameters that must be there, in this order, at the start)
_FUNCTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "mlx_lm.utils",
        "load",
        (
            "path_or_hf_repo",
            "tokenizer_config",
            "model_config",
            "adapter_path",
            "lazy",
            "return_config",
            "revision",
            "trust_remote_code",
        ),
    ),
    ("mlx_lm.tuner.utils", "load_adapters", ("model", "adapter_path")),
    ("mlx_lm.utils", "_transform_awq_weights", ("weights", "quantization_config")),
    ("mlx_lm.utils", "make_shards", ("weights", "max_file_size_gb")),
    ("mlx_lm.utils", "save_config", ("config", "config_path")),
    (
        "mlx_lm.utils",
        "load_tokenizer",
        ("model_path", "tokenizer_config_extra", "eos_token_ids"),
    ),
    ("mlx_lm.utils", "infer_quant_config", ("path", "module", "weights")),
    ("mlx_lm.generate", "generate_step", ("prompt", "model", "stream")),
    (
        "mlx_lm.generate",
        "stream_generate",
        ("model", "tokenizer", "prompt", "max_tokens", "draft_model", "stream"),
    ),
    ("mlx_lm.generate", "generate", ("model", "tokenizer", "prompt", "verbose")),
    ("mlx_lm.generate", "wired_limit", ("model", "streams")),
    (
        "mlx_lm.models.base",
        "scaled_dot_product_attention",
        ("queries", "keys", "values", "cache", "scale", "mask"),
    ),
    ("mlx_lm.models.activations", "swiglu", ("gate", "x")),
    ("mlx_lm.tokenizer_utils", "_infer_tool_parser", ("tokenizer",)),
    ("mlx_lm.models.base", "create_attention_mask", ("h", "cache", "window_size")),
)
# Imported by name: nothing to check but that they are there.
_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "mlx_lm.generate",
        (
            "BatchGenerator",
            "GenerationResponse",
            "generation_stream",
            "speculative_generate_step",
        ),
    ),
    ("mlx_lm.models.cache", ("load_prompt_cache", "make_prompt_cache")),
    *((f"mlx_lm.models.{name}", ("Model", "ModelArgs")) for name in ("llama", "qwen2", "qwen3")),
    ("mlx_lm.sample_utils", ("greedy_sampler", "make_logits_processors", "make_sampler")),
    (
        "mlx_lm.tokenizer_utils",
        (
            "BPEStreamingDetokenizer",
            "SPMStreamingDetokenizer",
            "StreamingDetokenizer",
            "TokenizerWrapper",
        ),
    ),
    ("mlx_lm.utils", ("DEFAULT_ALLOW_PATTERNS", "MODEL_REMAPPING", "dequantize_model")),
)
# (class in mlx_lm.models.cache, arguments that make one, members that our subclasses build on)
_CACHES: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    (
        "KVCache",
        (),
        ("update_and_fetch", "keys_and_values", "state", "from_state", "trim", "merge", "offset"),
    ),
    (
        "RotatingKVCache",
        (1, 0),
        (
            "update_and_fetch",
            "keys_and_values",
            "_trim",
            "state",
            "from_state",
            "merge",
            "keep",
            "max_size",
            "offset",
            "_idx",
        ),
    ),
    (
        "BatchKVCache",
        ([0],),
        (
            "update_and_fetch",
            "prepare",
            "finalize",
            "filter",
            "extend",
            "extract",
            "merge",
            "left_padding",
            "offset",
            "_idx",
            "_right_padding",
        ),
    ),
    ("QuantizedKVCache", (), ("update_and_fetch", "state", "offset")),
)
_RESPONSE_FIELDS = (
    "text",
    "token",
    "logprobs",
    "from_draft",
    "prompt_tokens",
    "prompt_tps",
    "generation_tokens",
    "generation_tps",
    "peak_memory",
    "finish_reason",
)
_OUR_KEYWORDS = (
    "backend",
    "max_context",
    "max_kv_size",
    "fallback",
    "quant",
    "verbose",
    "warm",
)


@functools.cache
def violations() -> list[str]:
    """Where the installed mlx-lm differs from what we build on, a sentence each."""
    found = [
        f"{module}.{name} is gone"
        for module, names in (*_NAMES, *((module, (name,)) for module, name, _ in _FUNCTIONS))
        for name in names
        if _find(module, name) is None
    ]
    for module, name, expected in _FUNCTIONS:
        function = _find(module, name)
        if function is None:
            continue
        parameters = tuple(inspect.signature(function).parameters)
        if parameters[: len(expected)] != expected:
            found.append(f"{module}.{name} takes {parameters}, expected {expected} first")
    for name, arguments, members in _CACHES:
        kind = _find("mlx_lm.models.cache", name)
        holders = (kind, _made(kind, arguments))
        missing = [m for m in members if not any(hasattr(holder, m) for holder in holders)]
        if missing:
            found.append(f"mlx_lm.models.cache.{name} has no {', '.join(missing)}")
    response = _find("mlx_lm.generate", "GenerationResponse")
    fields = inspect.signature(response).parameters if response else _RESPONSE_FIELDS
    absent = [field for field in _RESPONSE_FIELDS if field not in fields]
    if absent:
        found.append(f"mlx_lm.generate.GenerationResponse has no {', '.join(absent)}")
    return found


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _made(kind: Any, arguments: tuple[Any, ...]) -> Any:
    """An instance, for the attributes that its class does not show; None where there is none."""
    try:
        return kind(*arguments)
    except TypeError:
        return None


def entry_point(name: str) -> Callable[..., Any]:
    """Our ``load``, ``generate`` or ``stream_generate``; mlx-lm's own under a broken contract."""
    import mlx_lm

    if not violations():
        home = "loading" if name == "load" else "generation"
        return getattr(importlib.import_module(f"husky_mlx.{home}"), name)
    _give_notice(mlx_lm.__version__)
    stock = getattr(mlx_lm, name)
    return _without_our_keywords(stock) if name == "load" else stock


@functools.cache
def _give_notice(version: str) -> None:
    """Once a process, however many names are imported."""
    warnings.warn(
        f"husky_mlx does not fit mlx-lm {version} and uses stock mlx-lm instead: "
        f"{'; '.join(violations())}",
        RuntimeWarning,
        stacklevel=4,
    )


def _without_our_keywords(stock_load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock_load)
    def load(*args: Any, **kwargs: Any) -> Any:
        return stock_load(*args, **{k: v for k, v in kwargs.items() if k not in _OUR_KEYWORDS})

    return load
