"""The decode step made of kernels, run from their Metal sources in the emulator, against mlx-lm."""

from __future__ import annotations

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import emulated_kernels
import fused_models
import mlx.core as mx
import pytest
import reference
from fixtures import FIX_A, PROMPT, mlx_weights, numpy_weights
from fused_models import CHIPS, decode, difference, expected, weights_of
from mlx_lm.generate import generation_stream, speculative_generate_step
from test_parity import YARN, stock_model

from husky_mlx import buffers, device, kernels, loading
from husky_mlx.cache import BatchKVCache, RotatingKVCache
from husky_mlx.greedy import greedy_tokens
from husky_mlx.loading import build_model
from husky_mlx.ops import embed

on = pytest.fixture(fused_models.on)
emulated_cuda = pytest.fixture(emulated_kernels.emulated_cuda)
NEAR_THE_BORDER = PROMPT + PROMPT[:10]  # 50 tokens; the CPU's caches grow by 32
fast_emulator = pytest.fixture(autouse=True)(emulated_kernels.fast_emulator)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_tokens_of_32_steps_across_a_growth_are_the_reference_paths(on, chip):
    weights = weights_of(FIX_A)
    on(chip)
    model = build_model(FIX_A, dict(weights))
    tokens, cache = decode(model, NEAR_THE_BORDER, 32)
    assert tokens == expected(FIX_A, weights, NEAR_THE_BORDER, 32)
    assert cache[0].capacity() == 96, "50 tokens and 32 more pass 64 rows"
    assert cache[0].offset == 82
    assert model.plan.counts == {
        "native": 0,
        "frozen": 33,
        "prefill": 0,
        "reference": 1,
        "traces": 33,
    }


