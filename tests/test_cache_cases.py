"""Public reports about KV caches, each under its id."""

from __future__ import annotations

import copy

import greedy_loops
import mlx.core as mx
import numpy as np
import psutil
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
from greedy_loops import mlx_lm_tokens
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock_cache
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from husky_mlx import cache as our_cache
from husky_mlx.config import LlamaConfig
from husky_mlx.errors import ContextLimitError
from husky_mlx.generation import stream_generate
from husky_mlx.loading import build_model, load
from husky_mlx.ops.rotate import rotation

LONG = {**FIX_A, "max_position_embeddings": 4096}
WIDE = {**FIX_A, "head_dim": 64}
LONG_PROMPT = np.random.default_rng(4).integers(3, 96, 2100).tolist()

husky_tokens = pytest.fixture(greedy_loops.husky_tokens)
tokens_of = pytest.fixture(params=greedy_loops.LOOPS)(greedy_loops.tokens_of)


def test_positions_advance_C046(tokens_of):
    model = model_of()
    tokens = tokens_of(model, PROMPT, 64)
    assert tokens == reference.check(numpy_weights(FIX_A), FIX_A, PROMPT, tokens)
    assert model.plan.counts["frozen"] == 65


def test_rows_are_written_one_after_another_C046():
    """The unit form: a compiled step that writes to a slot given as an array."""
    cache = our_cache.KVCache()
    cache.make_room(*[mx.zeros((1, 1, 4, 1))] * 2, used=0)
    write = mx.compile(lambda buffer, x, slot: mx.slice_update(buffer, x, slot, axes=(2,)))
    for number in (1.0, 2.0, 3.0):
        slot, _ = cache.begin_step()
        keys, values = cache.buffers()
        written = write(keys, mx.full((1, 1, 1, 1), number), mx.array([slot]))
        cache.replace(written, values)
        cache.end_step(cache.offset + 1)
    assert cache.keys[0, 0, :5, 0].tolist() == [1, 2, 3, 0, 0]


def test_2000_tokens_trace_once_a_capacity_and_hold_no_more_host_memory_C047():
    model = model_of()

    def capacities_of_a_reply():
        caches = model.make_cache()
        steps = generate_step(mx.array(PROMPT), model, max_tokens=2000, prompt_cache=caches)
        return {caches[0].capacity() for _ in steps}

    capacities = capacities_of_a_reply()
    assert max(capacities) >= 2040
    assert model.plan.counts["traces"] == len(capacities) < 30
    resident = psutil.Process().memory_info().rss
    assert capacities_of_a_reply() == capacities
    assert model.plan.counts["traces"] == len(capacities), "the second reply traces nothing"
    assert psutil.Process().memory_info().rss - resident < 5e6


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_padded_and_idle_rows_spread_no_nan_C050(dtype):
    weights = {name: value.astype(dtype) for name, value in mlx_weights(FIX_A).items()}
    model = build_model(FIX_A, weights)
    lengths = [40, 17, 1]
    padding = [*(40 - n for n in lengths), 40]
    rows = [[0] * pad + PROMPT[: 40 - pad] for pad in padding]
    caches = [our_cache.BatchKVCache(padding) for _ in model.layers]
    logits = model(mx.array(rows), cache=caches)
    assert not mx.isnan(logits).any(), "padding and the idle row included"
    singles = []
    for row, length in enumerate(lengths):
        single = make_prompt_cache(model)
        alone = model(mx.array([PROMPT[:length]]), cache=single)
        assert mx.abs(logits[row, -1] - alone[0, -1]).max() < 1e-4
        singles.append(single)
    frozen = model.plan.counts["frozen"]
    for token in (5, 6, 7):
        logits = model(mx.array([[token]] * 4), cache=caches)
        assert not mx.isnan(logits).any()
        for row, single in enumerate(singles):
            alone = model(mx.array([[token]]), cache=single)
            assert mx.abs(logits[row] - alone[0]).max() < 1e-4
    assert model.plan.counts["frozen"] == frozen + 3 * 4


