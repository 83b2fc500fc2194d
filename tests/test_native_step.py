"""The native program behind the drop-in: mlx-lm's loops, caches and tools, against mlx-lm."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from fixtures import FIX_A, PROMPT, mlx_weights, quantize_weights
from mlx.utils import tree_flatten
from mlx_lm.generate import (
    batch_generate,
    generate_step,
    generation_stream,
    speculative_generate_step,
)
from mlx_lm.models.cache import (
    BatchKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tuner.lora import LoRALinear

from husky_mlx import cache, stream_generate
from husky_mlx.errors import ContextLimitError
from husky_mlx.greedy import greedy_tokens
from husky_mlx.loading import build_model
from husky_mlx.native import NativeError, Program

LONG = [(7 * i + 3) % 96 for i in range(60)]
WINDOW = {"model_type": "mistral", "sliding_window": 24}


@pytest.fixture
def native(monkeypatch):
    """``native(mode)``: models take their native program, with float activations unless told."""

    def choose(mode="exact"):
        monkeypatch.setenv("HUSKY_NATIVE", mode)

    choose()
    return choose


def models(config=FIX_A, bits=4, **options):
    weights = mlx_weights(config)
    weights = quantize_weights(weights, bits, 32) if bits < 16 else weights
    return [
        build_model(config, dict(weights), backend=name, **(options if name == "husky" else {}))
        for name in ("husky", "mlx")
    ]


def tokens(model, prompt, count, cache=None, **options):
    cache = model.make_cache() if cache is None else cache
    stream = {"stream": generation_stream, "prompt_cache": cache}
    found = greedy_tokens(model, mx.array(prompt), count, **stream, **options)
    return [token for token, _ in found]


def theirs(model, prompt, count, **options):
    found = generate_step(mx.array(prompt), model, max_tokens=count, **options)
    return [int(token) for token, _ in found]


def difference(a, b):
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


def only_native(model):
    counts = model.plan.counts
    return counts["native"] > 0 and not any(v for name, v in counts.items() if name != "native")


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("prompt", [PROMPT[:1], PROMPT, LONG])
def test_greedy_tokens_are_mlx_lms(native, bits, prompt):
    model, stock = models(bits=bits)
    wanted = theirs(stock, prompt, 40)
    assert tokens(model, prompt, 40) == wanted
    assert theirs(model, prompt, 40) == wanted
    assert only_native(model)
    assert "native program, " in str(model.plan) and "float activations" in str(model.plan)


@pytest.mark.parametrize("length", [2, 16, 17, 60])
def test_logits_of_every_position(native, length):
    """Eager for a few tokens, left to MLX's head for more."""
    model, stock = models()
    cache = model.make_cache()
    model(mx.array([LONG[:5]]), cache=cache)
    found = model(mx.array([LONG[5 : 5 + length]]), cache=cache)
    wanted = stock(mx.array([LONG[: 5 + length]]))[:, 5:]
    assert found.shape == wanted.shape and difference(found, wanted) < 1e-4
    assert only_native(model)


@pytest.mark.parametrize("step", [1, 7, 16, 59, 60, 2048])
def test_borders_of_chunks_change_no_token(native, step):
    model, stock = models()
    assert tokens(model, LONG, 4, prefill_step_size=step) == theirs(stock, LONG, 4)


def test_rows_of_a_batch_have_their_own_places(native, plain_tokenizer):
    """Prompts of unequal length, which mlx-lm pads on the left; and a batch wider than four."""
    model, stock = models({**FIX_A, "vocab_size": 264})
    prompts = [LONG[:n] for n in (3, 17, 9, 1, 30, 12)]
    found, wanted = (
        batch_generate(m, plain_tokenizer, prompts, max_tokens=12, verbose=False).texts
        for m in (model, stock)
    )
    assert found == wanted
    assert only_native(model)


