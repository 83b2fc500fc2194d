"""Unmodified mlx-lm code on our model: the results are mlx-lm's, and which path ran is counted."""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.perplexity
import numpy as np
import pytest
from fixtures import FIX_A, GREEDY, PROMPT, mlx_weights, model_of
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models import cache as stock_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from husky_mlx import cache as our_cache
from husky_mlx.loading import build_model

# One frozen call for the last prompt token, one for each reply token (mlx-lm's loop is one ahead).
DECODE_CALLS = 1 + len(GREEDY)


def tokens_of(responses) -> list[int]:
    return [response.token for response in responses]


def test_generate(ours, stock, plain_tokenizer):
    arguments = {"prompt": PROMPT, "max_tokens": 12}
    expected = mlx_lm.generate(stock, plain_tokenizer, **arguments)
    assert mlx_lm.generate(ours, plain_tokenizer, **arguments) == expected
    assert ours.plan.counts == {
        "native": 0,
        "frozen": DECODE_CALLS,
        "prefill": 0,
        "reference": 1,
        "traces": 1,
    }


def test_stream_generate(ours, stock, plain_tokenizer):
    arguments = {"prompt": PROMPT, "max_tokens": 12}
    found = list(mlx_lm.stream_generate(ours, plain_tokenizer, **arguments))
    expected = list(mlx_lm.stream_generate(stock, plain_tokenizer, **arguments))
    assert tokens_of(found) == tokens_of(expected) == GREEDY
    for ours_one, theirs in zip(found, expected, strict=True):
        assert mx.abs(ours_one.logprobs - theirs.logprobs).max() < 1e-5
        assert (ours_one.text, ours_one.finish_reason) == (theirs.text, theirs.finish_reason)
    assert ours.plan.counts["frozen"] == DECODE_CALLS


def test_sampling_draws_mlx_lms_tokens(ours, stock, plain_tokenizer):
    def sampled(model):
        mx.random.seed(7)
        sampler = make_sampler(temp=0.7, top_p=0.9)
        return tokens_of(
            mlx_lm.stream_generate(model, plain_tokenizer, PROMPT, 12, sampler=sampler)
        )

    assert sampled(ours) == sampled(stock) != GREEDY
    assert ours.plan.counts["frozen"] == DECODE_CALLS


@pytest.mark.parametrize("lengths", [[40], [40, 17, 3], [1, 2, 40], [5, 40, 17, 3]], ids=str)
def test_batch_rows_equal_their_single_runs_on_the_frozen_step(
    lengths, ours, stock, plain_tokenizer
):
    prompts = [PROMPT[:length] for length in lengths]
    reply = batch_generate(
        ours, plain_tokenizer, prompts, max_tokens=12, return_token_ids=True, return_logprobs=True
    )
    counts = ours.plan.counts
    assert counts["frozen"] >= 12, "every decode call"
    assert counts["reference"] <= 2, "the prompts only"
    for prompt, found, logprobs in zip(prompts, reply.token_ids, reply.logprobs, strict=True):
        single = list(mlx_lm.stream_generate(stock, plain_tokenizer, prompt, max_tokens=12))
        assert found == tokens_of(single)
        expected = [r.logprobs[r.token].item() for r in single]
        assert np.allclose(logprobs, expected, atol=1e-4)


def test_batch_above_four_rows_runs_on_the_reference_path(ours, stock, plain_tokenizer):
    prompts = [PROMPT[: 5 + row] for row in range(5)]
    reply = batch_generate(ours, plain_tokenizer, prompts, max_tokens=4, return_token_ids=True)
    assert ours.plan.counts["frozen"] == 0
    for prompt, found in zip(prompts, reply.token_ids, strict=True):
        assert found == [t for t, _ in generate_step(mx.array(prompt), stock, max_tokens=4)]


