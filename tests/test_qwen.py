"""Llama's near relatives: Qwen2, with biases of q, k and v, and Qwen3, with norms of heads."""

from __future__ import annotations

from collections import Counter

import emulated_kernels
import fused_models
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from compiled_builds import compiled, converted
from fixtures import (
    FIX_B,
    PROMPT,
    QWEN2,
    QWEN3,
    mlx_weights,
    model_of,
    numpy_weights,
    quantize_weights,
    write_folder,
)
from fused_models import expected
from mlx_lm.models import qwen2
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.tuner.utils import linear_to_lora_layers
from numpy_llama import logits, stepwise_logits
from test_parity import stock_model

from husky_mlx import chips, kernels
from husky_mlx.bench_ops import compare
from husky_mlx.bench_ops_cases import OPS, Cases
from husky_mlx.config import LlamaConfig
from husky_mlx.dropin import DropIn
from husky_mlx.errors import CheckpointError
from husky_mlx.footprint import NORMS, footprint
from husky_mlx.loading import build_model, load
from husky_mlx.model import Model
from husky_mlx.ops.gemv import Platform
from husky_mlx.shapes import shape_config

FAMILIES = {"qwen2": QWEN2, "qwen3": QWEN3}
# As published with Qwen/Qwen2.5-0.5B-Instruct and Qwen/Qwen3-0.6B, but for the sizes.
PUBLISHED_QWEN2 = {
    **QWEN2,
    "hidden_act": "silu",
    "max_window_layers": 21,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
}
PUBLISHED_QWEN3 = {
    **QWEN3,
    "attention_bias": False,
    "hidden_act": "silu",
    "max_window_layers": 28,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
}

fast_emulator = pytest.fixture(emulated_kernels.fast_emulator)
on = pytest.fixture(fused_models.on)
families = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())


def decode(model, prompt, count):
    return fused_models.decode(model, prompt, count)[0]


class TestConfig:
    @pytest.mark.parametrize("config", [PUBLISHED_QWEN2, PUBLISHED_QWEN3], ids=FAMILIES)
    def test_published_configs(self, config):
        found = LlamaConfig.from_dict(config)
        assert found.rope_theta == 1000000.0
        assert found.layer_types == ("full_attention",) * 2
        biased = config["model_type"] == "qwen2"
        assert (found.attention_bias, found.output_bias) == (biased, False)
        assert found.qk_norm is not biased

    def test_a_llama_has_biases_everywhere_or_nowhere(self):
        for bias in (True, False):
            found = LlamaConfig.from_dict({**QWEN2, "model_type": "llama", "attention_bias": bias})
            assert (found.attention_bias, found.output_bias, found.qk_norm) == (bias, bias, False)

    def test_a_qwen3_with_attention_bias_has_it_in_all_four(self):
        found = LlamaConfig.from_dict({**QWEN3, "attention_bias": True})
        assert (found.attention_bias, found.output_bias) == (True, True)

    @pytest.mark.parametrize(
        ("asked", "first", "windows"),
        [
            (True, 1, [None, 8]),
            (True, 0, [8, 8]),
            (True, 28, [None, None]),
            (False, 0, [None, None]),
            (None, 0, [None, None]),
        ],
    )
    def test_windows_only_where_asked_for(self, asked, first, windows):
        found = LlamaConfig.from_dict(
            {
                **QWEN2,
                "sliding_window": 8,
                "use_sliding_window": asked,
                "max_window_layers": first,
            }
        )
        assert [found.window_of(layer) for layer in range(2)] == windows

    @families
    def test_a_window_hides_what_it_should(self, config):
        """mlx-lm attends to everything."""
        config = {**config, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
        wanted = logits(config, numpy_weights(config), PROMPT, window=8)
        found = stepwise_logits(model_of(config=config), PROMPT, 5)
        np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())

    def test_a_config_without_a_rotary_base(self):
        without = {name: value for name, value in QWEN2.items() if name != "rope_theta"}
        theirs = qwen2.ModelArgs.from_dict(without).rope_theta
        assert LlamaConfig.from_dict(without).rope_theta == theirs

    def test_an_impossible_number_of_window_layers(self):
        config = {**QWEN2, "sliding_window": 8, "use_sliding_window": True}
        with pytest.raises(CheckpointError, match="max_window_layers must be a whole number"):
            LlamaConfig.from_dict({**config, "max_window_layers": "all"})

    def test_published_yarn(self):
        """Of deepseek-ai/DeepSeek-R1-0528-Qwen3-8B; nobody reads its attn_factor."""
        scaling = {
            "attn_factor": 0.8782488562869419,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "rope_type": "yarn",
        }
        rope = LlamaConfig.from_dict({**QWEN3, "rope_scaling": scaling}).rope
        assert (rope.kind, rope.factor, round(rope.magnitude, 4)) == ("yarn", 4.0, 1.1386)


