"""The frozen step: traces, growth, memory, and weights that change under it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from fixtures import FIX_A, PROMPT, mlx_weights, quantize_weights
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models import cache as stock_cache
from test_parity import stock_model

from husky_mlx.greedy import greedy_tokens
from husky_mlx.loading import build_model

# Buffers that dwarf a step's temporaries, so that a copy of one shows in the peak.
WIDE_CACHE = {**FIX_A, "head_dim": 64, "max_position_embeddings": 8192}


def fresh_model(config=FIX_A, **options):
    return build_model(config, mlx_weights(config), **options)


def decode(model, prompt, count, cache=None, stream=generation_stream):
    """Token ids of the greedy loop, and the cache that it filled."""
    cache = cache or model.make_cache()
    tokens = greedy_tokens(model, mx.array(prompt), count, stream=stream, prompt_cache=cache)
    return [token for token, _ in tokens], cache


def test_500_steps_across_growths_equal_mlx_lm_with_one_trace_a_capacity():
    model = fresh_model()
    expected = [
        int(t)
        for t, _ in generate_step(
            mx.array(PROMPT), stock_model(FIX_A, mlx_weights(FIX_A)), max_tokens=500
        )
    ]
    tokens, cache = decode(model, PROMPT, 500)
    assert tokens == expected
    assert cache[0].offset == 540, "the prompt and every token that was yielded"
    capacities = [*range(64, 513, 32), 576]  # for 40 to 540 rows, on the CPU
    assert cache[0].capacity() == capacities[-1]
    assert model.plan.counts == {
        "native": 0,
        "frozen": 501,
        "prefill": 0,
        "reference": 1,
        "traces": len(capacities),
    }
    decode(model, PROMPT, 500)
    assert model.plan.counts["traces"] == len(capacities), "a second reply traces nothing"


def test_a_growth_is_one_copy_of_one_layer_at_a_time_and_nothing_else_is_copied():
    model = fresh_model(WIDE_CACHE)
    cache = model.make_cache()
    tokens = greedy_tokens(
        model,
        mx.array(PROMPT * 50),
        400,
        stream=generation_stream,
        prompt_cache=cache,
        prefill_step_size=256,
    )
    peaks, capacities = [], []
    held = 0
    for _ in tokens:
        peaks.append(mx.get_peak_memory() - held)
        capacities.append(cache[0].capacity())
        mx.reset_peak_memory()
        held = mx.get_active_memory()
    assert sorted(set(capacities)) == [2016, 2240, 2496], "the reply crosses two growths"
    buffer = 2016 * 2 * 64 * 4  # rows, kv heads, head_dim, float32
    copies = [peak for peak in peaks[1:] if peak > buffer // 4]
    assert len(copies) == 2, "only the growths copy buffers"
    assert max(copies) < 3 * buffer, "the old keys and values of one layer at a time"


def test_no_memory_and_no_arrays_gained_per_token_C135():
    model = fresh_model()
    decode(model, PROMPT, 3)
    cache = model.make_cache()
    tokens = greedy_tokens(
        model, mx.array(PROMPT), 200, stream=generation_stream, prompt_cache=cache
    )
    active, arrays = {}, {}
    for count, _ in enumerate(tokens):
        if count in (20, 190):
            mx.clear_cache()
            active[count] = mx.get_active_memory() - sum(layer.nbytes for layer in cache)
            arrays[count] = sum(isinstance(o, mx.array) for o in gc.get_objects())
    assert active[190] - active[20] < 4096
    assert arrays[190] <= arrays[20]


def test_capacity_follows_the_need_and_not_max_context():
    small, large = fresh_model(max_context=600), fresh_model(max_context=1_000_000)
    tokens, cache = decode(small, PROMPT, 30)
    more_tokens, more_cache = decode(large, PROMPT, 30)
    assert tokens == more_tokens
    assert cache[0].capacity() == more_cache[0].capacity() == 96


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("reply", [1, 2, 29, 30, 31, 32, 33])
def test_short_prompts_and_replies_that_end_on_a_capacity(length, reply):
    model = fresh_model()
    stock = stock_model(FIX_A, mlx_weights(FIX_A))
    prompt = PROMPT[:length]
    expected = [int(t) for t, _ in generate_step(mx.array(prompt), stock, max_tokens=reply)]
    tokens, cache = decode(model, prompt, reply)
    assert tokens == expected
    assert cache[0].offset == length + reply
    through_mlx_lm = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=reply)]
    assert through_mlx_lm == expected


def test_one_trace_for_each_thread_and_stream():
    model = fresh_model()
    mx.eval(model.parameters())
    expected, _ = decode(model, PROMPT, 8)
    assert model.plan.counts["traces"] == 1
    other = mx.new_stream(mx.default_device())
    assert decode(model, PROMPT, 8, stream=other)[0] == expected
    assert model.plan.counts["traces"] == 2
    found = []

    def work():
        for _ in range(2):
            found.append(decode(model, PROMPT, 8)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [expected, expected]
    assert model.plan.counts["traces"] == 3, "the thread traced once for two replies"


def test_position_is_an_array_C046_C047():
    """A position frozen at trace time would write every token to one slot and loop."""
    model = fresh_model()
    cache = model.make_cache()
    model(mx.array([PROMPT[:35]]), cache)
    for token in PROMPT[35:]:
        logits = model(mx.array([[token]]), cache)
    whole = model(mx.array([PROMPT]))[:, -1:]
    assert mx.abs(logits - whole).max() < 1e-4
    assert model.plan.counts["traces"] == 1


def changed_weights():
    return mlx_weights(FIX_A, seed=5)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, weights: model.load_weights(list(weights.items())),
        lambda model, weights: [
            layer.self_attn.q_proj.update(
                {"weight": weights[f"model.layers.{i}.self_attn.q_proj.weight"]}
            )
            for i, layer in enumerate(model.layers)
        ],
    ],
    ids=["load_weights", "one module's update"],
)
def test_new_weights_are_seen_by_the_next_reply(change):
    model = fresh_model()
    before, _ = decode(model, PROMPT, 6)
    change(model, changed_weights())
    after, _ = decode(model, PROMPT, 6)
    assert after != before
    assert after == decode(copy.deepcopy(model), PROMPT, 6)[0]
    reference = model(mx.array([PROMPT + after[:-1]]))[0, len(PROMPT) - 1 :]
    assert mx.argmax(reference, axis=-1).tolist() == after


def test_a_layer_update_in_the_middle_of_a_reply_is_seen():
    """LoRA replaces modules layer by layer, with no prefill before the next token."""
    model = fresh_model()
    cache = model.make_cache()
    model(mx.array([PROMPT]), cache)
    model(mx.array([[7]]), cache)
    layer = model.layers[1]
    silent = nn.Linear(128, 64, bias=False)
    silent.weight = mx.zeros((64, 128))
    layer.mlp.update_modules({})
    layer.update_modules({"mlp": {"down_proj": silent}})
    logits = model(mx.array([[9]]), cache)
    fresh = fresh_model()
    fresh.layers[1].mlp.down_proj = silent
    # The history keeps the keys that the old weights wrote; with one layer changed after the
    # attention of the last layer, only the new token's own output differs.
    expected = fresh(mx.array([[*PROMPT, 7, 9]]))[:, -1:]
    assert mx.abs(logits - expected).max() < 1e-4
    assert model.plan.counts["frozen"] == 2


def test_training_mode_leaves_the_frozen_step():
    model = fresh_model()
    cache = model.make_cache()
    model(mx.array([PROMPT]), cache)
    model.train()
    model(mx.array([[3]]), cache)
    assert model.plan.counts == {
        "native": 0,
        "frozen": 0,
        "prefill": 0,
        "reference": 2,
        "traces": 0,
    }
    model.eval()
    model(mx.array([[3]]), cache)
    assert model.plan.counts["frozen"] == 1


def test_mixed_storage_stays_separate_and_the_plan_says_so_C034():
    weights = mlx_weights(FIX_A)
    name = "model.layers.0.self_attn.v_proj"
    packed = mx.quantize(weights.pop(f"{name}.weight"), group_size=32, bits=6)
    for part, value in zip(("weight", "scales", "biases"), packed, strict=True):
        weights[f"{name}.{part}"] = value
    expected = [
        int(t)
        for t, _ in generate_step(mx.array(PROMPT), stock_model(FIX_A, weights), max_tokens=12)
    ]
    model = build_model(FIX_A, weights)
    assert decode(model, PROMPT, 12)[0] == expected
    assert "not fused: layers.0.qkv" in str(model.plan)
    assert "layers.1" not in str(model.plan)


@pytest.fixture
def no_buffer_cache():
    """Else an array may get a freed buffer that is up to two pages longer, and counts it all."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


