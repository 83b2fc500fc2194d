"""Which graph a model's decode step runs: fused kernels where all of them apply, else plain mx."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from husky_mlx import chips, device, switches
from husky_mlx.config import LlamaConfig
from husky_mlx.freeze import StepGraph
from husky_mlx.fused import FusedGraph, fused_weights
from husky_mlx.launches import launch_lines
from husky_mlx.ops.gemv import Platform, TileKey
from husky_mlx.pack import StepWeights
from husky_mlx.plan import Plan
from husky_mlx.policy import chains_steps, dequantize_from, frozen_rows, short_prompts
from husky_mlx.prefill import Prefill
from husky_mlx.products import Products
from husky_mlx.selftest import SelfTest
from husky_mlx.short_prompt import ShortPrompt
from husky_mlx.single_launch import SingleLaunch
from husky_mlx.tiles import GemvTile


def kernel_platform(tiles: Mapping[TileKey, GemvTile] | None = None) -> Platform | None:
    """Where kernels run on MLX's default device, with ``tiles`` of a build; None on the CPU."""
    target = device.target()
    return None if target == "cpu" else Platform(chips.detect(), target, tiles or {})


def choose_graph(
    config: LlamaConfig,
    weights: StepWeights,
    plan: Plan,
    tiles: Mapping[TileKey, GemvTile] | None = None,
) -> StepGraph | FusedGraph:
    """The graph for these weights on MLX's default device; the plan says which and why.

    ``tiles``: chosen when the model was compiled, instead of the policy's.
    """
    twin = StepGraph(config, weights, plan)
    plan.launches, plan.prefill = [], "plain MLX operations"
    platform = kernel_platform(tiles)
    if platform is None:
        plan.kernels = "plain MLX operations"
        return twin
    if not switches.KERNELS.read():
        plan.kernels = "plain MLX operations (HUSKY_KERNELS is off)"
        return twin
    made = fused_weights(config, weights)
    if isinstance(made, str):
        plan.kernels = f"plain MLX operations ({made})"
        return twin
    self_test = SelfTest(config, made, twin, platform)
    if not self_test.passes(1, batched=False):
        return twin
    plan.kernels, plan.launches = "fused kernels", launch_lines(made, platform)
    graph = FusedGraph(config, made, plan, platform, self_test)
    _add_single_launch(graph, plan, self_test)
    if self_test.prompts_pass():
        itemsize = made.embedding.dtype.size
        threshold = functools.partial(dequantize_from, platform.chip)
        products = Products(config, platform, weights, made, threshold)
        lengths = short_prompts(platform.chip, itemsize)
        short = None
        if lengths and self_test.short_prompts_pass(lengths):
            # Of a graph of its own: this one leads to the prefill, and weights that have been
            # replaced should be freed at once.
            own = FusedGraph(config, made, plan, platform)
            short = ShortPrompt(own, plan, lengths)
        frozen = frozen_rows(platform.chip, itemsize)
        graph.prefill = Prefill(config, products, plan, short, frozen)
        plan.prefill = "fused projections, kernels between them"
        if short is not None:
            plan.prefill += f", up to {short.lengths[-1]} tokens one step of the decode kernels"
        widest = made.layers[0].gate_up
        rows = threshold(widest.rows, widest.bits) if widest.bits < 16 else None
        if rows is not None:
            plan.prefill += f", the largest matrices dequantized from {rows} rows on"
    return graph


def _add_single_launch(graph: FusedGraph, plan: Plan, self_test: SelfTest) -> None:
    """Let one-token steps be one launch, where that is wanted, right and faster."""
    wanted = switches.SINGLE_LAUNCH.read()
    if not (wanted and chains_steps(graph.platform.chip, graph.dtype.size)):
        return
    if self_test.single_launch_wins():
        graph.single = SingleLaunch(graph)
        plan.kernels += ", those of one token in one launch"
    else:
        plan.kernels += ", several launches a token (one is not faster here)"
