"""``husky bench``: statistics, the order of trials, counts, failures, pure JSON, random weights."""

import argparse
import gc
import hashlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from test_gguf_tokenizer import byte_level_file

from husky_mlx import (
    bandwidth,
    bench,
    bench_engine,
    bench_llama_cpp,
    bench_plot,
    bench_report,
    bench_run,
    bench_table,
    bench_trial,
    gguf,
    loading,
    shapes,
)
from husky_mlx.errors import HuskyError

ROOT = Path(__file__).resolve().parent.parent
TINY = shapes.llama_config(*(64, 3, 4, 2, 16, 96, 160), tied=True, context=512, rope_theta=10000.0)
SETTINGS = {
    "model": "tiny",
    "config": TINY,
    "bits": 4,
    "group_size": 32,
    "dtype": "bfloat16",
    "prompt_tokens": [5],
    "generation_tokens": [4],
    "batch": [1],
    "prompt_file": None,
    "num_trials": 3,
    "temp": 0.0,
    "top_p": 1.0,
    "seed": 0,
    "debug": False,
}
# What a process is told besides the settings, by its engine.
AS_STORED = {"unquantized": ""}
# An engine that speaks the protocol and logs every trial. Its n-th one takes n ms.
FAKE = """
import json, os, sys, time
name, fault, log = sys.argv[1:]
def reply(message):
    print(json.dumps(message), flush=True)
def note(message):
    with open(log, "a") as file:
        file.write(json.dumps({"name": name, "pid": os.getpid(), **message}) + "\\n")
specification = json.loads(input())
note({"specification": specification})
if fault == "load":
    reply({"error": "ValueError: no such model"})
    sys.exit(1)
reply({"target": "cpu", "versions": {"mlx": "1"},
       "machine": {"device": "d", "cores": 2, "os": "o", "memory_mb": 8000.0,
                   "available_mb": 4000.0, "power": "mains"},
       "model_class": "M", "plan": "p", "dtypes": ["float32"], "active_mb": 1.0, "load_s": 0.5,
       "quantized": fault != "dense", "gguf": fault == "gguf",
       "values": 1_000_000, "read_bytes": 100_000_000,
       "memory_limit_mb": 4.0 if fault == "small" else 100.0, "cache_bytes": 1_000_000,
       "vocab_size": 50 if name == "husky" else 40})
number = 0
for line in sys.stdin:
    request = json.loads(line)
    if "tokenize" in request:
        note(request)
        reply({"tokens": list(range(7, 7 + len(open(request["tokenize"]).read().split())))})
        continue
    number += 1
    note({"request": request})
    if fault == "hang":
        time.sleep(60)
    if fault == "die":
        os._exit(7)
    if fault == "trial" and number == 2:
        reply({"error": "RuntimeError: out of luck"})
        sys.exit(1)
    reply({"first_token_ms": float(number), "prefill_tps": 2.0, "decode_tps": 10.0 * number,
           "total_s": 1.0, "peak_mb": 5.0, "rss_mb": 6.0, "calls": {},
           "prompt_tokens": sum(map(len, request["prompts"])),
           "generation_tokens": len(request["prompts"]) * request["generation_tokens"]
           - (fault == "short")})
"""


@pytest.fixture
def fake_engines(tmp_path, monkeypatch):
    """Replace every engine by FAKE; ``fake_engines(mlx_lm="die")`` sets faults, gives the log."""
    script, log = tmp_path / "fake.py", tmp_path / "log"
    script.write_text(FAKE)
    monkeypatch.setattr(bench_run, "copy_bandwidth_apart", lambda: 20.0)

    def install(**faults):
        monkeypatch.setattr(
            bench_run,
            "engine_command",
            lambda name: [
                *(sys.executable, str(script), name),
                *(faults.get(name.replace("-", "_"), "none"), str(log)),
            ],
        )
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return install


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def trial(**figures):
    return dict.fromkeys(bench_report.FIGURES, 1.0) | figures


def test_summary_by_hand():
    assert bench_report.summarise([10.0, 12.0, 11.0]) == {
        "median": 11.0,
        "min": 10.0,
        "max": 12.0,
        "spread": pytest.approx(2 / 11),
        "noisy": True,
    }
    even = bench_report.summarise([100.0, 104.0, 101.0, 102.0])
    assert even["median"] == 101.5
    assert even["spread"] == pytest.approx(4 / 101.5)
    assert even["noisy"] is False


def test_ratio_is_the_median_over_rounds_not_the_ratio_of_medians():
    ours = [trial(decode_tps=value) for value in (10.0, 40.0, 30.0)]
    theirs = [trial(decode_tps=value) for value in (5.0, 10.0, 30.0)]
    ratio = bench_report.pair_ratios(ours, theirs)["decode_tps"]
    assert (ratio["median"], ratio["min"], ratio["max"]) == (2.0, 1.0, 4.0)
    assert np.median([10, 40, 30]) / np.median([5, 10, 30]) == 3.0


