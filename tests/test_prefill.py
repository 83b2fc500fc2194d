"""Prompts through the kernels, in the emulator, against mlx-lm and the reference path."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import emulated_kernels
import mlx.core as mx
import pytest
from fixtures import FIX_A, PROMPT, QWEN2, QWEN3, mlx_weights, quantize_weights
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step, generation_stream
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from test_parity import YARN

from husky_mlx import graphs, prefill, products, verdicts
from husky_mlx.cache import RotatingKVCache
from husky_mlx.errors import ContextLimitError
from husky_mlx.greedy import greedy_tokens
from husky_mlx.loading import build_model

LONG = [(7 * i + 3) % 96 for i in range(45)]


kernels_of = pytest.fixture(emulated_kernels.kernels_of)
plant = pytest.fixture(emulated_kernels.plant)


@pytest.fixture
def emulated(kernels_of, monkeypatch, tmp_path):
    """``emulated(dequantize_from)``: models take the kernels of an M1; the file of verdicts."""
    path = tmp_path / "selftest.json"
    monkeypatch.setattr(verdicts, "path", lambda: path)

    def choose(dequantize_from=None):
        kernels_of()
        monkeypatch.setattr(graphs, "dequantize_from", lambda chip, rows, bits: dequantize_from)
        return path

    return choose


def models(config=FIX_A, bits=4):
    weights = mlx_weights(config)
    weights = quantize_weights(weights, bits, 32) if bits < 16 else weights
    return [build_model(config, dict(weights), backend=name) for name in ("husky", "mlx")]


def tokens(model, prompt, count, cache=None, **options):
    found = greedy_tokens(
        model,
        mx.array(prompt),
        count,
        stream=generation_stream,
        prompt_cache=model.make_cache() if cache is None else cache,
        **options,
    )
    return [token for token, _ in found]


def theirs(stock, prompt, count):
    return [int(t) for t, _ in generate_step(mx.array(prompt), stock, max_tokens=count)]


def difference(a, b):
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


@pytest.mark.parametrize("dequantize_from", [None, 1, 8])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"rope_traditional": True, "vocab_size": 101, "num_key_value_heads": 1},
        {"rope_scaling": YARN, "rope_traditional": True},
        QWEN2,
        {**QWEN3, "rope_scaling": YARN},
    ],
)
def test_logits_of_every_position(emulated, changes, dequantize_from):
    """Of a prompt, and of a piece that goes on; with the rows that both leave in the cache."""
    emulated(dequantize_from)
    model, stock = models({**FIX_A, **changes})
    cache = model.make_cache()
    found = [model(mx.array([piece]), cache=cache) for piece in (LONG[:20], LONG[20:])]
    wanted = stock(mx.array([LONG]))
    assert difference(mx.concatenate(found, axis=1), wanted) < 1e-4
    assert model.plan.counts == {
        "native": 0,
        "frozen": 0,
        "prefill": 2,
        "reference": 0,
        "traces": 0,
    }
    stock_cache = make_prompt_cache(stock)
    stock(mx.array([LONG]), cache=stock_cache)
    for ours, other in zip(cache, stock_cache, strict=True):
        for a, b in zip(ours.state[:2], other.state[:2], strict=True):
            assert difference(a, b[:, :, : len(LONG)]) < 1e-4


@pytest.mark.parametrize("step", [1, 2, 4, 5, 7, 8, 15, 16, 44, 45, 46, 2048])
def test_borders_of_chunks_change_no_token(emulated, step):
    emulated(8)
    model, stock = models()
    assert tokens(model, LONG, 4, prefill_step_size=step) == theirs(stock, LONG, 4)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_prompts_of_few_tokens_are_one_call(emulated, length):
    """Up to four take the decode step, which needs no cache that holds something."""
    emulated()
    model, stock = models(bits=8)
    assert tokens(model, LONG[:length], 3) == theirs(stock, LONG[:length], 3)
    # One step is under way when the last token is read.
    counts = {"frozen": 4 if length <= 4 else 3, "prefill": int(length > 4), "reference": 0}
    assert {name: model.plan.counts[name] for name in counts} == counts


def test_progress_is_told_as_it_is_made(emulated):
    emulated()
    model, _ = models()
    told = []
    options = {"prefill_step_size": 20, "prompt_progress_callback": lambda *done: told.append(done)}
    tokens(model, LONG, 1, **options)
    assert told == [(0, 45), (20, 45), (40, 45), (45, 45)]


def test_a_prompt_goes_on_behind_a_reply_and_a_trim(emulated):
    emulated()
    model, stock = models()
    cache = model.make_cache()
    first = tokens(model, LONG[:9], 6, cache)
    assert tokens(model, LONG[9:20], 3, cache) == theirs(stock, LONG[:9] + first + LONG[9:20], 3)
    kept = [c.state for c in cache]
    for c in cache:
        c.trim(8)
    again = LONG[:9] + first + LONG[9:15]
    assert tokens(model, LONG[20:30], 3, cache) == theirs(stock, again + LONG[20:30], 3)
    # Who saw the rows that were trimmed still sees them.
    fresh = model.make_cache()
    model(mx.array([LONG[:9] + first + LONG[9:20]]), cache=fresh)
    assert difference(kept[1][0][:, :, :26], fresh[1].state[0]) < 1e-4


def test_little_may_be_in_flight(emulated, monkeypatch):
    """Then one piece is, and the result is the same."""
    emulated(1)
    monkeypatch.setattr(prefill, "IN_FLIGHT", 1)
    monkeypatch.setattr(prefill, "LEAST_PIECE", 1)
    most, add = [], prefill._Waiting.add

    def counted(self, result, held):
        add(self, result, held)
        most.append(len(self._pieces))

    monkeypatch.setattr(prefill._Waiting, "add", counted)
    model, stock = models()
    assert tokens(model, LONG, 3) == theirs(stock, LONG, 3)
    assert max(most) == 1


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_norms_of_another_dtype_than_the_weights(emulated, dtype):
    """GGUF files have float32 norms beside float16 scales."""
    emulated(8)
    weights = quantize_weights(mlx_weights(FIX_A), 4, 32)
    weights = {
        name: value.astype(dtype if "norm" in name else mx.float32)
        if value.dtype != mx.uint32
        else value
        for name, value in weights.items()
    }
    model = build_model(FIX_A, dict(weights))
    stock = build_model(FIX_A, dict(weights), backend="mlx")
    found = model(mx.array([LONG]), cache=model.make_cache())
    assert difference(found, stock(mx.array([LONG]))) < 2e-3
    assert model.plan.counts["prefill"] == 1


def test_a_bias_of_another_dtype_takes_no_kernel(emulated):
    emulated()
    config = {**FIX_A, "attention_bias": True}
    weights = quantize_weights(mlx_weights(config), 4, 32)
    weights = {k: v.astype(mx.float16) if k.endswith(".bias") else v for k, v in weights.items()}
    model = build_model(config, dict(weights))
    stock = build_model(config, dict(weights), backend="mlx")
    assert tokens(model, LONG, 3) == theirs(stock, LONG, 3)
    assert "no kernel for a bias of mlx.core.float16" in str(model.plan)


def test_a_cache_of_two_sequences_is_not_one(emulated):
    emulated()
    model, _ = models()
    cache = model.make_cache()
    model(mx.array([LONG, LONG]), cache=cache)
    for piece in ([[5]], [LONG[:9]]):
        with pytest.raises(ValueError, match="holds 2 sequences, the call 1"):
            model(mx.array(piece), cache=cache)


def test_mlx_lms_own_loop(emulated):
    emulated(4)
    model, stock = models()
    assert theirs(model, LONG, 5) == theirs(stock, LONG, 5)
    assert model.plan.counts["prefill"] == 1 and model.plan.counts["reference"] == 0


@pytest.mark.parametrize("length", [6, 45])
def test_a_cache_that_one_thread_read_a_prompt_into_goes_on_in_another(emulated, length):
    emulated()
    ours, stock = models()
    cache = ours.make_cache()

    def read(prompt):
        mx.eval(ours(mx.array([prompt]), cache=cache))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(read, LONG[: length - 1]).result()
    assert ours.plan.counts["prefill"] > 0
    assert tokens(ours, LONG[length - 1 : length], 4, cache) == theirs(stock, LONG[:length], 4)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 45])
def test_a_single_sequence_in_a_batchs_cache(emulated, length):
    """As mlx-lm's server reads it: the prompt, the same in pieces, and what follows."""
    emulated(4)
    model, stock = models()
    for pieces in ([LONG[:length]], [LONG[:length], LONG[:7], LONG[:1]]):
        caches = [[BatchKVCache([0]) for _ in model.layers] for _ in range(2)]
        for piece in pieces:
            found, wanted = (
                m(mx.array([piece]), cache=cache)
                for m, cache in zip((model, stock), caches, strict=True)
            )
            assert difference(found, wanted) < 1e-4
        ours, theirs_ = caches[0][-1], caches[1][-1]
        assert ours.offset.tolist() == theirs_.offset.tolist() == [sum(map(len, pieces))]
        for a, b in zip(ours.keys_and_values(), theirs_.keys_and_values(), strict=True):
            assert difference(a, b) < 1e-4
    counts = model.plan.counts
    assert counts["prefill"] > 0 and counts["reference"] == 0