def test_max_kv_size_bounds_the_cache_C051(husky_tokens):
    model = model_of()
    caches = model.make_cache(16)
    expected = husky_tokens(model, PROMPT, 100, prompt_cache=caches)
    assert expected == reference.check(
        numpy_weights(FIX_A), FIX_A, PROMPT, expected, reference.ring(16, 4, [39])
    )
    rows = sum(cache.keys.shape[2] for cache in caches)
    assert rows == 2 * 16
    assert sum(cache.nbytes for cache in caches) == rows * 2 * 2 * 16 * 4
    assert husky_tokens(model, PROMPT, 100, max_kv_size=16) == expected
    assert mlx_lm_tokens(model_of(max_kv_size=16), PROMPT, 100) == expected
    assert model.plan.counts["frozen"] == 2 * 101


def test_max_kv_size_of_load_reaches_mlx_lms_make_prompt_cache_C051(tmp_path):
    """mlx-lm's make_prompt_cache never hands its own max_kv_size to a model that makes caches."""
    folder = write_folder(tmp_path / "fix-b", FIX_B, tokenizer=True)
    model, _ = load(str(folder), max_kv_size=16)
    for cache in make_prompt_cache(model):
        assert type(cache) is our_cache.RotatingKVCache
        assert (cache.max_size, cache.keep) == (16, 4)


@pytest.mark.parametrize("options", [{"max_kv_size": 16}, {"prompt_cache": "rotating"}])
def test_kv_bits_with_a_window_is_refused_before_prefill_C052(options, husky_tokens):
    """mlx-lm raises NotImplementedError in the middle of the request."""
    model = model_of(config=WIDE)
    if "prompt_cache" in options:
        options = {"prompt_cache": model.make_cache(16)}
    with pytest.raises(ValueError, match=r"kv_bits .*max_kv_size"):
        husky_tokens(model, PROMPT, 5, kv_bits=8, quantized_kv_start=0, **options)
    assert model.plan.counts["reference"] == 0


@pytest.mark.parametrize("head_dim", [16, 80])
def test_kv_bits_without_a_group_that_divides_is_refused_by_size_C053(head_dim, husky_tokens):
    model = model_of(config={**FIX_A, "head_dim": head_dim})
    with pytest.raises(ValueError, match=f"head_dim {head_dim} .*kv_group_size 64"):
        husky_tokens(model, PROMPT, 5, kv_bits=8)
    assert model.plan.counts["reference"] == 0


@pytest.mark.parametrize("group_size", [32, 64])
def test_kv_bits_take_the_largest_group_that_divides_C053(group_size, husky_tokens):
    """mlx-lm fails at the default group 64 after the first chunk; group 32 works there."""
    config = {**FIX_A, "head_dim": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    quantized = {"kv_bits": 8, "quantized_kv_start": 0}
    expected = mlx_lm_tokens(model_of("mlx", config), PROMPT, 12, kv_group_size=32, **quantized)
    model = model_of(config=config)
    caches = model.make_cache()
    found = husky_tokens(
        model, PROMPT, 12, prompt_cache=caches, kv_group_size=group_size, **quantized
    )
    assert found == expected
    assert {(c.group_size, c.bits) for c in caches} == {(32, 8)}


def test_kv_bits_that_mlx_has_not_are_refused_C053(husky_tokens):
    with pytest.raises(ValueError, match=r"kv_bits must be one of .* found 7"):
        husky_tokens(model_of(config=WIDE), PROMPT, 5, kv_bits=7)


@pytest.mark.parametrize("start", [0, 39, 40, 41, 50, 5000])
def test_the_switch_to_a_quantized_cache_at_any_point_C054(start, tokens_of):
    model = model_of(config=WIDE)
    caches = model.make_cache()
    options = {"kv_bits": 8, "quantized_kv_start": start, "prompt_cache": caches}
    tokens = tokens_of(model, PROMPT, 30, **options)
    assert tokens == reference.check(numpy_weights(WIDE), WIDE, PROMPT, tokens)
    assert len(tokens) == 30
    kind = our_cache.KVCache if start == 5000 else stock_cache.QuantizedKVCache
    assert {type(cache) for cache in caches} == {kind}
    # The step runs until the switch, which follows the call that reaches the start.
    assert model.plan.counts["frozen"] == (31 if start == 5000 else max(start - 39, 0))


def test_the_float_copy_is_released_after_the_switch_C054():
    model = model_of(config=WIDE)
    caches = model.make_cache()
    mx.clear_cache()
    before = mx.get_active_memory()
    mlx_lm_tokens(model, LONG_PROMPT, 3, prompt_cache=caches, kv_bits=8, quantized_kv_start=2101)
    mx.clear_cache()
    float_rows = 2 * 2 * 2100 * 2 * 64 * 4
    assert mx.get_active_memory() - before < 0.5 * float_rows


def saved_by(model, file, quantized: bool) -> None:
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT[:-1]]), cache=caches)
    if quantized:
        caches = [cache.to_quantized(group_size=32, bits=8) for cache in caches]
    save_prompt_cache(str(file), caches, {"made": "here"})