def test_trials_interleave_on_equal_tokens_and_the_warm_up_is_apart_C126(fake_engines):
    log = fake_engines()
    result = bench_run.compare(["husky", "mlx-lm"], SETTINGS)
    requests = [entry for entry in log() if "request" in entry]
    order = " ".join(entry["name"] for entry in requests)
    assert order == "mlx-lm husky mlx-lm husky husky mlx-lm mlx-lm husky"
    (case,) = result["cases"]
    assert case["order"] == [["mlx-lm", "husky"], ["husky", "mlx-lm"], ["mlx-lm", "husky"]]

    prompts = {tuple(*entry["request"]["prompts"]) for entry in requests}
    assert len(prompts) == 1
    assert len(prompt := prompts.pop()) == 5
    assert all(0 <= token < 40 for token in prompt)

    assert result["engines"]["husky"]["load_s"] == 0.5
    ours = case["engines"]["husky"]
    assert ours["cold_first_token_ms"] == 1.0
    assert [done["first_token_ms"] for done in ours["trials"]] == [2.0, 3.0, 4.0]
    assert ours["figures"]["first_token_ms"]["median"] == 3.0
    assert (ours["prompt_tokens"], ours["generation_tokens"]) == (5, 4)
    assert case["ratios"]["husky / mlx-lm"]["decode_tps"]["median"] == 1.0
    changing = ("first_token_ms", "decode_tps", "percent_of_copy")
    assert set(case["noisy"]) == {
        f"{name} {key}" for name in ("husky", "mlx-lm") for key in changing
    }


def test_default_lengths_are_those_of_the_target_and_printed(fake_engines, capsys):
    log = fake_engines()
    settings = SETTINGS | dict.fromkeys(("prompt_tokens", "generation_tokens", "num_trials"))
    result = bench_run.compare(["mlx-lm"], settings)
    assert "-p 64 -g 32 -b 1 -n 3" in capsys.readouterr().err
    assert len(log()[-1]["request"]["prompts"][0]) == 64
    assert log()[-1]["request"]["generation_tokens"] == 32
    assert result["settings"]["prompt_tokens"] == [64]
    assert result["cases"][0]["ratios"] == {}


