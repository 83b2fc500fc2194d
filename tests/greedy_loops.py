"""Greedy tokens by either loop, ours and mlx-lm's own."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.generate import generate_step

from husky_mlx.generation import stream_generate

LOOPS = ("husky's loop", "mlx-lm's loop")


def mlx_lm_tokens(model, prompt, count, **options) -> list[int]:
    """Greedy tokens of mlx-lm's own loop."""
    return [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=count, **options)]


def husky_tokens(plain_tokenizer):
    """Greedy tokens of our loop."""

    def run(model, prompt, count, **options):
        responses = stream_generate(model, plain_tokenizer, prompt, max_tokens=count, **options)
        return [response.token for response in responses]

    return run


def tokens_of(request, husky_tokens):
    return husky_tokens if request.param == "husky's loop" else mlx_lm_tokens
