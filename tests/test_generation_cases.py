"""Public reports about generation, each under its id."""

from __future__ import annotations

import json
import threading

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import reference
from fixtures import (
    FIX_A,
    FIX_B,
    GREEDY,
    PROMPT,
    mlx_weights,
    model_of,
    numpy_weights,
    write_folder,
)
from mlx_lm.generate import BatchGenerator, batch_generate, generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from husky_mlx.generation import stream_generate
from husky_mlx.loading import build_model, load


@pytest.fixture
def tokens_of(plain_tokenizer):
    def run(model, prompt=PROMPT, count=12, **options):
        responses = stream_generate(model, plain_tokenizer, prompt, max_tokens=count, **options)
        return [response.token for response in responses]

    return run


@pytest.mark.parametrize("loop", [stream_generate, mlx_lm.stream_generate])
def test_max_tokens_0_is_an_error_and_1_is_one_response_C074(loop, ours, plain_tokenizer):
    with pytest.raises(ValueError, match="-1"):
        list(loop(ours, plain_tokenizer, PROMPT, max_tokens=0))
    (response,) = loop(ours, plain_tokenizer, PROMPT, max_tokens=1)
    assert (response.token, response.finish_reason) == (GREEDY[0], "length")
    assert list(generate_step(mx.array(PROMPT), ours, max_tokens=0)) == []


@pytest.mark.parametrize("loop", [stream_generate, mlx_lm.stream_generate])
def test_negative_max_tokens_run_until_a_stop_token_C074(
    loop, ours, stock, plain_tokenizer, monkeypatch
):
    steps = generate_step(mx.array(PROMPT), stock, max_tokens=400)
    expected = [token for token, _ in steps]
    # The greedy reply runs in a circle: a stop token that never comes, then one that does.
    responses = loop(ours, plain_tokenizer, PROMPT, max_tokens=-1)
    found = [next(responses).token for _ in range(400)]
    responses.close()
    assert found == expected
    monkeypatch.setattr(plain_tokenizer, "_eos_token_ids", {GREEDY[4]})
    stopped = list(loop(ours, plain_tokenizer, PROMPT, max_tokens=-1))
    assert (len(stopped), stopped[-1].finish_reason) == (5, "stop")


def test_an_empty_prompt_is_an_error_C075(ours, plain_tokenizer):
    for prompt in ([], mx.array([]), ""):
        with pytest.raises(ValueError, match="prompt is empty"):
            list(stream_generate(ours, plain_tokenizer, prompt, 3))
    assert ours.plan.counts["reference"] == 0


def test_an_empty_text_becomes_bos_where_the_tokenizer_adds_it_C075(tmp_path):
    folder = write_folder(tmp_path / "fix-b", FIX_B, tokenizer=True)
    prepend_bos(folder)
    model, tokenizer = load(str(folder))
    tokenizer.eos_token_ids = set()
    responses = list(stream_generate(model, tokenizer, "", 4))
    assert [response.prompt_tokens for response in responses] == [1] * 4
    found = [response.token for response in responses]
    assert found == reference.greedy(numpy_weights(FIX_B), FIX_B, [260], 4)


