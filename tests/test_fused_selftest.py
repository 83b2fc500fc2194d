"""The self-test before the kernels serve: what it lets through, remembers, and turns off."""

from __future__ import annotations

import json
import warnings

import emulated_kernels
import mlx.core as mx
import pytest
from fixtures import FIX_A, PROMPT, QWEN3, mlx_weights, quantize_weights
from fused_models import CHIPS, decode, difference, expected, weights_of

from husky_mlx import chips, differences, emulator, kernels, verdicts
from husky_mlx.fused import fused_weights
from husky_mlx.launches import launch_lines
from husky_mlx.loading import build_model
from husky_mlx.ops.gemv import Platform
from husky_mlx.pack import pack

fast_emulator = pytest.fixture(autouse=True)(emulated_kernels.fast_emulator)
kernels_of = pytest.fixture(emulated_kernels.kernels_of)
plant = pytest.fixture(emulated_kernels.plant)


@pytest.fixture
def tested_on(kernels_of, monkeypatch, tmp_path):
    """``tested_on(chip)``: from here on models find this chip, whose kernels are emulated, and run
    the self-test; returns the file of its verdicts."""
    path = tmp_path / "folder" / "selftest.json"
    monkeypatch.setattr(verdicts, "path", lambda: path)

    def choose(chip="m1"):
        monkeypatch.delenv("HUSKY_KERNELS", raising=False)
        kernels_of(chip)
        return path

    return choose


def test_a_self_test_passes_once_and_is_remembered(tested_on, monkeypatch):
    path = tested_on("m4max")
    weights = weights_of(FIX_A)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_model(FIX_A, dict(weights))
        tokens, _ = decode(model, PROMPT, 4)
    assert tokens == expected(FIX_A, weights, PROMPT, 4)
    assert "fused kernels" in str(model.plan)
    found = json.loads(path.read_text())
    assert list(found.values()) == [None, None]
    for combination, of in zip(found, ("1 rows", "prompts"), strict=True):
        words = ("emulator", "m4max", "mlx 0.", "husky_mlx 0.", of)
        assert all(word in combination for word in words)
    kept = {path, path.with_suffix(".lock")}
    assert set(path.parent.iterdir()) == kept, "nothing temporary is left"

    def again(*arguments):
        raise AssertionError("tested twice")

    monkeypatch.setattr(differences.Differences, "_difference", again)
    monkeypatch.setattr(differences.Differences, "_prompt_difference", again)
    assert decode(build_model(FIX_A, dict(weights)), PROMPT, 4)[0] == tokens


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_number_of_rows_passes_the_self_test(tested_on, chip):
    path = tested_on(chip)
    model = build_model(FIX_A, weights_of(FIX_A))
    model.prepare()
    step = model._frozen._step
    for rows, batched in [(2, False), (3, False), (4, False), (1, True), (3, True), (4, True)]:
        assert step.proven(rows, batched) is step
    assert list(json.loads(path.read_text()).values()) == [None] * 8


@pytest.mark.parametrize("config", [FIX_A, QWEN3], ids=["llama", "qwen3"])
def test_the_plan_shows_every_kernel(tested_on, config):
    """With what the weights of this model are, and as many kernels as a step launches."""
    tested_on("m1")
    model = build_model(config, weights_of(config))
    model.prepare()
    cache = model.make_cache()
    model(mx.array([PROMPT]), cache=cache)
    with kernels.record() as launches:
        model(mx.array([[5]]), cache=cache)
    lines = str(model.plan).splitlines()[2:]
    shown = [line.strip().partition(":")[0] for line in lines]
    assert shown == list(dict.fromkeys(launch.op for launch in launches))
    by_name = dict(zip(shown, lines, strict=True))
    attention = by_name.pop("attention_decode")
    assert "context whole, in 8 parts and attention_combine from 2048" in attention
    by_name.pop("norm_rope_append", None)
    assert all("4 bit in groups of 32" in line for line in by_name.values())
    assert model.plan.summary == "\n".join(str(model.plan).splitlines()[:2])


def test_the_plan_says_who_merges_a_split_context():
    model = build_model(FIX_A, weights_of(FIX_A), lazy=True)
    frequencies = mx.array(model.args.rope.frequencies(model.args.head_dim))
    weights, chip = fused_weights(model.args, pack(model, frequencies)), chips.parse("sm_90")[0]
    other, own = (
        next(line for line in launch_lines(weights, Platform(chip, backend)) if "context" in line)
        for backend in ("metal", "cuda")
    )
    assert " parts and attention_combine from 2048 rows on" in other
    assert own == other.replace(" and attention_combine", "")


def test_the_plan_tells_layers_of_other_formats_apart(tested_on):
    tested_on("m1")
    weights = quantize_weights(mlx_weights(FIX_A), 4, 32)
    eight = quantize_weights(mlx_weights(FIX_A), 8, 64)
    weights |= {name: value for name, value in eight.items() if "layers.1.mlp.down" in name}
    model = build_model(FIX_A, weights)
    model.prepare()
    lines = [line.split(", ")[:2] for line in str(model.plan).splitlines() if "down_add" in line]
    assert lines == [
        ["  down_add: 1 of 2 layers", "4 bit in groups of 32"],
        ["  down_add: 1 of 2 layers", "8 bit in groups of 64"],
    ]


