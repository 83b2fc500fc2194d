"""Bytes and operations by hand, by published totals and by models that are really built."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from husky_mlx import buffers, chips, footprint, shapes
from husky_mlx.cache import KVCache
from husky_mlx.config import LlamaConfig
from husky_mlx.loading import build_model
from husky_mlx.roofline import largest_context, needed, roof, working_set

TINY = shapes.llama_config(*(64, 3, 4, 2, 16, 96, 160), tied=True, context=512, rope_theta=10000.0)
MIB = 1 << 20


def of(raw, **options):
    return footprint.footprint(LlamaConfig.from_dict(raw), raw, **options)


def quantized(name, bits=4, group_size=64):
    raw = shapes.shape_config(name)
    return of({**raw, "quantization": {"bits": bits, "group_size": group_size}})


def test_16_bit_weights_are_two_bytes_a_published_parameter():
    found = of(shapes.shape_config("llama-3.1-8b"))
    assert found.weight_bytes() == 2 * 8_030_261_248
    # A decode step reads one row of the table and all of the head.
    assert found.read_bytes() == 2 * (8_030_261_248 - 128256 * 4096)
    assert found.words == "16 bit (16.00 bits a weight)"
    tied = of(shapes.shape_config("llama-3.2-1b"))
    assert tied.read_bytes() == tied.weight_bytes() == 2 * 1_235_814_400


def test_4_bit_groups_of_64_take_four_and_a_half_bits():
    found = quantized("llama-3.1-8b")
    norms = 65 * 4096
    assert found.weight_bytes() == (8_030_261_248 - norms) * 9 // 16 + 2 * norms
    assert found.parts()["norms"] == 2 * norms
    assert sum(found.parts().values()) == found.weight_bytes()
    assert list(found.parts()) == ["embedding", "attention", "MLP", "head", "norms"]


@pytest.mark.parametrize(
    ("quantization", "built"),
    [
        (None, (16, 32)),
        ({"bits": 4, "group_size": 32}, (4, 32)),
        ({"bits": 8, "group_size": 32}, (8, 32)),
    ],
)
def test_bytes_are_those_of_the_model_that_is_built(quantization, built):
    raw = {**TINY, "tie_word_embeddings": False, "attention_bias": True}
    weights = shapes.random_weights(raw, *built, mx.bfloat16, 0)
    if quantization:
        raw["quantization"] = quantization
    model = build_model(dict(raw), weights, backend="mlx")
    found: dict[str, int] = {}
    for name, value in tree_flatten(model.parameters()):
        path = name.rsplit(".", 1)[0]
        found[path] = found.get(path, 0) + value.nbytes
    assert dict(of(raw).tensors) == found


def test_exceptions_and_other_layouts():
    exceptions = {"lm_head": {"bits": 8, "group_size": 32}, "model.embed_tokens": False}
    raw = {**TINY, "tie_word_embeddings": False}
    found = of({**raw, "quantization": {"bits": 4, "group_size": 32, **exceptions}})
    assert found.tensors["lm_head"] == 160 * 64 * 9 // 8
    assert found.tensors["model.embed_tokens"] == 160 * 64 * 2
    assert found.tensors["model.layers.0.mlp.up_proj"] == 96 * 64 * 5 // 8
    found = of({**raw, "quantization": {"mode": "mxfp4", "bits": 4, "group_size": 32}})
    # One byte of scale for each 32 values.
    assert found.tensors["lm_head"] == 160 * 64 * (4 + 8 / 32) / 8
    assert of({**raw, "torch_dtype": "float32"}).tensors["lm_head"] == 160 * 64 * 4


def test_cache_bytes_by_hand():
    found = quantized("llama-3.1-8b")
    # Keys and values of 32 layers with 8 heads of 128, two bytes each.
    assert found.cache_bytes(1000) == 2 * 32 * 8 * 128 * 2 * 1000
    assert found.allocated_cache_bytes(1000) == found.cache_bytes(1024)
    # 8 bits and, for each 64 values, a scale and a bias of 16.
    assert found.quantized_cache_bytes(1000, 8) == found.cache_bytes(1000) * (8 + 0.5) / 16
    windows = {**TINY, "model_type": "mistral", "sliding_window": 64}
    assert of(windows).cache_bytes(1000) == of(TINY).cache_bytes(64)
    assert of(windows).quantized_cache_bytes(1000, 8) is None


@pytest.mark.parametrize("tokens", [1, 255, 256, 1000, 1024])
@pytest.mark.parametrize("kernel", [True, False])
def test_allocated_bytes_are_those_of_a_real_cache(monkeypatch, tokens, kernel):
    """As a GPU's kernels allocate it, and as the general forward does."""
    monkeypatch.setattr(buffers, "growth_step", lambda: 256)
    cache = KVCache()
    foretold = cache.capacity_for(tokens)
    if kernel:
        cache.allocate(tokens, 2, 16, mx.float16)
    else:
        cache.update_and_fetch(*(mx.zeros((1, 2, tokens, 16), mx.float16) for _ in range(2)))
    assert cache.capacity() == foretold
    assert of(TINY).allocated_cache_bytes(tokens) == TINY["num_hidden_layers"] * cache.nbytes
    assert tokens < cache.capacity() <= tokens + 256


