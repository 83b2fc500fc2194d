"""``husky bench ops``: both sides of every case, bytes, copies, chains, clock, table, JSON."""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace

import emulated_kernels
import mlx.core as mx
import numpy as np
import pytest
from fixtures import FIX_A, mlx_weights, quantize_weights, write_folder
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from test_parity import stock_model

from husky_mlx import (
    bench_ops,
    bench_ops_cases,
    bench_ops_timing,
    chips,
    cli,
    graphs,
    kernels,
)
from husky_mlx.bench_ops_cases import OPS, SLOT, Cases
from husky_mlx.bench_ops_timing import Chain, Side, Stopwatch, chain, copies_of, following
from husky_mlx.bench_ops_weights import projections
from husky_mlx.errors import HuskyError
from husky_mlx.loading import build_model
from husky_mlx.ops.gemv import Platform

M1 = Platform(chips.parse("m1")[0], "emulator")


fast_emulator = pytest.fixture(emulated_kernels.fast_emulator)
plant = pytest.fixture(emulated_kernels.plant)
emulated_cuda = pytest.fixture(emulated_kernels.emulated_cuda)


@pytest.fixture(autouse=True)
def small(fast_emulator, monkeypatch):
    """A fast emulator, two copies of everything, chains of one and two launches."""
    for name, value in (("SHORT", 1), ("MORE", (1, 1)), ("BUSY_BYTES", 1 << 16)):
        monkeypatch.setattr(bench_ops_timing, name, value)
    monkeypatch.setattr(bench_ops, "SHORT", 1)


def weights_of(config, bits=4, group_size=32):
    """Quantized weights with norms that are not ones."""
    weights = mlx_weights(config)
    weights = quantize_weights(weights, bits, group_size) if bits < 16 else weights
    rng = np.random.default_rng(7)
    for name in sorted(weights):
        if "norm" in name:
            size = weights[name].size
            weights[name] = mx.array(rng.uniform(0.3, 1.7, size).astype(np.float32))
    return weights


def cases_of(config=FIX_A, bits=4, group_size=32, rows=1, contexts=(7,), weights=None, platform=M1):
    weights = weights or weights_of(config, bits, group_size)
    model = build_model(dict(config), dict(weights), lazy=True)
    return Cases(model, platform, rows, contexts)


def case_of(op, **how):
    (case,) = cases_of(**how).of(op)
    return case


# FIX-A: hidden 64, 4 heads of 16, 2 for keys and values, MLP 128, vocabulary 96. Four bits in
# groups of 32 with float32 scales and biases are 0.5 + 2 * 4 / 32 = 0.75 bytes a weight.
BYTES = {
    "embed": (64 * 0.75 + 4 + 64 * 4, 3),
    "rms_qkv_rope_append": ((64 + 64 + 2 * 32) * 4, 3, 128 * 64 * 0.75 + 64 * 4),
    "o_proj_add": (3 * 64 * 4, 3, 64 * 64 * 0.75),
    "rms_gate_up_swiglu": ((64 + 128) * 4, 3, 256 * 64 * 0.75 + 64 * 4),
    "down_add": ((128 + 2 * 64) * 4, 3, 64 * 128 * 0.75),
    "rms_lm_head": ((64 + 96) * 4, 3, 96 * 64 * 0.75 + 64 * 4),
    "rms_lm_head_argmax": ((64 + 96) * 4 + 4, 3, 96 * 64 * 0.75 + 64 * 4),
}


@pytest.mark.parametrize("op", BYTES)
def test_bytes_by_hand(op):
    """What belongs to a row, and what is read once for all of them."""
    each, rows, *once = BYTES[op]
    for count in (1, rows):
        assert case_of(op, rows=count).bytes == count * each + sum(once)