def test_engines_get_their_backend_loop_and_environment(fake_engines, monkeypatch):
    log = fake_engines()
    names = ["husky", "mlx-lm", "mlx-lm-bf16", "mlx-lm-fp16", "husky-eager", "mlx-lm-loop"]
    bench_run.compare(names, SETTINGS | {"num_trials": 1})
    keys = ("backend", "loop", "unquantized")
    told = {
        entry["name"]: tuple(entry["specification"][key] for key in keys)
        for entry in log()
        if "specification" in entry
    }
    assert told == {
        "husky": ("husky", "husky", ""),
        "mlx-lm": ("mlx", "mlx-lm", ""),
        "mlx-lm-bf16": ("mlx", "mlx-lm", "bfloat16"),
        "mlx-lm-fp16": ("mlx", "mlx-lm", "float16"),
        "husky-eager": ("husky", "husky", ""),
        "mlx-lm-loop": ("husky", "mlx-lm", ""),
    }
    monkeypatch.setattr(
        bench_run,
        "engine_command",
        lambda name: [
            sys.executable,
            "-c",
            "import json, os; print(json.dumps({'error': os.environ.get('HUSKY_EAGER', 'unset')}))",
        ],
    )
    monkeypatch.delenv("HUSKY_EAGER", raising=False)
    for name, value in (("husky", "unset"), ("husky-eager", "1")):
        with pytest.raises(HuskyError, match=f"engine {name} failed: {value}"):
            bench_run.compare([name], SETTINGS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("load", "engine mlx-lm failed: ValueError: no such model"),
        ("trial", "engine mlx-lm failed: RuntimeError: out of luck"),
        ("die", "engine mlx-lm died with exit code 7"),
        ("short", "engine mlx-lm read 5 and generated 3 tokens, asked were 5 and 4"),
    ],
)
def test_a_failing_engine_is_named_and_the_others_ended(
    fake_engines, monkeypatch, capsys, fault, message
):
    log = fake_engines(mlx_lm=fault)
    command = "bench --shape smollm2-135m -p 5 -g 4 -n 3 --json --engines husky,mlx-lm"
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    assert bench.main() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"error: {message}" in captured.err
    pids = {entry["pid"] for entry in log()}
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_interrupt_ends_the_engines(tmp_path):
    script, log = tmp_path / "fake.py", tmp_path / "log"
    script.write_text(FAKE)
    driver = (
        "import sys; from husky_mlx import bench, bench_run; "
        f"bench_run.engine_command = lambda name: [sys.executable, {str(script)!r}, name, 'hang', "
        f"{str(log)!r}]; sys.exit(bench.main())"
    )
    command = [sys.executable, "-c", driver, "--shape", "smollm2-135m", "-p", "5", "-g", "4"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (log.exists() and '"request"' in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in errors
    pids = {json.loads(line)["pid"] for line in log.read_text().splitlines()}
    assert len(pids) == 3  # llama.cpp is left out
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    "words",
    [
        "--engines husky,unknown",
        "--engines husky,husky",
        "-g 1",
        "-n 0",
        "-p x",
        "--bits 5",
        "--shape gpt-2",
        "--shape mistral-7b --model folder",
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words, capsys):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args(words.split())
    assert exit_.value.code == 2


def test_flags_that_would_be_ignored_are_refused():
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(HuskyError, match="--bits needs --shape"):
        bench.run(parser.parse_args(["--bits", "8"]))
    args = parser.parse_args([])
    args.backend = "mlx"
    with pytest.raises(HuskyError, match="--backend does not apply"):
        bench.run(args)


TABLE = "bench --shape smollm2-135m -p 5 -g 4 --engines husky,mlx-lm"


def test_table_has_every_figure_and_marks_noise(fake_engines, monkeypatch, capsys):
    fake_engines()
    monkeypatch.setattr(sys, "argv", shlex.split(TABLE + " -n 3"))
    assert bench.main() == 0
    table = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "3.0 (2.0 to 4.0) !" in lines["first token, ms"]
    assert lines["decode, tok/s"].count("30.0 (20.0 to 40.0) !") == 2
    assert lines["peak resident, MB"].split()[3:5] == ["6.0", "6.0"]
    assert lines["peak resident, MB"].split()[-1] == "1.000"
    assert lines["generated tokens"].split()[2:] == ["4", "4"]
    assert "spread over 10 %: mlx-lm first_token_ms" in table
    assert "\x1b" not in table


def test_one_round_has_no_spread(fake_engines, monkeypatch, capsys):
    assert bench_report.summarise([2.0])["spread"] is None
    assert bench_report.summarise([2.0])["noisy"] is False
    fake_engines()
    monkeypatch.setattr(sys, "argv", shlex.split(TABLE + " -n 1"))
    assert bench.main() == 0
    table = capsys.readouterr().out
    assert "1 round, greedy" in table and "the spread is unknown" in table
    assert " to " not in table and "!" not in table


def test_the_run_is_recorded(monkeypatch):
    monkeypatch.setenv("HUSKY_EAGER", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "husky_mlx", "bench", "-o", "a b.json"])
    record = bench_report.describe_run()
    assert record["schema"] == 2
    assert record["environment"]["HUSKY_EAGER"] == "1"
    assert "secret" not in json.dumps(record)
    assert record["command"] == "python -m husky_mlx bench -o 'a b.json'"


class Clock:
    """A clock that only the loop below moves."""

    now = 100.0

    def perf_counter(self):
        return self.now


class Response:
    prompt_tokens = 3


def test_figures_of_a_trial_by_a_known_clock_C126(monkeypatch):
    clock = Clock()
    held = []

    def loop(model, tokenizer, prompt, max_tokens):
        clock.now += 2.0
        held.append(mx.ones((1000, 1000)))
        mx.eval(held)
        yield Response()
        for _ in range(max_tokens - 1):
            clock.now += 0.25
            yield Response()
        held.clear()
        clock.now += 1.0

    monkeypatch.setattr(bench_trial, "time", clock)
    monkeypatch.setattr(bench_trial, "stream_generate", loop)
    earlier = mx.ones((5000, 5000))
    mx.eval(earlier)
    del earlier
    # What earlier tests left in cycles would be freed by the trial itself.
    gc.collect()
    before = mx.get_active_memory() / 1e6
    figures = bench_trial.run_trial(
        nn.Linear(1, 1),
        None,
        {"prompts": [[1, 2, 3]], "generation_tokens": 5},
        SETTINGS | {"loop": "husky"},
    )
    assert figures["first_token_ms"] == 2000.0
    assert figures["prefill_tps"] == 1.5
    assert figures["decode_tps"] == 4.0
    assert figures["total_s"] == 4.0
    assert figures["prompt_tokens"] == 3
    assert figures["generation_tokens"] == 5
    assert 4.0 <= figures["peak_mb"] - before < 20.0


def serve(lines, **changes):
    """The replies of an engine in this process to a specification and further lines."""
    replies = []
    feed = iter([json.dumps(SETTINGS | AS_STORED | changes), *map(json.dumps, lines)])

    class Requests:
        def readline(self):
            return next(feed)

        def __iter__(self):
            return feed

    return bench_engine.serve(Requests(), replies.append), replies


REQUEST = {"prompts": [[3, 1, 4, 1, 5]], "generation_tokens": 6}


MEASURED = [key for key in bench_report.FIGURES if key not in ("token_mb", "percent_of_copy")]


@pytest.mark.parametrize("bits", [4, 16])
def test_engine_serves_trials_of_the_asked_model_and_length(bits):
    for backend, loop, package in (
        ("husky", "husky", "husky_mlx."),
        ("mlx", "mlx-lm", "mlx_lm.models.llama."),
        ("husky", "mlx-lm", "husky_mlx."),
    ):
        code, (loaded, *trials) = serve([REQUEST] * 2, backend=backend, loop=loop, bits=bits)
        assert code == 0
        assert loaded["model_class"].startswith(package)
        assert loaded["vocab_size"] == 160
        assert len(trials) == 2
        for done in trials:
            assert (done["prompt_tokens"], done["generation_tokens"]) == (5, 6)
            assert all(math.isfinite(done[key]) and done[key] > 0 for key in MEASURED)
    if loaded["target"] == "cpu":
        _, (stock,) = serve([], backend="mlx", loop="mlx-lm", bits=bits)
        assert stock["dtypes"] == ["float32"]


def numpy_values(weights, stem, bits):
    """The float32 values of MLX's affine layout: 32 / bits quants a word from the low end up."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    words = np.array(weights[f"{stem}.weight"])
    quants = (words[..., None] >> shifts & (2**bits - 1)).reshape(len(words), -1)
    scales, biases = (
        np.array(weights[f"{stem}.{part}"].astype(mx.float32)) for part in ("scales", "biases")
    )
    group = quants.shape[1] // scales.shape[1]
    return quants * scales.repeat(group, axis=1) + biases.repeat(group, axis=1)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_16_bit_engine_holds_the_same_values_without_the_quantized_ones(name):
    weights = shapes.random_weights(TINY, 4, 32, mx.bfloat16, 0)
    config = TINY | {"quantization": {"group_size": 32, "bits": 4}}
    model = loading.build_model(config, dict(weights), backend="mlx")
    bench_engine.unquantize(model, getattr(mx, name))
    held = dict(tree_flatten(model.parameters()))
    assert set(held) == set(shapes.parameter_shapes(TINY))
    assert {value.dtype for value in held.values()} == {getattr(mx, name)}
    for stem in ("model.embed_tokens", "model.layers.2.mlp.down_proj"):
        found = np.array(held[f"{stem}.weight"].astype(mx.float32))
        # bfloat16 keeps 8 bits: half a unit in the last place, here of the largest value.
        np.testing.assert_allclose(found, numpy_values(weights, stem, 4), atol=np.ptp(found) / 256)


@pytest.mark.parametrize("bits", [4, 16])
def test_a_16_bit_engine_runs_in_16_bits_on_the_cpu_too(bits):
    told = {"backend": "mlx", "loop": "mlx-lm", "unquantized": "bfloat16", "bits": bits}
    code, (loaded, done) = serve([REQUEST], **told)
    assert code == 0
    assert loaded["model_class"].startswith("mlx_lm.models.llama.")
    assert loaded["dtypes"] == ["bfloat16"]
    assert (done["prompt_tokens"], done["generation_tokens"]) == (5, 6)


def test_engine_samples_when_asked():
    code, (_, done) = serve([REQUEST], backend="mlx", loop="mlx-lm", temp=0.7, top_p=0.9)
    assert code == 0
    assert done["generation_tokens"] == 6


@pytest.fixture
def folder(tmp_path):
    """A tiny 4-bit checkpoint with a tokenizer, as on disk."""
    weights = shapes.random_weights(TINY, 4, 32, mx.float16, 0)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "mlx"})
    config = TINY | {
        "quantization": {"group_size": 32, "bits": 4},
        "eos_token_id": list(range(160)),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    bench_engine.shape_tokenizer(160)._tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_engines_take_a_folder_and_do_not_stop_at_its_end_token(folder):
    request = {"prompts": [[5, 9, 2]], "generation_tokens": 40}
    for backend, package in (("husky", "husky_mlx."), ("mlx", "mlx_lm.models.llama.")):
        code, (loaded, done) = serve(
            [request],
            backend=backend,
            loop=backend.replace("mlx", "mlx-lm"),
            config=None,
            model=folder,
        )
        assert code == 0
        assert loaded["model_class"].startswith(package)
        assert done["generation_tokens"] == 40


def test_a_cold_first_token_is_one(folder, monkeypatch):
    """A load that ran prompts would hide what mlx-lm's first token has to wait for."""
    asked = []

    def load(name, **options):
        asked.append(options["warm"])
        return loading.load(name, **options)

    monkeypatch.setattr(bench_engine, "load", load)
    serve([], backend="husky", loop="husky", config=None, model=folder)
    assert asked == [False]


def test_our_model_is_never_timed_as_mlx_lms(folder, monkeypatch):
    ours = loading.load(folder, backend="husky", return_config=True)
    monkeypatch.setattr(bench_engine.mlx_lm, "load", lambda *names, **options: ours)
    code, replies = serve([], backend="mlx", loop="mlx-lm", config=None, model=folder)
    assert code == 1
    assert "expected a model of backend mlx, found husky_mlx" in replies[-1]["error"]


def test_engine_reports_its_failure():
    code, replies = serve([], backend="husky", loop="husky", config=None, model="/no/such/folder")
    assert code == 1
    assert "/no/such/folder" in replies[-1]["error"]


def test_command_end_to_end_prints_only_json(tmp_path):
    """Real engines of a tiny shape, one of which prints where it should not."""
    engine = (
        "import os, sys; from husky_mlx import bench_engine as engine; load = engine.load_model\n"
        "def noisy(specification):\n"
        "    print('noise'); os.write(1, b'more noise'); return load(specification)\n"
        "engine.load_model = noisy; sys.exit(engine.main())"
    )
    driver = (
        "import sys; from husky_mlx import bench, bench_run\n"
        f"bench.shape_config = lambda name: {TINY!r}\n"
        f"bench_run.engine_command = lambda name: [sys.executable, '-c', {engine!r}]\n"
        "sys.exit(bench.main())"
    )
    words = "--shape smollm2-135m --group-size 32 -p 7 -g 4 -n 2 --json --engines husky,mlx-lm"
    done = subprocess.run(
        [sys.executable, "-c", driver, *words.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "more noise" in done.stderr
    assert list(result["engines"]) == ["mlx-lm", "husky"]
    (case,) = result["cases"]
    for engine in case["engines"].values():
        assert (engine["prompt_tokens"], engine["generation_tokens"]) == (7, 4)
        assert len(engine["trials"]) == 2
    assert set(case["ratios"]["husky / mlx-lm"]) == set(bench_report.FIGURES)
    assert {"husky_mlx", "mlx", "mlx-lm"} <= set(result["versions"])
    assert result["machine"]["python"].startswith("3.")
    assert "--shape smollm2-135m" in result["command"]


# Totals published with the checkpoints' safetensors.
PUBLISHED_PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "smollm2-135m": 134_515_008,
}


def stock_model(config):
    return llama.Model(llama.ModelArgs.from_dict(config))


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shapes_are_mlx_lms_and_counts_the_published_ones(name):
    config = shapes.shape_config(name)
    ours = shapes.parameter_shapes(config)
    assert sum(map(math.prod, ours.values())) == PUBLISHED_PARAMETERS[name]
    held = mx.get_active_memory()
    stock = dict(tree_flatten(stock_model(config).parameters()))
    assert {key: value.shape for key, value in stock.items()} == ours
    assert mx.get_active_memory() - held < 1e6


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_load_strictly_into_mlx_lm(bits, tied):
    config = TINY | {"tie_word_embeddings": tied}
    weights = shapes.random_weights(config, bits, 32, mx.float16, 0)
    model = stock_model(config)
    if bits < 16:
        nn.quantize(model, group_size=32, bits=bits)
    model.load_weights(list(weights.items()), strict=True)
    dtypes = {array.dtype for array in weights.values()}
    assert dtypes == ({mx.uint32, mx.float16} if bits < 16 else {mx.float16})


@pytest.mark.parametrize("bits", [4, 8])
def test_random_weights_have_mean_0_and_variance_1_over_inputs(bits):
    weights = shapes.random_weights(TINY | {"vocab_size": 8192}, bits, 32, mx.float32, 0)
    values = numpy_values(weights, "model.embed_tokens", bits)
    assert values.shape == (8192, 64)
    assert abs(values.mean()) < 1e-3
    assert values.var() * 64 == pytest.approx(1.0, rel=0.02)


def digest(seed):
    weights = shapes.random_weights(TINY, 4, 32, mx.float32, seed)
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + np.array(weights[name]).tobytes())
    return total.hexdigest()


def test_random_weights_depend_on_the_seed_alone_across_processes():
    code = "import sys; sys.path.insert(0, 'tests'); import test_bench; print(test_bench.digest(5))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest(5)
    assert digest(6) != digest(5)
    weights = shapes.random_weights(TINY, 4, 32, mx.float32, 5)
    layers = [np.array(weights[f"model.layers.{i}.mlp.up_proj.weight"]) for i in (0, 1)]
    assert not np.array_equal(*layers)


def test_logits_stay_finite_over_hundreds_of_tokens_in_float16():
    config = TINY | {"num_hidden_layers": 12}
    model = stock_model(config)
    model.load_weights(list(shapes.random_weights(config, 16, 32, mx.float16, 0).items()))
    tokens = mx.array(np.random.default_rng(0).integers(160, size=(1, 300)))
    logits = np.array(model(tokens).astype(mx.float32))
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10.0


def test_groups_that_do_not_fit_the_rows_are_refused():
    with pytest.raises(HuskyError, match="row of 576 weights is not a multiple of group_size 128"):
        shapes.random_weights(shapes.shape_config("smollm2-135m"), 4, 128, mx.float16, 0)


def test_the_tokenizer_of_a_shape_takes_any_id_and_never_ends_a_reply():
    tokenizer = bench_engine.shape_tokenizer(160)
    assert tokenizer.eos_token_ids == set()
    detokenizer = tokenizer.detokenizer
    for token in (0, 159):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert (detokenizer.tokens, detokenizer.last_segment) == ([0, 159], "")


class FakeServer:
    """What xllamacpp has, as far as the engine uses it."""

    def __init__(self, parameters):
        self.parameters = parameters

    def handle_completions(self, request):
        assert request["cache_prompt"] is False and request["ignore_eos"] is True
        assert request["temperature"] == 0.0
        made = request["n_predict"]
        timings = {"prompt_n": len(request["prompt"]), "prompt_ms": 50.0, "prompt_per_second": 60.0}
        return [{"timings": timings | {"predicted_n": made, "predicted_ms": 80.0}}]


@pytest.fixture
def fake_llama_cpp(monkeypatch):
    def parameters():
        return SimpleNamespace(
            model=SimpleNamespace(),
            cpuparams=SimpleNamespace(),
            cpuparams_batch=SimpleNamespace(),
        )

    module = SimpleNamespace(CommonParams=parameters, Server=FakeServer)
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    monkeypatch.setattr(bench_llama_cpp, "version", lambda name: "1.2")


def llama_cpp_settings(model, **changes):
    return {"model": str(model), "config": None, "temp": 0.0, **changes}


def test_llama_cpp_reads_the_same_file_and_counts_its_own_tokens(fake_llama_cpp, tmp_path):
    path = byte_level_file(tmp_path / "a.gguf", "llama-bpe")
    described, run = bench_llama_cpp.open_engine(llama_cpp_settings(path))
    assert described["vocab_size"] == gguf.read_config(path)["vocab_size"]
    assert described["plan"].startswith("xllamacpp 1.2, ")
    done = run({"prompts": [[1, 2, 3]], "generation_tokens": 5})
    assert (done["prompt_tokens"], done["generation_tokens"]) == (3, 5)
    assert (done["first_token_ms"], done["prefill_tps"], done["decode_tps"]) == (50.0, 60.0, 50.0)
    assert done["peak_mb"] is None


def test_what_llama_cpp_cannot_run_is_refused(fake_llama_cpp, folder, monkeypatch):
    for changes in ({"config": {}}, {"temp": 0.5}):
        with pytest.raises(HuskyError, match=r"takes a \.gguf --model and no sampling"):
            bench_llama_cpp.open_engine(llama_cpp_settings(folder, **changes))
    with pytest.raises(HuskyError, match=r"reads \.gguf files"):
        bench_llama_cpp.open_engine(llama_cpp_settings(folder))
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(HuskyError, match=r"needs xllamacpp: pip install 'husky-mlx\[bench\]'"):
        bench_llama_cpp.open_engine(llama_cpp_settings(folder))


def test_figures_that_an_engine_has_not_are_left_out(capsys):
    """And husky is compared with llama.cpp itself, not only each with mlx-lm."""
    facts = {"model_class": "m", "plan": "p", "dtypes": [], "active_mb": 1.0, "load_s": 1.0}
    facts |= {"read_bytes": None, "cache_bytes": None, "target": "cpu", "versions": {}}
    machine = {"device": "d", "cores": 2, "os": "o", "memory_mb": 1.0, "available_mb": 1.0}
    facts |= {"machine": machine | {"power": "unknown"}}
    more = {"prompt_tokens": 3, "generation_tokens": 5}
    trials = {
        "husky": [trial(decode_tps=8.0, **more)] * 2,
        "llama.cpp": [trial(decode_tps=4.0, peak_mb=None, **more)] * 2,
    }
    loaded = dict.fromkeys(trials, facts)
    cold = {name: done[0] for name, done in trials.items()}
    case = {**more, "batch": 1, "order": [], "cold": cold, "trials": trials}
    case = bench_report.report_case(case, loaded, 10.0)
    assert list(case["ratios"]) == ["husky / llama.cpp"]
    assert case["ratios"]["husky / llama.cpp"]["decode_tps"]["median"] == 2.0
    assert "peak_mb" not in case["ratios"]["husky / llama.cpp"]
    settings = {**SETTINGS, "config": None, "num_trials": 2}
    bench_table.print_table(bench_report.report(settings, loaded, [case], [10.0], 0.0))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("peak MLX memory")]
    assert line.split() == ["peak", "MLX", "memory,", "MB", "1.0"]


