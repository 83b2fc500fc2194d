"""``husky bench``: the order of trials, counts, failures, the command line."""

import argparse
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import bench_fakes
import pytest
from bench_fakes import FAKE, ROOT, SETTINGS, TINY

from husky_mlx import (
    bandwidth,
    bench,
    bench_report,
    bench_run,
    bench_table,
)
from husky_mlx.errors import HuskyError

fake_engines = pytest.fixture(bench_fakes.fake_engines)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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
    changing = ("first_token_ms", "decode_tps", "percent_of_copy", "percent_of_matmul")
    assert set(case["noisy"]) == {
        f"{name} {key}" for name in ("husky", "mlx-lm") for key in changing
    }


def test_short_trials_are_repeated_and_their_medians_count(fake_engines, monkeypatch):
    log = fake_engines()
    monkeypatch.setattr(bench_run, "TRIAL_SECONDS", 2.5)
    clock = itertools.count()  # a trial takes a second
    monkeypatch.setattr(bench_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    result = bench_run.compare(["husky"], SETTINGS | {"num_trials": 2})
    assert len([entry for entry in log() if "request" in entry]) == 1 + 2 * 3
    (case,) = result["cases"]
    trials = case["engines"]["husky"]["trials"]
    assert [done["repeats"] for done in trials] == [3, 3]
    # Trial n takes n ms to its first token; the first of all is the cold one.
    assert [done["first_token_ms"] for done in trials] == [3.0, 6.0]


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


def interrupt_trial(number, monkeypatch):
    """Ctrl-C in trial ``number`` of all engines together, counted from 0."""
    calls, trial = itertools.count(), bench_run.EngineProcess.trial

    def interrupting(self, request):
        if next(calls) == number:
            raise KeyboardInterrupt
        return trial(self, request)

    monkeypatch.setattr(bench_run.EngineProcess, "trial", interrupting)


@pytest.mark.parametrize("interrupted_at, rounds", [(4, 1), (5, 1), (8, 3)])
def test_an_interrupt_keeps_the_rounds_that_are_complete(
    fake_engines, monkeypatch, capsys, interrupted_at, rounds
):
    """Of two engines: trials 1 and 2 are cold, then two make a round; a second case follows."""
    fake_engines()
    interrupt_trial(interrupted_at, monkeypatch)
    result = bench_run.compare(["husky", "mlx-lm"], SETTINGS | {"prompt_tokens": [3, 5]})
    assert result["interrupted"]
    (case,) = result["cases"]
    assert len(case["order"]) == rounds
    assert {len(engine["trials"]) for engine in case["engines"].values()} == {rounds}
    bench_table.print_table({**bench_report.describe_run(), **result})
    table = capsys.readouterr().out
    assert f"prompt 3, reply 4, {rounds} round{'s' if rounds > 1 else ''}\n" in table
    assert "interrupted: these are the rounds that were complete" in table


@pytest.mark.parametrize("interrupted_at", [1, 3])
def test_an_interrupt_before_the_first_round_is_complete_ends_the_run(
    fake_engines, monkeypatch, interrupted_at
):
    fake_engines()
    interrupt_trial(interrupted_at, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        bench_run.compare(["husky", "mlx-lm"], SETTINGS)


def test_an_interrupt_while_the_roofs_are_measured_again_loses_nothing(fake_engines, monkeypatch):
    fake_engines()
    calls = itertools.count()

    def interrupting():
        if next(calls) == 1:
            raise KeyboardInterrupt
        return 20.0, 8.0

    monkeypatch.setattr(bench_run, "roofs_apart", interrupting)
    result = bench_run.compare(["husky"], SETTINGS)
    assert not result["interrupted"] and len(result["cases"][0]["order"]) == 3
    assert result["copy_gb_s"] == [20.0]


def test_speeds_of_an_interrupted_run_are_none(fake_engines, monkeypatch):
    """``husky doctor`` keeps what it is told: a part of the rounds must not become its choice."""
    fake_engines()
    calls, trial = itertools.count(), bench_run.EngineProcess.trial

    def interrupting(self, request):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return trial(self, request)

    monkeypatch.setattr(bench_run.EngineProcess, "trial", interrupting)
    with pytest.raises(KeyboardInterrupt):
        bench_run.decode_speeds(["husky"], "tiny", 5, 4, 2)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_the_engines(tmp_path, sent):
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
    process.send_signal(sent)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, b"")
    assert b"interrupted: no round was complete" in errors
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
    with pytest.raises(HuskyError, match="20,000,000 tokens in a prompt"):
        bench.run(parser.parse_args(["-p", "5,10000000", "-b", "1,2"]))


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
    on_a_gpu = {"percent_of_matmul"} if result["target"] == "cpu" else set()
    assert set(case["ratios"]["husky / mlx-lm"]) == set(bench_report.FIGURES) - on_a_gpu
    assert {"husky_mlx", "mlx", "mlx-lm"} <= set(result["versions"])
    assert result["machine"]["python"].startswith("3.")
    assert "--shape smollm2-135m" in result["command"]


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
    assert "none: cannot be read: No such file" in capsys.readouterr().err


def test_a_prompt_file_is_read_once_and_may_be_a_pipe(fake_engines, tmp_path):
    log = fake_engines()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("one two",), daemon=True)
    writer.start()
    settings = {"prompt_file": str(pipe), "prompt_tokens": None, "num_trials": 1}
    bench_run.compare(["husky"], SETTINGS | settings)
    assert log()[-1]["request"]["prompts"] == [[7, 8]]
    pipe.unlink()
    pipe.write_text("")
    with pytest.raises(HuskyError, match="pipe is empty"):
        bench_run.compare(["husky"], SETTINGS | settings)


def test_llama_cpp_is_not_asked_to_read_the_prompt_file(fake_engines, tmp_path):
    log = fake_engines()
    text = tmp_path / "text"
    text.write_text("one two", encoding="utf-8")
    settings = SETTINGS | {"prompt_file": str(text), "prompt_tokens": None, "num_trials": 1}
    bench_run.compare(["llama.cpp", "husky"], settings)
    assert [entry["name"] for entry in log() if "tokenize" in entry] == ["husky"]
    with pytest.raises(HuskyError, match=r"--prompt-file needs an engine besides llama\.cpp"):
        bench_run.compare(["llama.cpp"], settings)


def test_copying_is_measured_in_a_process_of_its_own(monkeypatch):
    assert bandwidth.cpu_copy_bandwidth(1_000_003, 3) > 0
    assert bandwidth.matmul_rate() is None
    monkeypatch.setattr(bandwidth.sys, "executable", "false")
    with pytest.raises(HuskyError, match="could not be measured"):
        bandwidth.roofs_apart()


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


def test_what_no_engine_could_take_is_refused_before_one_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_run, "EngineProcess", None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    words = {
        "--top-p 7": (2, "--top-p must be"),
        "--top-p nan": (2, "--top-p must be"),
        f"--prompt-file {tmp_path / 'binary'}": (1, "not UTF-8"),
    }
    for given, (code, said) in words.items():
        monkeypatch.setattr(sys, "argv", ["bench", "--model", "m", *given.split()])
        assert bench.main() == code
        assert said in capsys.readouterr().err
