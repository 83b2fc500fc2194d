"""``husky bench``: statistics, tables, pictures, JSON."""

import json
import shlex
import sys
from pathlib import Path

import bench_fakes
import numpy as np
import pytest
from bench_fakes import SETTINGS, TABLE

from husky_mlx import bench, bench_plot, bench_report, bench_run, bench_table
from husky_mlx.errors import HuskyError

fake_engines = pytest.fixture(bench_fakes.fake_engines)


def trial(**figures):
    return dict.fromkeys(bench_report.FIGURES, 1.0) | {"repeats": 1} | figures


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
    assert lines["trials a round"].split()[3:] == ["1", "1"]
    # The fake's first trial takes 1 ms.
    assert lines["first token cold, ms"].split()[4:] == ["1.0", "1.0"]
    assert "medians (min to max); ! marks a spread over 10 %; " in table
    marked = table.count(" !  ") + table.count(" !\n")
    assert f"\n{marked} figures spread over 10 %, marked by !: is the machine busy?\n" in table
    assert "\x1b" not in table


def test_one_round_has_no_spread(fake_engines, monkeypatch, capsys):
    assert bench_report.summarise([2.0])["spread"] is None
    assert bench_report.summarise([2.0])["noisy"] is False
    fake_engines()
    monkeypatch.setattr(sys, "argv", shlex.split(TABLE + " -n 1"))
    assert bench.main() == 0
    table = capsys.readouterr().out
    assert ", 1 round\n" in table and "the spread is unknown" in table
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


def test_figures_that_an_engine_has_not_are_left_out(capsys):
    """And husky is compared with llama.cpp itself, not only each with mlx-lm."""
    facts = {"model_class": "m", "plan": "p", "dtypes": [], "active_mb": 1.0, "load_s": 1.0}
    facts |= {"read_bytes": None, "cache_bytes": None, "target": "cpu", "versions": {}}
    machine = {"device": "d", "cores": 2, "os": "o", "memory_mb": 1.0, "available_mb": 1.0}
    facts |= {"machine": machine | {"power": "unknown"}}
    more = {"prompt_tokens": 3, "generation_tokens": 5, "prompt_operations": None}
    trials = {
        "husky": [trial(decode_tps=8.0, **more)] * 2,
        "llama.cpp": [trial(decode_tps=4.0, peak_mb=None, **more)] * 2,
    }
    loaded = dict.fromkeys(trials, facts)
    cold = {name: done[0] for name, done in trials.items()}
    case = {**more, "batch": 1, "order": [], "cold": cold, "trials": trials}
    case = bench_report.report_case(case, loaded, 10.0, None)
    assert list(case["ratios"]) == ["husky / llama.cpp"]
    assert case["ratios"]["husky / llama.cpp"]["decode_tps"]["median"] == 2.0
    assert "peak_mb" not in case["ratios"]["husky / llama.cpp"]
    settings = {**SETTINGS, "config": None, "num_trials": 2}
    bench_table.print_table(bench_report.report(settings, loaded, [case], [10.0], [], 0.0))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("peak MLX memory")]
    assert line.split() == ["peak", "MLX", "memory,", "MB", "1.0"]


def test_columns_are_stock_in_16_bit_stock_ours_and_the_ratio_to_the_same_bits(fake_engines):
    fake_engines()
    names = ["llama.cpp", "husky", "mlx-lm", "mlx-lm-bf16"]
    result = bench_run.compare(names, SETTINGS | {"num_trials": 1})
    (case,) = result["cases"]
    assert list(case["engines"]) == ["mlx-lm-bf16", "mlx-lm", "husky", "llama.cpp"]
    assert next(iter(case["ratios"])) == "husky / mlx-lm"


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


def test_bytes_a_token_and_percent_of_the_copy_by_hand(fake_engines):
    fake_engines()
    settings = SETTINGS | {"num_trials": 1, "batch": [2], "generation_tokens": [10]}
    (case,) = bench_run.compare(["husky"], settings)["cases"]
    figures = case["engines"]["husky"]["figures"]
    # 100 MB of weights, and for each of 2 sequences 1 MB of each of 5 + 10 / 2 tokens.
    assert figures["token_mb"]["median"] == (100 + 2 * 10) / 2
    # The second trial decodes 20 tokens a second: 10 steps of 120 MB, of 20 GB/s.
    assert figures["percent_of_copy"]["median"] == pytest.approx(100 * 10 * 0.120 / 20)


def test_percent_of_the_matmul_rate_by_hand(fake_engines):
    fake_engines()
    (case,) = bench_run.compare(["husky"], SETTINGS | {"num_trials": 1})["cases"]
    figures = case["engines"]["husky"]["figures"]
    # 10^9 operations in the second trial's 2 ms: 0.5 of 8 TFLOP/s.
    assert figures["percent_of_matmul"]["median"] == pytest.approx(100 * 0.5 / 8)


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
