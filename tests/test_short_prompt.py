"""Prompts of a few tokens in one padded step, in the emulator, against mlx-lm."""

from __future__ import annotations

import mlx.core as mx
import pytest
from fixtures import FIX_A, QWEN3
from test_prefill import LONG, emulated, kernels_of, models, theirs, tokens  # noqa: F401

from husky_mlx import differences, graphs


@pytest.fixture
def short(emulated, monkeypatch):  # noqa: F811
    """Models take short prompts in steps of 8 and 16 rows."""
    emulated(8)
    monkeypatch.setattr(graphs, "short_prompts", lambda chip, itemsize: (8, 16))


@pytest.mark.parametrize("config", [FIX_A, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("length", [4, 5, 8, 9, 16, 17])
def test_tokens_and_path_at_every_border(short, length, config):
    model, stock = models(config)
    assert tokens(model, LONG[:length], 3) == theirs(stock, LONG[:length], 3)
    assert model.plan.counts["prefill"] == int(length > 4)
    assert model.plan.counts["reference"] == 0


def test_a_prompt_that_goes_on(short):
    """Where the padding ended the next piece writes over it."""
    model, stock = models({**FIX_A, "attention_bias": True, "num_key_value_heads": 1})
    cache = model.make_cache()
    first = tokens(model, LONG[:9], 1, cache)
    for layer in cache:
        layer.trim(1)  # the reply's token
    again = tokens(model, LONG[9:16], 6, cache)
    wanted = theirs(stock, LONG[:9], 1) + theirs(stock, LONG[:16], 6)
    assert first + again == wanted


def test_padding_needs_room_under_a_limit(short):
    """A prompt whose padding would pass the user's limit goes the long way."""
    model, stock = models()
    cache = model.make_cache()
    for layer in cache:
        layer.limit = 12
    assert tokens(model, LONG[:11], 1, cache) == theirs(stock, LONG[:11], 1)
    assert cache[0].capacity() == 12


def test_a_wrong_step_is_off_with_a_warning(short, monkeypatch):
    class Wrong(differences.ShortPrompt):
        def greedy(self, tokens, caches):
            token, logits = super().greedy(tokens, caches)
            return token, mx.roll(logits, 1)

    monkeypatch.setattr(differences, "ShortPrompt", Wrong)
    with pytest.warns(UserWarning, match="short prompts are off"):
        model, stock = models()
        assert tokens(model, LONG[:7], 3) == theirs(stock, LONG[:7], 3)
    assert "decode kernels" not in model.plan.prefill
