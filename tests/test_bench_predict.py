"""``husky bench --predict``: roofs by hand, labelled, and nothing else runs."""

from __future__ import annotations

import json

import pytest
from fixtures import FIX_A

from husky_mlx import bench_run, cli


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def refuse(*words):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(bench_run, "EngineProcess", refuse)


def ask(capsys, *words):
    assert cli.main(["bench", "--predict", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_roof_of_a_shape_by_hand(capsys):
    result = ask(capsys, "m3pro-18c", "--shape", "llama-3.1-8b", "-p", "1000", "-g", "200")
    assert result["predicted"] is True and result["notes"] == []
    (row,) = result["rows"]
    # 131,072 bytes of keys and values a token, 1,100 of them in the middle of the reply.
    dense = 2 * (8_030_261_248 - 128256 * 4096) + 131072 * 1100
    assert row["roofs"]["16 bit"]["decode_bytes"] == dense
    assert row["roofs"]["16 bit"]["decode_tps"] == pytest.approx(150e9 / dense)
    # All but norms in 4 bits with a scale and a bias of 16 for each 64.
    norms = 65 * 4096
    packed = (8_030_261_248 - 128256 * 4096 - norms) * 4.5 / 8 + 2 * norms + 131072 * 1100
    assert row["roofs"]["4 bit"]["decode_bytes"] == packed
    assert row["chip"]["memory"] == [18, 36]
    assert (row["roofs"]["16 bit"]["fits"], row["roofs"]["4 bit"]["fits"]) == (False, True)


def test_every_chip_and_length_is_a_row(capsys):
    words = ["m1,m4max", "--memory", "64gb", "-p", "8,16", "--shape", "smollm2-135m"]
    assert cli.main(["bench", "--predict", *words]) == 2
    assert "none has 64 GB" in capsys.readouterr().err
    result = ask(capsys, "m1,m4max", "-p", "8,16", "--shape", "smollm2-135m")
    asked = [(row["chip"]["name"], row["prompt_tokens"]) for row in result["rows"]]
    assert asked == [("m1", 8), ("m1", 16), ("m4max", 8), ("m4max", 16)]
    assert len(result["notes"]) == 2


def test_the_table_says_that_it_is_predicted(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(FIX_A))
    words = ["bench", "--predict", "m5max-40c,sm_86", "--model", str(tmp_path)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "PREDICTED from data sheets and byte counts, nothing was measured" in out
    assert "m5max, 40c, 48 GB" in out and "sm_86, 18 SMs" in out and "not known" in out
    assert "more than the least memory" not in out
    # Not quantized: one column only.
    assert "4 bit" not in out
    assert cli.main([*words, "--markdown"]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and len(table) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--predict m9", "unknown chip 'm9'"),
        ("--predict m1 --engines husky", "--predict takes no"),
        ("--predict m1 -b 2", "--predict takes no"),
        ("--memory 16gb", "--memory needs --predict"),
    ],
)
def test_words_that_do_not_fit_are_refused(words, message, capsys):
    assert cli.main(["bench", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_refused_model_gives_its_reasons(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**FIX_A, "model_type": "gemma"}))
    assert cli.main(["bench", "--predict", "m1", "--model", str(tmp_path)]) == 1
    assert "model_type is 'gemma'" in capsys.readouterr().err


def test_what_does_not_fit_is_marked_and_explained(capsys):
    """16 GB of weights in 16 bit, of the 8 GB that the smallest M1 is sold with."""
    assert cli.main(["bench", "--predict", "m1-8c", "--shape", "llama-3.1-8b"]) == 0
    out = capsys.readouterr().out
    assert out.count(" *") == 1 and "* more than the least memory" in out