def test_bytes_of_attention_by_hand():
    one, many = cases_of(contexts=(7, 40)).of("attention_decode")
    # Keys and values of 2 heads of 16, the query and the result of 4.
    assert one.bytes == 2 * 7 * 32 * 4 + 2 * 64 * 4
    assert many.bytes == 2 * 40 * 32 * 4 + 2 * 64 * 4
    # Three rows of a sequence see 40, 41 and 42 of the same.
    assert case_of("attention_decode", rows=3, contexts=(40,)).bytes == (
        2 * 42 * 32 * 4 + 3 * 2 * 64 * 4
    )
    assert (many.context, many.shape) == (40, "4/2 heads of 16, 40 rows")


def test_bytes_of_other_formats_by_hand():
    biased = {**FIX_A, "attention_bias": True}
    dense = case_of("rms_qkv_rope_append", config=biased, bits=16)
    assert dense.bytes == (128 * 64 + 128 + 64 + 64 + 64 + 2 * 32) * 4
    assert dense.weights == "float32 with bias"
    eight = case_of("down_add", bits=8, group_size=64)
    assert eight.bytes == 64 * 128 * (1 + 2 * 4 / 64) + (128 + 2 * 64) * 4
    assert (eight.weights, eight.shape) == ("8 bit g64 float32", "64x128")


VARIANTS = {
    "4 bit": ({}, 4, 32, 1),
    "8 bit, 3 rows": ({}, 8, 64, 3),
    "16 bit, biases, tied, traditional": (
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_traditional": True,
        },
        16,
        0,
        2,
    ),
    "heads narrower than the model": (
        {"num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 16},
        4,
        32,
        1,
    ),
}


def test_attention_on_cuda_counts_in_the_same_tickets_again(emulated_cuda):
    """Whole and in splits, the second launch of a chain too."""
    cuda = Platform(chips.parse("sm_90")[0], "cuda")
    for case in cases_of(rows=2, contexts=(40, 2100), platform=cuda).of("attention_decode"):
        with kernels.record() as launches:
            assert bench_ops.compare(case) < 2e-6, case.shape
            chain(case.ours, 2)(*case.ours.state)
        assert {launch.template["SPLIT"] for launch in launches} == {case.context > 1024}
        assert {launch.op for launch in launches} == {"attention_decode"}
        assert not mx.any(launches[0].inputs["tickets"])
    with kernels.record() as launches:
        (embed,) = cases_of(platform=cuda).of("embed")
        assert bench_ops.compare(embed) < 2e-6
    assert launches[0].outputs["tickets"].tolist() == [0] * 16


@pytest.mark.parametrize("name", VARIANTS)
def test_both_sides_compute_the_same(name):
    changes, bits, group_size, rows = VARIANTS[name]
    cases = cases_of({**FIX_A, **changes}, bits, group_size, rows, contexts=(7, 40))
    for op in OPS:
        for case in cases.of(op):
            assert bench_ops.compare(case) < 2e-6, case.shape
            # The second launch of a chain: other copies of the same, the first result as input.
            for side in (case.ours, case.stock):
                result = chain(side, 2)(*side.state)[0]
                assert mx.all(mx.isfinite(result.astype(mx.float32))).item(), op


@pytest.mark.parametrize("rows", [1, 2])
def test_both_sides_can_be_compiled(rows, tmp_path):
    """Metal's kernels cannot run here, but be traced, for a file; the stock side runs too."""
    model = build_model(dict(FIX_A), weights_of(FIX_A), lazy=True)
    metal = Platform(M1.chip, "metal")
    cases = Cases(model, metal, rows, [7])
    sides = {op: case.ours for op in OPS for case in cases.of(op)}
    sides["floor"] = bench_ops_timing.floor(metal)
    for op, side in sides.items():
        with kernels.record() as launches:
            mx.export_function(str(tmp_path / "chain"), chain(side, 3), *side.state)
        made = [launch.op for launch in launches]
        assert made.count(op) == 3, made
        assert set(made) <= {op, "argmax_combine"}
    for op in OPS:
        (case,) = cases.of(op)
        fused = mx.compile(chain(case.stock, 3))(*case.stock.state)
        for array, right in zip(fused, chain(case.stock, 3)(*case.stock.state), strict=True):
            np.testing.assert_allclose(array, right, rtol=1e-5, atol=1e-5, err_msg=op)