def test_columns_are_stock_in_16_bit_stock_ours_and_the_ratio_to_the_same_bits(fake_engines):
    fake_engines()
    names = ["llama.cpp", "husky", "mlx-lm", "mlx-lm-bf16"]
    result = bench_run.compare(names, SETTINGS | {"num_trials": 1})
    (case,) = result["cases"]
    assert list(case["engines"]) == ["mlx-lm-bf16", "mlx-lm", "husky", "llama.cpp"]
    assert next(iter(case["ratios"])) == "husky / mlx-lm"


@pytest.mark.parametrize(
    ("fault", "says"),
    [("small", "all engines together would take 4 MB, 3 are"), ("dense", "are not quantized")],
)
def test_16_bit_is_left_out_where_it_shows_nothing_or_does_not_fit(
    fake_engines, capsys, fault, says
):
    fake_engines(mlx_lm=fault)
    settings = SETTINGS | {"num_trials": 1}
    names = ["mlx-lm-bf16", "mlx-lm", "husky"]
    result = bench_run.compare(names, settings, ["mlx-lm-bf16"])
    assert list(result["engines"]) == ["mlx-lm", "husky"]
    assert says in capsys.readouterr().err
    fake_engines()
    assert len(bench_run.compare(names, settings, ["mlx-lm-bf16"])["engines"]) == 3