# (op, what to replace, by what, what the warning says)
PLANTED = {
    "a row too far": (
        "rms_qkv_rope_append",
        "+ slot +",
        "+ slot + 1 +",
        "the keys of layer 0 differ by",
    ),
    "a row short": ("attention_decode", "live = place[1]", "live = place[1] - 1", "differ by"),
    "no residual": ("down_add", "residual", "activated", "differ by"),
    "another token": ("argmax_combine", "tokens[", "tokens[0] = 0; if (false) tokens[", "token"),
    "does not compile": ("o_proj_add", "constexpr int", "constexpr wrong", "wrong"),
}


def test_norms_of_heads_are_tested_too(tested_on, plant):
    """Of a model that has them: the norm of k in place of q's."""
    tested_on()
    plant("norm_rope_append", "head < HEADS ? q_norm : k_norm", "k_norm")
    weights = weights_of(QWEN3)
    with pytest.warns(UserWarning, match="fused kernels are off") as caught:
        model = build_model(QWEN3, dict(weights))
        tokens, _ = decode(model, PROMPT, 6)
    assert tokens == expected(QWEN3, weights, PROMPT, 6)
    assert len(caught) == 1 and "the logits differ by" in str(caught[0].message)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_one_warning_and_the_reference_path(tested_on, plant, name):
    op, old, new, message = PLANTED[name]
    path = tested_on()
    plant(op, old, new)
    weights = weights_of(FIX_A)
    with pytest.warns(UserWarning, match="fused kernels are off") as caught:
        model = build_model(FIX_A, dict(weights))
        tokens, _ = decode(model, PROMPT, 6)
    assert tokens == expected(FIX_A, weights, PROMPT, 6)
    assert len(caught) == 1 and message in str(caught[0].message)
    assert "plain MLX operations (self-test: " in str(model.plan) and message in str(model.plan)
    (problem,) = json.loads(path.read_text()).values()
    assert message in problem
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = build_model(FIX_A, dict(weights))
        assert decode(other, PROMPT, 6)[0] == tokens
    assert message in str(other.plan), "remembered"


def test_writes_that_the_device_loses_are_caught(tested_on, monkeypatch):
    """A backend that hands the kernel a copy of the buffers: what it writes there is nowhere."""
    tested_on()
    losing = property(lambda self: {}, lambda self, updated: None)
    monkeypatch.setattr(emulator.Outputs, "updated", losing, raising=False)
    with pytest.warns(UserWarning, match="the keys of layer 0 differ by"):
        build_model(FIX_A, weights_of(FIX_A)).prepare()


def test_a_first_token_where_the_step_turns_out_to_have_no_kernels(tested_on, plant):
    """A prompt of one token is what builds the step, here after the weights changed."""
    tested_on()
    plant("norm_rope_append", "head < HEADS ? q_norm : k_norm", "k_norm")
    weights = weights_of(QWEN3)
    with pytest.warns(UserWarning, match="fused kernels are off"):
        model = build_model(QWEN3, dict(weights))
        decode(model, PROMPT, 1)
    model._frozen.invalidate()
    tokens, _ = decode(model, PROMPT[:1], 3)
    assert tokens == expected(QWEN3, weights, PROMPT[:1], 3)


def test_a_fault_in_further_rows_is_found_before_they_serve(tested_on, plant):
    """Not at load, and in the middle of a conversation: its cache goes on."""
    tested_on()
    plant("o_proj_add", "constexpr int", "static_assert(M == 1);\nconstexpr int")
    weights = weights_of(FIX_A)
    model, stock = (
        build_model(FIX_A, dict(weights)),
        build_model(FIX_A, dict(weights), backend="mlx"),
    )
    cache = model.make_cache()
    model(mx.array([PROMPT]), cache=cache)
    model(mx.array([[5]]), cache=cache)
    assert "fused kernels" in str(model.plan)
    with pytest.warns(UserWarning, match="self-test of 2 rows") as caught:
        logits = model(mx.array([[6, 7]]), cache=cache)
    assert len(caught) == 1
    assert difference(logits, stock(mx.array([[*PROMPT, 5, 6, 7]]))[:, -2:]) < 1e-4
    logits = model(mx.array([[8]]), cache=cache)
    assert difference(logits, stock(mx.array([[*PROMPT, 5, 6, 7, 8]]))[:, -1:]) < 1e-4
    assert "plain MLX operations (self-test: " in str(model.plan)


@pytest.mark.parametrize("content", ["{not json", "[]", None])
def test_a_broken_memory_of_verdicts_is_no_error(tested_on, content):
    path = tested_on()
    path.parent.mkdir()
    if content is None:
        path.mkdir()  # can be neither read nor replaced
    else:
        path.write_text(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_model(FIX_A, weights_of(FIX_A))
        model.prepare()
    assert "fused kernels" in str(model.plan)


def test_kernels_can_be_switched_off(tested_on, monkeypatch):
    tested_on()
    monkeypatch.setenv("HUSKY_KERNELS", "0")
    model = build_model(FIX_A, weights_of(FIX_A))
    with kernels.record() as launches:
        decode(model, PROMPT, 2)
    assert not launches
    assert "plain MLX operations (HUSKY_KERNELS is off)" in str(model.plan)