def prepend_bos(folder) -> None:
    """A post-processor that puts <|bos|> before every text."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    piece = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [260], "tokens": ["<|bos|>"]}},
    }
    file.write_text(json.dumps(tokenizer))


def test_one_token_prompt_C075(ours, stock, tokens_of):
    expected = [token for token, _ in generate_step(mx.array([5]), stock, max_tokens=6)]
    assert tokens_of(ours, [5], 6) == expected


@pytest.mark.parametrize(
    ("config_stop", "generation_config", "expected"),
    [
        ([261, 262], {"eos_token_id": 262}, {261, 262}),
        ([260, 262], {"eos_token_id": 262}, {261, 262}),
        (261, {"eos_token_id": [261, 262]}, {261, 262}),
        ([261, 262], None, {261, 262}),
        (None, {}, set()),
        (261, "{not json", {261}),
    ],
    ids=str,
)
def test_stop_tokens_of_both_config_files_C076(config_stop, generation_config, expected, tmp_path):
    """As in mlx-lm: generation_config.json in place of config.json, and the tokenizer's own."""
    folder = write_folder(tmp_path / "fix-b", FIX_B, tokenizer=True, eos_token_id=config_stop)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if config_stop is None:
        del settings["eos_token"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation_config is not None:
        text = generation_config
        text = text if isinstance(text, str) else json.dumps(text)
        (folder / "generation_config.json").write_text(text)
    _, stock_tokenizer = mlx_lm.load(str(folder))
    model, tokenizer = load(str(folder))
    assert set(tokenizer.eos_token_ids) == set(stock_tokenizer.eos_token_ids) == expected
    if not expected:
        last = list(stream_generate(model, tokenizer, PROMPT, 7))[-1]
        assert (last.generation_tokens, last.finish_reason) == (7, "length")


def test_the_stop_token_is_not_in_the_text_C076(ours, plain_tokenizer, monkeypatch):
    monkeypatch.setattr(plain_tokenizer, "_eos_token_ids", {GREEDY[3]})
    responses = list(stream_generate(ours, plain_tokenizer, PROMPT, 12))
    assert responses[-1].finish_reason == "stop" and responses[-1].token == GREEDY[3]
    text = "".join(response.text for response in responses)
    assert text == plain_tokenizer.decode(GREEDY[:3])


def in_a_thread(work):
    result = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.parametrize("run", [lambda work: work(), in_a_thread], ids=["main", "thread"])
def test_seeds_and_unseeded_runs_C077(run, ours, tokens_of):
    def sampled(seed=None):
        if seed is not None:
            mx.random.seed(seed)
        return tokens_of(ours, count=8, sampler=make_sampler(temp=1.0))

    first, again, other, more, even_more = run(
        lambda: [sampled(1), sampled(1), sampled(2), sampled(), sampled()]
    )
    assert first == again != other
    assert len({tuple(reply) for reply in (other, more, even_more)}) == 3
    assert ours.plan.counts["frozen"] == 5 * 9


@pytest.mark.parametrize(
    "options",
    [
        {"temp": 0.01, "top_k": 1, "top_p": 0.8},
        {"temp": 0.01, "top_p": 1e-6},
        {"temp": 0.01, "min_p": 1.0},
        {"temp": 0.001, "top_k": 95},
    ],
    ids=str,
)
def test_the_most_likely_token_survives_every_filter_C079(options, ours, tokens_of):
    assert tokens_of(ours, sampler=make_sampler(**options)) == GREEDY


@pytest.mark.parametrize("step_size", [8, 2048])
def test_processors_see_the_prompt_and_every_token_C080(step_size, ours, stock, tokens_of):
    def histories(model, run):
        seen = []

        def record(tokens, logits):
            seen.append(tokens.tolist())
            return logits

        run(model, [record])
        return seen

    def husky(model, processors):
        tokens_of(model, count=3, logits_processors=processors, prefill_step_size=step_size)

    def mlx(model, processors):
        steps = generate_step(
            mx.array(PROMPT),
            model,
            max_tokens=3,
            logits_processors=processors,
            prefill_step_size=step_size,
        )
        list(steps)

    found = histories(ours, husky)
    assert found == [PROMPT + GREEDY[:count] for count in range(len(found))]
    assert [len(history) for history in found[:3]] == [40, 41, 42]
    assert found[: len(histories(stock, mlx))] == histories(stock, mlx)


@pytest.mark.parametrize(("window", "penalised"), [(20, False), (128, True)])
def test_a_penalty_reaches_back_as_far_as_its_window_C080(window, penalised, ours, tokens_of):
    prompt = [GREEDY[0], *[t for t in PROMPT if t != GREEDY[0]][:24]]
    plain = ours(mx.array([prompt]))[0, -1]
    (first,) = stream_logprobs(
        ours, prompt, make_logits_processors(repetition_penalty=1.5, repetition_context_size=window)
    )
    expected = np.array(plain)
    recent = prompt[-window:]
    for token in set(recent):
        expected[token] *= 1.5 if expected[token] < 0 else 1 / 1.5
    expected -= np.log(np.exp(expected).sum())
    assert np.abs(np.array(first) - expected).max() < 1e-5
    assert (GREEDY[0] in recent) == penalised


def stream_logprobs(model, prompt, processors) -> list:
    steps = generate_step(mx.array(prompt), model, max_tokens=1, logits_processors=processors)
    return [logprobs for _, logprobs in steps]


def test_a_bias_bans_a_token_and_a_changed_one_takes_effect_C082(ours, tokens_of):
    first = tokens_of(ours, count=1)[0]
    second = tokens_of(ours, count=1, logits_processors=make_logits_processors({first: -100.0}))[0]
    assert second != first
    bias = {first: -100.0, second: -100.0}
    third = tokens_of(ours, count=1, logits_processors=make_logits_processors(bias))[0]
    assert third not in bias
    assert tokens_of(ours, count=1) == [first]
    ranked = np.argsort(-np.array(ours(mx.array([PROMPT]))[0, -1]))
    assert [first, second, third] == ranked[:3].tolist()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_numbers_that_overflow_are_reported_C083(dtype, tokens_of, stock):
    weights = {
        name: value * (1e6 if "down_proj" in name or "o_proj" in name else 1)
        for name, value in mlx_weights(FIX_A).items()
    }
    model = build_model(FIX_A, {name: value.astype(dtype) for name, value in weights.items()})
    if dtype == mx.float16:
        with pytest.warns(UserWarning, match=r"NaN.*float16.*bfloat16"):
            tokens_of(model, count=2)
        with pytest.warns(UserWarning, match="NaN"):
            tokens_of(model, count=2, sampler=make_sampler(temp=1.0))
        return
    widened = {name: value.astype(dtype).astype(mx.float32) for name, value in weights.items()}
    expected = reference.greedy(
        {name: np.array(value) for name, value in widened.items()}, FIX_A, PROMPT, 4
    )
    assert tokens_of(model, count=4) == expected


@pytest.mark.parametrize("step_size", [1, 7, 8, 38, 39, 40, 41, 64])
@pytest.mark.parametrize("greedy", [True, False])
def test_chunks_of_the_prompt_leave_the_reply_alone_C084(step_size, greedy, ours, tokens_of):
    calls = []
    options = {} if greedy else {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)}
    tokens = tokens_of(
        ours,
        prefill_step_size=step_size,
        prompt_progress_callback=lambda done, total: calls.append((done, total)),
        **options,
    )
    assert tokens == GREEDY
    starts = [*range(0, 39, step_size), 39, 40]
    assert calls == [(done, 40) for done in starts]


