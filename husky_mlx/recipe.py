"""Recipes: at how many bits each matrix is stored. Pure functions from names and sizes to specs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from husky_mlx.errors import UsageError
from husky_mlx.structure import AFFINE_BITS, AFFINE_GROUP_SIZES

DEFAULT_GROUP_SIZE = 64
FLOAT_BITS = 16
FLOAT_RECIPES = {"fp16": "float16", "bf16": "bfloat16"}
MLX_LM_RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
# Name -> bits of the layers, bits of the embedding and the head.
FIXED_RECIPES = {
    "8bit": (8, 8),
    "4bit": (4, 8),
    **{f"{bits}bit-uniform": (bits, bits) for bits in AFFINE_BITS if bits < 8},
}
RECIPES: Mapping[str, str] = {
    "keep": "every matrix as the source has it",
    "fp16": "no quantization, float16",
    "bf16": "no quantization, bfloat16",
    "8bit": "8 bit everywhere",
    "4bit": "embedding and head 8 bit, attention and MLP 4 bit",
    **{name: f"{bits} bit everywhere" for name, (bits, _) in list(FIXED_RECIPES.items())[2:]},
    "mixed_2_6": "mlx-lm's: 2 bit, 6 bit where llama.cpp spends more",
    "mixed_3_4": "mlx-lm's: 3 bit, 4 bit where llama.cpp spends more",
    "mixed_3_6": "mlx-lm's: 3 bit, 6 bit where llama.cpp spends more",
    "mixed_4_6": "mlx-lm's: 4 bit, 6 bit where llama.cpp spends more",
    "auto": "the least divergence under a bit budget, measured tensor by tensor",
}
# How finely `allocate` counts bits: above this many steps sizes are rounded up to whole steps.
_MOST_STEPS = 1 << 16


@dataclass(frozen=True)
class QuantSpec:
    """How MLX stores a matrix: ``bits`` a weight, a scale for each ``group_size`` of a row.

    ``mode`` as in ``mx.quantize``. Where a spec is asked for, None stands for floats.
    """

    bits: int
    group_size: int
    mode: str = "affine"

    @property
    def bits_per_weight(self) -> float:
        """With the scale and bias of 16 bit of each group; MX formats have one scale of 8 bit."""
        return self.bits + (32 if self.mode == "affine" else 8) / self.group_size


@dataclass(frozen=True)
class Tensor:
    """A matrix of the source: ``path`` without ".weight", ``shape`` (rows, columns) unpacked.

    ``role`` is "embedding", "head" or the projection's name, ``layer`` None outside the layers,
    ``spec`` what the source stores.
    """

    path: str
    shape: tuple[int, int]
    role: str
    layer: int | None
    spec: QuantSpec | None

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


Allocation = dict[str, QuantSpec | None]


def fitting(bits: int, columns: int, group_size: int) -> QuantSpec | None:
    """Affine ``bits`` in the largest groups up to ``group_size`` that divide ``columns``.

    None where no group size of MLX does: such a matrix stays in floats.
    """
    sizes = [size for size in AFFINE_GROUP_SIZES if size <= group_size and columns % size == 0]
    return QuantSpec(bits, max(sizes)) if sizes else None


def candidates(tensor: Tensor, group_size: int | None = None) -> list[QuantSpec | None]:
    """What ``auto`` chooses from: each number of bits below the source's, and the source's spec.

    ``group_size`` (default 64) as in ``resolve``.
    """
    most = 9 if tensor.spec is None else tensor.spec.bits
    specs = [
        fitting(bits, tensor.shape[1], group_size or DEFAULT_GROUP_SIZE)
        for bits in AFFINE_BITS
        if bits < most
    ]
    kept: list[QuantSpec | None] = [spec for spec in specs if spec is not None]
    return kept if tensor.spec is None and kept else [*kept, tensor.spec]


def resolve(recipe: str, tensors: Sequence[Tensor], *, group_size: int | None = None) -> Allocation:
    """Path -> spec for a named recipe; ``group_size`` (default 64) is the largest that it takes.

    Raises ValueError for a name that is not in ``RECIPES``, for a group size that MLX lacks, for
    "auto", whose bits come from ``allocate``, and where a matrix would get more bits than the
    source has: they would hold nothing.
    """
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}, expected one of {', '.join(RECIPES)}")
    group = DEFAULT_GROUP_SIZE if group_size is None else group_size
    if group not in AFFINE_GROUP_SIZES:
        raise ValueError(f"group_size must be one of {AFFINE_GROUP_SIZES}, found {group}")
    if recipe == "auto":
        raise ValueError("the recipe 'auto' has no bits of its own: measure, then allocate()")
    if recipe == "keep":
        return {tensor.path: tensor.spec for tensor in tensors}
    allocation: Allocation
    if recipe in FLOAT_RECIPES:
        allocation = dict.fromkeys(tensor.path for tensor in tensors)
    elif recipe in MLX_LM_RECIPES:
        allocation = _mlx_lm(recipe, tensors, group)
    else:
        inner, outer = FIXED_RECIPES[recipe]
        allocation = {
            tensor.path: fitting(
                inner if tensor.layer is not None else outer, tensor.shape[1], group
            )
            for tensor in tensors
        }
    raised = [tensor for tensor in tensors if raises(tensor, allocation[tensor.path])]
    if raised:
        first = raised[0]
        raise ValueError(
            f"the recipe {recipe!r} would raise the bits of {len(raised)} matrices that the source "
            f"has quantized already ({first.path}: {_words(first.spec)} to "
            f"{_words(allocation[first.path])}); take 'keep' or fewer bits"
        )
    return allocation


def raises(tensor: Tensor, spec: QuantSpec | None) -> bool:
    """Whether ``spec`` spends more bits on a matrix than its source has."""
    if tensor.spec is None or tensor.spec == spec:
        return False
    return spec is None or spec.bits > tensor.spec.bits


def bits_per_weight(tensors: Sequence[Tensor], allocation: Mapping[str, QuantSpec | None]) -> float:
    """Of all matrices together, with scales and biases; floats count as 16 bit."""
    return _bits(tensors, allocation) / sum(tensor.size for tensor in tensors)


def allocate(
    tensors: Sequence[Tensor],
    sensitivity: Mapping[str, Mapping[QuantSpec | None, float]],
    budget_bpw: float,
) -> Allocation:
    """The specs of least total sensitivity at no more than ``budget_bpw`` bits per weight.

    ``sensitivity``: path -> candidate -> what it costs, for instance nats of divergence. Candidates
    that raise a source's bits are left out. An exact multiple-choice knapsack, by dynamic
    programming over the bits above the smallest choice, where these come in at most 65,536 whole
    steps; else sizes are rounded up to such steps. Never costlier than giving all matrices the same
    candidate, where that is within the budget. Ties go to fewer bits.

    Raises ValueError for a budget below the smallest choice, saying what that is.
    """
    choices = [_choices(tensor, sensitivity[tensor.path]) for tensor in tensors]
    least = sum(options[0][0] for options in choices)
    total = sum(tensor.size for tensor in tensors)
    most = sum(options[-1][0] for options in choices)
    if not budget_bpw * total + 1e-6 >= least:
        raise ValueError(
            f"a budget of {budget_bpw:g} bits per weight is below the smallest choice, "
            f"{least / total:.3f}"
        )
    spare = math.floor(min(budget_bpw * total + 1e-6, most)) - least
    best = _knapsack(
        [[(size - options[0][0], cost) for size, cost, _ in options] for options in choices], spare
    )
    allocation = {
        tensor.path: options[index][2]
        for tensor, options, index in zip(tensors, choices, best, strict=True)
    }

    def cost(each: Mapping[str, QuantSpec | None]) -> float:
        return sum(sensitivity[path][spec] for path, spec in each.items())

    uniform: list[Allocation] = [
        dict.fromkeys((tensor.path for tensor in tensors), spec)
        for _, _, spec in choices[0]
        if all(spec in (option[2] for option in options) for options in choices)
    ]
    affordable = [each for each in uniform if _bits(tensors, each) <= least + spare]
    return min([allocation, *affordable], key=cost)


def check_budget(recipes: Iterable[str | None], bits_per_weight: float | None) -> None:
    """Raise UsageError unless "auto" has a budget, and nothing else has, that is a number of bits:
    before anything is measured for it."""
    if ("auto" in recipes) != (bits_per_weight is not None):
        raise UsageError("the recipe 'auto' and a budget in bits per weight need each other")
    if bits_per_weight is not None and not 0 < bits_per_weight < math.inf:
        raise UsageError(
            f"a budget is a number of bits per weight above 0, as in 4.5, found {bits_per_weight:g}"
        )


def _choices(
    tensor: Tensor, costs: Mapping[QuantSpec | None, float]
) -> list[tuple[int, float, QuantSpec | None]]:
    """(bits, cost, spec) of each candidate, smallest first."""
    kept = [
        (_tensor_bits(tensor, s), cost, s) for s, cost in costs.items() if not raises(tensor, s)
    ]
    if not kept:
        raise ValueError(f"{tensor.path}: no candidate at or below its {_words(tensor.spec)}")
    return sorted(kept, key=lambda each: each[:2])


def _knapsack(choices: Sequence[Sequence[tuple[int, float]]], spare: int) -> list[int]:
    """The index of one (bits, cost) in each list: least cost, at most ``spare`` bits in all."""
    step = math.gcd(*(bits for options in choices for bits, _ in options))
    step = max(step, -(-spare // _MOST_STEPS), 1)
    capacity = spare // step
    least = np.zeros(capacity + 1)  # the least cost with at most so many steps
    taken = []
    for options in choices:
        new = np.full(capacity + 1, np.inf)
        index = np.zeros(capacity + 1, np.uint8)
        for number, (bits, cost) in enumerate(options):
            steps = -(-bits // step)
            if steps > capacity:
                continue
            reached = least[: capacity + 1 - steps] + cost
            better = reached < new[steps:]
            new[steps:][better] = reached[better]
            index[steps:][better] = number
        least = new
        taken.append(index)
    picked, left = [], capacity
    for options, index in zip(reversed(choices), reversed(taken), strict=True):
        number = int(index[left])
        picked.append(number)
        left -= -(-options[number][0] // step)
    return picked[::-1]


def _mlx_lm(recipe: str, tensors: Sequence[Tensor], group_size: int) -> Allocation:
    """mlx-lm's own choice; it reads no more of a model than its modules' names and layers."""
    from mlx_lm.convert import mixed_quant_predicate_builder

    model = SimpleNamespace(
        named_modules=lambda: [(tensor.path, tensor) for tensor in tensors],
        layers=sorted({tensor.layer for tensor in tensors if tensor.layer is not None}),
    )
    predicate = mixed_quant_predicate_builder(recipe, model, group_size)  # type: ignore[arg-type]
    return {
        tensor.path: fitting(predicate(tensor.path, tensor)["bits"], tensor.shape[1], group_size)  # type: ignore
        for tensor in tensors
    }


def _tensor_bits(tensor: Tensor, spec: QuantSpec | None) -> int:
    return round(tensor.size * (FLOAT_BITS if spec is None else spec.bits_per_weight))


def _bits(tensors: Sequence[Tensor], allocation: Mapping[str, QuantSpec | None]) -> int:
    return sum(_tensor_bits(tensor, allocation[tensor.path]) for tensor in tensors)


def _words(spec: QuantSpec | None) -> str:
    return "floats" if spec is None else f"{spec.bits} bit"