def test_the_argmax_is_the_stock_one():
    case = case_of("rms_lm_head_argmax", rows=4)
    (token, _), (right, logits) = (s.step(0, *s.state) for s in (case.ours, case.stock))
    assert token.tolist() == right[0].tolist() == np.argmax(np.array(logits[0]), -1).tolist()


def test_the_stock_side_of_the_layer_is_mlx_lms(monkeypatch):
    """Its queries, keys and values at the position that the case writes, and its MLP."""
    weights = weights_of(FIX_A)
    layer = stock_model(FIX_A, dict(weights)).model.layers[0]
    case = case_of("rms_qkv_rope_append", weights=weights, rows=2)
    x = case.stock.state[0]
    seen = []
    monkeypatch.setattr(
        llama,
        "scaled_dot_product_attention",
        lambda queries, *rest, **named: (seen.append(queries), queries)[1],
    )
    cache = KVCache()
    cache.update_and_fetch(*[mx.zeros((1, 2, SLOT, 16))] * 2)
    layer.self_attn(layer.input_layernorm(x), cache=cache)
    queries, keys, values = case.stock.step(0, *case.stock.state)
    np.testing.assert_array_equal(queries, seen[0].transpose(0, 2, 1, 3))
    for ours, theirs in ((keys, cache.keys), (values, cache.values)):
        written = slice(SLOT, SLOT + 2)
        assert mx.abs(theirs[..., written, :]).min().item() > 0
        np.testing.assert_array_equal(ours[..., written, :], theirs[..., written, :])

    gate_up, down = (case_of(op, weights=weights) for op in ("rms_gate_up_swiglu", "down_add"))
    x = gate_up.stock.state[0]
    (activated,) = gate_up.stock.step(0, x)
    # The residual of the case itself is what a projection of nothing leaves.
    (residual,) = down.stock.step(0, mx.zeros((1, 1, 128)))
    (y,) = down.stock.step(0, activated)
    right = layer.mlp(layer.post_attention_layernorm(x))
    np.testing.assert_allclose((y - residual)[:1], right, atol=1e-6)


def test_a_kernel_that_is_wrong_is_not_timed(plant):
    plant("embed", "tokens[row]", "tokens[0]")
    # How far other rows of the table are from the right ones depends on the tokens.
    mx.random.seed(0)
    with pytest.raises(HuskyError, match=r"embed 96x64: the kernel's result differs .* 1"):
        bench_ops.compare(case_of("embed", rows=4))


def test_a_result_that_is_no_number_is_an_error():
    case = case_of("o_proj_add")
    nan = Side(lambda number, x: (x * float("nan"),), case.ours.state)
    with pytest.raises(HuskyError, match="differs from MLX's by nan"):
        bench_ops.compare(replace(case, ours=nan))


def test_launches_and_copies_by_hand(monkeypatch):
    monkeypatch.setattr(bench_ops_timing, "SHORT", 8)
    monkeypatch.setattr(bench_ops_timing, "MORE", (8, 64))
    # Llama-3.2-1B's o_proj at 4 bit: each of 72 launches has a copy of its own.
    assert (bench_ops_timing.launches_of(2_359_296), copies_of(2_359_296)) == (72, 72)
    # 4 GB are 100 launches of 40 MB, 13 copies of which pass 512 MB.
    assert (bench_ops_timing.launches_of(40_000_000), copies_of(40_000_000)) == (72, 13)
    # 4 GB are 13 launches of 295 MB.
    assert (bench_ops_timing.launches_of(295_000_000), copies_of(295_000_000)) == (21, 2)
    assert (bench_ops_timing.launches_of(1_050_000_000), copies_of(1_050_000_000)) == (16, 1)