@pytest.mark.parametrize("prompt", [[5, 200, 7], [5, -1, 7], [96]])
def test_token_ids_outside_the_vocabulary_are_named_C087(prompt, ours, tokens_of):
    wrong = next(token for token in prompt if not 0 <= token < 96)
    with pytest.raises(ValueError, match=f"{wrong} is outside the vocabulary of 96"):
        tokens_of(ours, prompt)


def test_callbacks_may_read_values_C088(ours, tokens_of):
    seen = []

    def processor(tokens, logits):
        seen.append(tokens.tolist()[-1])
        return logits

    def sampler(logprobs):
        best = mx.argmax(logprobs, axis=-1)
        assert best.item() >= 0 and bool((logprobs <= 0).all())
        return best

    assert tokens_of(ours, logits_processors=[processor], sampler=sampler) == GREEDY
    assert seen[:12] == [PROMPT[-1], *GREEDY[:11]]
    assert ours.plan.counts["frozen"] == 13, "they run outside the compiled step"


def test_nothing_is_compiled_without_shapes_C090(monkeypatch, tokens_of):
    calls = []
    compile_function = mx.compile

    def spy(function, *arguments, **options):
        calls.append((arguments, options))
        return compile_function(function, *arguments, **options)

    monkeypatch.setattr(mx, "compile", spy)
    model = model_of()
    assert tokens_of(model) == GREEDY
    assert tokens_of(model, PROMPT[:3], 2) and calls
    assert not any(options.get("shapeless") or len(args) > 2 for args, options in calls)


def test_batch_limits_and_prompts_must_agree_C094(ours, stock, plain_tokenizer):
    prompts = [PROMPT[:3], PROMPT[:17], PROMPT]
    with pytest.raises(ValueError):
        batch_generate(ours, plain_tokenizer, prompts, max_tokens=[5, 5])
    with pytest.raises(ValueError):
        batch_generate(ours, plain_tokenizer, [PROMPT, []], max_tokens=5)
    limits = [1, 5, 10]
    reply = batch_generate(ours, plain_tokenizer, prompts, max_tokens=limits, return_token_ids=True)
    for prompt, limit, found in zip(prompts, limits, reply.token_ids, strict=True):
        steps = generate_step(mx.array(prompt), stock, max_tokens=limit)
        assert found == [token for token, _ in steps]