@pytest.mark.parametrize(
    ("fault", "changes", "says"),
    [
        ("none", {}, "it compares with the CPU build on .gguf files"),
        ("gguf", {"batch": [1, 2]}, "it runs one greedy sequence"),
        ("gguf", {"temp": 0.5}, "it runs one greedy sequence"),
        ("gguf", {}, None),
    ],
)
def test_llama_cpp_runs_by_itself_where_it_can(
    fake_engines, monkeypatch, capsys, fault, changes, says
):
    monkeypatch.setattr(bench_run.importlib.util, "find_spec", lambda name: name)
    fake_engines(mlx_lm=fault)
    settings = SETTINGS | {"num_trials": 1} | changes
    result = bench_run.compare(["mlx-lm", "llama.cpp"], settings, ["llama.cpp"])
    assert ("llama.cpp" in result["engines"]) == (says is None)
    assert says is None or says in capsys.readouterr().err
    monkeypatch.setattr(bench_run.importlib.util, "find_spec", lambda name: None)
    result = bench_run.compare(["mlx-lm", "llama.cpp"], settings, ["llama.cpp"])
    assert list(result["engines"]) == ["mlx-lm"]
    assert "xllamacpp is not installed" in capsys.readouterr().err


def test_the_ratio_stands_right_behind_ours(fake_engines, monkeypatch, capsys):
    fake_engines()
    words = [*TABLE.split(), "-n", "1", "--markdown"]
    words[words.index("husky,mlx-lm")] = "llama.cpp,husky,mlx-lm,mlx-lm-bf16"
    monkeypatch.setattr(sys, "argv", words)
    assert bench.main() == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("|"))
    assert [name.strip() for name in header.split("|")[2:-1]] == [
        *("mlx-lm-bf16", "mlx-lm", "husky", "husky / mlx-lm", "llama.cpp"),
        *("mlx-lm-bf16 / mlx-lm", "llama.cpp / mlx-lm", "husky / llama.cpp"),
    ]