def address(array):
    return np.frombuffer(array.view(mx.uint8), np.uint8).__array_interface__["data"][0]


@pytest.mark.parametrize("bits", [4, 16])
def test_copies_have_memory_of_their_own_and_leave_the_model_alone(bits):
    cases = cases_of(bits=bits)
    copies = cases._copies
    template = copies.model.layers[0]
    before = {id(value) for value in template.self_attn.o_proj.parameters().values()}
    layers, made = copies.layers(template, "o_proj", 3)
    assert len(layers) == len(made.layers) == 3
    (original,) = projections(template, "o_proj")
    assert {id(value) for value in original.parameters().values()} == before
    stored = [original.weight, *(projections(layer, "o_proj")[0].weight for layer in layers)]
    assert len(set(map(address, stored))) == 4
    for weight in stored[1:]:
        assert mx.array_equal(weight, original.weight)
    assert len({address(layer.o_proj.constants) for layer in made.layers}) == 3


def test_each_format_among_the_layers_is_a_case():
    weights = mlx_weights(FIX_A)
    four, eight = quantize_weights(weights, 4, 32), quantize_weights(weights, 8, 32)
    mixed = {**eight, **{name: four[name] for name in four if ".layers.1." in name}}
    cases = cases_of(weights=mixed)
    found = [case.weights for case in cases.of("o_proj_add")]
    assert found == ["8 bit g32 float32", "4 bit g32 float32"]
    # Within a group, no kernel takes them.
    name = "model.layers.0.self_attn.k_proj"
    parts = {f"{name}.{part}" for part in ("weight", "scales", "biases")}
    mixed |= {part: four[part] for part in parts}
    with pytest.raises(HuskyError, match=r"nothing to time: layers\.0\.qkv: no kernel for stored"):
        list(cases_of(weights=mixed).of("rms_qkv_rope_append"))


def test_the_next_input_is_the_result_itself_where_it_is_enough():
    x, result = mx.zeros((2, 3)), mx.arange(12.0).reshape(3, 4)
    assert following(x, result).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert address(following(x, result)) == address(result)
    ids = mx.array([5, 9], mx.uint32)
    after = following(ids, result)
    assert (after.tolist(), after.dtype) == ([5, 9], mx.uint32)
    assert following(x, mx.ones((5,))).tolist() == x.tolist()


def test_a_chain_hands_each_result_and_the_rest_of_the_state_on():
    numbers = []

    def step(number, x, total):
        numbers.append(number)
        return x * 2, total + number, mx.array(-1.0)

    result, total = chain(Side(step, ()), 4)(mx.ones((3,)), mx.array(10.0))
    assert numbers == [0, 1, 2, 3]
    assert (result.tolist(), total.item()) == ([16.0] * 3, 16.0)


class FakeWatch:
    """Says what each run takes: 7 ms of copying, 1 ms to start, 5 us a launch."""

    def __init__(self, launch=5e-6):
        self.launch, self.waits = launch, []

    def passes(self, seconds):
        self.waits.append(seconds)
        return 3

    def seconds(self, run, passes):
        assert passes == 3
        return 0.007 + 0.001 + self.launch * run()[0].item()


def counting():
    return Side(lambda number, x: (x + 1,), (mx.array(0.0),))


def test_microseconds_are_the_slope_between_two_chains(monkeypatch):
    monkeypatch.setattr(bench_ops_timing, "SHORT", 8)
    watch = FakeWatch()
    timed = Chain("x", counting(), 24, watch, compiled=True)
    assert timed.microseconds() == pytest.approx(5.0)
    with pytest.raises(HuskyError, match=r"^x: more launches took .* is the machine busy\?"):
        Chain("x", counting(), 24, FakeWatch(0.0), compiled=True).microseconds()


class Clock:
    """Moved by the runs only."""

    now = 0.0

    def perf_counter(self):
        return self.now


