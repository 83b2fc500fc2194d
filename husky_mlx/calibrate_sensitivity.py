"""The recipe ``auto``: what each matrix's bits are worth, and the best way to spend a budget.

A group of projections with one input is rounded alone at the candidates next to the budget, and the
divergence of the model's output is measured. What the other candidates cost follows from these and
from how much larger or smaller the weighted error of rounding to nearest is with them. The sum of
such costs is only an estimate, so the best allocation has to prove itself against the best recipe
of one number of bits.
mlx_lm.quant.dynamic_quant estimates from gradients instead, between two bit widths, over MLX's
float32 products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from husky_mlx.calibrate import Statistics, head_statistics, layer_statistics, weighted_error
from husky_mlx.calibrate_forward import EMBEDDING, FloatLlama
from husky_mlx.calibrate_probe import Probe, Trial
from husky_mlx.progress import count_bar
from husky_mlx.recipe import (
    FIXED_RECIPES,
    Allocation,
    QuantSpec,
    Tensor,
    allocate,
    bits_per_weight,
    candidates,
    resolve,
)
from husky_mlx.rounding import dequantize, nearest
from husky_mlx.rounding_gptq import gptq

Sensitivity = dict[str, dict[QuantSpec | None, float]]


def auto(
    llama: FloatLlama,
    tensors: Sequence[Tensor],
    budget_bpw: float,
    method: str,
    tokens: np.ndarray,
    dtype: mx.Dtype,
    group_size: int | None = None,
) -> Allocation:
    """Path -> spec of least expected divergence at no more than ``budget_bpw``.

    Projections that share an input and are stored alike get one spec, as the fused kernels need.
    ``method`` is the rounding that divergence is measured with; a group alone takes "rtn" for
    "awq". ``tokens``: (sequences, length) of calibration text. ValueError for a budget that no
    choice meets.
    """
    free: Sensitivity = {t.path: dict.fromkeys(candidates(t, group_size), 0.0) for t in tensors}
    allocate(tensors, free, budget_bpw)  # refuses a budget that is too small before the long part
    groups = {}
    costs: Sensitivity = {}
    with count_bar("measuring matrices", len(tensors)) as advance:
        for group, each in measure(llama, tensors, budget_bpw, method, tokens, dtype, group_size):
            groups[group[0].path] = group
            costs[group[0].path] = each
            advance(len(group))
    units = [
        replace(group[0], shape=(sum(tensor.shape[0] for tensor in group), group[0].shape[1]))
        for group in groups.values()
    ]
    spent = allocate(units, costs, budget_bpw)
    fixed = _best_fixed(units, costs, budget_bpw, group_size)

    def whole(chosen: Allocation) -> Allocation:
        spec_of = {tensor.path: chosen[path] for path, group in groups.items() for tensor in group}
        return {tensor.path: spec_of[tensor.path] for tensor in tensors}

    if fixed is None or fixed == spent:
        return whole(spent)
    trial = Trial(llama, tensors, method, tokens, dtype)
    return min((whole(spent), whole(fixed)), key=trial.divergence)


def _best_fixed(
    units: Sequence[Tensor],
    costs: Sensitivity,
    budget_bpw: float,
    group_size: int | None,
) -> Allocation | None:
    """The recipe of least cost among those within the budget that name a number of bits."""
    within = []
    for name in FIXED_RECIPES:
        try:
            allocation = resolve(name, units, group_size=group_size)
        except ValueError:  # it would raise the bits of a quantized source
            continue
        known = all(spec in costs[path] for path, spec in allocation.items())
        if known and bits_per_weight(units, allocation) <= budget_bpw:
            within.append(allocation)
    return min(
        within,
        key=lambda each: sum(costs[path][spec] for path, spec in each.items()),
        default=None,
    )


def measure(
    llama: FloatLlama,
    tensors: Sequence[Tensor],
    budget_bpw: float,
    method: str,
    tokens: np.ndarray,
    dtype: mx.Dtype,
    group_size: int | None = None,
) -> Iterator[tuple[list[Tensor], dict[QuantSpec | None, float]]]:
    """Each group of matrices, and what each of its candidates costs in nats a token."""
    probe = Probe(llama, tokens)
    by_path = {tensor.path: tensor for tensor in tensors}

    def costs_of(group: list[Tensor], found: Statistics, first: int | None):
        options = candidates(group[0], group_size)
        errors = {spec: _error(llama, group, found, spec, dtype) for spec in options}
        rounded = [spec for spec, error in errors.items() if spec is not None and error]
        if not rounded:
            return group, errors
        rounded.sort(key=lambda spec: spec.bits_per_weight)
        over = sum(spec.bits_per_weight <= budget_bpw for spec in rounded)
        tried = rounded[max(over - 1, 0) : over + 1]
        prices = {}
        for spec in tried:
            changed = _rounded(llama, group, found, spec, method, dtype)
            prices[spec] = probe.divergence(changed, first) / errors[spec]
        for number, spec in enumerate(rounded):
            errors[spec] *= prices[tried[0] if number < over else tried[-1]]
        return group, errors

    if llama.head != EMBEDDING:
        yield costs_of([by_path[EMBEDDING]], {}, None)
    x = llama.embed(tokens)
    for index in range(llama.config.num_hidden_layers):
        x, found = layer_statistics(llama, index, x)
        alike: dict[tuple[int, QuantSpec | None], list[Tensor]] = {}
        for path, statistics in found.items():
            tensor = by_path[path]
            alike.setdefault((id(statistics), tensor.spec), []).append(tensor)
        for group in alike.values():
            yield costs_of(group, found, index)
    first = None if llama.head == EMBEDDING else llama.config.num_hidden_layers
    yield costs_of([by_path[llama.head]], head_statistics(llama, x), first)


def _error(
    llama: FloatLlama,
    group: Sequence[Tensor],
    found: Statistics,
    spec: QuantSpec | None,
    dtype: mx.Dtype,
) -> float:
    """The weighted error of a group rounded to the nearest, 0 for what the source has."""
    if spec == group[0].spec:
        return 0.0
    plain = _rounded(llama, group, found, spec, "rtn", dtype)
    total = 0.0
    for tensor in group:
        matrix, columns = llama.weights[f"{tensor.path}.weight"], tensor.shape[1]
        # Rows of an untied embedding are looked up: every column counts alike.
        statistics = found.get(tensor.path)
        hessian = np.eye(columns, dtype=np.float32) if statistics is None else statistics.hessian
        total += weighted_error(np.asarray(matrix), plain[f"{tensor.path}.weight"], hessian)
    return total


def _rounded(
    llama: FloatLlama,
    group: Sequence[Tensor],
    found: Statistics,
    spec: QuantSpec | None,
    method: str,
    dtype: mx.Dtype,
) -> dict[str, np.ndarray]:
    """The matrices of a group by name, after rounding."""
    rounded = {}
    for tensor in group:
        name = f"{tensor.path}.weight"
        matrix = np.asarray(llama.weights[name])
        if spec is None:
            rounded[name] = matrix
        elif method == "gptq" and tensor.path in found:
            packed = gptq(matrix, found[tensor.path].hessian, spec, dtype)
            rounded[name] = dequantize(packed, spec)
        else:
            rounded[name] = dequantize(nearest(matrix, spec, dtype), spec)
    return rounded