def test_fused_projections_are_held_once_and_freed_with_their_model(no_buffer_cache):
    def active():
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory()

    empty = active()
    total = sum(value.nbytes for value in mlx_weights(FIX_A).values())
    model = fresh_model()
    decode(model, PROMPT, 3)
    thread = threading.Thread(target=decode, args=(model, PROMPT, 3))
    thread.start()
    thread.join()
    del thread
    loaded = active()
    assert loaded - empty < total + 4096, "the modules keep views of the fused buffers"
    for _ in range(3):
        model.load_weights(list(mlx_weights(FIX_A).items()))
        decode(model, PROMPT, 3)
    assert active() - empty < total + 4096, "a new freeze lets go of the old buffers"
    del model
    assert active() - empty < 4096


def wrapped(module):
    """A module around another one, as research code adds them: twice its output."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def __call__(self, *arguments):
            return 2 * self.inner(*arguments)

    return Twice()


def multiply(model):
    model.layers[0].self_attn.q_proj.weight *= 3


def assign_rows(model):
    model.lm_head.weight[:5] = 1.0


def wrap(holder, name):
    def change(model):
        owner = model.layers[0] if holder is None else model.layers[0][holder]
        owner[name] = wrapped(owner[name])

    return change


def scale_attention(model):
    model.layers[0].self_attn.scale = 3.0


def remove_a_layer(model):
    model.layers.pop()


def subclass(model):
    class Scaled(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 3

    model.layers[0].self_attn.q_proj.__class__ = Scaled


def wrap_the_embedding(model):
    model.model.embed_tokens = wrapped(model.model.embed_tokens)


@pytest.mark.parametrize(
    "change, frozen",
    [
        (multiply, True),
        (assign_rows, True),
        (wrap("mlp", "down_proj"), True),
        (subclass, True),
        (wrap_the_embedding, True),
        (wrap(None, "mlp"), False),
        (wrap(None, "input_layernorm"), False),
        (wrap(None, "self_attn"), False),
        (scale_attention, False),
        (remove_a_layer, False),
    ],
)
def test_a_model_that_somebody_built_into_answers_as_it_is_now(change, frozen):
    weights = mlx_weights(FIX_A)
    stock, model = stock_model(FIX_A, dict(weights)), fresh_model()
    decode(model, PROMPT, 6)
    before = model.plan.counts["frozen"]
    change(stock)
    change(model)
    expected = [int(t) for t, _ in generate_step(mx.array(PROMPT), stock, max_tokens=8)]
    assert decode(model, PROMPT, 8)[0] == expected
    assert (model.plan.counts["frozen"] > before) is frozen
    assert ("frozen step" in str(model.plan)) is frozen or change is remove_a_layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: [stock_cache.KVCache(), stock_cache.RotatingKVCache(8)],
        lambda: [stock_cache.RotatingKVCache(12), stock_cache.RotatingKVCache(8)],
        lambda: [stock_cache.RotatingKVCache(64), stock_cache.KVCache()],
    ],
    ids=["whole and ring", "two rings", "ring and whole of one capacity"],
)
def test_caches_that_differ_from_layer_to_layer_are_not_taken_for_one(make):
    """The step writes one row for all layers of a kind."""
    stock, model = stock_model(FIX_A, mlx_weights(FIX_A)), fresh_model()
    ours, theirs = make(), make()
    for cache in (ours, theirs):
        runner = model if cache is ours else stock
        runner(mx.array([PROMPT]), cache=cache)
    for token in range(3, 40):
        a, b = model(mx.array([[token]]), cache=ours), stock(mx.array([[token]]), cache=theirs)
        assert mx.abs(a - b).max() < 1e-4


def test_buffers_that_were_grown_apart_serve_one_step():
    stock, model = stock_model(FIX_A, mlx_weights(FIX_A)), fresh_model()
    cache, theirs = model.make_cache(), stock_cache.make_prompt_cache(stock)
    model(mx.array([PROMPT]), cache=cache)
    stock(mx.array([PROMPT]), cache=theirs)
    cache[1].grow(500, cache[1].offset)
    assert cache[0].capacity() != cache[1].capacity()
    a, b = model(mx.array([[7]]), cache=cache), stock(mx.array([[7]]), cache=theirs)
    assert mx.abs(a - b).max() < 1e-4
    assert model.plan.counts["frozen"] == 1


def test_a_negative_token_counts_from_the_end_as_in_mlx():
    model = fresh_model()
    logits = []
    for token in (-1, FIX_A["vocab_size"] - 1):
        cache = model.make_cache()
        model(mx.array([PROMPT]), cache=cache)
        logits.append(model(mx.array([[token]]), cache=cache))
    assert model.plan.counts["frozen"] == 2
    assert mx.array_equal(*logits)


def test_a_pickled_model_answers_and_freezes_its_own_step():
    model = fresh_model()
    expected, _ = decode(model, PROMPT, 6)
    other = pickle.loads(pickle.dumps(model))
    assert decode(other, PROMPT, 6)[0] == expected
    assert other.plan.counts["frozen"] > 0


@pytest.mark.parametrize("bits", [None, 4])
def test_a_group_of_one_shards_into_the_same_answers(bits):
    weights = mlx_weights(FIX_A)
    if bits:
        weights = quantize_weights(weights, bits=bits, group_size=32)
    model = build_model(FIX_A, weights)
    whole, _ = decode(model, PROMPT, 8)
    frozen = model.plan.counts["frozen"]
    assert frozen > 0
    group = mx.distributed.init()
    assert group.size() == 1
    model.shard(group)
    assert decode(model, PROMPT, 8)[0] == whole
    assert model.plan.counts["frozen"] == frozen
    assert "sharded over 1" in str(model.plan)