def test_the_host_is_kept_busy_half_again_as_long_as_it_needs(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(bench_ops_timing, "time", clock)

    def step(number, x):
        clock.now += 2e-6  # of the host, for each launch
        return (x + 1,)

    watch = FakeWatch()
    timed = Chain("x", Side(step, (mx.array(0.0),)), 30, watch, compiled=False)
    assert watch.waits == [pytest.approx(1.5 * 30 * 2e-6)]
    assert timed.host_microseconds() == pytest.approx(2.0)


def test_the_copy_counts_what_it_reads_and_writes(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(bench_ops_timing, "time", clock)
    copied = mx.abs

    def abs_(x):
        clock.now += 1e-3
        return copied(x)

    monkeypatch.setattr(bench_ops_timing.mx, "abs", abs_)
    watch = Stopwatch()
    assert watch.copy_bandwidth() == pytest.approx(2 * (1 << 16) / 1e-3 / 1e9)
    assert watch.passes(0.0) == 1
    assert watch.passes(2.5e-3) == 3


def test_the_floor_is_a_launch_that_copies():
    side = bench_ops_timing.floor(M1)
    with kernels.record() as launches:
        result, *rest = chain(side, 2)(*side.state)
    assert result.tolist() == list(range(32)) and not rest
    assert [launch.op for launch in launches] == ["floor", "floor"]


def test_derived_figures_by_hand():
    trial = {"us": 20.0, "stock_us": 50.0, "copy_gb_s": 400.0}
    # 2 MB in 20 us are 100 GB/s.
    assert bench_ops.derived(trial, 2_000_000) == {
        "gb_s": 100.0,
        "percent_of_copy": 25.0,
        "stock_ratio": 2.5,
    }


@pytest.fixture
def on_emulator(monkeypatch):
    monkeypatch.setattr(graphs, "kernel_platform", lambda: M1)
    # The emulator's launches take what the machine gives them: any order of times may come.
    monkeypatch.setattr(
        bench_ops_timing, "_difference", lambda longer, shorter, what: abs(longer - shorter) + 1e-9
    )


def test_a_whole_run_is_pure_json_with_every_case(on_emulator, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HUSKY_KERNELS", "1")
    folder = write_folder(tmp_path / "model", FIX_A, weights_of(FIX_A))
    words = ["--model", str(folder), "--context", "7,40", "--rows", "2", "-n", "2", "--json"]
    assert cli.main(["bench", "ops", *words]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["schema"], result["benchmark"], result["target"]) == (2, "ops", "cpu")
    assert result["chip"]["name"] == "m1"
    assert result["environment"]["HUSKY_KERNELS"] == "1"
    assert {"mlx", "mlx-lm", "husky_mlx"} <= set(result["versions"])
    assert result["settings"]["model"] == str(folder)
    assert (result["settings"]["rows"], result["settings"]["context"]) == (2, [7, 40])
    ran = [(case["op"], case["context"]) for case in result["cases"]]
    wanted = [(op, c) for op in OPS for c in ((7, 40) if op == "attention_decode" else (None,))]
    assert ran == wanted
    for case in result["cases"]:
        assert len(case["trials"]) == 2 and case["difference"] < 2e-6
        assert {"us", "stock_us", "floor_us", "host_us"} <= set(case["figures"])
        for trial in case["trials"]:
            assert trial["gb_s"] == pytest.approx(case["bytes"] / trial["us"] / 1e3)
        assert f"{case['op']} {case['shape']}: " in err


def test_a_shape_takes_bits_groups_and_dtype(on_emulator, monkeypatch, capsys):
    tiny = {**FIX_A, "rope_scaling": None}
    monkeypatch.setattr(bench_ops.shapes, "SHAPES", ("tiny",))
    monkeypatch.setattr(bench_ops.shapes, "shape_config", lambda name: copy.deepcopy(tiny))
    words = "--model tiny --bits 8 --group-size 64 --dtype float32 --ops down_add,embed -n 1"
    assert cli.main(["bench", "ops", *words.split()]) == 0
    table = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "64x128  8 bit g64 float32" in lines["down_add"]
    assert lines["embed +"].split()[2:4] == ["96x64", "8"]
    assert "+ with one small launch more" in table
    assert "the spread is unknown" in table and "\x1b" not in table


def figure(median, spread=0.02):
    low, high = median * (1 - spread / 2), median * (1 + spread / 2)
    noisy = spread > 0.1
    return {"median": median, "min": low, "max": high, "spread": spread, "noisy": noisy}


def test_table_by_hand(capsys):
    figures = {
        "us": figure(4.125),
        "stock_us": figure(12.0, 0.5),
        "gb_s": figure(572.4),
        "percent_of_copy": figure(16.4),
        "stock_ratio": figure(2.909),
        "floor_us": figure(1.9),
        "host_us": figure(4.5),
    }
    case = {
        "op": "o_proj_add",
        "shape": "2048x2048",
        "weights": "4 bit g64 bfloat16",
        "ordered": False,
        "figures": figures,
        "trials": [{"copy_gb_s": 3500.0}, {"copy_gb_s": 3510.0}],
    }
    bench_ops.print_table(
        {
            "target": "cuda",
            "machine": {"device": "GPU", "cores": 8, "os": "Linux"},
            "versions": {"mlx": "1"},
            "settings": {"model": "llama-3.2-1b", "rows": 1, "rounds": 2},
            "cases": [case],
            "noisy": ["o_proj_add 2048x2048 stock_us"],
        }
    )
    out = capsys.readouterr().out
    assert out.startswith("llama-3.2-1b: 1 row, 2 rounds\ncuda: GPU, 8 cores, Linux\n")
    assert "MLX's copy: 3505.0 (3500.0 to 3510.0) GB/s" in out
    (row,) = [line for line in out.splitlines() if line.startswith("o_proj_add")]
    cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
    assert cells == [
        *("o_proj_add", "2048x2048", "4 bit g64 bfloat16"),
        *("4.12 (4.08 to 4.17)", "572", "16", "12.00 (9.00 to 15.00) !", "2.91", "1.90", "4.50 >"),
    ]
    assert "> the host needs longer than the GPU" in out
    assert "+ with" not in out
    assert "\n1 figure spreads over 10 %, marked by !: is the machine busy?\n" in out


def test_on_the_cpu_there_is_nothing_to_time(monkeypatch, capsys):
    monkeypatch.setattr(graphs, "kernel_platform", lambda: None)
    assert cli.main(["bench", "ops"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "default device is the CPU, where no kernels run: there is nothing to time" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ops", "embed,norm"], "unknown norm: expected names out of embed, "),
        (["--context", "1024,0"], "expected a number from 1 up, found 0"),
        (["--rows", "5"], "invalid choice: 5"),
        (["--bits", "5"], "invalid choice: 5"),
        (["-n", "0"], "expected a number from 1 up"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words, says, capsys):
    assert cli.main(["bench", "ops", *words]) == 2
    assert says in capsys.readouterr().err


def test_flags_that_would_be_ignored_are_refused(on_emulator, tmp_path, capsys):
    folder = write_folder(tmp_path / "model", FIX_A, weights_of(FIX_A))
    assert cli.main(["bench", "ops", "--model", str(folder), "--bits", "8"]) == 2
    assert "--bits needs a shape as --model" in capsys.readouterr().err


def test_help_tells_the_two_benchmarks_apart(capsys):
    assert cli.main(["--help"]) == 0
    assert "bench ops" in capsys.readouterr().out
    assert cli.main(["bench", "--help"]) == 0
    assert "husky bench ops times kernel by kernel" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["bench", "ops", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: husky bench ops ") and "--context" in text
    parser = argparse.ArgumentParser()
    bench_ops.add_arguments(parser)
    assert parser.parse_args([]).ops == list(bench_ops_cases.OPS)
