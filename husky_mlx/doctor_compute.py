"""The part of ``husky doctor`` that computes: kernels, the decode step, prompts, a tiny model.

Everything runs against plain MLX operations or against mlx-lm, here and now: no remembered verdict
is taken.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from husky_mlx import device, graphs, kernels, shapes
from husky_mlx.bench_ops import compare
from husky_mlx.bench_ops_cases import OPS, Cases
from husky_mlx.doctor_report import Finding, fail, ok, warn
from husky_mlx.errors import brief
from husky_mlx.freeze import StepGraph
from husky_mlx.fused import fused_weights
from husky_mlx.loading import build_model
from husky_mlx.metal_text import kernel_folder
from husky_mlx.model import Model
from husky_mlx.ops.gemv import Platform
from husky_mlx.pack import pack
from husky_mlx.policy import short_prompts
from husky_mlx.selftest import SelfTest

# hidden, layers, heads, key/value heads, head_dim, MLP width, vocabulary
CONFIG = shapes.llama_config(
    *(256, 2, 4, 2, 64, 512, 512), tied=False, context=512, rope_theta=10000.0
)
HEAD_NORMS = {**CONFIG, "model_type": "qwen3"}
# Bits, group size and dtype of the weights that the kernels are run on.
FORMATS = ((4, 64, "bfloat16"), (8, 64, "float16"), (16, 64, "float16"))
CONTEXT = 300  # rows that attention sees: more than one block of any tile
SEED = 0
PARITY_PROMPT, PARITY_TOKENS = 24, 16
# Of the spread of the logits: two right computations may pick either of tokens that are closer.
TIE = 0.05
OFF = "until then set HUSKY_KERNELS=0; report it with the output of husky doctor --json"


def tiny_model(
    bits: int,
    group_size: int,
    dtype: str,
    backend: str = "husky",
    *,
    lazy: bool = False,
    config: dict[str, Any] = CONFIG,
) -> Any:
    """A model of random weights; with ``lazy`` it is not frozen, and no self-test runs."""
    config = shapes.quantized(config, bits, group_size)
    weights = shapes.random_weights(config, bits, group_size, getattr(mx, dtype), SEED)
    return build_model(config, weights, backend=backend, lazy=lazy, source="the built-in model")


def kernel_checks() -> Iterator[Finding]:
    """Every kernel compiled and run, each operation by itself, then whole steps and prompts."""
    platform = graphs.kernel_platform()
    if platform is None:
        yield ok("kernels", "none run on a CPU")
        return
    mx.random.seed(SEED)
    with kernels.record() as launches:
        plain, normed = (
            {settings: tiny_model(*settings, lazy=True, config=config) for settings in FORMATS}
            for config in (CONFIG, HEAD_NORMS)
        )
        for op in OPS:
            yield _operation(op, op, plain, platform)
        yield _operation("norm_rope_append", "rms_qkv_rope_append", normed, platform)
        for config in (CONFIG, HEAD_NORMS):
            yield from _steps(tiny_model(*FORMATS[0], lazy=True, config=config), platform)
    run = {launch.op for launch in launches}
    unseen = sorted(
        {path.stem for path in kernel_folder().glob("*.metal")} - run - unused(platform)
    )
    if unseen:
        yield warn("kernels", f"not run: {', '.join(unseen)}", "nothing to do: others replace them")
    else:
        yield ok("kernels", f"{len(run)} run in {len(FORMATS)} formats")


def unused(platform: Platform) -> set[str]:
    """The kernels that no model runs there: CUDA's attention merges its splits itself."""
    return {"floor", "attention_combine"} if platform.backend == "cuda" else {"floor"}


def _operation(name: str, op: str, models: dict[tuple, Any], platform: Platform) -> Finding:
    """One operation in every format, against the MLX operations that it replaces."""
    largest = 0.0
    for (bits, _, dtype), model in models.items():
        try:
            for case in Cases(model, platform, 1, [CONTEXT]).of(op):
                largest = max(largest, compare(case))
        except Exception as error:  # whatever a compiler, a driver or a check of ours raises
            return fail(f"kernel {name}", f"{bits} bit, {dtype}: {brief(error)}", OFF)
    return ok(f"kernel {name}", f"right within {largest:.1%} of the result's size")


def _steps(model: Model, platform: Platform) -> Iterator[Finding]:
    """The self-tests that a model's first load makes, on the built-in model."""
    mx.eval(model.parameters())
    frequencies = mx.array(model.args.rope.frequencies(model.args.head_dim))
    weights = pack(model, frequencies)
    made = fused_weights(model.args, weights)
    if isinstance(made, str):
        raise ValueError(f"the built-in model takes no kernels: {made}")
    twin = StepGraph(model.args, weights, copy.copy(model.plan))
    test = SelfTest(model.args, made, twin, platform)
    lengths = short_prompts(platform.chip, made.embedding.dtype.size)
    more = " with norms of heads" if model.args.qk_norm else ""
    for name, problem in (
        ("decode step", test.problem(1, False)),
        ("decode, 2 rows", test.problem(2, True)),
        ("prompts", test.prompt_problem()),
        *([("short prompts", test.short_prompt_problem(lengths))] if lengths else []),
    ):
        name += more
        yield ok(name, "as plain MLX operations") if problem is None else fail(name, problem, OFF)


def parity() -> Iterator[Finding]:
    """Greedy tokens of a tiny model, ours and mlx-lm's own; on a CPU through its native program."""
    settings = FORMATS[0]
    dtype = "float32" if device.target() == "cpu" else settings[2]
    stock, ours = (tiny_model(*settings[:2], dtype, backend) for backend in ("mlx", "husky"))
    problem = different_token(stock, ours)
    path = ", ".join(name for name, count in ours.plan.counts.items() if count and name != "traces")
    if problem is None:
        yield ok("parity", f"{PARITY_TOKENS} greedy tokens are mlx-lm's ({path})")
    else:
        yield fail(
            "parity", f"{problem} ({path})", OFF.replace("KERNELS", "EAGER").replace("=0", "=1")
        )
    if device.target() == "cpu":
        yield _native(ours)


def _native(model: Model) -> Finding:
    if model.plan.counts["native"]:
        return ok("native program", f"{model.plan.native}: built and right")
    why = next(iter(model.plan.notes), "HUSKY_NATIVE or HUSKY_EAGER turns it off")
    return warn("native program", f"not used: {why}", "replies are several times slower without it")


def different_token(stock: Any, ours: Any) -> str | None:
    """Where our most likely token is not mlx-lm's and no tie, both behind the same tokens."""
    tokens = [(7919 * i + 1) % CONFIG["vocab_size"] for i in range(PARITY_PROMPT)]
    caches = [make_prompt_cache(model) for model in (stock, ours)]
    pieces = [mx.array([tokens])]
    for number in range(PARITY_TOKENS):
        expected, found = (
            model(pieces[-1], cache=cache)[0, -1].astype(mx.float32)
            for model, cache in zip((stock, ours), caches, strict=True)
        )
        best, ours_best = mx.argmax(expected), mx.argmax(found)
        gap = (expected[best] - expected[ours_best]) / mx.sqrt(mx.var(expected))
        # Not the other way round: NaN is a difference.
        if not float(gap.item()) <= TIE:
            return f"token {number + 1} is {ours_best.item()}, mlx-lm's is {best.item()}"
        pieces.append(best.reshape(1, 1))
    return None
