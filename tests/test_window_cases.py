"""Attention windows against a band mask, in every kind of call."""

from __future__ import annotations

import greedy_loops
import pytest
import reference
from fixtures import FIX_A, GREEDY, PROMPT, model_of, numpy_weights
from greedy_loops import mlx_lm_tokens
from mlx_lm.generate import batch_generate
from mlx_lm.models import cache as stock_cache
from mlx_lm.models.cache import make_prompt_cache

from husky_mlx.generation import stream_generate

MISTRAL = {**FIX_A, "model_type": "mistral", "sliding_window": 4}

husky_tokens = pytest.fixture(greedy_loops.husky_tokens)
tokens_of = pytest.fixture(params=greedy_loops.LOOPS)(greedy_loops.tokens_of)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 40])
def test_mistrals_window_is_honoured_unlike_in_mlx_lm(length, tokens_of):
    """A Mistral config without layer_types: mlx-lm's llama class ignores its sliding_window."""
    prompt = PROMPT[:length]
    weights = numpy_weights(MISTRAL)
    expected = reference.greedy(weights, MISTRAL, prompt, 24, reference.band(4))
    model = model_of(config=MISTRAL)
    assert tokens_of(model, prompt, 24) == expected
    assert model.plan.counts["frozen"] >= 24
    if length == 40:
        stock = mlx_lm_tokens(model_of("mlx", MISTRAL), prompt, 24)
        assert stock == reference.greedy(weights, MISTRAL, prompt, 24) != expected


@pytest.mark.parametrize("step_size", [1, 2, 3, 5, 38, 39])
@pytest.mark.parametrize("window", [1, 4, 7])
def test_a_window_under_chunked_prefill(step_size, window, tokens_of):
    config = {**MISTRAL, "sliding_window": window}
    expected = reference.greedy(numpy_weights(config), config, PROMPT, 12, reference.band(window))
    model = model_of(config=config)
    assert tokens_of(model, PROMPT, 12, prefill_step_size=step_size) == expected


def test_a_window_over_caches_that_keep_everything():
    """A caller may bring mlx-lm's plain caches: the reference path then masks the window."""
    expected = reference.greedy(numpy_weights(MISTRAL), MISTRAL, PROMPT, 12, reference.band(4))
    for caches in (
        [stock_cache.KVCache() for _ in range(2)],
        [stock_cache.RotatingKVCache(max_size=30) for _ in range(2)],
    ):
        model = model_of(config=MISTRAL)
        assert mlx_lm_tokens(model, PROMPT, 12, prompt_cache=caches) == expected
        assert model.plan.counts["frozen"] == 0


def test_a_window_with_a_smaller_max_kv_size(husky_tokens):
    config = {**MISTRAL, "sliding_window": 20}
    expected = reference.greedy(
        numpy_weights(config), config, PROMPT, 24, reference.ring(9, 4, [39])
    )
    assert husky_tokens(model_of(config=config), PROMPT, 24, max_kv_size=9) == expected


def test_a_window_in_batches(plain_tokenizer):
    model = model_of(config=MISTRAL)
    prompts = [PROMPT[:3], PROMPT[:17], PROMPT]
    reply = batch_generate(model, plain_tokenizer, prompts, max_tokens=12, return_token_ids=True)
    for prompt, found in zip(prompts, reply.token_ids, strict=True):
        assert found == reference.greedy(
            numpy_weights(MISTRAL), MISTRAL, prompt, 12, reference.band(4)
        )
    assert model.plan.counts["frozen"] == 0, "mlx-lm's batched ring runs on the reference path"


def test_a_window_that_keeps_first_tokens_is_not_batched_unlike_in_mlx_lm(plain_tokenizer):
    """mlx-lm's batched ring forgets the first tokens; without ``merge`` its server decodes the
    requests one by one and its batch_generate refuses."""
    model = model_of(max_kv_size=16)
    assert not any(hasattr(cache, "merge") for cache in make_prompt_cache(model))
    with pytest.raises(ValueError, match="batching"):
        batch_generate(model, plain_tokenizer, [PROMPT], max_tokens=12)
    assert all(hasattr(cache, "merge") for cache in make_prompt_cache(model_of(config=MISTRAL)))


def test_some_layers_with_a_window(tokens_of):
    """Layers of both kinds against mlx-lm, whose class honours layer_types."""
    config = {
        **FIX_A,
        "num_hidden_layers": 4,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    model = model_of(config=config)
    assert tokens_of(model, PROMPT, 24) == mlx_lm_tokens(model_of("mlx", config), PROMPT, 24)
    assert model.plan.counts["frozen"] == 25


def test_speculation_past_a_window_is_refused_where_mlx_lm_answers_wrongly(plain_tokenizer):
    """A ring that has gone round cannot take a rejected token back; mlx-lm keeps it."""
    model, draft = model_of(config=MISTRAL), model_of(seed=3)
    with pytest.raises(ValueError, match="window of 4 tokens"):
        list(stream_generate(model, plain_tokenizer, PROMPT, 12, draft_model=draft))
    config = {**MISTRAL, "sliding_window": 60}
    responses = stream_generate(
        model_of(config=config), plain_tokenizer, PROMPT, 12, draft_model=draft
    )
    assert [response.token for response in responses] == GREEDY