@pytest.mark.parametrize("writer", ["husky", "mlx"])
@pytest.mark.parametrize("reader", ["husky", "mlx"])
@pytest.mark.parametrize("quantized", [False, True])
def test_saved_prompt_caches_serve_both_ways_C056(writer, reader, quantized, tmp_path):
    file = tmp_path / "prompt.safetensors"
    saved_by(model_of(writer, WIDE), file, quantized)
    caches, metadata = load_prompt_cache(str(file), return_metadata=True)
    name = "QuantizedKVCache" if quantized else "KVCache"
    assert [type(c) for c in caches] == [getattr(stock_cache, name)] * 2
    assert metadata == {"made": "here"} and caches[0].offset == 39
    model = model_of(reader, WIDE)
    expected = reference.greedy(numpy_weights(WIDE), WIDE, PROMPT, 12)
    assert mlx_lm_tokens(model, PROMPT[-1:], 12, prompt_cache=caches) == expected
    if reader == "husky":
        steps = 0 if quantized else 13
        assert model.plan.counts["frozen"] == steps


@pytest.mark.parametrize("moment", ["empty", "prompt", "full ring"])
def test_saved_rings_serve_both_ways_C056(moment, tmp_path):
    model = model_of(max_kv_size=16)
    fed = {"empty": 0, "prompt": 10, "full ring": 36}[moment]
    caches = make_prompt_cache(model)
    if fed:
        model(mx.array([PROMPT[:10]]), cache=caches)
    for token in PROMPT[10:fed]:
        model(mx.array([[token]]), cache=caches)
    file = str(tmp_path / "ring.safetensors")
    save_prompt_cache(file, caches)
    again = load_prompt_cache(file)
    assert [type(c) for c in again] == [stock_cache.RotatingKVCache] * 2
    theirs = copy.deepcopy(again)
    rest = PROMPT[fed:]
    expected = mlx_lm_tokens(model_of("mlx"), rest, 12, prompt_cache=theirs)
    assert mlx_lm_tokens(model_of(), rest, 12, prompt_cache=again) == expected
    assert mlx_lm_tokens(model, rest, 12, prompt_cache=caches) == expected


def filled_caches(config: dict, tokens: int = 10):
    model = model_of(config=config)
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT[:tokens]]), cache=caches)
    return caches


@pytest.mark.parametrize("prompt", [[5], PROMPT], ids=["one token", "a prompt"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "3 layers and the model has 2"),
        ({"num_hidden_layers": 1}, "1 layers and the model has 2"),
        ({"head_dim": 64}, "2 key/value heads of 64 and the model has 2 of 16"),
        ({"num_key_value_heads": 4}, "4 key/value heads of 16 and the model has 2 of 16"),
        ({"num_key_value_heads": 1}, "1 key/value heads of 16 and the model has 2 of 16"),
    ],
    ids=str,
)
def test_a_cache_of_another_model_is_refused_C057(changes, message, prompt, tokens_of):
    """mlx-lm drops the layers that are too many without a word."""
    with pytest.raises(ValueError, match=message):
        tokens_of(model_of(), prompt, 3, prompt_cache=filled_caches({**FIX_A, **changes}))