def test_lengths_and_batches_are_cases_of_their_own(fake_engines):
    log = fake_engines()
    settings = {"prompt_tokens": [5, 9], "generation_tokens": [4], "batch": [1, 3], "num_trials": 1}
    result = bench_run.compare(["husky"], SETTINGS | settings)
    cases = [(case["prompt_tokens"], case["batch"]) for case in result["cases"]]
    assert cases == [(5, 1), (5, 3), (9, 1), (9, 3)]
    shapes_asked = [list(map(len, entry["request"]["prompts"])) for entry in log()[1::2]]
    assert shapes_asked == [[5], [5, 5, 5], [9], [9, 9, 9]]
    last = log()[-1]["request"]["prompts"]
    assert last[0] != last[1]  # other tokens in each row


def test_a_prompt_file_is_read_by_the_model_and_cut(fake_engines, tmp_path, monkeypatch, capsys):
    log = fake_engines()
    text = tmp_path / "a text.txt"
    text.write_text("one two three four", encoding="utf-8")
    settings = {"prompt_file": str(text), "prompt_tokens": None, "num_trials": 1}
    bench_run.compare(["husky"], SETTINGS | settings)
    assert log()[-1]["request"]["prompts"] == [[7, 8, 9, 10]]
    bench_run.compare(["husky"], SETTINGS | settings | {"prompt_tokens": [3]})
    assert log()[-1]["request"]["prompts"] == [[7, 8, 9]]
    with pytest.raises(HuskyError, match="--prompt-file has 4 tokens, -p asks for 5"):
        bench_run.compare(["husky"], SETTINGS | settings | {"prompt_tokens": [5]})
    monkeypatch.setattr(sys, "argv", ["bench", "--prompt-file", str(tmp_path / "none")])
    assert bench.main() == 1
    assert "no such file" in capsys.readouterr().err