@pytest.mark.parametrize("lengths", [(12, 3), (1, 40)], ids=str)
def test_padding_is_not_attended_C095(lengths, ours, stock):
    generator = BatchGenerator(ours)
    uids = generator.insert([PROMPT[:length] for length in lengths], max_tokens=[1, 1])
    found = {}
    while responses := generator.next_generated():
        found |= {response.uid: response.logprobs for response in responses}
    generator.close()
    for uid, length in zip(uids, lengths, strict=True):
        logits = stock(mx.array([PROMPT[:length]]))[0, -1]
        expected = logits - mx.logsumexp(logits, keepdims=True)
        assert mx.abs(found[uid] - expected).max() <= 1e-4


def test_embeddings_in_place_of_ids_C096(ours, tokens_of):
    embeddings = ours.model.embed_tokens(mx.array(PROMPT))
    for prompt in ([], PROMPT):
        assert tokens_of(ours, prompt, input_embeddings=embeddings) == GREEDY
    steps = generate_step(mx.array([]), ours, max_tokens=12, input_embeddings=embeddings)
    assert [token for token, _ in steps] == GREEDY
    with pytest.raises(ValueError, match="39"):
        tokens_of(ours, PROMPT, input_embeddings=embeddings[:-1])


@pytest.mark.parametrize(
    "prompt, message",
    [
        (mx.array([[3, 4]]), r"token ids of shape \(L,\), found int32 \(1, 2\)"),
        (mx.array(3), r"found int32 \(\)"),
        (mx.array([3.0, 4.0]), "found float32"),
        (mx.array([True]), "found bool"),
        ([3.0, 4.0], "the prompt must be text or a list of token ids"),
        ([[3, 4]], "the prompt must be text or a list of token ids"),
        ([2**70], "the prompt must be text or a list of token ids"),
        (None, "the prompt must be text or a list of token ids"),
        (5, "the prompt must be text or a list of token ids"),
        ("a\udcff", "the prompt is not valid text: .* at position 1"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt, message, ours, plain_tokenizer):
    with pytest.raises(ValueError, match=message):
        next(stream_generate(ours, plain_tokenizer, prompt))


@pytest.mark.parametrize(
    "form", [tuple, np.array, lambda ids: [*np.array(ids)], lambda ids: np.array(ids, np.uint8)]
)
def test_token_ids_in_any_sequence_of_whole_numbers(form, ours, plain_tokenizer):
    replies = stream_generate(ours, plain_tokenizer, form(PROMPT), max_tokens=3)
    assert [reply.token for reply in replies] == GREEDY[:3]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_tokens": float("nan")}, "max_tokens must be a whole number"),
        ({"max_tokens": "3"}, "max_tokens must be a whole number"),
        ({"prefill_step_size": 0}, "prefill_step_size must be a whole number from 1 up, found 0"),
        ({"prefill_step_size": -1}, "prefill_step_size must be"),
        ({"prefill_step_size": 1.5}, "prefill_step_size must be"),
        ({"max_kv_size": -5}, "max_kv_size must be a whole number from 5 up, found -5"),
        ({"max_kv_size": 0}, "max_kv_size must be"),
        ({"max_kv_size": 100.5}, "max_kv_size must be"),
        ({"kv_bits": "4"}, "kv_bits must be one of .* found '4'"),
        ({"kv_bits": 4.0}, "kv_bits must be one of .* found 4.0"),
        ({"prompt_cache": 5}, "prompt_cache must be a list"),
        ({"prompt_cache": [None, None]}, "prompt_cache must be a list"),
    ],
)
def test_options_that_are_no_numbers_or_out_of_range_are_named(
    options, message, ours, plain_tokenizer
):
    with pytest.raises(ValueError, match=message):
        next(stream_generate(ours, plain_tokenizer, PROMPT, **options))


def test_no_max_tokens_is_no_limit_as_in_mlx_lm(ours, plain_tokenizer):
    replies = stream_generate(ours, plain_tokenizer, PROMPT, max_tokens=None)
    assert [next(replies).token for _ in GREEDY] == GREEDY
