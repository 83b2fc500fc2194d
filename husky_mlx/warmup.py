"""What a first prompt would wait for, done while a model loads: kernels, traces, libraries.

MLX compiles kernels when they are first evaluated, on Metal in every process; CUDA's libraries load
their parts and choose algorithms at a first product.
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from husky_mlx import device, kernels
from husky_mlx.errors import ContextLimitError, MemoryLimitError
from husky_mlx.greedy import greedy_tokens
from husky_mlx.model import Model

# A prompt for each way that short prompts take, with two tokens of a reply: a trace and its replay.
PROMPTS = (20, 9, 5)
TOKENS = 2


def warm_up(model: Model, *build: Any) -> str | None:
    """Fuse and freeze a model and, on a GPU, run a few tokens through it; what it took, in words.

    ``build``: what ``Model.prepare`` takes. The tokens' buffers are small and let go again. What
    the tests of the kernels have compiled counts too.
    """
    started = time.perf_counter()
    with kernels.watch() as launched:
        model.prepare(*build)
        if device.target() != "cpu" and model.plan.eager_reason is None:
            _run(model)
    if not launched:
        return None
    return f"{len(launched)} kernels ready in {time.perf_counter() - started:.1f} s"


def _run(model: Model) -> None:
    for length in PROMPTS:
        try:
            for _ in greedy_tokens(
                model,
                mx.zeros((length,), mx.int32),
                TOKENS,
                # Traces are of a stream: this is the one of mlx-lm's loops and of ours.
                stream=generation_stream,
                prompt_cache=model.make_cache(),
            ):
                pass
        except (ContextLimitError, MemoryLimitError):
            continue  # the user's limit, or a full device: a reply will say so
    mx.synchronize(generation_stream)
    mx.clear_cache()
    model.plan.forget_counts()
