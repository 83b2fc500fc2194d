"""``generate`` and ``stream_generate`` against mlx-lm's own, run live on its own model class."""

from __future__ import annotations

import itertools
import re
import threading
import time
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from fixtures import FIX_A, GREEDY, PROMPT, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from husky_mlx import generation
from husky_mlx.errors import ContextLimitError
from husky_mlx.pack import pack

FIELDS = ("text", "token", "from_draft", "prompt_tokens", "generation_tokens", "finish_reason")
LONG_PROMPT = np.random.default_rng(4).integers(3, 96, 600).tolist()


def mlx_lm_tokens(model, prompt, count, **options) -> list[int]:
    return [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=count, **options)]


def seen(responses) -> list[tuple]:
    return [tuple(getattr(response, field) for field in FIELDS) for response in responses]


@pytest.mark.parametrize("length", [1, 2, 3, 40])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_responses_are_mlx_lms(length, count, ours, stock, plain_tokenizer):
    arguments = (plain_tokenizer, PROMPT[:length], count)
    found = list(generation.stream_generate(ours, *arguments))
    expected = list(mlx_lm.stream_generate(stock, *arguments))
    assert seen(found) == seen(expected)
    assert found[-1].finish_reason == "length" and len(found) == count
    for ours_one, theirs in zip(found, expected, strict=True):
        assert mx.abs(ours_one.logprobs - theirs.logprobs).max() < 1e-5
        assert ours_one.logprobs.shape == (96,)
        assert ours_one.prompt_tps > 0 and ours_one.generation_tps > 0
        assert ours_one.peak_memory > 0
    # The greedy loop of ours ran: a traced step with its argmax, not mlx-lm's logits step.
    assert all(type(response) is generation.GreedyResponse for response in found)
    assert ours.plan.counts["reference"] == 1, "what fills the empty cache"
    assert ours.plan.counts["frozen"] == count + (length > 1)


@pytest.mark.parametrize("count", [-1, 256])
@pytest.mark.parametrize("position", [0, 1, 4])
def test_a_stop_token_ends_the_reply(position, count, ours, stock, plain_tokenizer, monkeypatch):
    monkeypatch.setattr(plain_tokenizer, "_eos_token_ids", {GREEDY[position]})
    found = list(generation.stream_generate(ours, plain_tokenizer, PROMPT, count))
    expected = list(mlx_lm.stream_generate(stock, plain_tokenizer, PROMPT, count))
    assert seen(found) == seen(expected)
    assert (len(found), found[-1].finish_reason) == (position + 1, "stop")


@pytest.mark.parametrize("loop", [generation.stream_generate, mlx_lm.stream_generate])
def test_a_prompt_may_be_text_a_list_or_an_array(loop, ours, plain_tokenizer):
    text = "the inn and the hat"
    ids = plain_tokenizer.encode(text)
    model = model_of(config={**FIX_A, "vocab_size": 264})
    replies = [
        [r.token for r in loop(model, plain_tokenizer, prompt, 6)]
        for prompt in (text, ids, mx.array(ids), mx.array(ids, mx.uint32))
    ]
    assert replies == [replies[0]] * 4


def test_generate_returns_and_prints_what_mlx_lm_does(ours, stock, plain_tokenizer, capsys):
    expected = mlx_lm.generate(stock, plain_tokenizer, PROMPT, verbose=True, max_tokens=12)
    theirs = capsys.readouterr().out
    text = generation.generate(ours, plain_tokenizer, PROMPT, verbose=True, max_tokens=12)
    printed = capsys.readouterr().out
    assert text == expected
    without_figures = [re.sub(r"\d+\.\d+", "N", out) for out in (printed, theirs)]
    assert without_figures[0] == without_figures[1]
    assert "Prompt: 40 tokens, N tokens-per-sec" in without_figures[0]


@pytest.mark.parametrize("step_size", [1, 7, 38, 39, 40, 2048])
def test_progress_and_cache_are_mlx_lms_for_every_chunk_size(
    step_size, ours, stock, plain_tokenizer
):
    def run(stream_generate, model):
        calls: list[tuple[int, int]] = []
        caches = make_prompt_cache(model)
        responses = stream_generate(
            model,
            plain_tokenizer,
            PROMPT,
            5,
            prefill_step_size=step_size,
            prompt_progress_callback=lambda done, total: calls.append((done, total)),
            prompt_cache=caches,
        )
        tokens = [response.token for response in responses]
        return tokens, calls, [cache.offset for cache in caches]

    assert run(generation.stream_generate, ours) == run(mlx_lm.stream_generate, stock)


@pytest.mark.parametrize("taken", [1, 3])
def test_a_reader_who_leaves_early_finds_mlx_lms_cache(taken, ours, stock, plain_tokenizer):
    def offset_after(stream_generate, model):
        caches = make_prompt_cache(model)
        responses = stream_generate(model, plain_tokenizer, PROMPT, 12, prompt_cache=caches)
        tokens = [response.token for response in itertools.islice(responses, taken)]
        responses.close()
        return tokens, caches[0].offset, caches

    tokens, offset, caches = offset_after(generation.stream_generate, ours)
    assert (tokens, offset) == offset_after(mlx_lm.stream_generate, stock)[:2]
    assert offset == len(PROMPT) + taken
    rest = GREEDY[taken:-1]
    logits = ours(mx.array([rest]), cache=caches)
    assert mx.argmax(logits[0], axis=-1).tolist() == GREEDY[taken + 1 :]


