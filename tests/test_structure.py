"""The tensors of a checkpoint against its config: each mismatch named, expected and found."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from fixtures import FIX_A, PROMPT, mlx_weights, numpy_weights, quantize_weights
from numpy_llama import logits

from husky_mlx.config import LlamaConfig
from husky_mlx.errors import CheckpointError
from husky_mlx.loading import build_model
from husky_mlx.structure import expected_shapes

Q_PROJ = "model.layers.1.self_attn.q_proj"


def refusal(config: dict, weights: dict[str, mx.array]) -> list[str]:
    """The sentences of the one error that building the model must raise."""
    with pytest.raises(CheckpointError) as error:
        build_model(config, weights, source="some/folder")
    prefix = "some/folder: the tensors do not fit the config: "
    assert str(error.value).startswith(prefix)
    return str(error.value).removeprefix(prefix).split("; ")


def logits_of(config: dict, weights: dict[str, mx.array]) -> np.ndarray:
    return np.array(build_model(config, weights)(mx.array([PROMPT[:8]]))[0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_expected_shapes_are_those_of_the_published_drawing(tied, bias):
    config = {
        **FIX_A,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "mlp_bias": bias,
        "head_dim": 32,
    }
    drawn = {name: value.shape for name, value in numpy_weights(config).items()}
    assert expected_shapes(LlamaConfig.from_dict(config)) == drawn


@pytest.mark.parametrize("packed", [False, True])
def test_tied_checkpoint_with_a_stored_head_C016(packed):
    tied = {**FIX_A, "tie_word_embeddings": True}
    weights = mlx_weights(FIX_A)
    if packed:
        parts = mx.quantize(weights.pop("lm_head.weight"), group_size=64, bits=4)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            weights[f"lm_head.{part}"] = array
    expected = logits(tied, numpy_weights(FIX_A), PROMPT[:8])
    np.testing.assert_allclose(logits_of(tied, weights), expected, atol=3e-5)


def test_untied_checkpoint_without_a_head_C017():
    weights = mlx_weights(FIX_A)
    del weights["lm_head.weight"]
    assert refusal(FIX_A, weights) == ["lm_head.weight is missing (tie_word_embeddings is false)"]


@pytest.mark.parametrize("prefix", ["model.layers.0.self_attn.", "model."])
def test_rotary_tables_are_ignored_C019(prefix):
    weights = mlx_weights(FIX_A) | {f"{prefix}rotary_emb.inv_freq": mx.full((8,), 7.0)}
    expected = logits(FIX_A, numpy_weights(FIX_A), PROMPT[:8])
    np.testing.assert_allclose(logits_of(FIX_A, weights), expected, atol=3e-5)


@pytest.mark.parametrize("stored, configured", [(100, 96), (96, 100)])
def test_vocabulary_that_differs_from_the_config_C024(stored, configured):
    weights = mlx_weights({**FIX_A, "vocab_size": stored})
    assert refusal({**FIX_A, "vocab_size": configured}, weights) == [
        f"{name} should have shape ({configured}, 64) (vocab_size), found ({stored}, 64)"
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    ]


@pytest.mark.parametrize("stored, configured", [(100, 96), (96, 100)])
def test_packed_vocabulary_that_differs_C024(stored, configured):
    weights = quantize_weights(mlx_weights({**FIX_A, "vocab_size": stored}))
    assert refusal({**FIX_A, "vocab_size": configured}, weights) == [
        f"{name}.{part} should have {configured} rows (vocab_size), found {stored}"
        for name in ("model.embed_tokens", "lm_head")
        for part in ("weight", "scales")
    ]


def test_missing_extra_and_misshapen_tensors_are_all_listed():
    weights = mlx_weights(FIX_A)
    del weights["model.norm.weight"]
    weights[f"{Q_PROJ}.weight"] = mx.zeros((64, 32))
    weights["model.layers.0.mlp.up_proj.weight"] = mx.zeros((128, 64), mx.int32)
    weights["model.layers.0.self_attn.q_norm.weight"] = mx.ones((16,))
    weights["visual.patch.weight"] = mx.ones((16,))
    assert sorted(refusal(FIX_A, weights)) == [
        "model.layers.0.mlp.up_proj.weight should be one of float16, bfloat16, float32, "
        "found int32",
        "model.layers.0.self_attn.q_norm.weight is not part of this model",
        f"{Q_PROJ}.weight should have shape (64, 64), found (64, 32)",
        "model.norm.weight is missing",
        "visual.patch.weight is not part of this model",
    ]


@pytest.mark.parametrize(
    "configured, stored, sentence",
    [
        (3, 2, "num_hidden_layers is 3, found tensors of 2 layers (0 to 1)"),
        (1, 2, "num_hidden_layers is 1, found tensors of 2 layers (0 to 1)"),
        (9999, 2, "num_hidden_layers is 9999, found tensors of 2 layers (0 to 1)"),
    ],
)
def test_number_of_layers_that_differs(configured, stored, sentence):
    weights = mlx_weights({**FIX_A, "num_hidden_layers": stored})
    assert refusal({**FIX_A, "num_hidden_layers": configured}, weights) == [sentence]


def test_biases_follow_the_config():
    biased = {**FIX_A, "attention_bias": True}
    missing = refusal(biased, mlx_weights(FIX_A))
    assert len(missing) == 8 and f"{Q_PROJ}.bias is missing" in missing
    extra = refusal(FIX_A, mlx_weights(biased))
    assert len(extra) == 8 and f"{Q_PROJ}.bias is not part of this model" in extra


def packed_with(**parts: mx.array | None) -> dict[str, mx.array]:
    """4-bit FIX-A, with parts of one matrix replaced or (None) removed."""
    weights = quantize_weights(mlx_weights(FIX_A))
    for part, value in parts.items():
        weights[f"{Q_PROJ}.{part}"] = value
    return {name: value for name, value in weights.items() if value is not None}


@pytest.mark.parametrize(
    "parts, sentence",
    [
        ({"biases": None}, "biases is missing"),
        ({"biases": mx.zeros((64, 2))}, "biases should be float32 (64, 1) as the scales"),
        ({"biases": mx.zeros((64, 1), mx.float16)}, "found float16 (64, 1)"),
        ({"scales": mx.ones((64, 1), mx.int32)}, "scales should be floats or uint8, found int32"),
        ({"scales": mx.ones((63, 1))}, "scales should have 64 rows, found 63"),
        ({"scales": mx.ones((64, 3))}, "8 words and 3 scales a row for 64 values: supported are"),
        ({"scales": mx.ones((64, 4))}, "supported are (2, 3, 4, 5, 6, 8) bits in groups of"),
        ({"scales": mx.ones((64, 0))}, "8 words and 0 scales a row"),
        ({"scales": mx.ones((64,))}, "should be packed uint32 of 2 dimensions"),
        ({"weight": mx.zeros((64, 7), mx.uint32)}, "7 words and 1 scales a row for 64 values"),
        ({"weight": mx.zeros((64, 8), mx.int32)}, "should be packed uint32"),
        ({"scales": mx.ones((64, 1), mx.uint8)}, "none of ['mxfp4', 'mxfp8', 'nvfp4']"),
        ({"scales": mx.ones((64, 2), mx.uint8)}, "biases is not part of a matrix with uint8"),
    ],
)
def test_packed_matrix_that_no_format_explains(parts, sentence):
    sentences = refusal(FIX_A, packed_with(**parts))
    assert all(each.startswith(Q_PROJ) for each in sentences)
    assert any(sentence in each for each in sentences), sentences


def test_scales_where_no_matrix_is():
    weights = mlx_weights(FIX_A) | {"model.norm.scales": mx.ones((1,))}
    assert refusal(FIX_A, weights) == ["model.norm.scales is not part of this model"]
    weights = mlx_weights(FIX_A) | {f"{Q_PROJ}.biases": mx.ones((64, 1))}
    assert refusal(FIX_A, weights) == [f"{Q_PROJ}.biases is not part of this model"]
