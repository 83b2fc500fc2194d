"""Models that decode by the kernels in the emulator, and what they are held against."""

from __future__ import annotations

import mlx.core as mx
from fixtures import mlx_weights, quantize_weights
from mlx_lm.generate import generate_step, generation_stream
from test_parity import stock_model

from husky_mlx import chips, frozen
from husky_mlx.fused import FusedGraph, fused_weights
from husky_mlx.greedy import greedy_tokens
from husky_mlx.ops.gemv import Platform

CHIPS = ["m1", "m4max", "sm_90"]


def on(monkeypatch):
    """``on(chip)``: from here on models get the fused step of a chip, without its self-test.

    ``backend="cuda"`` needs ``emulated_kernels.emulated_cuda``.
    """

    def choose(chip, backend="emulator"):
        def fused(config, weights, plan, tiles=None):
            made = fused_weights(config, weights)
            assert not isinstance(made, str), made
            graph = FusedGraph(config, made, plan, Platform(chips.parse(chip)[0], backend))
            graph.compiled = False  # the emulator cannot be traced
            return graph

        monkeypatch.setattr(frozen, "choose_graph", fused)

    return choose


def weights_of(config, bits=4, group_size=32):
    weights = mlx_weights(config)
    return quantize_weights(weights, bits, group_size) if bits < 16 else weights


def expected(config, weights, prompt, count):
    """mlx-lm's own greedy tokens."""
    stock = stock_model(config, dict(weights))
    return [int(t) for t, _ in generate_step(mx.array(prompt), stock, max_tokens=count)]


def decode(model, prompt, count):
    cache = model.make_cache()
    tokens = greedy_tokens(
        model, mx.array(prompt), count, stream=generation_stream, prompt_cache=cache
    )
    return [token for token, _ in tokens], cache


def difference(a, b):
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()
