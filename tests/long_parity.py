"""Slow parity checks against mlx-lm on SmolLM2, run by hand (the suite has the short ones).

    python tests/long_parity.py             # both below
    python tests/long_parity.py long        # 1,500 greedy tokens in float32
    python tests/long_parity.py bits16      # bfloat16 weights, every choice of mlx-lm's explained

In 16 bit two engines may choose different tokens where the two best logits are closer than their
rounding. ``bits16`` lets mlx-lm decode in bfloat16, feeds the same tokens to ours and to a float32
run, and holds each choice of ours against the float32 run's: another one is a tie if the two best
float32 logits are within bfloat16's rounding of each other, else a failure. Where mlx-lm's own
bfloat16 choice is not the float32 one is counted beside it.
"""

from __future__ import annotations

import os
import sys

# Of two engines with float arithmetic: the frozen step, or with "exact" the native program.
os.environ.setdefault("HUSKY_NATIVE", "0")

import mlx.core as mx
from mlx_lm.generate import generate_step

from husky_mlx import checkpoint, sources
from husky_mlx.loading import build_model, load

PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ", "春天来了，")
LONG, SHORT = 1500, 48
BFLOAT16_ROUNDING = 2.0**-8


def tokens_of(model, prompt: list[int], count: int) -> list[int]:
    return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def long_run() -> bool:
    ours, tokenizer = load("smollm2")
    stock, _ = load("smollm2", backend="mlx")
    stock.set_dtype(mx.float32)
    prompt = tokenizer.encode("Once upon a time")
    expected, found = tokens_of(stock, prompt, LONG), tokens_of(ours, prompt, LONG)
    same = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), LONG)
    print(f"float32: {same} of {LONG} tokens equal; {ours.plan.counts}")
    return same == LONG


def dense_bfloat16() -> tuple[dict, dict[str, mx.array]]:
    """SmolLM2 dequantized to bfloat16 under mlx-lm's names, and its config."""
    found = checkpoint.read(sources.resolve("smollm2"))
    weights = {}
    for name, value in found.weights.items():
        base = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{base}.scales" in found.weights:
            scales, biases = found.weights[f"{base}.scales"], found.weights[f"{base}.biases"]
            bits = value.shape[1] // scales.shape[1]
            value = mx.dequantize(value, scales, biases, group_size=32, bits=bits)
        weights[name] = value.astype(mx.bfloat16)
    return found.config, weights


def bits16() -> bool:
    config, weights = dense_bfloat16()
    _, tokenizer = load("smollm2", lazy=True)
    stock = build_model(config, dict(weights), backend="mlx")
    ours = build_model(config, dict(weights))
    exact = build_model(
        config, {k: v.astype(mx.float32) for k, v in weights.items()}, backend="mlx"
    )
    steps = ties = failures = theirs = 0
    for text in PROMPTS:
        prompt = tokenizer.encode(text)
        expected = tokens_of(stock, prompt, SHORT)
        sequence = mx.array([prompt + expected[:-1]])
        cache = ours.make_cache()
        ours(sequence[:, : len(prompt) - 1], cache=cache)
        reference = exact(sequence)[0, len(prompt) - 1 :]
        for i, token in enumerate(expected):
            column = len(prompt) - 1 + i
            logits = ours(sequence[:, column : column + 1], cache=cache)[0, -1]
            best = int(mx.argmax(reference[i]).item())
            steps += 1
            theirs += token != best
            if int(mx.argmax(logits).item()) == best:
                continue
            low, high = sorted(mx.topk(reference[i], 2).tolist())
            tie = high - low < BFLOAT16_ROUNDING * max(abs(high), 1.0)
            ties, failures = ties + tie, failures + (not tie)
            print(f"{text!r} token {i}: gap {high - low:.4f}, {'tie' if tie else 'WRONG'}")
    print(
        f"bfloat16: {steps} steps, ours other than float32 in {ties} ties and {failures} failures; "
        f"mlx-lm other than float32 in {theirs}; {ours.plan.counts}"
    )
    return failures == 0


def main() -> int:
    checks = {"long": long_run, "bits16": bits16}
    results = [checks[name]() for name in sys.argv[1:] or checks]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