def test_a_prompt_reads_the_head_once():
    raw = {**TINY, "tie_word_embeddings": False}
    once, twice = (of(raw).prompt_bytes(tokens) for tokens in (2048, 4096))
    block = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert twice - once == 2 * 3 * block + of(raw).cache_bytes(2048)


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_operations_by_counting(window, tokens):
    raw = {**TINY, "model_type": "mistral", "sliding_window": window}
    matrices = 3 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96)
    seen = sum(min(i, window or i) for i in range(1, tokens + 1))
    # A query meets each key once and each value once: 16 multiplications and additions a head.
    attention = 3 * 4 * seen * 2 * (16 + 16)
    expected = 2 * matrices * tokens + 2 * 160 * 64 + attention
    assert of(raw).prompt_operations(tokens) == expected


def test_roofs_by_hand():
    m1, _ = chips.parse("m1-8c", 16)
    found = quantized("llama-3.2-1b")
    answer = roof(found, m1, 512, 1024)
    moved = found.weight_bytes() + 2 * 16 * 8 * 64 * 2 * 1024
    assert answer.decode_bytes == moved
    assert answer.decode_tps == pytest.approx(68.3e9 / moved)
    assert answer.prompt_bound == "arithmetic"
    assert answer.prompt_seconds == pytest.approx(found.prompt_operations(512) / 2.6e12, rel=0.01)
    assert roof(found, m1, 1, 1).prompt_bound == "memory"
    unknown = roof(found, chips.parse("sm_86")[0], 512, 1024)
    assert (unknown.prompt_seconds, unknown.prompt_bound) == (None, "unknown")


@pytest.mark.parametrize(
    # As Macs logged it (sources beside the rule).
    ("memory", "mebibytes"),
    [(16, 10922.67), (32, 21845.34), (96, 73728.0)],
)
def test_working_set_is_the_one_that_macs_log(memory, mebibytes):
    chip = chips.parse("m2max")[0]
    assert working_set(chip, memory) / MIB == pytest.approx(mebibytes, abs=0.01)


def test_working_set_of_other_gpus_is_their_memory():
    assert working_set(chips.parse("sm_90")[0], 80) == 80e9


def test_largest_context_fits_and_one_more_does_not():
    found = quantized("llama-3.1-8b")
    budget = working_set(chips.parse("m1")[0], 16)
    most = largest_context(found, budget)
    assert needed(found, most) <= budget < needed(found, most + 1)
    assert largest_context(found, 1_000_000) == 0
    windows = {**TINY, "model_type": "mistral", "sliding_window": 64}
    assert largest_context(of(windows), 1 << 30) is None


def test_every_shape_fits_its_parts():
    for name in shapes.SHAPES:
        raw = shapes.shape_config(name)
        expected = sum(map(math.prod, shapes.parameter_shapes(raw).values())) * 2
        assert sum(of(raw).parts().values()) == expected