VARIANTS = {
    "8 bit": ({}, 8, 64),
    "16 bit": ({}, 16, 0),
    "biases": ({"attention_bias": True, "mlp_bias": True}, 4, 64),
    "yarn": ({"rope_scaling": YARN}, 4, 64),
    "tied": ({"tie_word_embeddings": True}, 4, 32),
    "traditional": ({"rope_traditional": True, "vocab_size": 101}, 4, 32),
    "one kv head": ({"num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96}, 8, 32),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_formats_biases_ties_and_odd_shapes(on, name):
    changes, bits, group_size = VARIANTS[name]
    config = {**FIX_A, **changes}
    weights = weights_of(config, bits, group_size)
    on("m4max")
    model = build_model(config, dict(weights))
    tokens, _ = decode(model, PROMPT, 12)
    assert tokens == expected(config, weights, PROMPT, 12)
    assert model.plan.counts["frozen"] == 13


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_activations(on, monkeypatch, dtype):
    """As on a GPU, where nothing is widened; against mlx-lm in float32 with the same weights."""
    for module in (device, embed, loading):
        monkeypatch.setattr(module, "activation_dtype", lambda stored: stored)
    weights = {
        name: value if value.dtype == mx.uint32 else value.astype(dtype)
        for name, value in weights_of(FIX_A).items()
    }
    exact = {
        name: value if value.dtype == mx.uint32 else value.astype(mx.float32)
        for name, value in weights.items()
    }
    on("m1")
    model, stock = build_model(FIX_A, weights), stock_model(FIX_A, exact)
    cache, theirs = model.make_cache(), stock.make_cache() if hasattr(stock, "make_cache") else None
    theirs = theirs or [type(c).__mro__[2]() for c in cache]
    model(mx.array([PROMPT]), cache=cache)
    stock(mx.array([PROMPT]), cache=theirs)
    for token in (3, 60, 68):
        ours, right = (
            m(mx.array([[token]]), cache=c) for m, c in ((model, cache), (stock, theirs))
        )
        # Two layers round about ten times, by at most half a unit in the last place.
        assert difference(ours, right) < 5 * (2**-11 if dtype == mx.float16 else 2**-8)
    assert cache[0].keys.dtype == dtype
    assert model.plan.counts["frozen"] == 3


@pytest.mark.parametrize("other", ["sliding_attention", "full_attention"])
def test_a_ring_that_goes_round(on, other):
    """Against the whole sequence under a mask, in float64."""
    kinds = ["sliding_attention", other]
    config = {**FIX_A, "sliding_window": 48, "layer_types": kinds}
    on("m1")
    model = build_model(config, mlx_weights(config))
    tokens, cache = decode(model, PROMPT, 24)
    if other == "sliding_attention":
        right = reference.check(numpy_weights(config), config, PROMPT, tokens, reference.band(48))
    else:
        right = expected(config, mlx_weights(config), PROMPT, 24)
    assert tokens == right
    assert type(cache[0]) is RotatingKVCache and cache[0].capacity() == 48
    assert model.plan.counts["frozen"] == 25


def test_batched_rows_equal_single_runs(on):
    weights = weights_of(FIX_A)
    on("m1")
    model, stock = (
        build_model(FIX_A, dict(weights)),
        build_model(FIX_A, dict(weights), backend="mlx"),
    )
    prompts = [PROMPT[:9], PROMPT[9:29], PROMPT[29:34]]
    singles = []
    for prompt in prompts:
        singles.append(model.make_cache())
        model(mx.array([prompt]), cache=singles[-1])
    caches = [BatchKVCache.merge(list(layer)) for layer in zip(*singles, strict=True)]
    assert caches[0].left_padding.tolist() == [11, 0, 15]
    for step in range(4):
        tokens = [PROMPT[step], PROMPT[step + 7], PROMPT[step + 20]]
        logits = model(mx.array(tokens)[:, None], cache=caches)
        for row, token in enumerate(tokens):
            prompts[row] = [*prompts[row], token]
            alone = stock(mx.array([prompts[row]]))[:, -1:]
            assert difference(logits[row : row + 1], alone) < 1e-4
    assert model.plan.counts["frozen"] == 4


def test_the_greedy_graph_picks_from_the_logits_of_the_other(on):
    weights = weights_of({**FIX_A, "vocab_size": 101})
    on("m4max")
    model = build_model({**FIX_A, "vocab_size": 101}, weights)
    caches = [model.make_cache() for _ in range(2)]
    for cache in caches:
        model(mx.array([PROMPT]), cache=cache)
    token = mx.array([[7]])
    for _ in range(4):
        step = model.decode_step(token, caches[0])
        picked, logits = step.greedy(token, caches[0])
        assert mx.array_equal(logits, step.logits(token, caches[1]))
        assert picked.tolist() == mx.argmax(logits, axis=-1).tolist()
        token = picked


@pytest.mark.parametrize(
    "kinds", [{}, {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}]
)
def test_a_cache_goes_on_in_another_thread(on, kinds):
    config = {**FIX_A, **kinds}
    weights = weights_of(config)
    on("m1")
    model = build_model(config, dict(weights))
    cache = model.make_cache()

    def reply(prompt):
        stream = {"stream": generation_stream, "prompt_cache": cache}
        return [token for token, _ in greedy_tokens(model, mx.array(prompt), 4, **stream)]

    right = expected(config, weights, PROMPT, 9)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        assert first.submit(reply, PROMPT).result() == right[:4]
        assert second.submit(reply, right[4:5]).result() == right[5:]
    assert model.plan.counts["frozen"] == 10, "the prompt's last token, eight, and one ahead twice"


@pytest.mark.parametrize(
    ("chip", "backend"), [*((chip, "emulator") for chip in CHIPS), ("sm_90", "cuda")]
)
def test_five_launches_a_layer_and_few_beside_them(on, request, chip, backend):
    """And one more where the context is split, which CUDA does not need."""
    if backend == "cuda":
        request.getfixturevalue("emulated_cuda")
    config = {**FIX_A, "num_hidden_layers": 3}
    on(chip, backend)
    model = build_model(config, weights_of(config))
    cache = model.make_cache()
    model(mx.array([PROMPT]), cache=cache)
    token = mx.array([[5]])
    for rows, combines in ((0, 0), (4000, 0 if backend == "cuda" else 3)):
        for layer in cache if rows else ():
            layer.grow(rows, layer.offset)
        for call in ("logits", "greedy"):
            step = model.decode_step(token, cache)
            with kernels.record() as launches:
                getattr(step, call)(token, cache)
            found = Counter(launch.op for launch in launches)
            layers = {
                op: found.pop(op)
                for op in (
                    "rms_qkv_rope_append",
                    "attention_decode",
                    "o_proj_add",
                    "rms_gate_up_swiglu",
                    "down_add",
                )
            }
            assert set(layers.values()) == {3}, "one of each a layer"
            assert found.pop("attention_combine", 0) == combines
            assert found.total() <= 4, dict(found)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("length", [1, 3])
def test_a_step_of_cudas_kernels_with_a_split_context(on, emulated_cuda, bits, length):
    """All layers count in the same tickets; the logits are those of the reference path."""
    weights = weights_of(FIX_A, bits)
    on("sm_90", "cuda")
    model, stock = (build_model(FIX_A, dict(weights), backend=name) for name in ("husky", "mlx"))
    cache = model.make_cache()
    model(mx.array([NEAR_THE_BORDER]), cache=cache)
    for layer in cache:
        layer.grow(4000, layer.offset)
    with kernels.record() as launches:
        logits = model(mx.array([PROMPT[:length]]), cache=cache)
    right = stock(mx.array([NEAR_THE_BORDER + PROMPT[:length]]))[:, -length:]
    assert difference(logits, right) < 1e-4
    attention = [launch for launch in launches if launch.op == "attention_decode"]
    assert len(attention) == FIX_A["num_hidden_layers"]
    assert all(launch.template["SPLIT"] for launch in attention)
    tickets = launches[0].outputs["tickets"]
    assert all(launch.inputs["tickets"] is tickets for launch in attention)
    assert tickets.tolist() == [0] * 16


@pytest.mark.parametrize("length", [2, 3, 4])
def test_tokens_of_one_sequence_in_one_step(on, length):
    """What verifies a draft: the logits of all rows, across a growth, after a trim too."""
    weights = weights_of(FIX_A)
    on("m1")
    model, stock = (
        build_model(FIX_A, dict(weights)),
        build_model(FIX_A, dict(weights), backend="mlx"),
    )
    text = NEAR_THE_BORDER + PROMPT[:9]
    cache = model.make_cache()
    model(mx.array([text]), cache=cache)
    for step in range(4):
        more = PROMPT[10 * step : 10 * step + length]
        logits = model(mx.array([more]), cache=cache)
        right = stock(mx.array([text + more]))[:, -length:]
        assert logits.shape == right.shape
        assert difference(logits, right) < 1e-4
        # The draft's last token was refused.
        assert all(layer.trim(1) == 1 for layer in cache)
        text += more[:-1]
        assert cache[0].offset == len(text)
    assert cache[0].capacity() == (96 if length > 2 else 64)
    assert model.plan.counts["frozen"] == 4 and model.plan.counts["reference"] == 1


def test_speculative_decoding_runs_on_the_kernels_and_copies_no_cache(on, monkeypatch):
    copies = []
    own = buffers.CacheBuffers._own
    monkeypatch.setattr(buffers.CacheBuffers, "_own", lambda *a: (copies.append(a), own(*a)))
    weights = weights_of(FIX_A)
    on("m1")
    model, draft = build_model(FIX_A, dict(weights)), build_model(FIX_A, mlx_weights(FIX_A))
    found = speculative_generate_step(
        mx.array(PROMPT), model, draft, num_draft_tokens=3, max_tokens=24
    )
    assert [int(t) for t, *_ in found] == expected(FIX_A, weights, PROMPT, 24)
    assert model.plan.counts["reference"] == 1, "the prompt"
    assert draft.plan.counts["frozen"] > 0
    assert not copies, "what was taken back nobody has seen"


def test_five_tokens_rings_and_batches_take_the_reference_path(on):
    on("m1")
    model = build_model(FIX_A, weights_of(FIX_A))
    plain, ring = model.make_cache(), model.make_cache(max_kv_size=64)
    for cache in (plain, ring):
        model(mx.array([PROMPT]), cache=cache)
    batch = [BatchKVCache.merge([layer, layer]) for layer in plain]
    for tokens, cache in (([[3] * 5], plain), ([[3, 4]], ring), ([[3, 4], [3, 4]], batch)):
        model(mx.array(tokens), cache=cache)
    assert model.plan.counts["frozen"] == 0


def test_the_plain_step_takes_one_token_only():
    model = build_model(FIX_A, mlx_weights(FIX_A))
    cache = model.make_cache()
    model(mx.array([PROMPT]), cache=cache)
    model(mx.array([[3, 4]]), cache=cache)
    assert model.plan.counts == {
        "native": 0,
        "frozen": 0,
        "prefill": 0,
        "reference": 2,
        "traces": 0,
    }


def test_a_cache_of_another_dtype_is_converted_once(on):
    """A prompt cache that was saved on a machine with other activations."""
    weights = weights_of(FIX_A)
    on("m1")
    model, stock = (
        build_model(FIX_A, dict(weights)),
        build_model(FIX_A, dict(weights), backend="mlx"),
    )
    cache = model.make_cache()
    model(mx.array([PROMPT]), cache=cache)
    for layer in cache:
        keys, values, offset = layer.state
        layer.state = (keys.astype(mx.float16), values.astype(mx.float16), offset)
    logits = model(mx.array([[7]]), cache=cache)
    assert difference(logits, stock(mx.array([[*PROMPT, 7]]))[:, -1:]) < 1e-2
    assert cache[0].buffers()[0].dtype == mx.float32
    assert model.plan.counts["frozen"] == 1


def test_a_cache_of_other_heads_is_refused_by_the_kernels_too(on):
    on("m1")
    model = build_model(FIX_A, weights_of(FIX_A))
    cache = model.make_cache()
    for layer in cache:
        layer.state = (mx.zeros((1, 4, 8, 8)), mx.zeros((1, 4, 8, 8)), 8)
    with pytest.raises(ValueError, match="4 key/value heads of 8 and the model has 2 of 16"):
        model(mx.array([[7]]), cache=cache)


def test_a_step_waits_for_none_before_it(on, monkeypatch):
    """To settle a cache is to wait for the GPU: nothing may do that from token to token."""
    on("m1")
    model = build_model(FIX_A, weights_of(FIX_A))
    _, cache = decode(model, PROMPT, 2)
    waits = []
    settle = buffers.CacheBuffers.settle

    def counted(self):
        waits.extend([self] * (self.ordering is not None))
        settle(self)

    monkeypatch.setattr(buffers.CacheBuffers, "settle", counted)
    token = mx.array([[5]], mx.uint32)
    for _ in range(3):
        token, _ = model.decode_step(token, cache).greedy(token, cache)
        assert model.has_room(cache)
    assert not waits
    assert cache[0].state and waits, "the check sees who waits"


def test_a_copied_model_and_cache_go_on_alone(on):
    on("m1")
    weights = weights_of(FIX_A)
    model = build_model(FIX_A, dict(weights))
    cache = model.make_cache()
    model(mx.array([PROMPT]), cache=cache)
    model(mx.array([[5]]), cache=cache)
    other, others = copy.deepcopy(model), copy.deepcopy(cache)
    a = model(mx.array([[6]]), cache=cache)
    other(mx.array([[9]]), cache=others)
    b = other(mx.array([[6]]), cache=others)
    assert difference(model(mx.array([[9]]), cache=cache), a) > 1e-3
    stock = build_model(FIX_A, dict(weights), backend="mlx")
    assert difference(a, stock(mx.array([[*PROMPT, 5, 6]]))[:, -1:]) < 1e-4
    assert difference(b, stock(mx.array([[*PROMPT, 5, 9, 6]]))[:, -1:]) < 1e-4
