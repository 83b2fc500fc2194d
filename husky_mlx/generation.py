"""``generate`` and ``stream_generate``: mlx-lm's signatures, with a greedy loop of our own.

The greedy loop takes the argmax inside the frozen graph and leaves the log probabilities of the
vocabulary until somebody reads them. Everything else (sampling, logits processors, speculative
decoding, a quantized cache, embeddings) runs in mlx-lm's own loop on our model.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Generator
from operator import index
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.generate import stream_generate as stock_stream_generate
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from husky_mlx.errors import MemoryLimitError
from husky_mlx.greedy import greedy_tokens
from husky_mlx.model import Model
from husky_mlx.request import check_options, check_request, check_text

# Options of mlx-lm's loop that say nothing to a greedy one.
_SAMPLING_OPTIONS = (
    "sampler",
    "logits_processors",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "input_embeddings",
    "num_draft_tokens",
)


class GreedyResponse(GenerationResponse):
    """mlx-lm's response; ``logprobs``, (vocabulary,), are computed when they are first read."""

    _logits: mx.array | None
    _logprobs: mx.array

    @property  # type: ignore[override]
    def logprobs(self) -> mx.array:
        logits = self._logits
        if logits is not None:
            # Not sliced before: an array that is still to be computed belongs to its thread.
            row = logits[0, -1]
            self._logprobs = row - mx.logsumexp(row, keepdims=True)
            mx.eval(self._logprobs)
            self._logits = None
        return self._logprobs

    @logprobs.setter
    def logprobs(self, logits: mx.array) -> None:
        self._logits = logits


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    stream: Any = generation_stream,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """Stream a reply, a GenerationResponse a token; arguments as ``mlx_lm.stream_generate``.

    The user's limit (``max_context``) or memory ends a reply with finish_reason "length". Raises
    TypeError for an option that does not exist, ValueError for an empty prompt and for token ids
    outside the vocabulary, ContextLimitError for a prompt over the limit, and MemoryLimitError for
    one that does not fit the device.
    """
    if not isinstance(model, Model):
        yield from stock_stream_generate(
            model, tokenizer, prompt, max_tokens, draft_model, stream, **kwargs
        )
        return
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    check_options(kwargs)
    tokens = _encode(tokenizer, prompt)
    max_tokens = check_request(model, tokens, max_tokens, kwargs, draft_model)
    max_kv_size = kwargs.pop("max_kv_size", None)
    if kwargs.get("prompt_cache") is None and draft_model is None:
        kwargs["prompt_cache"] = model.make_cache(max_kv_size)
    fast = model.plan.eager_reason is None or model.plan.native is not None
    if fast and _is_greedy(draft_model, kwargs):
        responses = _greedy_responses(model, tokenizer, tokens, max_tokens, stream, **kwargs)
    else:
        responses = stock_stream_generate(
            model, tokenizer, tokens, max_tokens, draft_model, stream, **kwargs
        )
    caches = kwargs.get("prompt_cache") or []
    last = None
    try:
        for response in responses:
            theirs = not isinstance(response, GreedyResponse)
            if last is None and (response.token == 0 or theirs):
                _check_numbers(model, response.logprobs)
            last = response
            # Our greedy loop has asked already.
            full = theirs and response.finish_reason is None and not model.has_room(caches)
            if full:
                response.finish_reason = "length"
            yield response
            if full:
                return
    except MemoryLimitError:
        if last is None:
            raise
        # The room that there was has been taken since: the reply ends without one more token.
        end = copy.copy(last)
        end.text, end.finish_reason = "", "length"
        yield end


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | list[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """The whole reply as text; ``verbose`` prints it as it comes, then counts and speeds.

    Arguments as ``mlx_lm.generate``; the rest goes to ``stream_generate``.
    """
    rule = "=" * 10
    pieces: list[str] = []
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose and not pieces:
            print(rule)  # not before: a request that is refused prints nothing
        pieces.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    text = "".join(pieces)
    if verbose:
        print(f"\n{rule}")
        if not text:
            print("No text generated for this prompt")
        else:
            print(
                f"Prompt: {response.prompt_tokens} tokens, "
                f"{response.prompt_tps:.3f} tokens-per-sec\n"
                f"Generation: {response.generation_tokens} tokens, "
                f"{response.generation_tps:.3f} tokens-per-sec\n"
                f"Peak memory: {response.peak_memory:.3f} GB"
            )
    return text


def _check_numbers(model: Model, logprobs: mx.array) -> None:
    """Warn of logits that are no numbers: their argmax is token 0, what is sampled is anything."""
    if not mx.isnan(logprobs).any().item():
        return
    cause = "float16 overflows above 65,504: use the model in bfloat16"
    stored = model.model.norm.weight.dtype
    advice = cause if stored == mx.float16 else "its weights are damaged or too large"
    warnings.warn(f"the model's logits are not numbers (NaN); {advice}", stacklevel=3)


def _encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | list[int]) -> mx.array:
    """Token ids (L,); a rendered chat template that starts with BOS gets no second one.

    Raises ValueError for anything that is neither text nor a sequence of whole numbers.
    """
    if isinstance(prompt, str):
        if not prompt.isascii():
            check_text(prompt)
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=not has_bos)
    try:
        tokens = prompt if isinstance(prompt, mx.array) else mx.array([*map(index, prompt)])  # type: ignore[arg-type]
    except (TypeError, RuntimeError) as error:  # RuntimeError: a number past 64 bits
        raise ValueError(f"the prompt must be text or a list of token ids ({error})") from error
    if tokens.ndim != 1 or (tokens.size and not mx.issubdtype(tokens.dtype, mx.integer)):
        kind = str(tokens.dtype).removeprefix("mlx.core.")
        raise ValueError(
            f"the prompt must be text or token ids of shape (L,), found {kind} {tokens.shape}"
        )
    return tokens


def _is_greedy(draft_model: nn.Module | None, options: dict[str, Any]) -> bool:
    return (
        draft_model is None
        and options.get("sampler") in (None, greedy_sampler)
        and all(not options.get(name) for name in ("logits_processors", "kv_bits"))
        and options.get("input_embeddings") is None
    )


def _greedy_responses(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompt: mx.array,
    max_tokens: int,
    stream: Any,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    detokenizer = tokenizer.detokenizer
    for name in _SAMPLING_OPTIONS:
        options.pop(name, None)
    with wired_limit(model, [stream]):
        started = time.perf_counter()
        prompt_tps = 0.0
        tokens = greedy_tokens(model, prompt, max_tokens, stream=stream, **options)
        for count, (token, logits) in enumerate(tokens, start=1):
            if count == 1:
                prompt_tps = prompt.size / (time.perf_counter() - started)
                started = time.perf_counter()
            stop = token in tokenizer.eos_token_ids
            if not stop:
                detokenizer.add_token(token)
            last = stop or count == max_tokens or not model.has_room(options["prompt_cache"])
            if last:
                detokenizer.finalize()
            yield GreedyResponse(
                text=detokenizer.last_segment,
                token=token,
                logprobs=logits,
                from_draft=False,
                prompt_tokens=prompt.size,
                prompt_tps=prompt_tps,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - started),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=("stop" if stop else "length") if last else None,
            )
            if last:
                return
