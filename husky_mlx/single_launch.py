"""The decode step as one launch: the fused kernels chained in a persistent kernel, on CUDA.

On a fast GPU a short step is bound by what each launch costs the host. The step is traced as the
kernels that it is made of, and what they would launch becomes the table of one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from husky_mlx import cuda_binary, cuda_chain, cuda_source, kernel_signature, kernels
from husky_mlx.chain import Chain, ChainError, chain
from husky_mlx.fused import ORDER_SIZE, FusedGraph, next_places
from husky_mlx.kernel_signature import ArrayType, Signature, metal_type
from husky_mlx.kernels import OUTLINE, Launch
from husky_mlx.policy import chain_memory
from husky_mlx.turns import SIZE, TURNS


class _Outline(FusedGraph):
    """The steps as launches that are only recorded, each with the arrays that others made."""

    def _ordered(self, x: mx.array, others: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        return x, x


class SingleLaunch:
    """The steps of a graph as one launch each.

    As ``FusedGraph``'s, its methods take one array more, which the launch waits for, and return one
    more at the end, which waits for the launch; see ``turns.py``.
    """

    def __init__(self, graph: FusedGraph):
        self._chip = graph.platform.chip
        self._dtype = graph.dtype
        # Tiles that were tuned were tuned for launches of their own.
        outlined = replace(graph.platform, backend=OUTLINE, tiles={}, chained=True)
        self._outline = _Outline(graph.config, graph.weights, graph.plan, outlined)
        self._outline.kind_of_layer = graph.kind_of_layer

    def logits(self, tokens: mx.array, places: list[mx.array], *rest: Any) -> tuple:
        """See ``FusedGraph.logits``."""
        with kernels.record() as launches:
            self._outline.logits(tokens, places, *rest[:-1])
        following, logits = launches[0].outputs["following"], launches[-1].outputs["logits"]
        logits, following, order, turn = self._run(launches, [logits, following], rest[-1])
        logits = logits.reshape(*tokens.shape, -1)
        return (*_with_places(logits, places, following, order, tokens.shape[1]), turn)

    def greedy(self, tokens: mx.array, places: list[mx.array], *rest: Any) -> tuple:
        """See ``FusedGraph.greedy``."""
        with kernels.record() as launches:
            self._outline.greedy(tokens, places, *rest[:-1])
        head, combine = launches[-2:]
        results = [
            combine.outputs["tokens"],
            head.outputs["logits"],
            launches[0].outputs["following"],
        ]
        best, logits, following, order, turn = self._run(launches, results, rest[-1])
        best, logits = best.reshape(tokens.shape), logits.reshape(*tokens.shape, -1)
        best, *others = _with_places(best, places, following, order, tokens.shape[1])
        return best, logits, *others, turn

    def _run(
        self, launches: Sequence[Launch], results: Sequence[mx.array], turn: mx.array
    ) -> list[mx.array]:
        """The results of a step, an array that depends on all that it writes, and the next turn."""
        made = chain(launches, results)
        records = mx.array(made.records, mx.int32).reshape(-1) + 0  # on the device
        mx.eval(records)
        given = [*made.inputs, turn, records, TURNS.counter()]
        outputs = [(array.shape, array.dtype) for array in made.outputs]
        outputs += [((ORDER_SIZE,), self._dtype), ((SIZE,), mx.uint32)]
        outputs += [((made.scratch // self._dtype.size,), self._dtype)]
        built = _build(made, given, [dtype for _, dtype in outputs], chain_memory(self._chip))
        block = cuda_chain.BLOCK_THREADS
        *found, _ = built(
            inputs=given,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=(self._chip.cores * block, 1, 1),
            threadgroup=(block, 1, 1),
        )
        return found


def _with_places(
    result: mx.array,
    places: list[mx.array],
    following: mx.array,
    order: mx.array,
    length: int,
) -> tuple[mx.array, list[mx.array], mx.array]:
    """A result, the next places and the order: who evaluates the first evaluates all of them."""
    found = next_places(places, following, length)
    return mx.depends(result, [order, *found[1:]]), found, order


_kernels: dict[str, Any] = {}


def signature_of(made: Chain, given: Sequence[mx.array], dtypes: Sequence[mx.Dtype]) -> Signature:
    """Of a chain's kernel: what it takes and makes, in order."""
    return kernel_signature.build(
        "step",
        _inputs(made),
        [ArrayType(metal_type(array.dtype), tuple(array.shape)) for array in given],
        _outputs(made),
        [metal_type(dtype) for dtype in dtypes],
        "",
    )


def _inputs(made: Chain) -> list[str]:
    return [*(f"a{i}" for i in range(len(made.inputs))), "turn", "records", "counter"]


def _outputs(made: Chain) -> list[str]:
    return [*(f"b{i}" for i in range(len(made.outputs))), "order", "following_turn", "scratch"]


def _build(made: Chain, given: Sequence[mx.array], dtypes: Sequence[mx.Dtype], memory: int) -> Any:
    """The chain's kernel, whose blocks may have ``memory`` bytes of shared memory.

    Raises ChainError where it cannot be compiled.
    """
    signature = signature_of(made, given, dtypes)
    translated = cuda_chain.translate_chain(made, signature, memory)
    arguments = cuda_source.kernel_arguments(
        translated.source, "husky_step", _inputs(made), _outputs(made)
    )
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