@families
class TestOnCPU:
    @pytest.mark.parametrize("bits", [None, 4, 8])
    def test_native_program_gives_mlx_lms_tokens(self, config, bits, monkeypatch):
        monkeypatch.setenv("HUSKY_NATIVE", "exact")
        weights = mlx_weights(config)
        if bits:
            weights = quantize_weights(weights, bits, 32)
        model = build_model(config, dict(weights))
        assert decode(model, PROMPT, 16) == expected(config, weights, PROMPT, 16)
        assert model.plan.counts["native"] == 17

    def test_native_program_with_norms_and_biases_in_16_bit(self, config, monkeypatch):
        monkeypatch.setenv("HUSKY_NATIVE", "exact")
        halves = {
            name: value.astype(mx.float16) if value.ndim == 1 else value
            for name, value in mlx_weights(config).items()
        }
        model = build_model(config, dict(halves))
        exact = {name: value.astype(mx.float32) for name, value in halves.items()}
        assert decode(model, PROMPT, 12) == expected(config, exact, PROMPT, 12)

    def test_a_changed_norm_or_bias_is_seen(self, config):
        model = model_of(config=config)
        before = decode(model, PROMPT, 6)
        attention = model.layers[0].self_attn
        if config is QWEN3:
            attention.k_norm.weight = attention.k_norm.weight * -3
        else:
            attention.q_proj.bias = attention.q_proj.bias * -3
        weights = {**mlx_weights(config)}
        name = "k_norm.weight" if config is QWEN3 else "q_proj.bias"
        weights[f"model.layers.0.self_attn.{name}"] *= -3
        wanted = expected(config, weights, PROMPT, 6)
        assert decode(model, PROMPT, 6) == wanted != before

    def test_a_folder_loads_and_names_what_is_missing(self, config, tmp_path):
        weights = mlx_weights(config)
        folder = write_folder(tmp_path / "whole", config, weights, tokenizer=True)
        assert decode(load(folder)[0], PROMPT, 6) == expected(config, weights, PROMPT, 6)
        name = "model.layers.1.self_attn." + ("k_norm.weight" if config is QWEN3 else "v_proj.bias")
        del weights[name]
        weights["model.layers.0.self_attn.o_proj.bias"] = mx.zeros((64,))
        damaged = write_folder(tmp_path / "damaged", config, weights, tokenizer=True)
        with pytest.raises(CheckpointError) as refused:
            load(damaged)
        assert f"{name} is missing" in str(refused.value)
        assert "layers.0.self_attn.o_proj.bias is not part of this model" in str(refused.value)


@families
class TestTools:
    @pytest.mark.parametrize("target", ["cpu", "m3pro", "sm_90"])
    def test_a_build_computes_what_the_quantized_model_does(self, config, target, tmp_path):
        with_tokens = {**config, **{key: FIX_B[key] for key in ("vocab_size", "eos_token_id")}}
        source = converted(tmp_path, with_tokens)
        built = compiled(source, target, "4bit-uniform")
        weights = quantize_weights(mlx_weights(with_tokens), 4, 64)
        wanted = stock_model(with_tokens, weights)(mx.array([PROMPT[:8]]))
        found = load(str(built), lazy=True)[0](mx.array([PROMPT[:8]]))
        assert mx.abs(found - wanted).max() < 1e-2 * mx.abs(wanted).max()

    @pytest.mark.parametrize("rounding", ["gptq", "awq"])
    def test_rounding_leaves_the_model_what_it_is(self, config, rounding, tmp_path):
        """At 8 bits nothing is lost but roundings."""
        with_tokens = {**config, **{key: FIX_B[key] for key in ("vocab_size", "eos_token_id")}}
        source = converted(tmp_path, with_tokens)
        built = compiled(source, "cpu", "8bit", rounding=rounding)
        wanted = model_of("mlx", with_tokens)(mx.array([PROMPT[:8]]))
        found = load(str(built))[0](mx.array([PROMPT[:8]]))
        assert mx.abs(found - wanted).max() < 5e-2 * mx.abs(wanted).max()

    def test_mlx_lms_own_load_finds_our_class_inside_husky(self, config, tmp_path):
        folder = write_folder(tmp_path / "m", config, tokenizer=True)
        with DropIn():
            model = mlx_lm.load(str(folder))[0]
        assert isinstance(model, Model)

    def test_lora_layers_train_and_are_seen(self, config):
        model = model_of(config=config)
        before = decode(model, PROMPT, 6)
        model.freeze()
        keys = {"keys": ["self_attn.q_proj"], "rank": 2, "scale": 20.0, "dropout": 0.0}
        linear_to_lora_layers(model, 2, keys)
        for layer in model.layers:
            layer.self_attn.q_proj.lora_b = mx.ones_like(layer.self_attn.q_proj.lora_b)
        after = decode(model, PROMPT, 6)
        assert after != before
        whole = model(mx.array([PROMPT + after[:-1]]))[0, len(PROMPT) - 1 :]
        assert mx.argmax(whole, axis=-1).tolist() == after


