"""The native program of SmolLM2: mlx-lm's tokens, and how far integers move the logits."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from husky_mlx.errors import SourceError
from husky_mlx.loading import load
from husky_mlx.native import NativeError, Program, compiler

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_float32.json").read_text())
CASES = GOLDEN["cases"]
TOKENS = 2000


@pytest.fixture(scope="module")
def smollm2():
    try:
        compiler.find()
        return load("smollm2")
    except (NativeError, SourceError) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def programs(smollm2):
    """By whether activations stay floats."""
    return {exact: Program.of(smollm2[0], exact=exact) for exact in (True, False)}


def new_buffers(program, capacity):
    shape = (1, program.config.num_key_value_heads, capacity, program.config.head_dim)
    layers = range(program.config.num_hidden_layers)
    return program.buffers([(mx.zeros(shape), mx.zeros(shape)) for _ in layers])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case["prompt"][:24] for case in CASES])
def test_exact_greedy_tokens_are_mlx_lms(case, programs):
    program = programs[True]
    prompt, count = case["prompt_ids"], len(case["tokens"])
    buffers = new_buffers(program, len(prompt) + count)
    tokens = [int(program.prefill(prompt, buffers).argmax())]
    while len(tokens) < count:
        tokens.append(program.greedy(tokens[-1], buffers, len(prompt) + len(tokens) - 1))
    assert tokens == case["tokens"]


@pytest.mark.slow
def test_integer_activations_keep_the_distribution(smollm2, programs):
    """Mean KL divergence from float activations, and how often the likeliest token is the same."""
    text = pydoc_data.topics.topics["typesmapping"] + pydoc_data.topics.topics["specialnames"]
    ids = smollm2[1].encode(text)[:TOKENS]
    assert len(ids) == TOKENS
    logs = []
    for exact in (True, False):
        program = programs[exact]
        logits = np.array(program.prefill(ids, new_buffers(program, TOKENS), wanted="all"))
        logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        logs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    divergence = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    best, second = np.sort(logs[0], axis=-1)[:, :-3:-1].T
    same = logs[0].argmax(-1) == logs[1].argmax(-1)
    figures = (divergence.mean(), same.mean(), same[best - second > 0.1].mean())
    assert 0 < figures[0] <= 1e-5 and figures[1] >= 0.995 and figures[2] >= 0.999, figures
