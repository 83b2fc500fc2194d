"""Recipes against hand-made tables, mlx-lm's own choice and exhaustive search."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from fixtures import FIX_A, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import quantize_model

from husky_mlx import recipe
from husky_mlx.recipe import QuantSpec, Tensor, allocate, bits_per_weight, resolve

ROLES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.v_proj": (32, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}


def tensors_of(layers: int = 2, spec: QuantSpec | None = None, tied: bool = False) -> list[Tensor]:
    tensors = [Tensor("model.embed_tokens", (96, 64), "embedding", None, spec)]
    if not tied:
        tensors.append(Tensor("lm_head", (96, 64), "head", None, spec))
    for layer in range(layers):
        for name, shape in ROLES.items():
            role = name.split(".")[1]
            tensors.append(Tensor(f"model.layers.{layer}.{name}", shape, role, layer, spec))
    return tensors


@pytest.mark.parametrize(
    "name, inner, outer",
    [
        ("8bit", 8, 8),
        ("4bit", 4, 8),
        ("4bit-uniform", 4, 4),
        ("3bit-uniform", 3, 3),
        ("2bit-uniform", 2, 2),
    ],
)
def test_fixed_recipes(name, inner, outer):
    for path, spec in resolve(name, tensors_of()).items():
        assert spec == QuantSpec(inner if "layers" in path else outer, 64), path


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_float_recipes_quantize_nothing(name):
    assert set(resolve(name, tensors_of()).values()) == {None}


def test_keep_is_what_the_source_has():
    stored = QuantSpec(4, 32, "mxfp4")
    assert set(resolve("keep", tensors_of(spec=stored)).values()) == {stored}


def test_smaller_groups_where_the_asked_one_does_not_divide_C035():
    tensors = [
        Tensor("a", (8, 1536), "down_proj", 0, None),
        Tensor("b", (8, 576), "q_proj", 0, None),
        Tensor("c", (8, 96), "up_proj", 0, None),
        Tensor("d", (8, 80), "o_proj", 0, None),
    ]
    allocation = resolve("4bit-uniform", tensors, group_size=128)
    assert {path: spec and spec.group_size for path, spec in allocation.items()} == {
        "a": 128,
        "b": 64,
        "c": 32,
        "d": None,
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", recipe.MLX_LM_RECIPES)
def test_mlx_lm_recipes_choose_as_mlx_lm_converts(name, tied):
    config = {**FIX_A, "num_hidden_layers": 8, "tie_word_embeddings": tied}
    model = model_of("mlx", config)
    predicate = mixed_quant_predicate_builder(name, model, 32)
    _, quantized = quantize_model(model, {}, 32, 4, quant_predicate=predicate)
    stored = {k: v["bits"] for k, v in quantized["quantization"].items() if isinstance(v, dict)}
    shapes = {
        path.removesuffix(".weight"): tuple(value.shape)
        for path, value in tree_flatten(model_of("mlx", config).parameters())
        if len(value.shape) == 2
    }
    tensors = [
        Tensor(path, shape, path.split(".")[-1], _layer(path), None)
        for path, shape in shapes.items()
    ]
    allocation = resolve(name, tensors, group_size=32)
    assert {path: spec.bits for path, spec in allocation.items() if spec} == stored
    assert {spec.group_size for spec in allocation.values() if spec} == {32}


def _layer(path: str) -> int | None:
    return int(path.split(".")[2]) if path.startswith("model.layers.") else None


@pytest.mark.parametrize("name", ["8bit", "6bit-uniform", "4bit", "mixed_4_6", "fp16"])
def test_raising_bits_is_refused(name):
    with pytest.raises(ValueError, match="would raise the bits") as error:
        resolve(name, tensors_of(spec=QuantSpec(4, 64)))
    assert "4 bit to" in str(error.value) and "'keep'" in str(error.value)


@pytest.mark.parametrize("name", ["4bit-uniform", "3bit-uniform", "mixed_3_4"])
def test_lowering_is_allowed(name):
    allocation = resolve(name, tensors_of(8, spec=QuantSpec(4, 64)))
    assert all(spec.bits <= 4 for spec in allocation.values())


def test_unknown_names_and_group_sizes():
    with pytest.raises(ValueError, match=r"unknown recipe '5bits', expected one of keep, fp16"):
        resolve("5bits", tensors_of())
    with pytest.raises(ValueError, match=r"group_size must be one of \(32, 64, 128\), found 48"):
        resolve("4bit", tensors_of(), group_size=48)
    with pytest.raises(ValueError, match="measure, then allocate"):
        resolve("auto", tensors_of())


def test_every_listed_recipe_resolves():
    for name in recipe.RECIPES:
        if name != "auto":
            assert list(resolve(name, tensors_of(8))) == [t.path for t in tensors_of(8)]


@pytest.mark.parametrize(
    "spec, expected",
    [
        (QuantSpec(4, 64), 4.5),
        (QuantSpec(4, 32), 5.0),
        (QuantSpec(3, 128), 3.25),
        (QuantSpec(4, 32, "mxfp4"), 4.25),
        (QuantSpec(8, 32, "mxfp8"), 8.25),
        (QuantSpec(4, 16, "nvfp4"), 4.5),
        (None, 16.0),
    ],
)
def test_bits_per_weight_counts_scales(spec, expected):
    tensors = tensors_of()
    assert bits_per_weight(tensors, {t.path: spec for t in tensors}) == pytest.approx(expected)


SPECS = [QuantSpec(bits, 64) for bits in (2, 3, 4, 6, 8)]
CASES = st.lists(
    st.tuples(
        st.sampled_from([32, 64, 96, 1000]),
        st.lists(st.sampled_from([*SPECS, None]), min_size=1, max_size=4, unique=True),
        st.lists(st.floats(0, 10), min_size=4, max_size=4),
    ),
    min_size=1,
    max_size=5,
)


@given(cases=CASES, budget=st.floats(2.5, 17))
@settings(deadline=None, max_examples=200)
def test_allocate_equals_exhaustive_search(cases, budget):
    tensors = [Tensor(f"t{i}", (r, 64), "q_proj", i, None) for i, (r, _, _) in enumerate(cases)]
    sensitivity = {
        f"t{i}": dict(zip(specs, costs, strict=False)) for i, (_, specs, costs) in enumerate(cases)
    }
    total = sum(tensor.size for tensor in tensors)
    best, least = None, float("inf")
    for picks in itertools.product(*(sensitivity[t.path] for t in tensors)):
        bpw = [16.0 if spec is None else spec.bits + 32 / spec.group_size for spec in picks]
        bits = sum(b * t.size for b, t in zip(bpw, tensors, strict=True))
        least = min(least, bits / total)
        if bits <= budget * total + 1e-6:
            cost = sum(sensitivity[t.path][s] for t, s in zip(tensors, picks, strict=True))
            best = cost if best is None else min(best, cost)
    if best is None:
        with pytest.raises(ValueError, match=f"smallest choice, {least:.3f}"):
            allocate(tensors, sensitivity, budget)
        return
    found = allocate(tensors, sensitivity, budget)
    assert bits_per_weight(tensors, found) <= budget + 1e-9
    cost = sum(sensitivity[path][spec] for path, spec in found.items())
    assert cost == pytest.approx(best, abs=1e-9)


@given(
    rows=st.lists(st.integers(1, 10**6), min_size=2, max_size=6),
    gains=st.lists(st.floats(0.01, 100), min_size=6, max_size=6),
    bits=st.sampled_from([3, 4, 6]),
)
@settings(deadline=None, max_examples=60)
def test_awkward_sizes_keep_the_budget_and_beat_the_uniform_recipe(rows, gains, bits):
    """Sizes without a common measure are rounded up to steps; equal bits stay within reach."""
    tensors = [Tensor(f"t{i}", (r, 64), "q_proj", i, None) for i, r in enumerate(rows)]
    costs = {f"t{i}": {s: gains[i] * 4.0**-s.bits for s in SPECS} for i in range(len(rows))}
    budget = QuantSpec(bits, 64).bits_per_weight
    found = allocate(tensors, costs, budget)
    assert bits_per_weight(tensors, found) <= budget + 1e-9
    uniform = sum(each[QuantSpec(bits, 64)] for each in costs.values())
    assert sum(costs[path][spec] for path, spec in found.items()) <= uniform * (1 + 1e-9)


def test_allocate_does_not_depend_on_the_order_of_candidates_and_prefers_fewer_bits():
    tensors = tensors_of()
    costs = {t.path: dict.fromkeys(SPECS, 1.0) for t in tensors}
    backwards = {path: dict(reversed(each.items())) for path, each in costs.items()}
    found = allocate(tensors, costs, 8.5)
    assert found == allocate(tensors, backwards, 8.5)
    assert set(found.values()) == {QuantSpec(2, 64)}


def test_allocate_never_raises_bits():
    tensors = [replace(t, spec=QuantSpec(4, 64)) for t in tensors_of()]
    costs = {t.path: {s: 4.0**-s.bits for s in SPECS} for t in tensors}
    assert set(allocate(tensors, costs, 8.5).values()) == {QuantSpec(4, 64)}
    with pytest.raises(ValueError, match="no candidate at or below its 4 bit"):
        allocate(tensors, {t.path: {QuantSpec(8, 64): 0.0} for t in tensors}, 8.5)


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_no_budget(budget):
    costs = {t.path: {QuantSpec(2, 64): 1.0} for t in tensors_of()}
    with pytest.raises(ValueError, match=r"below the smallest choice, 2\.500"):
        allocate(tensors_of(), costs, budget)


def test_a_budget_for_everything():
    costs = {t.path: {s: 4.0**-s.bits for s in SPECS} for t in tensors_of()}
    assert set(allocate(tensors_of(), costs, float("inf")).values()) == {QuantSpec(8, 64)}


def test_candidates():
    tensor = tensors_of()[0]
    assert recipe.candidates(tensor, 32) == [QuantSpec(b, 32) for b in (2, 3, 4, 5, 6, 8)]
    stored = QuantSpec(4, 32, "mxfp4")
    below = recipe.candidates(replace(tensor, spec=stored))
    assert below == [QuantSpec(2, 64), QuantSpec(3, 64), stored]
    assert recipe.candidates(replace(tensor, shape=(96, 80))) == [None]