def test_options_of_sampling_mean_nothing_to_a_greedy_reply(ours, plain_tokenizer):
    responses = generation.stream_generate(
        ours,
        plain_tokenizer,
        PROMPT,
        12,
        sampler=mlx_lm.sample_utils.greedy_sampler,
        logits_processors=[],
        kv_bits=None,
        quantized_kv_start=10,
        num_draft_tokens=3,
    )
    assert [response.token for response in responses] == GREEDY
    with pytest.raises(TypeError, match="no_such_option"):
        list(generation.stream_generate(ours, plain_tokenizer, PROMPT, 2, no_such_option=1))


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("temp", "sampler=make_sampler(temp=...)"),
        ("temperature", "sampler=make_sampler(temp=...)"),
        ("top_p", "sampler=make_sampler(top_p=...)"),
        ("repetition_penalty", "logits_processors=make_logits_processors(repetition_penalty=...)"),
        ("no_such_option", ""),
    ],
)
def test_an_option_that_no_loop_takes_is_named(option, advice, ours, plain_tokenizer):
    with pytest.raises(TypeError) as error:
        generation.generate(ours, plain_tokenizer, PROMPT, **{option: 0.5})
    assert f"no argument {option!r}" in str(error.value)
    assert str(error.value).endswith(f"it goes into {advice}" if advice else f"{option!r}")


def test_a_refused_request_prints_nothing(plain_tokenizer, capsys):
    model = model_of(max_context=4)
    with pytest.raises(ContextLimitError):
        generation.generate(model, plain_tokenizer, PROMPT, verbose=True)
    assert capsys.readouterr().out == ""


def test_a_stock_model_runs_in_mlx_lms_loop(stock, plain_tokenizer):
    responses = list(generation.stream_generate(stock, plain_tokenizer, PROMPT, 12))
    assert [response.token for response in responses] == GREEDY
    assert not any(isinstance(response, generation.GreedyResponse) for response in responses)


def test_husky_eager_turns_the_step_off(plain_tokenizer, monkeypatch):
    monkeypatch.setenv("HUSKY_EAGER", "1")
    model = model_of()
    responses = generation.stream_generate(model, plain_tokenizer, PROMPT, 12)
    assert [response.token for response in responses] == GREEDY
    assert model.plan.counts == {
        "native": 0,
        "frozen": 0,
        "prefill": 0,
        "reference": 14,
        "traces": 0,
    }
    assert "HUSKY_EAGER" in str(model.plan)


def test_max_context_ends_a_reply_and_is_reached_exactly(plain_tokenizer):
    model = model_of(max_context=46)
    for count in (6, 7, 100, -1):
        caches = model.make_cache()
        responses = list(
            generation.stream_generate(model, plain_tokenizer, PROMPT, count, prompt_cache=caches)
        )
        assert [response.token for response in responses] == GREEDY[:6]
        assert responses[-1].finish_reason == "length"
        assert caches[0].offset == caches[0].capacity() == 46
    with pytest.raises(ContextLimitError, match="46"):
        list(generation.stream_generate(model, plain_tokenizer, PROMPT + PROMPT[:6], 1))
    with pytest.raises(ContextLimitError, match="46"):
        list(generation.stream_generate(model, plain_tokenizer, [5], 1, prompt_cache=caches))
    longest = list(generation.stream_generate(model, plain_tokenizer, PROMPT + PROMPT[:5], 9))
    assert [r.finish_reason for r in longest] == ["length"]


def test_max_context_in_mlx_lms_loop_ends_in_an_error_not_in_a_wrong_token():
    """Its loop knows no limit of a model: what fits is right, the call after that raises."""
    model = model_of(max_context=46)
    assert mlx_lm_tokens(model, PROMPT, 6) == GREEDY[:6]
    tokens = []
    with pytest.raises(ContextLimitError, match="47 tokens do not fit max_context=46"):
        for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=9):
            tokens.append(token)
    assert tokens == GREEDY[: len(tokens)] and len(tokens) >= 5


turns = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 30, 61]),  # tokens of the prompt
        st.sampled_from([1, 2, 9, 30]),  # of the reply
        st.sampled_from([0, 1, 2, 13, 1000]),  # taken back afterwards
        st.sampled_from(["ours", "mlx-lm's", "cut off"]),  # loop
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(turns)
def test_turns_on_one_trimmed_cache_equal_mlx_lms(plain_tokenizer, stock, conversation):
    """Prompt-cache reuse: every turn goes on from what the last one left."""
    model = CONVERSATION_MODEL
    caches, stock_caches = make_prompt_cache(model), make_prompt_cache(stock)
    fed = 0
    for length, count, back, loop in conversation:
        prompt = LONG_PROMPT[fed : fed + length]
        fed += length
        expected = mlx_lm_tokens(stock, prompt, count, prompt_cache=stock_caches)
        if loop == "mlx-lm's":
            found = mlx_lm_tokens(model, prompt, count, prompt_cache=caches)
        else:
            asked = count if loop == "ours" else count + 7
            responses = generation.stream_generate(
                model, plain_tokenizer, prompt, asked, prompt_cache=caches
            )
            found = [response.token for response in itertools.islice(responses, count)]
            responses.close()
        assert found == expected
        assert caches[0].offset == stock_caches[0].offset
        taken = trim_prompt_cache(caches, back)
        assert taken == trim_prompt_cache(stock_caches, back)


