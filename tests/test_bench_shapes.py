"""Random weights in the dimensions of known models."""

import hashlib
import math
import os
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from bench_fakes import ROOT, TINY, numpy_values
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen2, qwen3

from husky_mlx import bench_engine, shapes
from husky_mlx.errors import HuskyError

# Totals published with the checkpoints' safetensors.
PUBLISHED_PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}


def stock_model(config):
    family = {"qwen2": qwen2, "qwen3": qwen3}.get(config["model_type"], llama)
    return family.Model(family.ModelArgs.from_dict(config))


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shapes_are_mlx_lms_and_counts_the_published_ones(name):
    config = shapes.shape_config(name)
    ours = shapes.parameter_shapes(config)
    assert sum(map(math.prod, ours.values())) == PUBLISHED_PARAMETERS[name]
    held = mx.get_active_memory()
    stock = dict(tree_flatten(stock_model(config).parameters()))
    assert {key: value.shape for key, value in stock.items()} == ours
    assert mx.get_active_memory() - held < 1e6


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_load_strictly_into_mlx_lm(bits, tied):
    config = TINY | {"tie_word_embeddings": tied}
    weights = shapes.random_weights(config, bits, 32, mx.float16, 0)
    model = stock_model(config)
    if bits < 16:
        nn.quantize(model, group_size=32, bits=bits)
    model.load_weights(list(weights.items()), strict=True)
    dtypes = {array.dtype for array in weights.values()}
    assert dtypes == ({mx.uint32, mx.float16} if bits < 16 else {mx.float16})


@pytest.mark.parametrize("bits", [4, 8])
def test_random_weights_have_mean_0_and_variance_1_over_inputs(bits):
    weights = shapes.random_weights(TINY | {"vocab_size": 8192}, bits, 32, mx.float32, 0)
    values = numpy_values(weights, "model.embed_tokens", bits)
    assert values.shape == (8192, 64)
    assert abs(values.mean()) < 1e-3
    assert values.var() * 64 == pytest.approx(1.0, rel=0.02)


def digest(seed):
    weights = shapes.random_weights(TINY, 4, 32, mx.float32, seed)
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + np.array(weights[name]).tobytes())
    return total.hexdigest()


def test_random_weights_depend_on_the_seed_alone_across_processes():
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_bench_shapes as s; print(s.digest(5))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest(5)
    assert digest(6) != digest(5)
    weights = shapes.random_weights(TINY, 4, 32, mx.float32, 5)
    layers = [np.array(weights[f"model.layers.{i}.mlp.up_proj.weight"]) for i in (0, 1)]
    assert not np.array_equal(*layers)


def test_logits_stay_finite_over_hundreds_of_tokens_in_float16():
    config = TINY | {"num_hidden_layers": 12}
    model = stock_model(config)
    model.load_weights(list(shapes.random_weights(config, 16, 32, mx.float16, 0).items()))
    tokens = mx.array(np.random.default_rng(0).integers(160, size=(1, 300)))
    logits = np.array(model(tokens).astype(mx.float32))
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10.0


def test_groups_that_do_not_fit_the_rows_are_refused():
    with pytest.raises(HuskyError, match="row of 576 weights is not a multiple of group_size 128"):
        shapes.random_weights(shapes.shape_config("smollm2-135m"), 4, 128, mx.float16, 0)


def test_the_tokenizer_of_a_shape_takes_any_id_and_never_ends_a_reply():
    tokenizer = bench_engine.shape_tokenizer(160)
    assert tokenizer.eos_token_ids == set()
    detokenizer = tokenizer.detokenizer
    for token in (0, 159):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert (detokenizer.tokens, detokenizer.last_segment) == ([0, 159], "")