def test_batch_changes_rows_while_it_runs(ours, stock, plain_tokenizer):
    """Rows that end early leave, waiting prompts join: filter, extend and extract on live rows."""
    prompts = [PROMPT[start : start + 9] for start in range(6)]
    limits = [3, 30, 8, 14, 1, 20]
    reply = batch_generate(
        ours,
        plain_tokenizer,
        prompts,
        max_tokens=limits,
        return_token_ids=True,
        return_prompt_caches=True,
        completion_batch_size=3,
        prefill_batch_size=2,
    )
    assert ours.plan.counts["frozen"] > 30
    for prompt, limit, found, caches in zip(
        prompts, limits, reply.token_ids, reply.caches, strict=True
    ):
        single = [t for t, _ in generate_step(mx.array(prompt), stock, max_tokens=limit + 5)]
        assert found == single[:limit]
        assert [type(c) for c in caches] == [our_cache.KVCache] * 2
        rest = generate_step(
            mx.array(single[limit : limit + 1]), ours, max_tokens=4, prompt_cache=caches
        )
        assert caches[0].offset == len(prompt) + limit
        assert [t for t, _ in rest] == single[limit + 1 :]


def test_make_prompt_cache_is_ours(ours):
    caches = make_prompt_cache(ours)
    assert [type(c) for c in caches] == [our_cache.KVCache] * 2
    assert all(c.empty() for c in caches)


def test_a_stock_prompt_cache_is_adopted_where_it_stands(ours):
    caches = [stock_cache.KVCache() for _ in ours.layers]
    held = list(caches)
    tokens = [
        t for t, _ in generate_step(mx.array(PROMPT), ours, max_tokens=12, prompt_cache=caches)
    ]
    assert tokens == GREEDY
    assert all(a is b for a, b in zip(caches, held, strict=True))
    assert held[0].offset == len(PROMPT) + 12
    assert ours.plan.counts["frozen"] == DECODE_CALLS


@pytest.mark.parametrize("role", ["target", "draft", "both"])
@pytest.mark.parametrize("agreement", ["twin", "other"])
def test_speculative_decoding(role, agreement, stock, plain_tokenizer):
    """A draft with the target's weights has all accepted, one with others is taken back often."""
    seed = 0 if agreement == "twin" else 3
    target = model_of() if role != "draft" else stock
    draft = model_of("mlx" if role == "target" else "husky", seed=seed)
    responses = list(
        mlx_lm.stream_generate(
            target, plain_tokenizer, PROMPT, 24, draft_model=draft, num_draft_tokens=3
        )
    )
    expected = [t for t, _ in generate_step(mx.array(PROMPT), stock, max_tokens=24)]
    assert tokens_of(responses) == expected
    drafted = sum(response.from_draft for response in responses)
    assert drafted >= 16 if agreement == "twin" else drafted < 12
    if role != "draft":
        assert target.plan.counts["frozen"] == 0, "the target checks several tokens a call"
        assert target.plan.counts["reference"] > 2
    if role != "target":
        assert draft.plan.counts["frozen"] > 6, "the draft decodes token by token"


def test_speculative_decoding_and_rejected_tokens_leave_the_cache_right(ours, plain_tokenizer):
    draft = model_of(seed=3)
    caches = [*make_prompt_cache(ours), *make_prompt_cache(draft)]
    responses = list(
        mlx_lm.stream_generate(
            ours, plain_tokenizer, PROMPT, 6, draft_model=draft, prompt_cache=caches
        )
    )
    assert tokens_of(responses) == GREEDY[:6]
    ours_only = caches[: len(ours.layers)]
    fed = ours_only[0].offset
    known = [*PROMPT, *GREEDY]
    rest = generate_step(mx.array(known[fed:46]), ours, max_tokens=6, prompt_cache=ours_only)
    assert [t for t, _ in rest] == GREEDY[6:]


def test_perplexity(ours, stock, capsys):
    data = mx.array(np.random.default_rng(2).integers(0, 96, (5, 33)))
    expected = mlx_lm.perplexity.eval_ppl(stock, data, batch_size=2)
    assert mlx_lm.perplexity.eval_ppl(ours, data, batch_size=2) == pytest.approx(expected, rel=1e-5)
    assert ours.plan.counts == {"native": 0, "frozen": 0, "prefill": 0, "reference": 3, "traces": 0}


def loss(model, batch: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="mean")


