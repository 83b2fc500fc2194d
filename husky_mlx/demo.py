"""``husky demo``: one answer from a real model, on any machine, with nothing to choose."""

from __future__ import annotations

import argparse
import sys
import time

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from husky_mlx import load, sources, stream_generate
from husky_mlx.errors import UsageError
from husky_mlx.notices import notice

DEFAULT_MODEL = "smollm2"
DEFAULT_PROMPT = "In two sentences: what do sled dogs do?"
DEFAULT_MAX_TOKENS = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``husky demo``."""
    parser.add_argument("--prompt", "-p", default=DEFAULT_PROMPT, help="what to ask the model")
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        help=f"the longest answer, in tokens (default: {DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="an alias, a folder, a .gguf file or a Hugging Face repo (default: smollm2, "
        "SmolLM2-135M-Instruct, about 98 MB, fetched once)",
    )


def run(args: argparse.Namespace) -> int:
    """Load, show the plan, stream the answer to stdout, then say how fast it was.

    Raises SourceError where the model can neither be found nor fetched, ValueError for an empty
    prompt, UsageError for a length below 1.
    """
    if not args.prompt.strip():
        raise ValueError("--prompt is empty")
    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens must be at least 1, found {args.max_tokens}")
    path = sources.resolve(args.model, notify=notice)
    start = time.perf_counter()
    model, tokenizer = load(
        str(path),
        backend=args.backend,
        max_context=args.max_context,
        max_kv_size=args.max_kv_size,
    )
    print(f"model   {args.model} ({path}), loaded in {time.perf_counter() - start:.1f} s")
    plan = str(getattr(model, "plan", "the model class and loop of mlx-lm"))
    print("plan    " + plan.replace("\n", "\n        "))
    print(f"prompt  {args.prompt}\n", flush=True)
    print(_answer(model, tokenizer, args.prompt, args.max_tokens))
    return 0


def _answer(model, tokenizer: TokenizerWrapper, prompt: str, max_tokens: int) -> str:
    """Stream the answer; returns the closing line of figures."""
    tokens = _prompt_tokens(tokenizer, prompt)
    count, first, reason = 0, 0.0, None
    start = now = time.perf_counter()
    for response in stream_generate(model, tokenizer, tokens, max_tokens=max_tokens):
        now = time.perf_counter()
        count += 1
        if count == 1:
            first = now
        reason = response.finish_reason
        sys.stdout.write(response.text)
        sys.stdout.flush()
    sys.stdout.write("\n\n")
    figures = [f"first token {first - start:.2f} s after {len(tokens)} prompt tokens"]
    if count > 1:
        figures.append(f"decode {(count - 1) / (now - first):.1f} tok/s")
    figures.append(f"{count} tokens" + (" (--max-tokens)" if reason == "length" else ""))
    figures.append(f"peak memory {mx.get_peak_memory() / 1e6:,.0f} MB")
    return ", ".join(figures)


def _prompt_tokens(tokenizer: TokenizerWrapper, prompt: str) -> list[int]:
    if tokenizer.has_chat_template:
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokenizer.encode(prompt)