@pytest.mark.parametrize(
    ("name", "parameters", "context"),
    [("qwen2.5-7b", 7_615_616_512, 131072), ("qwen3-8b", 8_190_735_360, 40960)],
)
def test_published_sizes(name, parameters, context):
    """Of Qwen/Qwen2.5-7B and Qwen/Qwen3-8B, as their safetensors and configs say."""
    raw = shape_config(name)
    found = LlamaConfig.from_dict(raw)
    assert footprint(found, raw).weight_bytes() == 2 * parameters
    assert found.max_position_embeddings == context


def test_norms_of_heads_count_as_norms():
    parts = footprint(LlamaConfig.from_dict(QWEN3), {"torch_dtype": "float32"}).parts()
    assert parts[NORMS] == 4 * (5 * 64 + 2 * 2 * 32)


@families
class TestKernels:
    """The fused step from its Metal sources in the emulator."""

    @pytest.fixture(autouse=True)
    def fast(self, fast_emulator):
        pass

    @pytest.fixture(params=["m1", "sm_90"])
    def models(self, request, config, on):
        """Ours on a chip's kernels, and mlx-lm's."""
        on(request.param)
        weights = quantize_weights(mlx_weights(config), 4, 32)
        return build_model(config, dict(weights)), stock_model(config, dict(weights))

    def test_tokens_across_a_growth(self, models, config):
        model, _ = models
        prompt = PROMPT + PROMPT[:18]
        weights = quantize_weights(mlx_weights(config), 4, 32)
        assert decode(model, prompt, 10) == expected(config, weights, prompt, 10)
        assert model.plan.counts["frozen"] == 11

    def test_launches_a_layer(self, models, config):
        model, _ = models
        cache = model.make_cache()
        model(mx.array([PROMPT]), cache=cache)
        token = mx.array([[5]])
        step = model.decode_step(token, cache)
        with kernels.record() as launches:
            step.greedy(token, cache)
        found = Counter(launch.op for launch in launches)
        edge = ["rms_qkv_rope_append"]
        if config is QWEN3:
            edge = ["rms_qkv", "norm_rope_append"]
        rest = ["attention_decode", "o_proj_add", "rms_gate_up_swiglu", "down_add"]
        assert [found.pop(op) for op in (*edge, *rest)] == [2] * (len(edge) + 4)
        assert found.total() <= 4, dict(found)

    def test_rows_of_one_sequence_and_of_a_batch(self, models):
        model, stock = models
        cache = model.make_cache()
        model(mx.array([PROMPT]), cache=cache)
        found = model(mx.array([[7, 9, 11]]), cache=cache)
        wanted = stock(mx.array([[*PROMPT, 7, 9, 11]]))[:, -3:]
        assert mx.abs(found - wanted).max() < 1e-4 * mx.abs(wanted).max()

        prompts = [PROMPT[:9], PROMPT[9:20]]
        padding = [2, 0]
        cache = [BatchKVCache(padding) for _ in model.layers]
        rows = mx.array([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
        model(rows, cache=cache)
        frozen_before = model.plan.counts["frozen"]
        found = model(mx.array([[7], [9]]), cache=cache)
        assert model.plan.counts["frozen"] == frozen_before + 1
        for row, (prompt, token) in enumerate(zip(prompts, (7, 9), strict=True)):
            wanted = stock(mx.array([[*prompt, token]]))[0, -1]
            assert mx.abs(found[row, 0] - wanted).max() < 1e-4 * mx.abs(wanted).max()

    def test_operations_as_they_are_timed_equal_mlx_lms(self, config):
        model = build_model(config, quantize_weights(mlx_weights(config), 4, 32))
        cases = Cases(model, Platform(chips.parse("m1")[0], "emulator"), rows=1, contexts=(33,))
        for op in OPS:
            for case in cases.of(op):
                assert compare(case) < 1e-4, op


@families
def test_a_saved_cache_and_numpy_agree(config):
    """q, k and v by hand for one layer: what the cache holds after a prompt."""
    weights = {name: np.array(value, np.float64) for name, value in mlx_weights(config).items()}
    model = model_of(config=config)
    cache = model.make_cache()
    model(mx.array([PROMPT[:5]]), cache=cache)
    x = weights["model.embed_tokens.weight"][PROMPT[:5]]
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
    prefix = "model.layers.0.self_attn"
    dim = config.get("head_dim", 16)
    k, v = (x @ weights[f"{prefix}.{name}_proj.weight"].T for name in "kv")
    if config is QWEN2:
        k, v = k + weights[f"{prefix}.k_proj.bias"], v + weights[f"{prefix}.v_proj.bias"]
    k, v = k.reshape(5, 2, dim), v.reshape(5, 2, dim)
    if config is QWEN3:
        k = k / np.sqrt((k**2).mean(axis=-1, keepdims=True) + 1e-5)
        k = k * weights[f"{prefix}.k_norm.weight"]
    angles = np.arange(5)[:, None, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    a, b = k[..., : dim // 2], k[..., dim // 2 :]
    turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
    keys, values = (np.array(part)[0].swapaxes(0, 1)[:5] for part in cache[0].state[:2])
    np.testing.assert_allclose(keys, np.concatenate(turned, axis=-1), atol=2e-5)
    np.testing.assert_allclose(values, v, atol=2e-5)
