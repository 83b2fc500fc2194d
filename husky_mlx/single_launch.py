"""The decode step as one launch: the fused kernels chained in a persistent kernel, on CUDA.

On a fast GPU a short step is bound by what each launch costs the host, and by the gaps between
launches on the device. The step is traced once as the five kernels a layer that it is made of, and
what they would launch becomes the table of one kernel.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from husky_mlx import cuda_binary, cuda_chain, cuda_source, kernel_signature, kernels
from husky_mlx.chain import Chain, ChainError, chain
from husky_mlx.fused import ORDER_SIZE, FusedGraph, FusedWeights, next_places
from husky_mlx.kernel_signature import ArrayType, metal_type
from husky_mlx.kernels import OUTLINE, Launch
from husky_mlx.ops.gemv import Platform

FETCH_AHEAD = 16 << 20
COUNTER_SIZE = 16  # MLX keeps arrays of 8 bytes in memory that the CPU shares


def wanted(platform: Platform, weights: FusedWeights) -> bool:
    """Whether steps of these weights are to be one launch."""
    if os.environ.get("HUSKY_SINGLE_LAUNCH") == "0":
        return False
    return platform.backend == "cuda" and weights.embedding.dtype.size == 2


class SingleLaunchGraph(FusedGraph):
    """``FusedGraph`` whose steps are one launch each, where they can be chained."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        outlined = replace(self.platform, backend=OUTLINE, chained=True)
        self._outline = FusedGraph(self.config, self.weights, self.plan, outlined)
        self._counter = mx.zeros((COUNTER_SIZE,), mx.uint32)
        mx.eval(self._counter)

    def logits(self, tokens: mx.array, *rest: Any) -> tuple:
        """See ``FusedGraph.logits``."""
        with kernels.record() as launches:
            self._outline.kind_of_layer = self.kind_of_layer
            self._outline.logits(tokens, *rest)
        following, logits = launches[0].outputs["following"], launches[-1].outputs["logits"]
        logits, following, order = self._run(launches, [logits, following])
        places = next_places(rest[0], following, tokens.shape[1])
        return logits.reshape(*tokens.shape, -1), places, order

    def greedy(self, tokens: mx.array, *rest: Any) -> tuple:
        """See ``FusedGraph.greedy``."""
        with kernels.record() as launches:
            self._outline.kind_of_layer = self.kind_of_layer
            self._outline.greedy(tokens, *rest)
        results = [
            launches[-1].outputs["tokens"],
            launches[-2].outputs["logits"],
            launches[0].outputs["following"],
        ]
        best, logits, following, order = self._run(launches, results)
        places = next_places(rest[0], following, tokens.shape[1])
        shape = tokens.shape
        return best.reshape(shape), logits.reshape(*shape, -1), places, order

    def _run(self, launches: Sequence[Launch], results: Sequence[mx.array]) -> list[mx.array]:
        """The results of a step, and an array that depends on all that it writes."""
        made = chain(launches, results, FETCH_AHEAD)
        records = mx.array(made.records, mx.int32).reshape(-1) + 0  # on the device
        mx.eval(records)
        built = _build(made, records, self._counter, self.dtype)
        block = cuda_chain.BLOCK_THREADS
        scratch = ((made.scratch // self.dtype.size,), self.dtype)
        outputs = [*((array.shape, array.dtype) for array in made.outputs), scratch]
        *found, scratch = built(
            inputs=[*made.inputs, records, self._counter],
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=(self.platform.chip.cores * block, 1, 1),
            threadgroup=(block, 1, 1),
        )
        return [*found, scratch[:ORDER_SIZE]]


_kernels: dict[str, Any] = {}


def _build(made: Chain, records: mx.array, counter: mx.array, dtype: mx.Dtype) -> Any:
    """The chain's kernel. Raises ChainError where it cannot be compiled."""
    arrays = [*made.inputs, records, counter]
    inputs = [*(f"a{i}" for i in range(len(made.inputs))), "records", "counter"]
    outputs = [*(f"b{i}" for i in range(len(made.outputs))), "scratch"]
    dtypes = [*(array.dtype for array in made.outputs), dtype]
    signature = kernel_signature.build(
        "step",
        inputs,
        [ArrayType(metal_type(array.dtype), tuple(array.shape)) for array in arrays],
        outputs,
        [metal_type(dtype) for dtype in dtypes],
        "",
    )
    translated = cuda_chain.translate_chain(made, signature)
    arguments = cuda_source.kernel_arguments(translated.source, "husky_step", inputs, outputs)
    name = arguments["name"]
    if name not in _kernels:
        suffix = cuda_binary.compiled_for()
        if suffix is None:
            raise ChainError("there is no compiler for CUDA kernels")
        arguments["name"] += f"_{suffix}"
        problem = cuda_binary.provide(
            arguments["name"], translated.source, signature, cuda_chain.BLOCK_THREADS
        )
        if problem is not None:
            raise ChainError(problem)
        _kernels[name] = mx.fast.cuda_kernel(**arguments, shared_memory=translated.shared_memory)
    return _kernels[name]
