"""The float32 forward, input statistics and sensitivities of calibration, against mlx-lm."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy_llama
import pytest
from fixtures import (
    FIX_A,
    QWEN2,
    QWEN3,
    model_of,
    numpy_weights,
    quantize_weights,
    write_folder,
    write_tokenizer,
)
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.quant.gptq import Catcher
from mlx_lm.utils import load_tokenizer
from test_parity import YARN

from husky_mlx import calibrate_forward, calibrate_text
from husky_mlx.calibrate import InputStatistics, head_statistics, layer_statistics, weighted_error
from husky_mlx.calibrate_forward import FloatLlama
from husky_mlx.calibrate_probe import Probe, Trial
from husky_mlx.calibrate_sensitivity import auto, measure
from husky_mlx.calibrate_weights import FloatWeights
from husky_mlx.config import LlamaConfig
from husky_mlx.recipe import QuantSpec, Tensor, bits_per_weight

TOKENS = np.random.default_rng(3).integers(3, 96, (3, 17))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1, "head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": {"rope_scaling": YARN},
    "traditional": {"rope_traditional": True},
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}


def llama_of(config: dict = FIX_A, xp=np) -> FloatLlama:
    weights = numpy_weights(config)
    if xp is mx:
        weights = {name: mx.array(value) for name, value in weights.items()}
    return FloatLlama(LlamaConfig.from_dict(config), weights, xp)


def tensors_of(config: dict = FIX_A, spec: QuantSpec | None = None) -> list[Tensor]:
    return [
        Tensor(
            name.removesuffix(".weight"),
            value.shape,
            name.split(".")[-2],
            int(name.split(".")[2]) if ".layers." in name else None,
            spec,
        )
        for name, value in numpy_weights(config).items()
        if value.ndim == 2
    ]


@pytest.mark.parametrize("xp", [np, mx], ids=["numpy", "mlx"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_equals_mlx_lm(variant, xp):
    config = {**FIX_A, **VARIANTS[variant]}
    llama = llama_of(config, xp)
    expected = np.array(model_of("mlx", config)(mx.array(TOKENS)))
    found = np.array(llama.logits(llama.hidden(TOKENS)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())


def test_forward_has_the_window_that_mlx_lm_ignores():
    config = {**FIX_A, "model_type": "mistral", "sliding_window": 5}
    llama = llama_of(config)
    expected = numpy_llama.logits(config, numpy_weights(config), TOKENS[0].tolist(), window=5)
    found = llama.logits(llama.hidden(TOKENS[:1]))[0]
    np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())


def test_a_gate_far_below_zero_does_not_overflow():
    llama = llama_of()
    llama.weights["model.layers.0.mlp.gate_proj.weight"] *= 1e4
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(llama.hidden(TOKENS)).all()


@pytest.mark.parametrize("config", [FIX_A, {**FIX_A, "tie_word_embeddings": True}])
def test_statistics_equal_those_of_mlx_lm_gptq(config):
    """mlx_lm.quant.gptq hooks each Linear of its own model and sums x xT."""
    model = model_of("mlx", config)
    hooked = [
        (path, Catcher(module))
        for path, module in tree_flatten(
            model.leaf_modules(), is_leaf=lambda module: hasattr(module, "parameters")
        )
        if "proj" in path or path == "lm_head"
    ]
    model.update_modules(tree_unflatten(hooked))
    model(mx.array(TOKENS))
    llama = llama_of(config)
    x = llama.embed(TOKENS)
    found = {}
    for index in range(2):
        x, each = layer_statistics(llama, index, x)
        found |= each
    found |= head_statistics(llama, x)
    if config["tie_word_embeddings"]:
        states = llama.final_norm(x).reshape(-1, 64).astype(np.float64)
        expected = states.T @ states / TOKENS.size
        np.testing.assert_allclose(found["model.embed_tokens"].hessian, expected, rtol=1e-4)
    for path, catcher in hooked:
        expected = np.array(catcher.H) / TOKENS.size
        np.testing.assert_allclose(
            found[path].hessian, expected, atol=1e-4 * np.abs(expected).max(), err_msg=path
        )
        assert found[path].tokens == TOKENS.size


def test_sequences_go_through_a_layer_in_parts(monkeypatch):
    llama = llama_of()
    x = llama.embed(TOKENS)
    whole, expected = layer_statistics(llama, 0, x)
    monkeypatch.setattr(calibrate_forward, "_TOKENS", 20)
    parts, found = layer_statistics(llama, 0, x)
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    for path, statistics in expected.items():
        assert found[path].tokens == TOKENS.size
        np.testing.assert_allclose(found[path].hessian, statistics.hessian, rtol=1e-3, atol=1e-5)


def test_statistics_of_parts_are_those_of_the_whole():
    x = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    found = InputStatistics.empty(8)
    for part in np.split(x, [3, 20]):
        found.add(part)
    np.testing.assert_allclose(found.hessian, x.T @ x / 40, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.magnitude, np.abs(x).mean(axis=0), rtol=1e-5)


def test_weighted_error_is_the_change_of_the_outputs():
    rng = np.random.default_rng(1)
    x, w, e = rng.normal(size=(50, 8)), rng.normal(size=(5, 8)), rng.normal(size=(5, 8))
    expected = np.square(x @ (w + e).T - x @ w.T).sum() / 50
    found = weighted_error(*(a.astype(np.float32) for a in (w, w + e, x.T @ x / 50)))
    assert found == pytest.approx(expected, rel=1e-5)


def divergence64(config, weights, changed) -> float:
    """KL(model || changed model) in float64, over all but each last position."""
    total = []
    for ids in TOKENS:
        p, q = (
            numpy_llama.logits(config, w, ids.tolist())[:-1] for w in (weights, weights | changed)
        )
        p, q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (p, q))
        total.append((np.exp(p) * (p - q)).sum(-1))
    return float(np.mean(total))


@pytest.mark.parametrize(
    "name, first, scale",
    [
        ("model.layers.1.mlp.up_proj", 1, 0.02),
        ("lm_head", 2, 0.02),
        ("model.embed_tokens", None, 0.2),
    ],
)
def test_probe_equals_float64(name, first, scale):
    weights = numpy_weights(FIX_A)
    matrix = weights[f"{name}.weight"]
    noise = np.random.default_rng(0).normal(0, scale, matrix.shape).astype(np.float32)
    changed = {f"{name}.weight": matrix + noise}
    probe = Probe(llama_of(), TOKENS)
    expected = divergence64(FIX_A, weights, changed)
    assert probe.divergence(changed, first) == pytest.approx(expected, rel=1e-3)


def rounded(matrix: np.ndarray, spec: QuantSpec) -> np.ndarray:
    parts = mx.quantize(mx.array(matrix), spec.group_size, spec.bits)
    return np.array(mx.dequantize(*parts, spec.group_size, spec.bits))


@pytest.mark.parametrize("tied", [False, True])
def test_costs_next_to_the_budget_are_divergences(tied):
    config = {**FIX_A, "tie_word_embeddings": tied}
    weights = numpy_weights(config)
    llama = llama_of(config)
    measured = list(measure(llama, tensors_of(config), 5.0, "rtn", TOKENS, mx.float32, 32))
    paths = [tensor.path for group, _ in measured for tensor in group]
    assert sorted(paths) == sorted(tensor.path for tensor in tensors_of(config))
    for group, costs in measured:
        names = [f"{tensor.path}.weight" for tensor in group]
        for tried in (QuantSpec(4, 32), QuantSpec(5, 32)):  # next to the budget
            changed = {name: rounded(weights[name], tried) for name in names}
            expected = divergence64(config, weights, changed)
            assert costs[tried] == pytest.approx(expected, rel=3e-2, abs=1e-12), (names, tried)
        by_bits = [cost for _, cost in sorted(costs.items(), key=lambda each: each[0].bits)]
        assert by_bits == sorted(by_bits, reverse=True), "more bits never cost more here"


def test_auto_keeps_the_budget_and_what_the_kernels_fuse_together():
    tensors = tensors_of()
    first = auto(llama_of(), tensors, 4.5, "rtn", TOKENS, mx.float16)
    assert first == auto(llama_of(), tensors, 4.5, "rtn", TOKENS, mx.float16)
    assert list(first) == [tensor.path for tensor in tensors]
    assert bits_per_weight(tensors, first) <= 4.5
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        assert len({first[f"{attention}.{name}_proj"] for name in "qkv"}) == 1
        assert first[f"{mlp}.gate_proj"] == first[f"{mlp}.up_proj"]


def test_auto_diverges_less_than_the_uniform_recipe_of_its_size():
    weights = numpy_weights(FIX_A)
    for name in list(weights):
        if "layers.1.mlp" in name:
            weights[name] *= 0.05  # a layer whose bits are worth little
    llama = FloatLlama(LlamaConfig.from_dict(FIX_A), weights, np)
    allocation = auto(llama, tensors_of(), 4.5, "rtn", TOKENS, mx.float32)
    uniform = dict.fromkeys(allocation, QuantSpec(4, 64))
    divergences = [
        divergence64(
            FIX_A,
            weights,
            {f"{p}.weight": rounded(weights[f"{p}.weight"], spec) for p, spec in each.items()},
        )
        for each in (allocation, uniform)
    ]
    assert divergences[0] < 0.9 * divergences[1]
    assert allocation["model.layers.1.mlp.up_proj"].bits < 4


def test_trial_equals_float64():
    weights, spec = numpy_weights(FIX_A), QuantSpec(3, 64)
    tensors = tensors_of()
    trial = Trial(llama_of(), tensors, "rtn", TOKENS, mx.float32)
    allocation = dict.fromkeys((tensor.path for tensor in tensors), spec)
    changed = {f"{path}.weight": rounded(weights[f"{path}.weight"], spec) for path in allocation}
    expected = divergence64(FIX_A, weights, changed)
    assert trial.divergence(allocation) == pytest.approx(expected, rel=1e-3)
    # What has the source's spec is not touched.
    trial = Trial(llama_of(), tensors_of(spec=spec), "rtn", TOKENS, mx.float32)
    assert trial.divergence(allocation) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("fixed_is_better", [True, False])
def test_auto_gives_way_to_a_fixed_recipe_that_diverges_less(monkeypatch, fixed_is_better):
    uniform = dict.fromkeys((tensor.path for tensor in tensors_of()), QuantSpec(4, 64))

    def divergence(self, allocation):
        return float((allocation == uniform) != fixed_is_better)

    monkeypatch.setattr(Trial, "divergence", divergence)
    found = auto(llama_of(), tensors_of(), 4.5, "rtn", TOKENS, mx.float16)
    assert (found == uniform) == fixed_is_better


def test_auto_of_a_quantized_source_keeps_or_lowers():
    stored = QuantSpec(4, 32)
    tensors = tensors_of(spec=stored)
    assert set(auto(llama_of(), tensors, 5.0, "rtn", TOKENS, mx.float16).values()) == {stored}
    lowered = auto(llama_of(), tensors, 4.0, "rtn", TOKENS, mx.float16)
    assert bits_per_weight(tensors, lowered) <= 4.0
    assert all(spec == stored or spec.bits < 4 for spec in lowered.values())


@pytest.mark.parametrize("quantized", [False, True])
def test_float_weights_are_the_checkpoints(tmp_path, quantized):
    plain = {name: mx.array(value) for name, value in numpy_weights(FIX_A).items()}
    stored = quantize_weights(plain, 4, 32) if quantized else plain
    weights = FloatWeights(write_folder(tmp_path / "a model é", FIX_A, stored))
    assert set(weights) == set(plain) and len(weights) == len(plain)
    for name, value in plain.items():
        base = name.removesuffix(".weight")
        if f"{base}.scales" in stored:
            parts = (stored[f"{base}.{part}"] for part in ("weight", "scales", "biases"))
            value = mx.dequantize(*parts, 32, 4)
        np.testing.assert_array_equal(weights[name], np.array(value))
    assert weights.vectors == 5 * 64
    with pytest.raises(KeyError):
        weights["model.layers.0.mlp.up_proj.scales"]
    assert "model.layers.0.mlp.up_proj.bias" not in weights


def test_float_weights_read_again_where_they_are_not_kept(tmp_path, monkeypatch):
    class NoRoom:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", NoRoom)
    weights = FloatWeights(write_folder(tmp_path / "model"))
    first, second = (weights["model.norm.weight"] for _ in range(2))
    assert first is not second
    np.testing.assert_array_equal(first, second)


def tokenizer_of(folder, **settings):
    write_folder(folder, {**FIX_A, "vocab_size": 264})
    write_tokenizer(folder, **settings)
    return load_tokenizer(folder)


def test_sequences_fill_and_start_with_bos(tmp_path):
    plain = tokenizer_of(tmp_path / "plain")
    found = calibrate_text.sequences(plain, "abcdefghij", 4)
    np.testing.assert_array_equal(found, [list(b"abcd"), list(b"efgh")])
    assert calibrate_text.sequences(plain, "abc", 100).tolist() == [list(b"abc")]
    with pytest.raises(ValueError, match="the text has 1 tokens, expected 2 or more"):
        calibrate_text.sequences(plain, "a", 4)

    class WithBos:
        bos_token_id = 260

        def encode(self, text):
            return [260, *text.encode()]

    found = calibrate_text.sequences(WithBos(), "abcdefgh", 4)
    np.testing.assert_array_equal(found, [[260, *b"abc"], [260, *b"def"]])
    parts = calibrate_text.calibration_sequences(plain, {"a": "abcdefgh", "b": "xyz"}, 4)
    np.testing.assert_array_equal(parts, [list(b"abc"), list(b"efg"), list(b"xyz")])


def test_bundled_texts_are_apart():
    calibration, held_out = calibrate_text.calibration_texts(), calibrate_text.held_out_texts()
    assert tuple(calibration) == tuple(held_out) == calibrate_text.DOMAINS
    for domain in calibrate_text.DOMAINS:
        seen = {line for line in calibration[domain].splitlines() if len(line) > 40}
        assert not seen & set(held_out[domain].splitlines()), domain


def test_a_users_text(tmp_path):
    file = tmp_path / "my text.txt"
    file.write_text("雪 snow", encoding="utf-8")
    assert calibrate_text.held_out_texts(str(file)) == {"my text": "雪 snow"}
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8 text"):
        calibrate_text.calibration_texts(str(file))
    with pytest.raises(FileNotFoundError):
        calibrate_text.held_out_texts(str(tmp_path / "none.txt"))
