"""The greedy token loop: one step encoded ahead of the one whose token is read."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx

from husky_mlx.cache import KVCache
from husky_mlx.model import Model

CLEAR_EVERY = 256  # tokens between releases of MLX's buffer cache, as in mlx-lm's loop


def greedy_tokens(
    model: Model,
    prompt: mx.array,
    max_tokens: int,
    *,
    stream: Any,
    prompt_cache: list[Any],
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
) -> Generator[tuple[int, mx.array], None, None]:
    """Yield (token id, logits of shape (1, 1, vocabulary)) for a prompt of shape (L,).

    ``max_tokens`` below 0 means no limit. As after mlx-lm's loop the cache then holds every token
    that was yielded; a single one that finds no room in it ends the loop.
    """
    report = prompt_progress_callback or (lambda done, total: None)
    total = prompt.size
    for cache in prompt_cache:
        if type(cache) is KVCache:
            cache.expect(cache.offset + total)

    def advance(tokens: mx.array) -> tuple[mx.array, mx.array]:
        step = model.decode_step(tokens, prompt_cache)
        if step is not None:
            token, logits = step.greedy(tokens, prompt_cache)
            return token[:, -1:], logits[:, -1:]
        if tokens.shape[1] > 1:
            prefill(tokens[:, :-1])
        logits = model(tokens[:, -1:], cache=prompt_cache)[:, -1:]
        return mx.argmax(logits, axis=-1), logits

    def prefill(tokens: mx.array) -> None:
        model(tokens, cache=prompt_cache)
        mx.eval([cache.state for cache in prompt_cache])

    # Around the work and not around a yield: the consumer's own operations keep their stream, and
    # the next token may be asked for, or the loop closed, by another thread.
    with mx.stream(stream):
        report(0, total)
        done = 0
        # Where prompts have a fast way it gives the last token's logits; elsewhere its step does.
        rest = prefill_step_size if model.has_prefill() else 1
        while total - done > rest:
            chunk = prompt[done : min(done + prefill_step_size, total - 1)]
            prefill(chunk[None])
            done += chunk.size
            report(done, total)
        token, logits = advance(prompt[done:][None])
        mx.async_eval(token, logits)
    count = 0
    while count != max_tokens:
        with mx.stream(stream):
            following = advance(token) if model.has_room(prompt_cache) else None
            if following is not None:
                mx.async_eval(*following)
            if count == 0:
                mx.eval(token)
                report(total, total)
        yield int(token.item()), logits  # type: ignore[arg-type]
        count += 1
        if following is None:
            return
        token, logits = following
        if count % CLEAR_EVERY == 0:
            mx.clear_cache()
