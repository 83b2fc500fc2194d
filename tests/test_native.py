"""The native program of whole tiny models against mlx-lm's class and a float64 forward."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy_llama
import pytest
from fixtures import FIX_A, PROMPT, mlx_weights, numpy_weights, quantize_weights
from mlx_lm.models.cache import make_prompt_cache
from test_parity import YARN

from husky_mlx.loading import build_model
from husky_mlx.native import NativeError, Program, compiler

try:
    compiler.find()
except NativeError as error:
    pytest.skip(str(error), allow_module_level=True)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {
    "sliding_window": 8,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}


@dataclass(frozen=True)
class Variant:
    """A config's changes to FIX-A, the storage of its weights, and of its KV buffers.

    ``bits`` None: plain weights. ``eight_bit``: part of the names of those that have 8 bits.
    """

    changes: dict[str, Any]
    bits: int | None = 4
    group_size: int = 32
    dtype: mx.Dtype = mx.float32
    kv_dtype: mx.Dtype = mx.float32
    eight_bit: str = "none of them"


VARIANTS = {
    "4 bit": Variant({}, dtype=mx.float16),
    "8 bit, tied, odd vocabulary": Variant(
        {"tie_word_embeddings": True, "vocab_size": 101}, bits=8, group_size=64, dtype=mx.bfloat16
    ),
    "biases, 16 bit cache": Variant(
        {"attention_bias": True, "mlp_bias": True}, group_size=64, kv_dtype=mx.float16
    ),
    "traditional rope, wide heads": Variant({"rope_traditional": True, "head_dim": 80}),
    "llama3 rope, one key head, mixed bits": Variant(
        {"rope_scaling": LLAMA3, "num_key_value_heads": 1},
        eight_bit="layers.1.",
        kv_dtype=mx.bfloat16,
    ),
    "plain, no size a multiple of anything": Variant(
        {"hidden_size": 42, "head_dim": 10, "intermediate_size": 75}, bits=None
    ),
    "plain float16, linear rope": Variant(
        {"rope_scaling": {"type": "linear", "factor": 4.0}}, bits=None, dtype=mx.float16
    ),
    "windows": Variant(SLIDING),
    "yarn": Variant({"rope_scaling": YARN}),
}
CAPACITY = 300
# Of the largest logit: what rounding keys and values to 11 or 8 bits does to these models.
TOLERANCE = {mx.float32: 5e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


def weights_of(variant: Variant) -> dict[str, mx.array]:
    """The weights with their scales (plain ones: themselves) in the variant's dtype."""
    config = {**FIX_A, **variant.changes}
    weights = mlx_weights(config)
    if variant.bits is not None:
        eight = {name: value for name, value in weights.items() if variant.eight_bit in name}
        rest = {name: value for name, value in weights.items() if name not in eight}
        weights = {
            **quantize_weights(rest, variant.bits, variant.group_size),
            **quantize_weights(eight, 8, variant.group_size),
        }
    stored = {
        name: v if v.dtype == mx.uint32 else v.astype(variant.dtype) for name, v in weights.items()
    }
    mx.eval(stored)
    return stored