def test_llama_cpp_is_not_asked_to_read_the_prompt_file(fake_engines, tmp_path):
    log = fake_engines()
    text = tmp_path / "text"
    text.write_text("one two", encoding="utf-8")
    settings = SETTINGS | {"prompt_file": str(text), "prompt_tokens": None, "num_trials": 1}
    bench_run.compare(["llama.cpp", "husky"], settings)
    assert [entry["name"] for entry in log() if "tokenize" in entry] == ["husky"]
    with pytest.raises(HuskyError, match=r"--prompt-file needs an engine besides llama\.cpp"):
        bench_run.compare(["llama.cpp"], settings)


def test_bytes_a_token_and_percent_of_the_copy_by_hand(fake_engines):
    fake_engines()
    settings = SETTINGS | {"num_trials": 1, "batch": [2], "generation_tokens": [10]}
    (case,) = bench_run.compare(["husky"], settings)["cases"]
    figures = case["engines"]["husky"]["figures"]
    # 100 MB of weights, and for each of 2 sequences 1 MB of each of 5 + 10 / 2 tokens.
    assert figures["token_mb"]["median"] == (100 + 2 * 10) / 2
    # The second trial decodes 20 tokens a second: 10 steps of 120 MB, of 20 GB/s.
    assert figures["percent_of_copy"]["median"] == pytest.approx(100 * 10 * 0.120 / 20)