CONVERSATION_MODEL = model_of()


def test_two_models_in_one_process_do_not_mix(plain_tokenizer, stock):
    models = [model_of(), model_of(config={**FIX_A, "num_hidden_layers": 3}, seed=3), model_of()]
    twins = [
        stock,
        model_of("mlx", {**FIX_A, "num_hidden_layers": 3}, seed=3),
        stock,
    ]
    prompts = [PROMPT, PROMPT[:17], PROMPT[5:]]
    expected = [
        mlx_lm_tokens(twin, prompt, 80) for twin, prompt in zip(twins, prompts, strict=True)
    ]
    loops = [
        generation.stream_generate(model, plain_tokenizer, prompt, 80)
        for model, prompt in zip(models, prompts, strict=True)
    ]
    loops += [generate_step(mx.array(PROMPT), models[0], max_tokens=80)]
    found: list[list[int]] = [[] for _ in loops]
    for _ in range(80):
        for loop, tokens in zip(loops, found, strict=True):
            step = next(loop)
            tokens.append(step[0] if isinstance(step, tuple) else step.token)
    assert found == [*expected, expected[0]]


def test_two_threads_decode_at_once(ours, stock, plain_tokenizer):
    """Each under its own default stream; one in our loop, one in mlx-lm's, a growth in each."""
    expected = {start: mlx_lm_tokens(stock, PROMPT[start:], 100) for start in (0, 9)}
    found: dict[int, list] = {0: [], 9: []}
    errors: list[BaseException] = []

    def work(start: int) -> None:
        try:
            mx.set_default_stream(mx.new_stream(mx.default_device()))
            for _ in range(4):
                responses = generation.stream_generate(ours, plain_tokenizer, PROMPT[start:], 100)
                found[start].append([response.token for response in responses])
                found[start].append(mlx_lm_tokens(ours, PROMPT[start:], 100))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for start, replies in found.items():
        assert replies == [expected[start]] * 8


def test_a_lazy_model_is_frozen_once_by_two_threads(stock, monkeypatch):
    """The first decode of both meets a model that was not prepared. Fused twice, its weights
    could be held twice."""
    calls = []

    def slow_pack(*arguments):
        calls.append(threading.get_ident())
        time.sleep(0.3)
        return pack(*arguments)

    monkeypatch.setattr("husky_mlx.frozen.pack", slow_pack)
    model = model_of(lazy=True)
    mx.eval(model.parameters())
    expected = mlx_lm_tokens(stock, PROMPT, 30)
    barrier = threading.Barrier(2)
    found: list[list[int]] = []

    def work() -> None:
        barrier.wait()
        found.append(mlx_lm_tokens(model, PROMPT, 30))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 2
    assert len(calls) == 1


def test_logprobs_may_be_read_later_and_from_another_thread(ours, stock, plain_tokenizer):
    expected = [
        response.logprobs for response in mlx_lm.stream_generate(stock, plain_tokenizer, PROMPT, 12)
    ]
    worker = SimpleNamespace(responses=[], error=None)

    def generate() -> None:
        worker.responses = list(generation.stream_generate(ours, plain_tokenizer, PROMPT, 12))

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
    for response, logprobs in zip(worker.responses, expected, strict=True):
        assert mx.abs(response.logprobs - logprobs).max() < 1e-5
        assert response.logprobs is response.logprobs, "computed once"

    main = list(generation.stream_generate(ours, plain_tokenizer, PROMPT, 12))
    differences: list[float] = []

    def read() -> None:
        for response, logprobs in zip(main, expected, strict=True):
            differences.append(mx.abs(response.logprobs - logprobs).max().item())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert len(differences) == 12 and max(differences) < 1e-5


def test_logprobs_do_not_change_when_the_cache_moves_on(ours, plain_tokenizer):
    caches = ours.make_cache()
    responses = list(
        generation.stream_generate(ours, plain_tokenizer, PROMPT, 4, prompt_cache=caches)
    )
    early = np.array(responses[0].logprobs)
    list(generation.stream_generate(ours, plain_tokenizer, PROMPT, 40, prompt_cache=caches))
    whole = ours(mx.array([PROMPT + GREEDY[:3]]))[0, 39:]
    whole = whole - mx.logsumexp(whole, axis=-1, keepdims=True)
    assert np.array_equal(np.array(responses[0].logprobs), early)
    for response, row in zip(responses, whole, strict=True):
        assert mx.abs(response.logprobs - row).max() < 1e-5
