"""Rounding to nearest, GPTQ and AWQ, against MLX's layout, float64 and mlx-lm."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from fixtures import FIX_A, numpy_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.quant.gptq import gptq_quantize

from husky_mlx import rounding_awq, rounding_gptq
from husky_mlx.calibrate import InputStatistics, layer_statistics, weighted_error
from husky_mlx.calibrate_forward import FloatLlama
from husky_mlx.config import LlamaConfig
from husky_mlx.recipe import QuantSpec, Tensor, resolve
from husky_mlx.rounding import Packed, as_stored, dequantize, nearest, pack
from husky_mlx.rounding_awq import awq_layer, clip
from husky_mlx.rounding_gptq import gptq
from husky_mlx.rounding_model import METHODS, round_model
from husky_mlx.rounding_range import best_range

BITS = (2, 3, 4, 5, 6, 8)
SPECS = [QuantSpec(bits, group) for bits in BITS for group in (32, 64, 128)]


def problem(rows=24, columns=128, tokens=400, seed=0) -> tuple[np.ndarray, np.ndarray]:
    """A matrix and the Hessian of correlated inputs of uneven size."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(columns, columns)) / columns**0.5 + np.eye(columns)
    x = rng.normal(size=(tokens, columns)) @ mixing * np.exp(rng.normal(0, 0.7, columns))
    matrix = rng.normal(0, 0.05, (rows, columns))
    return matrix.astype(np.float32), (x.T @ x / tokens).astype(np.float32)


def error_of(matrix, packed: Packed, spec: QuantSpec, hessian) -> float:
    return weighted_error(matrix, dequantize(packed, spec), hessian)


@given(
    spec=st.sampled_from(SPECS),
    rows=st.integers(1, 5),
    groups=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=60)
def test_pack_is_mlx_layout(spec, rows, groups, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**spec.bits, (rows, groups * spec.group_size)).astype(np.uint8)
    scales, biases = (rng.normal(size=(rows, groups)).astype(np.float32) for _ in range(2))
    packed = pack(codes, scales, biases, spec.bits, mx.float32)
    expected = codes * np.repeat(scales, spec.group_size, 1)
    expected = expected + np.repeat(biases, spec.group_size, 1)
    found = np.array(mx.dequantize(*packed, spec.group_size, spec.bits))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("spec", [QuantSpec(3, 64), QuantSpec(4, 32, "mxfp4")])
def test_nearest_is_mlx(spec, dtype):
    matrix, _ = problem()
    stored = mx.array(matrix).astype(dtype)
    expected = mx.quantize(stored, spec.group_size, spec.bits, mode=spec.mode)
    for found, each in zip(nearest(matrix, spec, dtype), expected, strict=False):
        assert found.dtype == each.dtype
        np.testing.assert_array_equal(found.astype(mx.float32), each.astype(mx.float32))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_as_stored_is_mlx(dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, 4000, np.uint32)
    ties = np.arange(0x3F800000, 0x3F900000, 0x1000, np.uint32)
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[(np.abs(values) < 6e4) & (np.abs(values) > 1e-4)]
    expected = np.array(mx.array(values).astype(dtype).astype(mx.float32))
    np.testing.assert_array_equal(as_stored(values, dtype), expected)


