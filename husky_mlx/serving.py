"""Checks that a request to mlx-lm's server must pass before it may join the others.

mlx-lm decodes in one thread, and what is raised there ends the service for everybody; what is
raised while a request is tokenized is the answer to that request alone.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from husky_mlx.errors import ContextLimitError, HuskyError


@contextlib.contextmanager
def checked_requests() -> Iterator[None]:
    """Refuse empty prompts, and hold replies to the model's ``max_context``, while open.

    A prompt that leaves no room is answered with the error, a reply that would pass the limit
    ends there with finish_reason "length".
    """
    generator = importlib.import_module("mlx_lm.server").ResponseGenerator
    stock = getattr(generator, "_tokenize", None)
    if stock is None:
        raise HuskyError("this mlx-lm's server has no place to check a request: use --backend mlx")

    def tokenize(self: Any, tokenizer: Any, request: Any, args: Any) -> tuple:
        prompt, *rest = stock(self, tokenizer, request, args)
        limit = getattr(self.model_provider.model, "max_context", None)
        args.max_tokens = _allowed(len(prompt), args.max_tokens, limit)
        return (prompt, *rest)

    generator._tokenize = tokenize
    try:
        yield
    finally:
        generator._tokenize = stock


def _allowed(prompt_tokens: int, max_tokens: int, limit: int | None) -> int:
    """How many tokens the reply to a prompt of this length may have."""
    if prompt_tokens == 0:
        raise ValueError("the prompt is empty")
    if limit is None:
        return max_tokens
    if prompt_tokens >= limit:
        raise ContextLimitError(
            f"the prompt has {prompt_tokens} tokens and max_context is {limit}, which leaves no "
            "room for a reply"
        )
    return min(max_tokens, limit - prompt_tokens)
