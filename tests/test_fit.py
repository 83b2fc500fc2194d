"""``husky plan``: fits or not, said for people and as JSON, from a config alone."""

from __future__ import annotations

import json

import pytest
from fixtures import FIX_A

from husky_mlx import cli, fit, sources


def ask(capsys, *words: str) -> tuple[int, dict]:
    code = cli.main(["plan", *words, "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, json.loads(captured.out)


def test_the_command_of_the_readme(capsys):
    words = ["--target", "m1", "--memory", "16gb", "--context", "16384"]
    code, answer = ask(capsys, "llama-3.1-8b", *words)
    assert code == 0 and answer["fits"]
    assert (answer["memory_gb"], answer["context"]) == (16, 16384)
    assert sum(answer["parts"].values()) == answer["needed"] <= answer["working_set"]
    # 131,072 bytes a token, the buffers in steps of 256 with room for one more token.
    assert answer["parts"]["KV cache"] == 131072 * (16384 + 256)
    assert answer["largest_context"] > 16384
    assert answer["predicted"]["decode_tps"] == pytest.approx(
        68.3e9 / answer["predicted"]["decode_bytes"]
    )


def test_what_does_not_fit_is_said_and_is_an_exit_code(capsys):
    assert cli.main(["plan", "llama-3.1-8b", "--bits", "16", "--target", "m1"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: 17,394 MB at 8,192 tokens" in out
    assert "the lowest is taken" in out and "sold with 8, 16 GB" in out
    assert "predicted from the chip's figures, not measured" in out


def folder_of(path, **changes) -> str:
    (path / "config.json").write_text(json.dumps({**FIX_A, **changes}))
    return str(path)


def test_a_folder_without_weights_is_planned_as_it_is_stored(tmp_path, capsys):
    name = folder_of(tmp_path, quantization={"bits": 4, "group_size": 32})
    _, answer = ask(capsys, name, "--target", "m3pro-18c", "--memory", "36")
    assert answer["parts"]["embedding"] == 96 * 64 * 5 // 8
    assert answer["context"] == 512  # what it is trained for
    assert answer["chip"]["cores"] == 18 and answer["notes"] == []


def test_more_tokens_than_trained_for_are_a_note(tmp_path, capsys):
    words = ["--target", "m3pro-18c", "--memory", "36gb", "--context", "2000"]
    _, answer = ask(capsys, folder_of(tmp_path), *words)
    assert answer["notes"] == ["the model is trained for 512 tokens, fewer than asked for"]


def test_a_refused_model_gives_its_reasons(tmp_path, capsys):
    code, answer = ask(capsys, folder_of(tmp_path, model_type="gemma"), "--target", "m1")
    assert (code, answer["verdict"]) == (1, "refused")
    assert cli.main(["plan", str(tmp_path), "--target", "m1"]) == 1
    assert "model_type is 'gemma'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--target m9", "unknown chip 'm9'"),
        ("--target m1 --memory much", "memory must be given as 16gb"),
        ("--target m1 --memory 12gb", "none has 12 GB"),
        ("--target sm_90", "the memory of sm_90 is not known"),
        ("--target m1 --context 0", "--context must be at least 1"),
    ],
)
def test_wrong_words_are_one_line(words, message, capsys):
    assert cli.main(["plan", "llama-3.2-1b", *words.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_without_a_target_it_is_this_machines_gpu(monkeypatch, capsys):
    monkeypatch.setattr(fit.device, "target", lambda: "cpu")
    assert cli.main(["plan", "llama-3.2-1b"]) == 1
    assert "say which, as in --target m1" in capsys.readouterr().err
    monkeypatch.setattr(fit.device, "target", lambda: "metal")
    info = {"device_name": "Apple M2 Max", "architecture": "applegpu_g14s", "memory_size": 32 << 30}
    monkeypatch.setattr(fit.chips.mx, "device_info", lambda: info)
    monkeypatch.setattr(fit, "memory_limit", lambda: 20_000_000_000)
    _, answer = ask(capsys, "llama-3.2-1b")
    assert (answer["chip"]["cores"], answer["memory_gb"]) == (30, 32)
    assert (answer["working_set"], answer["this_machine"]) == (20_000_000_000, True)
    (note,) = answer["notes"]
    assert "m2max may be m2max-30c with 32 GB" in note and "the lowest is taken" in note
    assert cli.main(["plan", "llama-3.2-1b"]) == 0
    assert "MLX may use 20,000 MB" in capsys.readouterr().out
    # Another machine with this chip: only one bin is sold with so much.
    _, answer = ask(capsys, "llama-3.2-1b", "--memory", "96gb")
    assert (answer["chip"]["cores"], answer["memory_gb"]) == (38, 96)
    assert (answer["notes"], answer["this_machine"]) == ([], False)
    assert cli.main(["plan", "llama-3.2-1b", "--memory", "12gb"]) == 2
    assert "none has 12 GB" in capsys.readouterr().err


def test_arithmetic_that_nobody_published_is_no_roof(capsys):
    _, answer = ask(capsys, "llama-3.2-1b", "--target", "m4max-32c")
    assert answer["predicted"]["prompt_seconds"] is None
    cli.main(["plan", "llama-3.2-1b", "--target", "m4max-32c"])
    assert "the chip's arithmetic is not known" in capsys.readouterr().out


def test_the_roof_of_a_stand_in_is_said_to_be_its_own(capsys):
    cli.main(["plan", "llama-3.2-1b", "--target", "sm_86", "--memory", "10gb"])
    assert "a small GPU of this kind at most" in capsys.readouterr().out


def test_only_the_config_is_fetched(tmp_path, monkeypatch):
    asked = []

    def resolve(name, revision=None, config_only=False, **_options):
        asked.append((name, config_only))
        folder_of(tmp_path)
        return tmp_path

    monkeypatch.setattr(sources, "resolve", resolve)
    assert cli.main(["plan", "someone/model", "--target", "m1"]) == 0
    assert asked == [("someone/model", True)]