def gptq64(matrix, hessian, spec, packed: Packed) -> np.ndarray:
    """Codes by the definition in float64, with the scales and biases of ``packed``: after each
    column the later ones move to the minimum of the error, found from the Hessian's own inverse."""
    w, h = matrix.astype(np.float64), hessian.astype(np.float64)
    h = h + np.eye(len(h)) * rounding_gptq.DAMPING * np.diag(h).mean()
    scales, biases = (np.array(x.astype(mx.float32), np.float64) for x in packed[1:])
    codes = np.empty(w.shape, int)
    for k in range(w.shape[1]):
        scale, bias = scales[:, k // spec.group_size], biases[:, k // spec.group_size]
        codes[:, k] = np.clip(np.rint((w[:, k] - bias) / scale), 0, 2**spec.bits - 1)
        inverse = np.linalg.solve(h[k:, k:], np.eye(len(h) - k)[0])  # its first row
        error = (w[:, k] - (codes[:, k] * scale + bias)) / inverse[0]
        w[:, k + 1 :] -= np.outer(error, inverse[1:])
    return codes


@pytest.mark.parametrize("spec", [QuantSpec(2, 32), QuantSpec(3, 64)])
def test_gptq_codes_equal_the_definition(spec):
    matrix, hessian = problem(rows=16)
    packed = gptq(matrix, hessian, spec, mx.float16)
    expected = gptq64(matrix, hessian, spec, packed)
    scales, biases = (np.array(x.astype(mx.float32)) for x in packed[1:])
    found = dequantize(packed, spec).reshape(16, -1, spec.group_size)
    found = np.rint((found - biases[..., None]) / scales[..., None]).reshape(16, -1)
    # A weight near the middle of two codes may go either way in float32, and then later ones too.
    assert (found == expected).mean() > 0.99
    same_start = (found == expected)[:, : spec.group_size].mean()
    assert same_start > 0.995


@pytest.mark.parametrize("spec", [QuantSpec(2, 64), QuantSpec(3, 64), QuantSpec(4, 128)])
def test_gptq_beats_nearest_in_the_hessian_norm(spec):
    for seed in range(4):
        matrix, hessian = problem(seed=seed)
        found = error_of(matrix, gptq(matrix, hessian, spec, mx.float16), spec, hessian)
        plain = error_of(matrix, nearest(matrix, spec, mx.float16), spec, hessian)
        assert found < 0.7 * plain, seed


def test_gptq_beats_mlx_lm_gptq():
    """mlx_lm.quant.gptq fits scales by MLX's rounding; 2, 4 and 8 bit are all that it packs."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(128, 64, bias=False)

        def __call__(self, x):
            return self.proj(x)

    spec, ours, theirs = QuantSpec(4, 64), [], []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        model, x = Block(), rng.normal(size=(8, 40, 128)) @ rng.normal(size=(128, 128))
        x = x.astype(np.float32)
        matrix = np.array(model.proj.weight)
        flat = x.reshape(-1, 128)
        hessian = flat.T @ flat / len(flat)
        gptq_quantize(model, mx.array(x), spec.bits, spec.group_size, 8, 64)
        layer = model.proj
        packed = Packed(layer.weight, layer.scales, layer.biases)
        theirs.append(error_of(matrix, packed, spec, hessian))
        ours.append(error_of(matrix, gptq(matrix, hessian, spec, mx.float32), spec, hessian))
    assert np.mean(ours) < np.mean(theirs)


@pytest.mark.parametrize("spec", [QuantSpec(2, 32), QuantSpec(3, 64), QuantSpec(6, 128)])
def test_what_fits_the_layout_comes_back(spec):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**spec.bits, (6, 256)).astype(np.uint8)
    codes[:, :: spec.group_size], codes[:, 1 :: spec.group_size] = 0, 2**spec.bits - 1
    groups = (6, 256 // spec.group_size)
    scales = 2.0 ** rng.integers(-8, -2, groups)
    biases = -scales * rng.integers(1, 4, groups)
    matrix = dequantize(pack(codes, scales, biases, spec.bits, mx.float16), spec)
    _, hessian = problem(columns=256)
    np.testing.assert_array_equal(dequantize(gptq(matrix, hessian, spec, mx.float16), spec), matrix)
    np.testing.assert_array_equal(clip(matrix, hessian, spec, mx.float16), matrix)


@pytest.mark.parametrize("hessian", [np.zeros((64, 64)), np.diag(np.r_[np.ones(32), np.zeros(32)])])
def test_gptq_of_inputs_that_never_came(hessian):
    matrix, _ = problem(columns=64)
    spec = QuantSpec(4, 32)
    found = dequantize(gptq(matrix, hessian.astype(np.float32), spec, mx.float16), spec)
    plain = dequantize(nearest(matrix, spec, mx.float16), spec)
    assert np.square(found - matrix).sum() <= np.square(plain - matrix).sum()


def test_gptq_is_deterministic_and_rows_are_independent(monkeypatch):
    matrix, hessian = problem(rows=50)
    spec = QuantSpec(3, 64)
    first = gptq(matrix, hessian, spec, mx.float16)
    monkeypatch.setattr(rounding_gptq, "_ROWS", 16)
    for again in (gptq(matrix, hessian, spec, mx.float16), gptq(matrix, hessian, spec, mx.float16)):
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(other))


@given(
    bits=st.sampled_from(BITS),
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1e-4, 1.0, 100.0]),
    shift=st.sampled_from([0.0, 1.0, -3.0]),
)
@settings(deadline=None, max_examples=60)
def test_best_range_is_no_worse_than_the_whole_range(bits, seed, size, shift):
    rng = np.random.default_rng(seed)
    weights = (size * (rng.standard_t(3, (32, 5)) + shift)).astype(np.float32)
    importance = rng.uniform(0.1, 2, 32).astype(np.float32)
    scale, bias = best_range(weights, importance, bits, mx.bfloat16)
    np.testing.assert_array_equal(scale, as_stored(scale, mx.bfloat16))

    def error(scale, bias):
        codes = np.clip(np.rint((weights - bias) / scale), 0, 2**bits - 1)
        return importance @ np.square(codes * scale + bias - weights)

    low, high = weights.min(axis=0), weights.max(axis=0)
    whole = error(as_stored((high - low) / (2**bits - 1), mx.bfloat16), as_stored(low, mx.bfloat16))
    assert (error(scale, bias) <= whole * (1 + 1e-5)).all()


def test_best_range_of_equal_weights():
    weights = np.full((32, 3), 0.25, np.float32)
    scale, bias = best_range(weights, np.ones(32, np.float32), 4, mx.float16)
    assert (scale != 0).all() and np.isfinite(scale).all()
    np.testing.assert_array_equal(np.rint((weights - bias) / scale) * scale + bias, weights)


CONFIG = {**FIX_A, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
TOKENS = np.random.default_rng(3).integers(3, 96, (4, 24))


def loud_llama() -> FloatLlama:
    """A model some of whose inputs are far larger than others, as real ones have."""
    weights = numpy_weights(CONFIG)
    for name in weights:
        if "layers" in name and name.endswith("layernorm.weight"):
            weights[name] = np.exp(np.random.default_rng(1).normal(0, 1.2, 64)).astype(np.float32)
    return FloatLlama(LlamaConfig.from_dict(CONFIG), weights)


def tensors_of(llama: FloatLlama) -> list[Tensor]:
    return [
        Tensor(
            name.removesuffix(".weight"),
            value.shape,
            name.split(".")[-2],
            int(name.split(".")[2]) if ".layers." in name else None,
            None,
        )
        for name, value in llama.weights.items()
        if value.ndim == 2
    ]


def layer_error(llama: FloatLlama, changed: dict) -> float:
    other = FloatLlama(llama.config, {**llama.weights, **changed})
    x = llama.embed(TOKENS)
    return float(np.square(other.layer(0, x) - llama.layer(0, x)).mean())


def rounded_layer(llama, changed, allocation) -> dict:
    result = dict(changed)
    for path, spec in allocation.items():
        if path.startswith("model.layers.0."):
            name = f"{path}.weight"
            matrix = changed.get(name, llama.weights[name])
            result[name] = dequantize(nearest(matrix, spec, mx.float16), spec)
    return result


def test_awq_scales_leave_the_layer_as_it_was(monkeypatch):
    monkeypatch.setattr(rounding_awq, "clip", lambda matrix, *others: matrix)
    llama = loud_llama()
    _, found = layer_statistics(llama, 0, llama.embed(TOKENS))
    allocation = resolve("3bit-uniform", tensors_of(llama))
    changed = awq_layer("model.layers.0", llama.weights, found, allocation, mx.float16)
    for name in ("input_layernorm", "post_attention_layernorm", "mlp.up_proj"):
        before = llama.weights[f"model.layers.0.{name}.weight"]
        assert np.abs(changed[f"model.layers.0.{name}.weight"] / before - 1).max() > 0.1
    assert "model.layers.0.mlp.up_proj.bias" in changed
    assert layer_error(llama, changed) < 1e-9


def test_awq_rounds_better_than_nearest():
    llama = loud_llama()
    _, found = layer_statistics(llama, 0, llama.embed(TOKENS))
    allocation = resolve("3bit-uniform", tensors_of(llama))
    changed = awq_layer("model.layers.0", llama.weights, found, allocation, mx.float16)
    awq = layer_error(llama, rounded_layer(llama, changed, allocation))
    assert awq < 0.8 * layer_error(llama, rounded_layer(llama, {}, allocation))


def test_awq_scales_no_input_of_a_matrix_that_stays():
    llama = loud_llama()
    _, found = layer_statistics(llama, 0, llama.embed(TOKENS))
    allocation = resolve("3bit-uniform", tensors_of(llama))
    allocation |= dict.fromkeys(f"model.layers.0.{n}" for n in ("self_attn.k_proj", "mlp.up_proj"))
    changed = awq_layer("model.layers.0", llama.weights, found, allocation, mx.float16)
    assert not any("norm" in name or "bias" in name or "up_proj" in name for name in changed)


def test_clip_finds_the_least_error_of_its_grid():
    matrix, hessian = problem(rows=3, columns=64)
    matrix[:, 5] *= 8
    spec = QuantSpec(3, 32)
    found = dequantize(nearest(clip(matrix, hessian, spec, mx.float16), spec, mx.float16), spec)
    for row in range(3):
        for start in (0, 32):
            block, own = hessian[start : start + 32, start : start + 32], slice(start, start + 32)
            group = matrix[row : row + 1, own]
            errors = []
            for part in np.arange(0.55, 1.01, 0.05):
                limit = np.abs(group).max() * part
                cut = nearest(np.clip(group, -limit, limit), spec, mx.float16)
                errors.append(error_of(group, cut, spec, block))
            assert weighted_error(group, found[row : row + 1, own], block) == pytest.approx(
                min(errors), rel=1e-3
            )


@pytest.mark.parametrize("method", METHODS)
def test_activations_of_mlx_round_as_those_of_numpy(method):
    """On a GPU the forward pass is MLX's; float sums differ, so a code here and there may."""
    config, weights = LlamaConfig.from_dict(CONFIG), loud_llama().weights
    allocation = resolve("3bit-uniform", tensors_of(loud_llama()))
    arrays = {name: mx.array(value) for name, value in weights.items()}
    for ours, theirs in zip(
        round_model(FloatLlama(config, weights), allocation, method, TOKENS, mx.float16),
        round_model(FloatLlama(config, arrays, mx), allocation, method, TOKENS, mx.float16),
        strict=True,
    ):
        assert list(ours) == list(theirs)
        for path in {name.removesuffix(".scales") for name in ours if name.endswith(".scales")}:
            one, other = (
                dequantize(Packed(*(part[f"{path}.{p}"] for p in Packed._fields)), allocation[path])
                for part in (ours, theirs)
            )
            assert np.square(one - other).mean() < 0.02 * np.square(one).mean(), path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_rounded_part_by_part(method, tied):
    config = {**CONFIG, "tie_word_embeddings": tied}
    llama = FloatLlama(LlamaConfig.from_dict(config), numpy_weights(config))
    allocation = resolve("4bit", tensors_of(llama), group_size=32)
    allocation["model.layers.1.mlp.down_proj"] = None
    runs = [list(round_model(llama, allocation, method, TOKENS, mx.bfloat16)) for _ in range(2)]
    assert len(runs[0]) == (3 if tied else 4)
    for one, other in zip(*runs, strict=True):
        assert list(one) == list(other)
        for name in one:
            assert mx.array_equal(one[name], other[name]), name
    found = {name: value for part in runs[0] for name, value in part.items()}
    for path, spec in allocation.items():
        if spec is None:
            assert f"{path}.scales" not in found
            continue
        rows, columns = llama.weights[f"{path}.weight"].shape
        assert found[f"{path}.weight"].shape == (rows, columns * spec.bits // 32)
        for part in ("scales", "biases"):
            assert found[f"{path}.{part}"].shape == (rows, columns // spec.group_size)
            assert found[f"{path}.{part}"].dtype == mx.bfloat16
    if method != "awq":
        assert not any("norm" in name for name in found)


def test_the_methods_ask_for_what_they_need():
    llama = loud_llama()
    allocation = resolve("4bit", tensors_of(llama))
    with pytest.raises(ValueError, match="unknown rounding 'gtpq', expected one of rtn, gptq, awq"):
        list(round_model(llama, allocation, "gtpq", TOKENS, mx.float16))
    with pytest.raises(ValueError, match="'awq' needs calibration text"):
        list(round_model(llama, allocation, "awq", None, mx.float16))


def test_magnitudes_of_zero_do_not_scale_to_infinity():
    found = InputStatistics(np.zeros((64, 64), np.float32), np.zeros(64, np.float32), 1)
    matrix, _ = problem(rows=4, columns=64)
    scales = rounding_awq._best_scales({"a": matrix}, {"a": QuantSpec(3, 64)}, found, mx.float16)
    assert np.isfinite(scales).all() and (scales > 0).all()
