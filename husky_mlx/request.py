"""What a request must satisfy before anything runs: its tokens, its limit, its cache options."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import RotatingKVCache as StockRotatingKVCache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from husky_mlx.cache import RotatingKVCache, quantized_group_size
from husky_mlx.errors import ContextLimitError, UsageError
from husky_mlx.model import SINK_TOKENS, Model

# Where mlx-lm takes sampling options: (argument, the function that makes it).
_MAKERS = (("sampler", make_sampler), ("logits_processors", make_logits_processors))


def check_request(
    model: Model,
    prompt: mx.array,
    max_tokens: int | None,
    options: dict[str, Any],
    draft_model: Any = None,
) -> int:
    """Check a prompt (L,) and the options of ``stream_generate``; returns the tokens to generate.

    The result is ``max_tokens`` lowered to what ``max_context`` leaves (-1 or None: no limit).
    Raises ValueError for an empty prompt, token ids outside the vocabulary, options that are no
    numbers or out of range, KV cache options that do not fit the model, and speculative decoding
    past a bounded window; ContextLimitError for a prompt that leaves no room for a reply.
    """
    if max_tokens is None:
        max_tokens = -1
    if max_tokens == 0 or not isinstance(max_tokens, int | np.integer):
        raise UsageError(
            f"max_tokens must be a whole number above 0, or -1 for no limit, found {max_tokens!r}"
        )
    check_size("prefill_step_size", options.get("prefill_step_size", 1), least=1)
    if options.get("max_kv_size") is not None:
        check_size("max_kv_size", options["max_kv_size"], least=SINK_TOKENS + 1)
    embeddings = options.get("input_embeddings")
    if prompt.size == 0 and embeddings is None:
        raise ValueError("the prompt is empty")
    if prompt.size:
        _check_token_ids(prompt, model.args.vocab_size)
    _check_kv_options(model, options)
    length = prompt.size if embeddings is None else len(embeddings)
    cached = options.get("prompt_cache")
    if cached is not None:
        _check_cache(cached)
    start = cached[0].offset if cached else 0
    trained = model.args.max_position_embeddings
    if trained is not None and start + length > trained:
        warnings.warn(
            f"a prompt of {start + length} tokens is longer than the {trained} that the model was "
            "trained on",
            stacklevel=3,
        )
    if draft_model is not None:
        _check_speculation(model, draft_model, start + length, max_tokens, cached)
    if model.max_context is None:
        return max_tokens
    room = model.max_context - start - length
    if room < 1:
        raise ContextLimitError(
            f"the prompt has {start + length} tokens and max_context is {model.max_context}, which "
            "leaves no room for a reply"
        )
    return room if max_tokens < 0 else min(max_tokens, room)


def check_options(options: Iterable[str]) -> None:
    """Raise TypeError for names that no loop of mlx-lm takes, with the way to say it."""
    unknown = [name for name in options if name not in _loop_options()]
    if not unknown:
        return
    advice = ""
    for argument, maker in _MAKERS:
        name = "temp" if unknown[0] == "temperature" else unknown[0]
        if name in inspect.signature(maker).parameters:
            advice = f"; it goes into {argument}={maker.__name__}({name}=...)"
    raise TypeError(f"generate and stream_generate take no argument {unknown[0]!r}{advice}")


@functools.cache
def _loop_options() -> frozenset[str]:
    loops = (generate_step, speculative_generate_step)
    return frozenset(name for loop in loops for name in inspect.signature(loop).parameters)


def check_text(text: str) -> None:
    """Raise ValueError for lone surrogates, which stand for bytes that were no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt is not valid text: {text[error.start]!r} at position {error.start} "
            "stands for a byte that is not UTF-8"
        ) from error


def check_size(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless an option is a whole number of at least ``least``."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be a whole number from {least} up, found {value!r}")


def _check_cache(caches: Any) -> None:
    if not isinstance(caches, Sequence) or not all(
        hasattr(cache, "update_and_fetch") and hasattr(cache, "offset") for cache in caches
    ):
        raise ValueError(
            "prompt_cache must be a list of one key-value cache a layer, as make_prompt_cache "
            f"returns it, found {caches!r}"
        )


def _check_token_ids(prompt: mx.array, vocab_size: int) -> None:
    # On the host, where a list of them is: a GPU's first look at memory that it shares with the
    # host takes 0.2 ms.
    ids = np.array(prompt)
    for token in (int(ids.min()), int(ids.max())):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {vocab_size}")


def _check_speculation(
    model: Model, draft_model: Any, prompt_length: int, max_tokens: int, cached: Any
) -> None:
    """A ring of rows that has gone round cannot take rejected tokens back; mlx-lm keeps them."""
    caches = cached or [*make_prompt_cache(model), *make_prompt_cache(draft_model)]
    windows = [c.max_size for c in caches if isinstance(c, StockRotatingKVCache)]
    if windows and (max_tokens < 0 or prompt_length + max_tokens >= min(windows)):
        raise ValueError(
            f"speculative decoding takes tokens back, which a window of {min(windows)} tokens "
            f"cannot once it is full: {prompt_length} of prompt and {max_tokens} of reply do not "
            "fit; decode without draft_model"
        )


def _check_kv_options(model: Model, options: dict[str, Any]) -> None:
    bits = options.get("kv_bits")
    if bits is None:
        return
    quantized_group_size((model.args.head_dim,), options.get("kv_group_size", 64), bits)
    caches = options.get("prompt_cache") or model.make_cache(options.get("max_kv_size"))
    if any(isinstance(cache, RotatingKVCache) for cache in caches):
        raise ValueError(
            "kv_bits cannot be used with a bounded window (max_kv_size or sliding_window): "
            "mlx-lm has no quantized rotating cache"
        )
