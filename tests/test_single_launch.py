"""Steps of one launch on a GPU against the same steps as several.

The kernels of both add up in one order here, but they are compiled apart: tokens are equal unless
two logits are as good as equal.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import speculative_generate_step

from husky_mlx import chips, device, shapes
from husky_mlx.bench_engine import shape_tokenizer
from husky_mlx.generation import stream_generate
from husky_mlx.loading import build_model
from husky_mlx.ops import attention_decode
from husky_mlx.policy import chained_tile, policy
from husky_mlx.selftest import SelfTest
from husky_mlx.turns import Turns

pytestmark = pytest.mark.skipif(device.target() != "cuda", reason="needs MLX's CUDA build")

# SmolLM2's widths, a few layers, and a vocabulary that takes part in no timing.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 6,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 8192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}

GROUP_SIZE = 64
# Of the largest logit: what bfloat16 tells apart, four times.
TIE = 4 * 2**-8


@pytest.fixture(autouse=True)
def one_launch(monkeypatch):
    """Whether it is faster here or not."""
    monkeypatch.setenv("HUSKY_SINGLE_LAUNCH", "1")
    monkeypatch.setattr(SelfTest, "_slower_in_one_launch", lambda self: None)


RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 8192, size).tolist() for size in (1, 3, 17, 40, 100, 250, 300, 700)]


class ChainedTiles(dict):
    """The tiles of one launch, for several, which have less memory: what is added up in which order
    is the same."""

    def get(self, key, default=None):
        tile = chained_tile(*key, GROUP_SIZE, chips.detect())
        return replace(tile, queue=0) if key[1].m == 1 else default


def own_attention(shape, chip):
    return policy("attention_decode", shape, 16, chip)


def model_of(bits: int, dtype: mx.Dtype, seed: int = 0, config=CONFIG):
    quantized = shapes.quantized(config, bits, GROUP_SIZE)
    model = build_model(quantized, shapes.random_weights(quantized, bits, GROUP_SIZE, dtype, seed))
    model._frozen.tiles = ChainedTiles()
    return model


def tokens_of(model, prompt, count):
    tokenizer = shape_tokenizer(CONFIG["vocab_size"])
    tokenizer.eos_token_ids = set()
    return [each.token for each in stream_generate(model, tokenizer, prompt, max_tokens=count)]


def several(monkeypatch):
    """From here on no thread has a turn."""
    monkeypatch.setattr(Turns, "take", lambda self: None)


def assert_right(model, prompt, tokens):
    """``tokens`` are those of several launches, but for ties: after each of them the next has a
    logit within rounding of the largest."""
    if tokens_of(model, prompt, len(tokens)) == tokens:
        return
    cache = model.make_cache()
    logits = [model(mx.array([prompt]), cache=cache)[:, -1]]
    for token in tokens[:-1]:
        logits.append(model(mx.array([[token]]), cache=cache)[:, -1])
    found = mx.concatenate(logits).astype(mx.float32)
    taken = mx.take_along_axis(found, mx.array(tokens)[:, None], axis=-1)[:, 0]
    missing = found.max(-1) - taken
    assert missing.max() <= TIE * mx.abs(found).max(), int(mx.argmax(missing).item())
    assert mx.mean(missing == 0) > 0.98


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(4, mx.bfloat16), (4, mx.float16), (8, mx.bfloat16), (16, mx.bfloat16), (16, mx.float16)],
    ids=str,
)
def test_the_tokens_of_2048_steps_are_those_of_several_launches(bits, dtype, monkeypatch):
    """Eight prompts, 256 tokens each; in five formats these are 10,240 steps."""
    monkeypatch.setattr(attention_decode, "chained_attention", own_attention)
    model = model_of(bits, dtype)
    taken = []
    with monkeypatch.context() as counted:
        real = Turns.take
        counted.setattr(Turns, "take", lambda self: taken.append(real(self)) or taken[-1])
        found = [tokens_of(model, prompt, 256) for prompt in PROMPTS]
        assert found == [tokens_of(model, prompt, 256) for prompt in PROMPTS]
    assert "in one launch" in str(model.plan)
    assert len(taken) >= 2 * 8 * 255 and all(turn is not None for turn in taken)
    several(monkeypatch)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert_right(model, prompt, tokens)


def test_with_its_own_tiles_the_logits_differ_by_rounding_only(monkeypatch):
    model = model_of(4, mx.float16)
    model._frozen.tiles = {}
    tokens = mx.array([PROMPTS[4]])

    def logits():
        cache = model.make_cache()
        model(tokens, cache=cache)
        return model(mx.array([[17]]), cache=cache).astype(mx.float32)

    one = logits()
    several(monkeypatch)
    other = logits()
    assert mx.abs(one - other).max() <= 0.01 * mx.abs(other).max()


def test_a_draft_and_its_target_take_turns(monkeypatch):
    monkeypatch.setattr(attention_decode, "chained_attention", own_attention)
    target, draft = model_of(4, mx.float16), model_of(4, mx.float16, seed=1)
    steps = speculative_generate_step(
        mx.array(PROMPTS[3]), target, draft, num_draft_tokens=3, max_tokens=60
    )
    tokens = [int(token) for token, *_ in steps]
    several(monkeypatch)
    assert_right(target, PROMPTS[3], tokens)


def test_two_threads_generate_at_once(monkeypatch):
    monkeypatch.setattr(attention_decode, "chained_attention", own_attention)
    models = [model_of(4, mx.float16, seed) for seed in (0, 1)]
    for model in models:
        model.prepare()
    found: dict[int, list] = {0: [], 1: []}

    def generate(number):
        for prompt in PROMPTS[2:5]:
            found[number].append(tokens_of(models[number], prompt, 300))

    threads = [threading.Thread(target=generate, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    several(monkeypatch)
    for number, model in enumerate(models):
        for prompt, tokens in zip(PROMPTS[2:5], found[number], strict=True):
            assert_right(model, prompt, tokens)


def test_two_models_of_a_thread_are_evaluated_at_once():
    """Nothing but their turns orders the launches of a graph."""
    models = [model_of(4, mx.float16, seed) for seed in (0, 1)]
    caches = [model.make_cache() for model in models]
    for model, cache in zip(models, caches, strict=True):
        mx.eval(model(mx.array([PROMPTS[3]]), cache=cache))
    for token in range(50):
        step = mx.array([[token]])
        mx.eval([model(step, cache=cache) for model, cache in zip(models, caches, strict=True)])