def test_mlx_lms_batch_loop_with_one_sequence(emulated):
    emulated(4)
    model, stock = models()
    made = []
    for m in (model, stock):
        loop = BatchGenerator(m)
        loop.insert([LONG], [6])
        made.append([])
        while responses := loop.next_generated():
            made[-1] += [response.token for response in responses]
        loop.close()
    assert made[0] == made[1] and len(made[0]) == 6
    assert model.plan.counts["prefill"] == 1 and model.plan.counts["reference"] == 0


def test_rings_and_batches_take_the_reference_path(emulated):
    emulated()
    model, stock = models()
    ring = model.make_cache(max_kv_size=64)
    assert type(ring[0]) is RotatingKVCache
    assert tokens(model, LONG, 3, ring) == theirs(stock, LONG, 3)
    model(mx.array([LONG, LONG]), cache=model.make_cache())
    assert model.plan.counts["prefill"] == 0 and model.plan.counts["reference"] > 0


def test_changed_weights_are_seen_by_the_next_prompt(emulated):
    emulated()
    model, _ = models(bits=16)
    before = tokens(model, LONG, 3)
    model.layers[0].mlp.down_proj.weight = -model.layers[0].mlp.down_proj.weight
    fresh = build_model(FIX_A, dict(tree_flatten(model.parameters())), backend="mlx")
    assert tokens(model, LONG, 3) == theirs(fresh, LONG, 3) != before