@pytest.mark.parametrize("backend", ["husky", "mlx"])
def test_several_sequences_at_once(backend):
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2], [1, 6, 1, 8, 0]]
    request = {"prompts": prompts, "generation_tokens": 6}
    code, (_, done) = serve([request], backend=backend, loop="mlx-lm")
    assert code == 0, done
    assert (done["prompt_tokens"], done["generation_tokens"]) == (15, 18)
    assert all(math.isfinite(done[key]) and done[key] > 0 for key in MEASURED)


def test_an_engine_says_what_a_step_reads():
    _, (ours,) = serve([], backend="husky", loop="husky")
    _, (stock,) = serve([], backend="mlx", loop="mlx-lm")
    matrices = 160 * 64 + 3 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96)
    # 4 bits, and a scale and a bias for 32 values: 32 bits each on the CPU, whose norms are too.
    itemsize = 4 if ours["target"] == "cpu" else 2
    expected = matrices // 2 + matrices // 32 * 2 * itemsize + 7 * 64 * itemsize
    assert stock["read_bytes"] == expected
    # Keys and values of 3 layers with 2 heads of 16.
    assert ours["cache_bytes"] == stock["cache_bytes"] == 3 * 2 * 32 * itemsize
    assert ours["values"] == matrices + 7 * 64 and ours["quantized"]


def test_a_text_becomes_the_ids_of_the_models_tokenizer(folder, tmp_path):
    text = tmp_path / "text"
    text.write_text("t3 t1 t4", encoding="utf-8")
    request = {"tokenize": str(text)}
    _, replies = serve([request], backend="husky", loop="husky", config=None, model=folder)
    assert replies[-1]["tokens"]
    code, replies = serve([request], backend="husky", loop="husky")
    assert (code, "needs an engine with a tokenizer" in replies[-1]["error"]) == (1, True)


def test_markdown_and_a_picture(fake_engines, monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    fake_engines()
    picture = tmp_path / "a picture.png"
    monkeypatch.setattr(sys, "argv", [*TABLE.split(), "-n", "2", "--markdown", "--plot"])
    sys.argv.append(str(picture))
    assert bench.main() == 0
    out = capsys.readouterr().out.splitlines()
    table = [line for line in out if line.startswith("|")]
    assert table[0] == "|  | mlx-lm | husky | husky / mlx-lm |"
    assert table[1] == "| --- | --- | --- | --- |"
    assert {line.count("|") for line in table} == {5}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["bench", "--plot", "a.png"])
    assert bench.main() == 1
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says"), [("none/a.png", "there is no folder none"), ("a.jpg", "ends in .png")]
)
def test_a_picture_that_could_not_be_written_is_refused_first(name, says):
    with pytest.raises(HuskyError, match=says):
        bench_plot.require(Path(name))


def test_copying_is_measured_in_a_process_of_its_own(monkeypatch):
    assert bandwidth.cpu_copy_bandwidth(1_000_003, 3) > 0
    monkeypatch.setattr(bandwidth.sys, "executable", "false")
    with pytest.raises(HuskyError, match="could not be measured"):
        bandwidth.copy_bandwidth_apart()


def test_a_busy_machine_is_flagged_in_table_and_json(fake_engines, monkeypatch, capsys):
    fake_engines()
    monkeypatch.setattr(bench_run.Bystanders, "share", lambda self: 0.4)
    monkeypatch.setattr(sys, "argv", [*TABLE.split(), "-n", "1"])
    assert bench.main() == 0
    assert "other processes used 40% of all cores meanwhile" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*TABLE.split(), "-n", "1", "--json"])
    assert bench.main() == 0
    result = json.loads(capsys.readouterr().out)
    assert result["busy"] is True and result["busy_share"] == 0.4


def test_bystanders_are_others_alone(monkeypatch):
    """A process that works is not counted if it is ours, and is if it is not."""
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        theirs = bench_run.Bystanders([])
        mine = bench_run.Bystanders([worker.pid])
        time.sleep(1.0)
        assert theirs.share() > mine.share()
    finally:
        worker.kill()
        worker.wait()