def test_a_ring_of_another_model_is_refused_C057(tokens_of):
    caches = model_of(config={**FIX_A, "head_dim": 64}).make_cache(16)
    model_of(config={**FIX_A, "head_dim": 64})(mx.array([PROMPT]), cache=caches)
    with pytest.raises(ValueError, match="2 key/value heads of 64"):
        tokens_of(model_of(), PROMPT, 3, prompt_cache=caches)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_quantized_cache_keeps_the_bits_of_its_file_C057(bits, tmp_path, tokens_of):
    file = tmp_path / "prompt.safetensors"
    saved_by(model_of(config=WIDE), file, quantized=True)
    caches = load_prompt_cache(str(file))
    options = {} if bits is None else {"kv_bits": bits, "quantized_kv_start": 0}
    found = tokens_of(model_of(config=WIDE), PROMPT[-1:], 12, prompt_cache=caches, **options)
    assert found == reference.greedy(numpy_weights(WIDE), WIDE, PROMPT, 12)
    assert {(c.bits, c.group_size) for c in caches} == {(8, 32)}


@pytest.mark.parametrize("calls", [(1, 280), (255, 2), (200, 100), (256, 1), (600,)], ids=str)
def test_growth_from_any_offset_C060(calls):
    model = model_of()
    caches = make_prompt_cache(model)
    fed = 0
    for length in calls:
        logits = model(mx.array([LONG_PROMPT[fed : fed + length]]), cache=caches)
        fed += length
    whole = model_of("mlx")(mx.array([LONG_PROMPT[:fed]]))
    assert mx.abs(logits[0, -1] - whole[0, -1]).max() <= 1e-4


def test_a_ring_serves_one_reply_after_another_C063(tokens_of):
    model = model_of()
    caches = model.make_cache(100)
    weights = numpy_weights(FIX_A)
    first = tokens_of(model, PROMPT, 100, prompt_cache=caches)
    visible = reference.ring(100, 4, [39])
    assert first == reference.check(weights, FIX_A, PROMPT, first, visible)
    second = tokens_of(model, PROMPT[:20], 100, prompt_cache=caches)
    history = [*PROMPT, *first, *PROMPT[:20]]
    visible = reference.ring(100, 4, [39, *[1] * 101, 19])
    assert second == reference.check(weights, FIX_A, history, second, visible)
    assert {cache.keys.shape[2] for cache in caches} == {100}


@pytest.mark.slow
def test_a_ring_after_a_prompt_longer_than_itself_C063(tokens_of):
    model = model_of(config=LONG)
    caches = model.make_cache(512)
    prompt = LONG_PROMPT[:2000]
    weights = numpy_weights(FIX_A)
    found = tokens_of(model, prompt, 50, prompt_cache=caches)
    assert {cache.keys.shape[2] for cache in caches} == {512}
    assert found == reference.check(weights, LONG, prompt, found, reference.ring(512, 4, [1999]))


def test_a_prompt_that_is_cached_whole_feeds_its_last_token_again_C064(husky_tokens):
    model = model_of()
    caches = model.make_cache()
    assert husky_tokens(model, PROMPT, 12, prompt_cache=caches) == GREEDY
    trim_prompt_cache(caches, caches[0].offset - len(PROMPT))
    with pytest.raises(ValueError, match="prompt is empty"):
        husky_tokens(model, [], 12, prompt_cache=caches)
    trim_prompt_cache(caches, 1)
    assert husky_tokens(model, PROMPT[-1:], 12, prompt_cache=caches) == GREEDY


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "boundary",
    [64, 256, 320, 512, pytest.param(1024, marks=slow), pytest.param(2048, marks=slow)],
)
def test_prompts_around_every_boundary_C069(boundary, tokens_of):
    model, stock = model_of(config=LONG), model_of("mlx", LONG)
    for length in range(boundary - 1, boundary + 3):
        prompt = LONG_PROMPT[:length]
        tokens = tokens_of(model, prompt, 3)
        whole = stock(mx.array([prompt + tokens]))[0, length - 1 : -1]
        assert tokens == mx.argmax(whole, axis=-1).tolist()
    assert tokens_of(model, PROMPT, 12) == GREEDY