def test_a_fault_is_one_warning_and_prompts_take_the_reference_path(emulated, plant):
    path = emulated()
    plant("swiglu", "+ N / 4]", "]")
    with pytest.warns(UserWarning, match="kernels for prompts are off") as caught:
        model, stock = models()
    assert len(caught) == 1
    assert tokens(model, LONG, 4) == theirs(stock, LONG, 4)
    assert model.plan.counts["prefill"] == 0 and model.plan.counts["frozen"] > 0
    assert "prefill: plain MLX operations" in str(model.plan)
    assert [bool(problem) for problem in json.loads(path.read_text()).values()] == [False, True]


def test_the_limit_of_a_prompt_is_the_users(emulated):
    emulated()
    weights = quantize_weights(mlx_weights(FIX_A), 4, 32)
    model = build_model(FIX_A, weights, max_context=20)
    with pytest.raises(ContextLimitError, match="max_context=20"):
        model(mx.array([LONG]), cache=model.make_cache())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(mx.array([PROMPT[:20]]), cache=model.make_cache())


@pytest.fixture
def frozen(emulated, monkeypatch):
    """Pieces of up to 12 and of up to 24 rows are padded to these."""
    emulated(8)
    monkeypatch.setattr(graphs, "frozen_rows", lambda chip, itemsize: (12, 24))


@pytest.mark.parametrize("length", [5, 11, 12, 13, 24, 25])
def test_padded_pieces_change_no_token(frozen, length):
    """Of a first piece and of one that goes on, where the padding's rows are written over."""
    model, stock = models({**FIX_A, "attention_bias": True})
    cache = model.make_cache()
    found = tokens(model, LONG[:length], 1, cache)
    for layer in cache:
        layer.trim(1)  # the reply's token
    found += tokens(model, LONG[length:36], 3, cache)
    assert found == theirs(stock, LONG[:length], 1) + theirs(stock, LONG[:36], 3)
    assert cache[0].offset == 39


def test_logits_of_a_padded_piece(frozen):
    model, stock = models()
    found = model(mx.array([LONG[:17]]), cache=model.make_cache())
    assert found.shape == (1, 17, FIX_A["vocab_size"])
    assert difference(found, stock(mx.array([LONG[:17]]))) < 1e-4


def test_a_limit_leaves_no_room_for_padding(frozen):
    model, stock = models()
    cache = model.make_cache()
    for layer in cache:
        layer.limit = 10
    assert tokens(model, LONG[:9], 1, cache) == theirs(stock, LONG[:9], 1)
    assert cache[0].capacity() == 10


def test_a_wrong_way_between_two_layers_is_off_with_a_warning(emulated, monkeypatch):
    emulated(8)
    right = products.Products.between

    def wrong(self, i, x, attended):
        x, qkv = right(self, i, x, attended)
        return x, mx.roll(qkv, 1)

    monkeypatch.setattr(products.Products, "between", wrong)
    with pytest.warns(UserWarning, match="kernels for prompts are off"):
        model, stock = models()
        assert tokens(model, LONG, 3) == theirs(stock, LONG, 3)
    assert model.plan.counts["prefill"] == 0


def test_padding_does_not_grow_a_cache(frozen):
    """Where only the padding has no room a piece is taken as long as it is."""
    model, _ = models()
    cache = model.make_cache()
    tokens(model, LONG[:5], 1, cache)
    for layer in cache:
        layer.trim(layer.offset - 1)
    capacity = cache[0].capacity()
    rest = [(5 * i) % 96 for i in range(capacity - 11)]
    model(mx.array([rest]), cache=cache)
    model(mx.array([LONG[:9]]), cache=cache)  # 12 rows with padding, and one more than fits
    assert cache[0].capacity() == capacity


def test_replaced_weights_are_freed_without_a_collection(emulated, monkeypatch):
    emulated(8)
    monkeypatch.setattr(graphs, "short_prompts", lambda chip, itemsize: (8, 16))
    monkeypatch.setattr(graphs, "frozen_rows", lambda chip, itemsize: (24,))
    gc.collect()
    gc.disable()
    try:
        model, _ = models()
        prefill = weakref.ref(model.decode_step(mx.array([LONG]), model.make_cache()))
        assert prefill() is not None
        model._frozen.invalidate()
        assert prefill() is None
    finally:
        gc.enable()
