"""One trial of ``husky bench``: a reply, or several at once, timed from outside the loop."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.sample_utils import make_sampler

from husky_mlx.bench_machine import MEGABYTE
from husky_mlx.generation import stream_generate


def run_trial(model: nn.Module, tokenizer: Any, trial: dict, specification: dict) -> dict:
    """One trial: ms, tokens a second over all sequences, seconds and megabytes (1e6).

    The first tokens end the prefill; decode counts the tokens after them over the time after them.
    ``peak_mb`` is what MLX held at most during the trial, weights included.
    """
    prompts = trial["prompts"]
    options = dict[str, Any]()
    if specification["temp"] > 0:
        options["sampler"] = make_sampler(specification["temp"], specification["top_p"])
    mx.random.seed(specification["seed"])
    before = dict(getattr(getattr(model, "plan", None), "counts", {}))
    gc.collect()
    mx.reset_peak_memory()

    started = time.perf_counter()
    if len(prompts) == 1:
        loop = {"husky": stream_generate, "mlx-lm": mlx_lm.stream_generate}[specification["loop"]]
        steps = _single(loop, model, tokenizer, prompts[0], trial["generation_tokens"], options)
    else:
        steps = _together(model, prompts, trial["generation_tokens"], options)
    arrivals, made, read = [], [], 0
    for tokens, counted in steps:
        read = counted
        if tokens:
            arrivals.append(time.perf_counter())
            made.append(tokens)
    total = time.perf_counter() - started

    peak = max(mx.get_peak_memory(), mx.get_active_memory())
    # mlx-lm runs one step past the last token: it must not run into the next engine's trial.
    mx.synchronize(generation_stream)
    mx.synchronize()
    first, after_first = arrivals[0] - started, arrivals[-1] - arrivals[0]
    return {
        "first_token_ms": first * 1e3,
        "prefill_tps": sum(map(len, prompts)) / first,
        "decode_tps": sum(made[1:]) / after_first if after_first else 0.0,
        "total_s": total,
        "peak_mb": peak / MEGABYTE,
        "prompt_tokens": read,
        "generation_tokens": sum(made),
        "calls": {
            kind: count - before.get(kind, 0)
            for kind, count in getattr(getattr(model, "plan", None), "counts", {}).items()
        },
    }


def _single(
    loop: Any, model: nn.Module, tokenizer: Any, prompt: list[int], count: int, options: dict
) -> Iterator[tuple[int, int]]:
    """For each token 1, and how many of the prompt were read."""
    for response in loop(model, tokenizer, prompt, max_tokens=count, **options):
        yield 1, int(response.prompt_tokens)


def _together(
    model: nn.Module, prompts: Sequence[list[int]], count: int, options: dict
) -> Iterator[tuple[int, int]]:
    """For each step of mlx-lm's batch loop the tokens made; at the end what it read of all
    prompts, by its own count."""
    size = len(prompts)
    generator = BatchGenerator(
        model, prefill_batch_size=size, completion_batch_size=size, **options
    )
    try:
        generator.insert(list(prompts), [count] * size)
        with generator.stats() as stats:
            while responses := generator.next_generated():
                yield len(responses), 0
        # The last token of each prompt is read by the first step, which counts as generation.
        yield 0, stats.prompt_tokens + size
    finally:
        generator.close()


def peak_resident_bytes() -> int:
    """The most memory that this process ever had resident, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # A new program inherits its parent's ru_maxrss on Linux; VmHWM (KiB) is its own.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