def test_a_short_prompt_after_a_refused_one_C069(husky_tokens):
    model = model_of(max_context=60)
    with pytest.raises(ContextLimitError):
        husky_tokens(model, LONG_PROMPT[:100], 5)
    with pytest.raises(ContextLimitError):
        mlx_lm_tokens(model, LONG_PROMPT[:100], 5)
    assert husky_tokens(model, PROMPT, 12) == mlx_lm_tokens(model, PROMPT, 12) == GREEDY


def rotate_of(head_dim: int):
    return rotation(LlamaConfig.from_dict({**FIX_A, "head_dim": head_dim}).rope, head_dim)


def test_offsets_of_rows_do_not_grow_the_sequence_C071():
    rotate = rotate_of(16)
    x = mx.random.normal((2, 4, 1, 16), key=mx.random.key(0))
    y = rotate(x, offset=mx.array([3, 17]))
    assert y.shape == (2, 4, 1, 16)
    for row, offset in enumerate((3, 17)):
        assert mx.abs(y[row] - rotate(x[row : row + 1], offset=offset)[0]).max() < 1e-6
    model = model_of()
    singles = [filled_caches(FIX_A, n) for n in (3, 17)]
    batch = [type(a).merge([a, b]) for a, b in zip(*singles, strict=True)]
    logits = model(mx.array([[9], [9]]), cache=batch)
    assert logits.shape == (2, 1, 96) and batch[0].offset.tolist() == [4, 18]
    for row, single in enumerate(singles):
        assert mx.abs(logits[row] - model(mx.array([[9]]), cache=single)[0]).max() < 1e-5


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_rows_stay_equal_C072(rows, head_dim):
    rotate = rotate_of(head_dim)
    x = mx.random.normal((1, 4, 1, head_dim), key=mx.random.key(0))
    single = rotate(x, offset=mx.array([5]))
    y = rotate(mx.repeat(x, rows, axis=0), offset=mx.array([5] * rows))
    assert all(mx.array_equal(y[row], single[0]) for row in range(rows))


def test_three_equal_rows_decode_as_one_C072():
    model = model_of()
    alone = filled_caches(FIX_A)
    batch = [type(c).merge([c, c, c]) for c in alone]
    for token in GREEDY:
        logits = model(mx.array([[token]] * 3), cache=batch)
        single = model(mx.array([[token]]), cache=alone)
        assert mx.abs(logits - single).max() < 1e-5
        assert mx.array_equal(logits[0], logits[1]) and mx.array_equal(logits[0], logits[2])


def test_a_full_context_rolls_or_stops_as_documented_C073(husky_tokens, plain_tokenizer):
    rolling = model_of()
    found = husky_tokens(rolling, PROMPT, 200, max_kv_size=64)
    visible = reference.ring(64, 4, [39])
    assert found == reference.check(numpy_weights(FIX_A), FIX_A, PROMPT, found, visible)
    with pytest.raises(ValueError, match="kv_bits"):
        husky_tokens(model_of(config=WIDE), PROMPT, 200, max_kv_size=64, kv_bits=8)
    for options in ({}, {"kv_bits": 8, "quantized_kv_start": 0}):
        stopping = model_of(config=WIDE, max_context=64)
        last = list(stream_generate(stopping, plain_tokenizer, PROMPT, 200, **options))[-1]
        assert (last.generation_tokens, last.finish_reason) == (24, "length")