def test_rings_of_a_bounded_cache_and_of_a_window(native):
    model, stock = models()
    rings = [RotatingKVCache(max_size=32, keep=4) for _ in stock.layers]
    wanted = theirs(stock, LONG, 40, prompt_cache=rings)
    assert tokens(model, LONG, 40, model.make_cache(max_kv_size=32)) == wanted
    assert model.plan.counts["native"] > 30
    model, stock = models(
        {**FIX_A, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    )
    assert tokens(model, LONG[:20], 30) == theirs(stock, LONG[:20], 30)
    assert model.plan.counts["native"] > 25


def test_prompt_caches_go_to_mlx_lm_and_come_back(native, tmp_path):
    model, stock = models()
    file = str(tmp_path / "cache.safetensors")
    cache = make_prompt_cache(model)
    model(mx.array([LONG[:30]]), cache=cache)
    save_prompt_cache(file, cache)
    wanted = theirs(stock, LONG[:40], 6)
    assert theirs(stock, LONG[30:40], 6, prompt_cache=load_prompt_cache(file)) == wanted
    stock_cache = make_prompt_cache(stock)
    stock(mx.array([LONG[:30]]), cache=stock_cache)
    save_prompt_cache(file, stock_cache)
    assert tokens(model, LONG[30:40], 6, load_prompt_cache(file)) == wanted


def test_copies_trims_and_states_keep_their_rows(native):
    """The program writes into the buffers: nobody who holds one may see that."""
    model, stock = models()
    cache = model.make_cache()
    model(mx.array([LONG[:20]]), cache=cache)
    state = cache[0].state
    other = copy.deepcopy(cache)
    for c in cache:
        c.trim(5)
    assert tokens(model, LONG[40:45], 5, cache) == theirs(stock, LONG[:15] + LONG[40:45], 5)
    assert tokens(model, LONG[20:25], 5, other) == theirs(stock, LONG[:25], 5)
    fresh = model.make_cache()
    model(mx.array([LONG[:20]]), cache=fresh)
    assert difference(state[0], fresh[0].state[0]) < 1e-6


def test_speculative_decoding_in_both_roles(native):
    model, stock = models()
    wanted = theirs(stock, LONG, 20)
    for target, draft in ((model, stock), (stock, model), (model, model)):
        found = speculative_generate_step(
            mx.array(LONG), target, draft, max_tokens=20, num_draft_tokens=3
        )
        assert [int(token) for token, *_ in found] == wanted


def test_sampling_draws_from_the_same_distribution(native):
    """mlx-lm's sampler on our logits: the same seed, the same tokens."""
    model, stock = models()
    found = []
    for m in (model, stock):
        mx.random.seed(3)
        found.append(theirs(m, LONG, 20, sampler=make_sampler(temp=0.7, top_p=0.9)))
    assert found[0] == found[1]


def test_integer_activations_are_close_and_the_default(native):
    native("1")
    model, stock = models()
    cache = model.make_cache()
    found = model(mx.array([LONG]), cache=cache)
    wanted = stock(mx.array([LONG]))
    assert 1e-7 < difference(found, wanted) < 1e-3
    assert "16-bit integer activations in groups of 32" in str(model.plan)


def test_changed_weights_and_adapters_are_seen(native):
    model, _ = models(bits=16)
    before = tokens(model, LONG, 4)
    model.layers[0].mlp.down_proj.weight = -model.layers[0].mlp.down_proj.weight
    other = build_model(FIX_A, dict(tree_flatten(model.parameters())), backend="mlx")
    assert tokens(model, LONG, 4) == theirs(other, LONG, 4) != before
    layer = model.layers[1].self_attn
    layer.q_proj = LoRALinear.from_base(layer.q_proj, r=2)
    calls = model.plan.counts["native"]
    assert tokens(model, LONG, 4) == theirs(other, LONG, 4)
    assert model.plan.counts["native"] == calls
    assert "no native program: " in str(model.plan) and "LoRALinear" in str(model.plan)


def test_training_and_tracing_take_the_reference_path(native):
    model, stock = models(bits=16)
    model.train()
    cache = model.make_cache()
    assert difference(model(mx.array([LONG]), cache=cache), stock(mx.array([LONG]))) < 1e-5
    model.eval()
    cache = model.make_cache()
    traced = mx.compile(lambda x: model(x, cache=cache))
    assert difference(traced(mx.array([LONG])), stock(mx.array([LONG]))) < 1e-5
    assert model.plan.counts["native"] == 0


def test_without_a_compiler_the_plan_says_how_to_get_one(native, monkeypatch):
    def none(*arguments, **options):
        raise NativeError(["no C++ compiler: pip install ziglang"])

    monkeypatch.setattr(Program, "of", none)
    model, stock = models()
    assert tokens(model, LONG, 3) == theirs(stock, LONG, 3)
    assert "no native program: no C++ compiler: pip install ziglang" in str(model.plan)
    assert model.plan.counts["frozen"] > 0


def test_it_can_be_switched_off(native, monkeypatch):
    for name, value in (("HUSKY_NATIVE", "0"), ("HUSKY_EAGER", "1")):
        native("exact")
        monkeypatch.setenv(name, value)
        model, _ = models()
        tokens(model, LONG, 2)
        assert model.plan.counts["native"] == 0 and "native" not in str(model.plan)


def test_the_users_limit_and_bad_tokens(native):
    model, _ = models(max_context=50)
    with pytest.raises(ContextLimitError, match="max_context=50"):
        model(mx.array([LONG]), cache=model.make_cache())
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model(mx.array([[96]]), cache=model.make_cache())


def test_a_reply_ends_at_the_limit(native, plain_tokenizer):
    model, _ = models({**FIX_A, "vocab_size": 264}, max_context=50)
    replies = list(stream_generate(model, plain_tokenizer, LONG[:40], max_tokens=100))
    assert len(replies) == 10 and replies[-1].finish_reason == "length"
    assert np.isfinite(np.array(replies[-1].logprobs)).all()


def test_rows_that_the_reference_path_wrote_are_seen(native):
    """It assigns items of the buffers: the same Python objects then have another memory."""
    model, stock = models()
    caches = [make_prompt_cache(m) for m in (model, stock)]
    held = []
    for start in range(0, 40, 8):
        piece, one = mx.array([LONG[start : start + 7]]), mx.array([LONG[start + 7 : start + 8]])
        held.append([cache.state for cache in caches[0]])
        embedded = model.model.embed_tokens(piece)
        model(piece, cache=caches[0], input_embeddings=embedded)
        stock(piece, cache=caches[1])
        found, wanted = (m(one, cache=c) for m, c in zip((model, stock), caches, strict=True))
        assert difference(found, wanted) < 1e-4
    assert model.plan.counts["native"] == 5 == model.plan.counts["reference"]


def test_caches_are_freed_with_their_last_reference(native):
    model, _ = models()
    model(mx.array([LONG]), cache=model.make_cache())
    before = mx.get_active_memory()
    for _ in range(3):
        cache = model.make_cache()
        cache[0].expect(50_000)
        model(mx.array([LONG]), cache=cache)
        size = cache[0].nbytes
        assert mx.get_active_memory() > before + 0.9 * size
        del cache
        assert mx.get_active_memory() < before + size / 10


def test_a_growing_cache_is_copied_layer_by_layer(native):
    model, _ = models({**FIX_A, "num_hidden_layers": 6})
    cache = model.make_cache()
    for layer in cache:
        layer.expect(20_000)
    model(mx.array([LONG]), cache=cache)
    outgrown = cache[0].nbytes
    for layer in cache:
        layer.offset = 20_000
    model(mx.array([[3]]), cache=cache)
    held = mx.get_active_memory()
    for layer in cache:
        layer.offset = layer.capacity()
    mx.reset_peak_memory()
    model(mx.array([[3]]), cache=cache)
    added = mx.get_active_memory() - held
    assert added > 0.5 * outgrown
    assert mx.get_peak_memory() - held < added + 2 * outgrown


def test_a_ring_wider_than_its_layers_window_is_left_to_mlx(native):
    """Its rows are in another order than their tokens, and more than the layer may see."""
    config = {**FIX_A, "model_type": "mistral", "sliding_window": 8}
    config["layer_types"] = ["sliding_attention", "full_attention"]
    model, stock = models(config)
    for wide, calls in ((16, 0), (8, 30)):
        before = model.plan.counts["native"]
        caches = [[RotatingKVCache(wide), RotatingKVCache(16)] for _ in range(2)]
        for token in LONG[:1] + LONG[:30]:
            found, wanted = (
                m(mx.array([[token]]), cache=cache)
                for m, cache in zip((model, stock), caches, strict=True)
            )
            assert difference(found, wanted) < 1e-4
        assert model.plan.counts["native"] - before == calls


@pytest.mark.parametrize("length", [1, 3, 5, 12, 20, 60])
def test_rows_of_a_batch_that_have_not_begun(native, length):
    """Calls that are padding for some rows, all of it or in part, and prompts that go on."""
    padding = [0, 4, 29]
    model, stock = models()
    caches = [[BatchKVCache(padding) for _ in model.layers] for _ in range(2)]
    rows = mx.array([[0] * skip + LONG[skip:] for skip in padding])
    for start in range(0, 60, length):
        found, wanted = (
            m(rows[:, start : start + length], cache=cache)
            for m, cache in zip((model, stock), caches, strict=True)
        )
        assert found.shape == wanted.shape
        for row, skip in enumerate(padding):
            begun = max(skip - start, 0)
            if begun < found.shape[1]:
                assert difference(found[row, begun:], wanted[row, begun:]) < 1e-4
    for ours, theirs_ in zip(*caches, strict=True):
        for a, b in zip(ours.keys_and_values(), theirs_.keys_and_values(), strict=True):
            for row, skip in enumerate(padding):
                assert difference(a[row, :, skip:], b[row, :, skip:]) < 1e-4
        assert ours.offset.tolist() == theirs_.offset.tolist() == [60, 56, 31]
    assert only_native(model)


def test_a_batchs_prompt_keeps_the_limit(native):
    model, _ = models()
    caches = [cache.BatchKVCache([0, 2]) for _ in model.layers]
    for each in caches:
        each.limit = 10
    prompt = mx.array([LONG[:8]] * 2)
    model(prompt, cache=caches)
    with pytest.raises(ContextLimitError):
        model(prompt, cache=caches)
    assert caches[0].offset.tolist() == [8, 6]


def test_calls_that_do_not_fit_are_refused_as_without_the_program(native):
    model, _ = models()
    cache = model.make_cache()
    for wrong in (2**32 + 5, -(2**32) + 5, 2**63 - 1):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            model(mx.array([[wrong]]), cache=cache)
    cache = model.make_cache()
    model(mx.array([LONG[:5], LONG[5:10]]), cache=cache)
    with pytest.raises(ValueError, match="holds 2 sequences, the call 1"):
        model(mx.array([LONG[:1]]), cache=cache)
    other, _ = models({**FIX_A, "num_key_value_heads": 1})
    cache = other.make_cache()
    other(mx.array([LONG[:5]]), cache=cache)
    with pytest.raises(ValueError, match="1 key/value heads of 16 and the model has 2 of 16"):
        model(mx.array([LONG[:1]]), cache=cache)
    with pytest.raises(ValueError):
        model(mx.zeros((1, 0), mx.int32), cache=model.make_cache())
    with pytest.raises(ValueError):
        model(mx.array([[1.0]]), cache=model.make_cache())


def test_a_traced_first_token_finds_its_cache_empty(native):
    model, stock = models()
    model(mx.array([LONG]), cache=model.make_cache())
    cache = model.make_cache()
    traced = mx.compile(lambda x: model(x, cache=cache))
    assert difference(traced(mx.array([LONG[:1]])), stock(mx.array([LONG[:1]]))) < 1e-5


@pytest.mark.parametrize("rows", [90, 120])
@pytest.mark.parametrize("bits", [4, 16])
def test_a_vocabulary_that_was_resized_takes_no_program(native, rows, bits):
    """Its sizes are constants of the program, which would read past the end of a smaller one."""
    ours, stock = models(bits=bits)
    weight = mx.random.normal((rows, 64), key=mx.random.key(0))
    parts = dict(zip(("weight", "scales", "biases"), mx.quantize(weight, 32, 4), strict=True))
    for model in (ours, stock):
        model.lm_head.update(parts if bits == 4 else {"weight": weight})
    right = stock(mx.array([LONG]))
    assert difference(ours(mx.array([LONG]), cache=ours.make_cache()), right) < 1e-5
    assert ours.plan.native is None
    found = (
        "lm_head.weight should have 96 rows" if bits == 4 else r"lm_head.weight should have shape"
    )
    assert found in str(ours.plan)


def test_weights_changed_in_place_stay_as_they_were_for_the_program(native):
    """Until the next prompt: MLX would write the product into the memory of a factor."""
    model, _ = models(bits=16)
    program = Program.of(model)
    pairs = [tuple(mx.zeros((1, 2, 8, 16)) for _ in range(2)) for _ in model.layers]
    first = np.array(program.prefill(LONG[:5], program.buffers(pairs)))
    for _, weight in tree_flatten(model.parameters()):
        weight *= 0
        mx.eval(weight)
    again = np.array(program.prefill(LONG[:5], program.buffers(pairs)))
    assert (again == first).all() and first.any()
    assert not np.array(Program.of(model).prefill(LONG[:5], program.buffers(pairs))).any()


@pytest.mark.parametrize(
    ("length", "limit", "capacity"),
    [(60, None, 64), (32, None, 64), (60, 60, 60), (60, 70, 64), (32, 40, 40)],
)
def test_a_first_buffer_has_a_row_to_spare_within_the_limit(native, length, limit, capacity):
    """It grows by 32, and the reply's first token must not ask for a copy."""
    model, _ = models(max_context=limit)
    cache = model.make_cache()
    model(mx.array([LONG[:length]]), cache=cache)
    assert cache[0].capacity() == capacity
