"""Which graph a model's decode step runs: fused kernels where all of them apply, else plain mx."""

from __future__ import annotations

import os

from husky_mlx import chips, device
from husky_mlx.config import LlamaConfig
from husky_mlx.freeze import StepGraph
from husky_mlx.fused import FusedGraph, fused_weights
from husky_mlx.ops.gemv import Platform
from husky_mlx.pack import StepWeights
from husky_mlx.plan import Plan


def choose_graph(config: LlamaConfig, weights: StepWeights, plan: Plan) -> StepGraph | FusedGraph:
    """The graph for these weights on MLX's default device; the plan says which and why."""
    target = device.target()
    if target == "cpu":
        plan.kernels = "plain mx operations"
        return StepGraph(config, weights, plan)
    made = "HUSKY_KERNELS is 0"
    if os.environ.get("HUSKY_KERNELS", "1") not in ("", "0"):
        made = fused_weights(config, weights)  # type: ignore[assignment]
    if isinstance(made, str):
        plan.kernels = f"plain mx operations ({made})"
        return StepGraph(config, weights, plan)
    plan.kernels = "fused kernels"
    return FusedGraph(config, made, plan, Platform(chips.detect(), target))
