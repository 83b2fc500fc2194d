"""The greedy token loop: one step encoded ahead of the one whose token is read."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx

from husky_mlx.cache import KVCache
from husky_mlx.errors import ContextLimitError, MemoryLimitError
from husky_mlx.model import Model

CLEAR_EVERY = 256  # tokens between releases of MLX's buffer cache, as in mlx-lm's loop
EXPECTED_REPLY = 256  # tokens of a reply that the first KV buffers make room for


def greedy_tokens(
    model: Model,
    prompt: mx.array,
    max_tokens: int,
    *,
    stream: Any,
    prompt_cache: list[Any],
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    no_room: Callable[[], None] = lambda: None,
) -> Generator[tuple[int, mx.array], None, None]:
    """Yield (token id, logits of shape (1, 1, vocabulary)) for a prompt of shape (L,).

    ``max_tokens`` below 0 means no limit. The cache holds every token that was yielded when the
    loop ends, as after mlx-lm's, unless its limit leaves no room for the last. Memory or the
    cache's limit may end a reply early: ``no_room`` is called before that last token is yielded.
    """
    report = prompt_progress_callback or (lambda done, total: None)
    total = prompt.size
    reply = EXPECTED_REPLY if max_tokens < 0 else min(max_tokens, EXPECTED_REPLY)
    for cache in prompt_cache:
        if type(cache) is KVCache:
            cache.expect(cache.offset + total + reply)

    def advance(tokens: mx.array) -> tuple[mx.array, mx.array]:
        step = model.decode_step(tokens, prompt_cache)
        if step is not None:
            return step.greedy(tokens, prompt_cache)
        logits = model(tokens, cache=prompt_cache)[:, -1:]
        return mx.argmax(logits, axis=-1), logits

    with mx.stream(stream):
        report(0, total)
        done = 0
        while total - done > 1:
            chunk = prompt[done : min(done + prefill_step_size, total - 1)]
            model(chunk[None], cache=prompt_cache)
            mx.eval([cache.state for cache in prompt_cache])
            done += chunk.size
            report(done, total)
            mx.clear_cache()
        token, logits = advance(prompt[done:][None])
        mx.async_eval(token, logits)
        count = 0
        while count != max_tokens:
            following = _unless_full(advance, token)
            if following is None:
                no_room()
            if count == 0:
                mx.eval(token)
                report(total, total)
            yield int(token.item()), logits
            count += 1
            if following is None:
                return
            token, logits = following
            if count % CLEAR_EVERY == 0:
                mx.clear_cache()


def _unless_full(
    advance: Callable[[mx.array], tuple[mx.array, mx.array]], token: mx.array
) -> tuple[mx.array, mx.array] | None:
    """Encode the step after ``token``; None where ``token`` finds no room in the cache."""
    try:
        following = advance(token)
    except (ContextLimitError, MemoryLimitError):
        return None
    mx.async_eval(*following)
    return following