@pytest.mark.parametrize("training", [True, False])
def test_gradients(ours, stock, training):
    batch = mx.array([PROMPT[:20], PROMPT[20:]])
    ours.train(training)
    expected_loss, expected = nn.value_and_grad(stock, loss)(stock, batch)
    found_loss, found = nn.value_and_grad(ours, loss)(ours, batch)
    assert found_loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    expected = dict(tree_flatten(expected))
    found = dict(tree_flatten(found))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert mx.abs(gradient - expected[name]).max() < 1e-5, name
    ours.eval()
    tokens = [t for t, _ in generate_step(mx.array(PROMPT), ours, max_tokens=12)]
    assert tokens == GREEDY, "the traced parameters that nn.value_and_grad leaves behind are used"


def test_parameters_and_leaf_types_are_mlx_lms(ours, stock):
    def shapes(model):
        return {n: (value.shape, value.dtype) for n, value in tree_flatten(model.parameters())}

    def leaves(model):
        modules = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
        return {name: type(module) for name, module in modules if module.parameters()}

    assert shapes(ours) == shapes(stock)
    assert leaves(ours) == leaves(stock)
    assert len(leaves(ours)) == 2 * 9 + 3
    assert len(ours.layers) == 2 and ours.model_type == "llama"
    assert ours.args.num_key_value_heads == stock.args.num_key_value_heads


def test_saved_weights_are_the_ones_that_were_loaded(ours, tmp_path):
    """After fusing, the modules hold row views of shared buffers."""
    list(generate_step(mx.array(PROMPT), ours, max_tokens=2))
    file = str(Path(tmp_path) / "saved.safetensors")
    ours.save_weights(file)
    saved = mx.load(file)
    expected = mlx_weights(FIX_A)
    assert saved.keys() == expected.keys()
    assert all(mx.array_equal(saved[name], value) for name, value in expected.items())


def test_a_deep_copy_decodes_for_itself_and_counts_for_itself(ours):
    """mlx-lm's quantization tools copy whole models."""
    list(generate_step(mx.array(PROMPT), ours, max_tokens=3))
    before = ours.plan.counts
    duplicate = copy.deepcopy(ours)
    assert duplicate.plan.counts == {
        "native": 0,
        "frozen": 0,
        "prefill": 0,
        "reference": 0,
        "traces": 0,
    }
    duplicate.update(tree_map(lambda p: p * 0, duplicate.parameters()))
    tokens = [t for t, _ in generate_step(mx.array(PROMPT), duplicate, max_tokens=3)]
    assert tokens == [0, 0, 0]
    assert duplicate.plan.counts == {
        "native": 0,
        "frozen": 4,
        "prefill": 0,
        "reference": 1,
        "traces": 1,
    }
    assert ours.plan.counts == before
    assert [t for t, _ in generate_step(mx.array(PROMPT), ours, max_tokens=12)] == GREEDY


def test_quantizing_in_place_is_seen_by_the_next_token(ours, stock):
    stock = copy.deepcopy(stock)
    list(generate_step(mx.array(PROMPT), ours, max_tokens=2))
    for model in (ours, stock):
        nn.quantize(model, group_size=32, bits=4)
    expected = [t for t, _ in generate_step(mx.array(PROMPT), stock, max_tokens=12)]
    assert expected != GREEDY
    assert [t for t, _ in generate_step(mx.array(PROMPT), ours, max_tokens=12)] == expected
    assert ours.plan.counts["frozen"] == 3 + DECODE_CALLS


def test_set_dtype_is_seen_by_the_next_reply(ours):
    list(generate_step(mx.array(PROMPT), ours, max_tokens=2))
    ours.set_dtype(mx.bfloat16)
    rounded = {name: value.astype(mx.bfloat16) for name, value in mlx_weights(FIX_A).items()}
    fresh = build_model(FIX_A, rounded)
    expected = [(t, lp) for t, lp in generate_step(mx.array(PROMPT), fresh, max_tokens=4)]
    found = list(generate_step(mx.array(PROMPT), ours, max_tokens=4))
    for (token, logprobs), (expected_token, expected_logprobs) in zip(found, expected, strict=True):
        assert token == expected_token
        assert mx.abs(logprobs - expected_logprobs).max() < 1e-5
