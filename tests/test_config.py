"""LlamaConfig: what a config.json says, what is refused, and logits where a field changes them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from fixtures import FIX_A, PROMPT, mlx_weights, numpy_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_llama import logits, stepwise_logits

from husky_mlx.cache import RotatingKVCache
from husky_mlx.config import LlamaConfig
from husky_mlx.errors import CheckpointError, HuskyError, UnsupportedModel
from husky_mlx.loading import build_model


def without(field: str) -> dict:
    return {name: value for name, value in FIX_A.items() if name != field}


def check_against_numpy(config: dict, tokens: list[int], prompt: int, window: int | None = None):
    model = build_model(config, mlx_weights(config))
    result = stepwise_logits(model, tokens, prompt)
    expected = logits(config, numpy_weights(config), tokens, window=window)
    np.testing.assert_allclose(result, expected, atol=3e-5)
    assert model.plan.counts["frozen"] == len(tokens) - prompt
    return model


def test_head_dim_other_than_the_quotient_C012():
    config = {**FIX_A, "head_dim": 32}
    model = check_against_numpy(config, PROMPT[:13], prompt=8)
    assert model.args.attention_scale == 32**-0.5
    cache = model.make_cache()
    model(mx.array([PROMPT[:8]]), cache=cache)
    assert cache[0].keys.shape[-1] == cache[0].values.shape[-1] == 32


def test_heads_that_do_not_divide_the_width_C013():
    config = {**FIX_A, "num_attention_heads": 6, "head_dim": 16}
    check_against_numpy(config, PROMPT[:13], prompt=8)
    with pytest.raises(CheckpointError, match=r"hidden_size 64 .* num_attention_heads 6"):
        LlamaConfig.from_dict({**FIX_A, "num_attention_heads": 6})


@pytest.mark.parametrize(
    "config, twin",
    [
        ({**FIX_A, "head_dim": None}, {**FIX_A, "head_dim": 16}),
        ({**FIX_A, "num_key_value_heads": None}, {**FIX_A, "num_key_value_heads": 4}),
        (without("num_key_value_heads"), {**FIX_A, "num_key_value_heads": 4}),
        ({**FIX_A, "rope_theta": None}, {**FIX_A, "rope_theta": 10000.0}),
        (without("rope_theta"), {**FIX_A, "rope_theta": 10000.0}),
        ({**FIX_A, "rope_scaling": None}, FIX_A),
        ({**FIX_A, "rope_parameters": None}, FIX_A),
        ({**FIX_A, "sliding_window": None, "layer_types": None}, FIX_A),
        ({**FIX_A, "attention_bias": None, "mlp_bias": None}, FIX_A),
    ],
)
def test_null_means_absent_C014(config, twin):
    assert LlamaConfig.from_dict(config) == LlamaConfig.from_dict(twin)


def test_absent_fields_give_the_right_logits_C014():
    """K and V of 4 heads, theta 10000, head_dim 16, all by default."""
    explicit = {**FIX_A, "num_key_value_heads": 4, "rope_theta": 10000.0, "head_dim": 16}
    nulls = {"num_key_value_heads": None, "rope_theta": None, "head_dim": None}
    model = build_model({**FIX_A, **nulls, "rope_scaling": None}, mlx_weights(explicit))
    result = stepwise_logits(model, PROMPT[:8], 6)
    expected = logits(explicit, numpy_weights(explicit), PROMPT[:8])
    np.testing.assert_allclose(result, expected, atol=3e-5)


def test_heads_no_multiple_of_kv_heads_C015():
    fields = {"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 16}
    expected = "num_attention_heads 3 is not a multiple of num_key_value_heads 2"
    with pytest.raises(CheckpointError, match=expected):
        build_model({**FIX_A, **fields}, mlx_weights(FIX_A))


@pytest.mark.parametrize("prompt", [2, 4, 5, 8, 39])
def test_mistral_window_in_prefill_and_decode_C021(prompt):
    """The window is honoured, as Mistral was trained, although mlx-lm 0.32.2 ignores it."""
    config = {**FIX_A, "model_type": "mistral", "sliding_window": 4}
    full = logits(config, numpy_weights(config), PROMPT)
    banded = logits(config, numpy_weights(config), PROMPT, window=4)
    assert np.abs(full - banded).max() > 0.1, "the window shows"
    model = check_against_numpy(config, PROMPT, prompt, window=4)
    assert all(type(cache) is RotatingKVCache for cache in model.make_cache())


def test_window_policy_C021():
    """LlamaForCausalLM has no window; Mistral has one unless it says otherwise."""

    def windows(**fields) -> list[int | None]:
        config = LlamaConfig.from_dict({**FIX_A, **fields})
        return [config.window_of(layer) for layer in range(2)]

    assert windows(model_type="llama", sliding_window=4) == [None, None]
    assert windows(model_type="mistral", sliding_window=None) == [None, None]
    assert windows(model_type="mistral", sliding_window=4, use_sliding_window=False) == [None, None]
    kinds = ["full_attention", "sliding_attention"]
    assert windows(model_type="llama", sliding_window=4, layer_types=kinds) == [None, 4]
    assert windows(model_type="mistral", sliding_window=4, layer_types=kinds) == [None, 4]


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (
            {"model_type": "gemma"},
            "model_type is 'gemma', supported are ('llama', 'mistral', 'qwen2', 'qwen3')",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported is 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, supported is 1.0"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"residual_multiplier": 0.22}, "residual_multiplier is 0.22"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "['linear_attention']"),
    ],
)
def test_what_is_not_covered_is_refused_by_field(fields, sentence):
    with pytest.raises(UnsupportedModel) as error:
        LlamaConfig.from_dict({**FIX_A, **fields}, "there/config.json")
    (difference,) = error.value.differences
    assert sentence in difference
    assert str(error.value).startswith("there/config.json: ")
    assert str(error.value).endswith('load(..., fallback="mlx") or --backend mlx.')


def test_all_differences_are_listed_at_once():
    fields = {"hidden_act": "gelu", "num_experts": 4, "rope_scaling": {"type": "longrope"}}
    with pytest.raises(UnsupportedModel) as error:
        LlamaConfig.from_dict({**FIX_A, **fields})
    assert len(error.value.differences) == 3


@pytest.mark.parametrize(
    "field, value, sentence",
    [
        ("model_type", None, "model_type is missing"),
        ("model_type", ["llama"], "model_type must be a name, found ['llama']"),
        ("hidden_size", None, "hidden_size is missing"),
        ("hidden_size", "64", "hidden_size must be a whole number from 1"),
        ("num_hidden_layers", 0, "num_hidden_layers must be a whole number from 1"),
        ("num_hidden_layers", 10**9, "num_hidden_layers must be a whole number from 1 to 10000"),
        ("vocab_size", True, "vocab_size must be a whole number"),
        ("vocab_size", 2**31, "vocab_size must be a whole number from 1 to 2147483647"),
        ("num_attention_heads", 2.5, "num_attention_heads must be a whole number"),
        ("head_dim", 15, "head_dim must be even"),
        ("hidden_size", 4, "head_dim must be even for rotary embedding, found 1 (hidden_size 4 /"),
        ("rms_norm_eps", None, "rms_norm_eps must be a number above 0, found None"),
        ("rms_norm_eps", 0, "rms_norm_eps must be a number above 0, found 0"),
        ("max_position_embeddings", 1.5, "max_position_embeddings must be a whole number above 0"),
        ("tie_word_embeddings", "false", "tie_word_embeddings must be true or false"),
        ("attention_bias", 1, "attention_bias must be true or false, found 1"),
        ("eos_token_id", True, "eos_token_id must be a token id or a list of them, found True"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps must be a number"),
        ("max_position_embeddings", "512", "max_position_embeddings must be a whole number"),
        ("layer_types", 2, "layer_types must be a list of names, found 2"),
        ("layer_types", ["full_attention"], "layer_types has 1 entries for 2 layers"),
        ("layer_types", ["sliding_attention"] * 2, "sliding_window must be a whole number"),
        ("eos_token_id", 1.5, "eos_token_id must be a token id or a list of them, found 1.5"),
    ],
)
def test_impossible_values_are_named(field, value, sentence):
    with pytest.raises(CheckpointError) as error:
        LlamaConfig.from_dict({**FIX_A, field: value}, "there/config.json")
    assert sentence in str(error.value)
    assert str(error.value).startswith("there/config.json: ")


def test_several_impossible_values_are_named_together():
    with pytest.raises(CheckpointError) as error:
        LlamaConfig.from_dict({"model_type": "llama"})
    named = [sentence.split()[0] for sentence in str(error.value).split(": ", 1)[1].split("; ")]
    sizes = ["hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"]
    assert sorted(named) == sorted([*sizes, "vocab_size", "rms_norm_eps"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
FIELDS = [
    *FIX_A,
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "attention_bias",
    "eos_token_id",
    "hidden_act",
]


@settings(max_examples=300, deadline=None)
@given(field=st.sampled_from(FIELDS), value=JSON)
def test_any_value_in_any_field_is_taken_or_refused(field, value):
    try:
        config = LlamaConfig.from_dict({**FIX_A, field: value})
    except HuskyError as error:
        assert field in str(error) or (field == "num_attention_heads" and "heads" in str(error))
    else:
        assert len(config.layer_types) == config.num_hidden_layers
