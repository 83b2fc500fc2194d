"""Rotary embedding: every spelling of a config, its frequencies, and what is refused."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from fixtures import FIX_A, PROMPT, mlx_weights, numpy_weights
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE
from numpy_llama import inverse_frequencies, logits, stepwise_logits
from test_parity import stock_model

from husky_mlx.config import LlamaConfig
from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.loading import build_model
from husky_mlx.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def model_logits(**fields) -> np.ndarray:
    """Prefill of 8 tokens, then decode, of FIX-A with other fields."""
    model = build_model({**FIX_A, **fields}, mlx_weights(FIX_A))
    result = stepwise_logits(model, PROMPT[:16], prompt=8)
    assert model.plan.counts["frozen"] == 8
    return result


def reference(scaling=None, **fields) -> np.ndarray:
    return logits({**FIX_A, **fields}, numpy_weights(FIX_A), PROMPT[:16], scaling=scaling)


def rope_of(**fields) -> Rope:
    return LlamaConfig.from_dict({**FIX_A, **fields}).rope


@pytest.mark.parametrize(
    "dims, theta, scaling",
    [
        (128, 500000.0, {**LLAMA3, "original_max_position_embeddings": 8192}),  # Llama 3.1
        (64, 500000.0, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}),
        (16, 10000.0, LLAMA3),
        (96, 10000.0, {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5}),
    ],
)
def test_llama3_frequencies_equal_a_float64_computation_and_mlx_lm(dims, theta, scaling):
    table = rope_of(head_dim=dims, rope_theta=theta, rope_scaling=scaling).wavelength_table(dims)
    expected = 1 / np.array(inverse_frequencies(dims, theta, scaling))
    np.testing.assert_allclose(table, expected, rtol=1e-6)
    stock = Llama3RoPE(dims, base=theta, scaling_config=scaling)
    np.testing.assert_allclose(table, np.array(stock._freqs), rtol=1e-5)


def test_llama3_frequencies_by_hand():
    """head_dim 4, theta 10000: wavelengths 2 pi and 200 pi; with a context of 64 the first is below
    64 / 4 and is kept, the second is above 64 / 1 and is slowed 8 times."""
    table = rope_of(head_dim=4, rope_scaling=LLAMA3).wavelength_table(4)
    np.testing.assert_allclose(table, [1.0, 800.0], rtol=1e-6)


def test_scaling_under_rope_parameters_is_honoured_C002():
    parameters = {**LLAMA3, "rope_theta": 500000.0}
    expected = reference(LLAMA3, rope_theta=500000.0)
    assert np.abs(expected - reference()).max() > 0.01, "the scaling shows at these positions"
    new = model_logits(rope_parameters=parameters, rope_theta=None)
    np.testing.assert_allclose(new, expected, atol=2e-5)
    twin = model_logits(rope_scaling=LLAMA3, rope_theta=500000.0)
    np.testing.assert_array_equal(new, twin)


def test_rope_parameters_win_over_rope_scaling_C002():
    rope = rope_of(
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        rope_scaling={"type": "linear", "factor": 4.0},
        rope_theta=10000.0,
    )
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5000.0)


@pytest.mark.parametrize("factor", [4.0, 4])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_the_type_C003(key, factor):
    result = model_logits(rope_scaling={key: "linear", "factor": factor})
    expected = reference({"rope_type": "linear", "factor": 4.0})
    np.testing.assert_allclose(result, expected, atol=2e-5)


def test_null_type_beside_rope_type_and_default_constants_C003():
    scaling = {"type": None, "rope_type": "llama3", "factor": 8.0}
    assert rope_of(rope_scaling=scaling) == Rope(
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def test_default_type_is_no_scaling_C003():
    result = model_logits(rope_scaling={"rope_type": "default"})
    np.testing.assert_allclose(result, reference(), atol=2e-5)


@pytest.mark.parametrize(
    "scaling, parts",
    [
        ({"type": "linear"}, ["rope_scaling.factor", "missing"]),
        ({"factor": 2.0}, ["rope_scaling", "'factor'", "no rope_type"]),
        ({"rope_type": "ntk", "factor": 2.0}, ["rope_scaling.rope_type", "'ntk'", "supported"]),
        ("linear", ["rope_scaling", "object", "'linear'"]),
        ({"type": "linear", "factor": "x"}, ["rope_scaling.factor", "number above 0", "'x'"]),
        ({"type": "linear", "factor": -1}, ["rope_scaling.factor", "number above 0", "-1"]),
        ({**LLAMA3, "high_freq_factor": 1.0}, ["high_freq_factor", "above low_freq_factor"]),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (
            {"rope_type": "yarn", "factor": 2.0},
            ["original_max_position_embeddings is missing", "'yarn' needs it"],
        ),
        ({**YARN, "attention_factor": 1.2}, ["attention_factor is 1.2"]),
        ({**YARN, "truncate": False}, ["truncate is False", "supported is True"]),
        ({**YARN, "mscale": "x"}, ["mscale must be a number from 0 up", "'x'"]),
    ],
)
def test_incomplete_scaling_is_refused_by_field_C004(scaling, parts):
    with pytest.raises(ValueError) as error:
        LlamaConfig.from_dict({**FIX_A, "rope_scaling": scaling}, "here/config.json")
    for part in ["here/config.json", *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize("dims", [16, 80, 128])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 40.0, "beta_fast": 16, "beta_slow": 2},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"factor": 1.0},
        {"original_max_position_embeddings": 4096},
    ],
)
def test_yarn_is_mlx_lms(changes, dims):
    scaling = {**YARN, **changes}
    ours = rope_of(rope_scaling=scaling)
    options = {
        name: value for name, value in scaling.items() if name not in ("rope_type", "factor")
    }
    theirs = YarnRoPE(dims, base=10000.0, scaling_factor=scaling["factor"], **options)
    np.testing.assert_allclose(ours.wavelength_table(dims), np.array(theirs._freqs), rtol=2e-6)
    assert ours.magnitude == pytest.approx(theirs.mscale, rel=1e-12)


def test_yarn_by_hand():
    """dims 16, base 10,000, a context of 64: the wave that turns 32 times in it has number -0.99,
    the one that turns once 2.02. From 0 to 3 waves are slowed more and more, then by 4."""
    rope = rope_of(rope_scaling=YARN)
    plain = 10000.0 ** (-np.arange(8) / 8)
    slowed = np.array([0, 1 / 3, 2 / 3, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(rope.frequencies(16), plain * (1 - slowed + slowed / 4), rtol=1e-6)
    assert rope.magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_gives_mlx_lms_logits():
    config = {**FIX_A, "rope_scaling": YARN}
    expected = stock_model(config, mlx_weights(config))(mx.array([PROMPT[:16]]))[0]
    np.testing.assert_allclose(model_logits(rope_scaling=YARN), np.array(expected), atol=2e-5)


@pytest.mark.parametrize("theta", ["10000", [], 0, -1.0, True, float("nan")])
def test_theta_must_be_a_number(theta):
    with pytest.raises(CheckpointError, match="rope_theta must be a number above 0"):
        rope_of(rope_theta=theta)


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param({"type": "su", **LONG}, id="C008-su"),
        pytest.param({"rope_type": "longrope", **LONG}, id="C008-longrope"),
        pytest.param(
            {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
            id="C008-short-lists",
        ),
        pytest.param({"rope_type": "dynamic", "factor": 2.0}, id="C009-dynamic"),
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_other_rope_kinds_are_refused_by_name_C008_C009(field, scaling):
    fields = {field: scaling, "original_max_position_embeddings": 128}
    with pytest.raises(UnsupportedModel) as error:
        build_model({**FIX_A, **fields}, mlx_weights(FIX_A), source="here")
    kind = scaling.get("rope_type") or scaling["type"]
    (difference,) = error.value.differences
    assert difference.startswith(f"{field}.rope_type is {kind!r}, supported are")
    assert "here" in str(error.value)