def as_float32(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return {n: v if v.dtype == mx.uint32 else v.astype(mx.float32) for n, v in weights.items()}


def judge(variant: Variant) -> nn.Module:
    """mlx-lm's own class on the same values in float32."""
    config = {**FIX_A, **variant.changes}
    return build_model(config, as_float32(weights_of(variant)), backend="mlx")


def native_model(variant: Variant) -> nn.Module:
    """Our model, whose modules hold the variant's dtype whatever the loader makes of it."""
    config, stored = {**FIX_A, **variant.changes}, weights_of(variant)
    model = build_model(config, as_float32(stored))
    for path, module in model.named_modules():
        for part in ("weight", "scales", "biases", "bias"):
            if f"{path}.{part}" in stored:
                module[part] = stored[f"{path}.{part}"]
    return model


def program_of(variant: Variant, *, exact: bool = True, threads: int = 2) -> Program:
    model = native_model(variant)
    return Program.of(model, kv_dtype=variant.kv_dtype, exact=exact, threads=threads)


def new_buffers(program: Program, capacity: int = CAPACITY):
    config = program.config
    shape = (1, config.num_key_value_heads, capacity, config.head_dim)
    pairs = [
        (mx.zeros(shape, program.kv_dtype), mx.zeros(shape, program.kv_dtype))
        for _ in range(config.num_hidden_layers)
    ]
    return program.buffers(pairs)


def tokens_of(count: int, vocabulary: int = 96) -> list[int]:
    return np.random.default_rng(3).integers(0, vocabulary, count).tolist()


def assert_near(found: Any, wanted: Any, tolerance: float) -> None:
    found, wanted = np.array(found), np.array(wanted)
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert error <= tolerance, f"{error:.2e} > {tolerance:.2e}"


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def case(request):
    return request.param, program_of(request.param)


def test_logits_are_mlx_lms(case):
    variant, program = case
    wanted = judge(variant)(mx.array([PROMPT]))[0]
    found = program.prefill(PROMPT, new_buffers(program), wanted="all")
    # MLX's own float32 sums are the larger part of this.
    assert_near(found, wanted, max(TOLERANCE[variant.kv_dtype], 3e-5))


def test_greedy_tokens_are_mlx_lms(case):
    variant, program = case
    stock, buffers = judge(variant), new_buffers(program)
    tokens: list[int] = []
    cache, call = make_prompt_cache(stock), PROMPT
    for _ in range(24):
        tokens.append(int(stock(mx.array([call]), cache=cache)[0, -1].argmax()))
        call = tokens[-1:]
    found = [int(program.prefill(PROMPT, buffers).argmax())]
    while len(found) < 24:
        found.append(program.greedy(found[-1], buffers, len(PROMPT) + len(found) - 1))
    assert found == tokens


def test_pieces_of_a_prompt_give_what_the_whole_gives(case):
    """Every size of call: one token, a few, tiles of many, and more than a block."""
    variant, program = case
    prompt = tokens_of(program.block + 60)
    whole = np.array(program.prefill(prompt, new_buffers(program), wanted="all"))
    buffers, rows = new_buffers(program), []
    start = 0
    for length in (1, 1, 2, 3, 4, 5, 13, 24, 1, 25, 40):
        rows.append(program.prefill(prompt[start : start + length], buffers, start, wanted="all"))
        start += length
    rows.append(program.prefill(prompt[start:-1], buffers, start, wanted="all"))
    last = program.decode(prompt[-1], buffers, len(prompt) - 1)
    assert_near(np.concatenate([*rows, last]), whole, 2 * TOLERANCE[variant.kv_dtype])
    only_last = program.prefill(prompt, new_buffers(program))
    assert only_last.shape == (1, whole.shape[1])
    assert_near(only_last, whole[-1:], 2 * TOLERANCE[variant.kv_dtype])


def test_a_prompt_without_logits_leaves_the_same_rows(case):
    variant, program = case
    prompt = tokens_of(50)
    buffers = new_buffers(program)
    assert program.prefill(prompt[:-1], buffers, wanted="none") is None
    wanted = program.prefill(prompt, new_buffers(program))
    found = program.decode(prompt[-1], buffers, len(prompt) - 1)
    assert_near(found, wanted, 2 * TOLERANCE[variant.kv_dtype])


def test_only_the_calls_own_rows_are_written(case):
    """The buffers are the middle of larger arrays: nothing outside the new rows changes."""
    variant, program = case
    config = program.config
    shape = (3, config.num_key_value_heads, 64, config.head_dim)
    outer = [mx.full(shape, 7.0, variant.kv_dtype) for _ in range(2 * config.num_hidden_layers)]
    inner = [array[1:2] for array in outer]
    buffers = program.buffers(list(zip(inner[::2], inner[1::2], strict=True)))
    program.prefill(PROMPT[:20], buffers, 0)
    before = [np.array(array.astype(mx.float32)) for array in outer]
    program.prefill(PROMPT[20:33], buffers, 20)
    program.decode(PROMPT[33], buffers, 33)
    for array, old in zip(outer, before, strict=True):
        new = np.array(array.astype(mx.float32))
        changed = (new != old).any(axis=-1)
        assert changed[1, :, 20:34].all()
        changed[1, :, 20:34] = False
        assert not changed.any()
    assert all((old[1, :, :20] != 7).any() for old in before)
    assert all((old[[0, 2]] == 7).all() for old in before)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_rows_of_a_16_bit_cache_are_rounded_to_nearest(dtype):
    """The first layer's rows depend on no cache: they are the float32 ones, rounded as MLX does."""
    rows = []
    for kv_dtype in (mx.float32, dtype):
        program = program_of(Variant({}, kv_dtype=kv_dtype))
        pairs = [tuple(mx.zeros((1, 2, 64, 16), kv_dtype) for _ in range(2)) for _ in range(2)]
        program.prefill(PROMPT, program.buffers(pairs), wanted="none")
        rows.append(pairs[0])
    for exact, rounded in zip(*rows, strict=True):
        assert (exact != 0).any() and (exact != rounded).any()
        assert mx.array_equal(exact.astype(dtype), rounded)


def test_float32_logits_against_float64():
    """The judge that shares no code and no precision with either."""
    config = {**FIX_A, "attention_bias": True, "num_hidden_layers": 3}
    program = program_of(Variant({"attention_bias": True, "num_hidden_layers": 3}, bits=None))
    wanted = numpy_llama.logits(config, numpy_weights(config), PROMPT)
    found = program.prefill(PROMPT, new_buffers(program), wanted="all")
    assert_near(found, wanted, 1e-6)


@pytest.mark.parametrize("name", ["4 bit", "8 bit, tied, odd vocabulary"])
def test_integer_activations_stay_near_the_float_ones(name):
    """Each product is off by half a step of 32512 at most."""
    variant = VARIANTS[name]
    prompt = tokens_of(120)
    logits = {}
    for exact in (True, False):
        program = program_of(variant, exact=exact)
        logits[exact] = np.array(program.prefill(prompt, new_buffers(program), wanted="all"))
    difference = logits[False] - logits[True]
    assert 1e-7 < np.sqrt((difference**2).mean()) / logits[True].std() < 1e-4


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_any_number_of_threads_gives_the_same_logits(threads):
    variant = VARIANTS["4 bit"]
    prompt = tokens_of(70)
    results = []
    for count in (2, threads):
        program = program_of(variant, exact=False, threads=count)
        buffers = new_buffers(program)
        rows = program.prefill(prompt, buffers, wanted="all")
        results.append(np.concatenate([rows, program.decode(5, buffers, 70)]))
    # Who computes a unit does not change what it is.
    assert (results[0] == results[1]).all()


def test_a_ring_is_the_same_as_a_window():
    """Eight rows that are overwritten in turn, against rows in order of which eight are seen."""
    changes = {"model_type": "mistral", "sliding_window": 8}
    program = program_of(Variant(changes))
    ordered, ring = new_buffers(program), new_buffers(program, capacity=8)
    for position, token in enumerate(tokens_of(30)):
        wanted = program.decode(token, ordered, position)
        found = program.decode(
            token, ring, position, row=position % 8, live=[min(position + 1, 8)] * 2
        )
        assert_near(found, wanted, 5e-6)


def test_a_position_need_not_be_its_row():
    """Positions count from anywhere: rotary embedding sees only how far apart they are."""
    program = program_of(VARIANTS["4 bit"])
    prompt = tokens_of(20)
    wanted = program.prefill(prompt, new_buffers(program), wanted="all")
    buffers = new_buffers(program)
    program.prefill(prompt[:7], buffers, 1000, row=0)
    found = [
        program.prefill(prompt[7:-1], buffers, 1007, row=7, wanted="all"),
        program.decode(prompt[-1], buffers, 1019, row=19, live=20),
    ]
    # Angles of a thousand radians have float32's rounding of their frequency.
    assert_near(np.concatenate(found), wanted[7:], 1e-4)


def test_weights_are_read_where_they_are():
    model = native_model(VARIANTS["4 bit"])
    program = Program.of(model, exact=True, threads=1)
    before = np.array(program.prefill(PROMPT, new_buffers(program)))
    np.asarray(model.model.norm.weight.view(mx.uint16))[:] = 0
    assert not np.array(program.prefill(PROMPT, new_buffers(program))).any()
    assert before.any()


@pytest.mark.parametrize("wrong", [-1, FIX_A["vocab_size"], 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_refused(wrong):
    program = program_of(VARIANTS["4 bit"])
    buffers = new_buffers(program)
    with pytest.raises(ValueError, match="vocabulary"):
        program.prefill([1, wrong, 2], buffers)
    with pytest.raises(ValueError, match="vocabulary"):
        program.decode(wrong, buffers, 0)
    program.prefill([1, 2], buffers)


def test_rows_outside_the_buffers_are_refused():
    program = program_of(VARIANTS["4 bit"])
    buffers = new_buffers(program, capacity=16)
    with pytest.raises(ValueError, match="rows outside the buffers"):
        program.prefill(tokens_of(17), buffers)
    program.prefill(tokens_of(16), buffers)
    with pytest.raises(ValueError, match="rows outside the buffers"):
        program.decode(1, buffers, 16)
    for rows in ({"row": -1, "live": 16}, {"row": 3, "live": 17}, {"row": [0, 16], "live": 16}):
        with pytest.raises(ValueError, match="rows outside the buffers"):
            program.decode(1, buffers, 16, **rows)


def test_buffers_of_another_kind_are_refused():
    program = program_of(VARIANTS["4 bit"])
    good, half = mx.zeros((1, 2, 8, 16)), mx.zeros((1, 2, 8, 16), mx.float16)
    shorter = mx.zeros((1, 2, 4, 16))
    turned = mx.zeros((1, 2, 16, 8)).swapaxes(2, 3)
    for pair, message in [
        ((good, half), "float16"),
        ((good, mx.zeros((1, 3, 8, 16))), r"\(more than 0, 2, at least 0, 16\)"),
        ((good, shorter), "beside values"),
        ((good, turned), "row order"),
    ]:
        with pytest.raises(ValueError, match=message):
            program.buffers([(good, good), pair])
    with pytest.raises(ValueError, match="1 layers"):
        program.buffers([(good, good)])
    for place in ({"sequence": 1}, {"skip": 9}):
        with pytest.raises(ValueError, match="more than"):
            program.buffers([(good, good)] * 2, **place)


def test_formats_that_it_does_not_take_are_named():
    weights = quantize_weights(mlx_weights(FIX_A), bits=3)
    with pytest.raises(
        NativeError, match=r"embed_tokens and 15 more: 3 bit weights in groups of 64"
    ):
        Program.of(build_model(FIX_A, weights))


def test_two_threads_take_turns():
    program = program_of(VARIANTS["4 bit"])
    prompts = [tokens_of(40), tokens_of(80)[40:]]
    wanted = [np.array(program.prefill(prompt, new_buffers(program))) for prompt in prompts]
    own = [new_buffers(program), new_buffers(program)]
    wrong = []

    def work(index):
        for _ in range(30):
            logits = program.prefill(prompts[index], own[index])
            if not (np.array(logits) == wanted[index]).all():
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert not wrong


def in_child(work) -> int:
    """The exit status of a forked process that does ``work()`` and nothing else."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        os._exit(0 if work() else 3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_starts_threads_of_its_own():
    program = program_of(VARIANTS["4 bit"])
    buffers = new_buffers(program)
    program.prefill(PROMPT, buffers)
    wanted = program.greedy(5, buffers, len(PROMPT))
    assert in_child(lambda: program.greedy(5, buffers, len(PROMPT)) == wanted) == 0
    assert program.greedy(5, buffers, len(PROMPT)) == wanted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_process_forked_in_the_middle_of_a_call_does_not_hang():
    program = program_of(VARIANTS["4 bit"])
    mine, others = new_buffers(program), new_buffers(program)
    program.prefill(PROMPT, mine)
    wanted = program.greedy(5, mine, len(PROMPT))
    prompt, stop = tokens_of(150), threading.Event()

    def keep_busy():
        while not stop.is_set():
            program.prefill(prompt, others, wanted="none")

    worker = threading.Thread(target=keep_busy)
    worker.start()
    try:
        for _ in range(8):
            assert in_child(lambda: program.greedy(5, mine, len(PROMPT)) == wanted) == 0
            time.sleep(0.003)
    finally:
        stop.set()
        worker.join(60)


LONG_PREFILL = """
import sys, time
sys.path[:0] = [{tests!r}, {root!r}]
from test_native import *
program = program_of(VARIANTS["4 bit"])
buffers = new_buffers(program, capacity=40000)
prompt = tokens_of(40000)
print("ready", flush=True)
try:
    program.prefill(prompt, buffers)
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
program.prefill(prompt[:100], buffers)
print("usable")
"""


def test_ctrl_c_ends_a_long_prefill():
    here = Path(__file__).resolve().parent
    script = LONG_PREFILL.format(tests=str(here), root=str(here.parent))
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert output == "interrupted\nusable\n"
