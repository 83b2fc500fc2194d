"""Greedy tokens and logits against mlx-lm, live, on tiny checkpoints of every supported shape."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from fixtures import FIX_A, PROMPT, QWEN2, QWEN3, mlx_weights, quantize_weights
from mlx_lm.generate import generate_step
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import infer_quant_config

from husky_mlx.generation import stream_generate
from husky_mlx.loading import build_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "multi-head": {"num_key_value_heads": 4},
    "grouped": {},
    "multi-query": {"num_key_value_heads": 1},
    "head_dim 64": {"head_dim": 64},
    "head_dim 80": {"head_dim": 80},
    "head_dim 96": {"head_dim": 96, "num_attention_heads": 2, "num_key_value_heads": 1},
    "head_dim 128": {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "rope linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope llama3": {"rope_scaling": LLAMA3},
    "rope yarn": {"rope_scaling": YARN},
    "rope traditional": {"rope_traditional": True},
    "theta 500000": {"rope_theta": 500000.0},
    "odd vocabulary": {"vocab_size": 101},
    "window on some layers": {
        "sliding_window": 8,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3 tied": {**QWEN3, "tie_word_embeddings": True},
    "window on the first layer": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def stock_model(config, weights):
    """mlx-lm's own class, built with mlx-lm's own pieces only."""
    family = {"qwen2": qwen2, "qwen3": qwen3}.get(config["model_type"], llama)
    model = family.Model(family.ModelArgs.from_dict(config))
    weights = model.sanitize(dict(weights))

    def storage(path, module):
        return f"{path}.scales" in weights and infer_quant_config(path, module, weights)

    nn.quantize(model, class_predicate=storage)
    model.eval()
    model.load_weights(list(weights.items()))
    return model


def greedy(model, prompt, count):
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def our_tokens(model, tokenizer, prompt, count):
    return [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=count)]


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_variant_gives_mlx_lm_tokens(changes, plain_tokenizer):
    config = {**FIX_A, **changes}
    weights = mlx_weights(config)
    expected = greedy(stock_model(config, weights), PROMPT, 24)
    model = build_model(config, weights)
    assert our_tokens(model, plain_tokenizer, PROMPT, 24) == expected
    assert model.plan.counts["frozen"] == 25, "24 tokens and the call for the last prompt token"


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_quantized_gives_mlx_lm_tokens(bits, group_size, plain_tokenizer):
    weights = quantize_weights(mlx_weights(FIX_A), bits, group_size)
    expected = greedy(stock_model(FIX_A, weights), PROMPT, 16)
    model = build_model(FIX_A, weights)
    assert our_tokens(model, plain_tokenizer, PROMPT, 16) == expected
    assert model.plan.counts["frozen"] == 17
    assert "not fused" not in str(model.plan)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_of_both_paths_are_mlx_lms(changes):
    config = {**FIX_A, **changes}
    weights = mlx_weights(config)
    stock, ours = stock_model(config, weights), build_model(config, dict(weights))
    stock_cache, our_cache = make_prompt_cache(stock), make_prompt_cache(ours)
    prompt, tail = mx.array([PROMPT[:-3]]), PROMPT[-3:]
    assert mx.abs(stock(prompt, stock_cache) - ours(prompt, our_cache)).max() < 1e-4
    for token in tail:
        step = mx.array([[token]])
        assert mx.abs(stock(step, stock_cache) - ours(step, our_cache)).max() < 1e-4
    assert ours.plan.counts == {"native": 0, "frozen": 3, "prefill": 0, "reference": 1, "traces": 1}
