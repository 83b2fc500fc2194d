"""``husky demo`` on a tiny model: what it prints, and its errors."""

from __future__ import annotations

import re
from pathlib import Path

import mlx_lm
import pytest
from server_fixture import write_fix_b

from husky_mlx import cli, sources
from husky_mlx.errors import SourceError


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_fix_b(tmp_path_factory.mktemp("demo") / "fix-b")


def run(model: Path, *words: str) -> int:
    return cli.main(["demo", "--model", str(model), *words])


@pytest.mark.parametrize("backend", ["husky", "mlx"])
def test_answer_is_that_of_mlx_lm(model, capsys, backend):
    stock, tokenizer = mlx_lm.load(str(model))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True
    )
    expected = mlx_lm.generate(stock, tokenizer, prompt, max_tokens=8)
    words = ["--prompt", "hello", "--max-tokens", "8", "--backend", backend]
    assert run(model, *words) == 0
    output = capsys.readouterr().out
    assert f"\n\n{expected}\n\n" in output
    assert re.search(
        rf"first token \d+\.\d\d s after {len(prompt)} prompt tokens, decode \d+\.\d tok/s, "
        r"8 tokens \(--max-tokens\), peak memory [\d,]+ MB\n$",
        output,
    )


def test_plan_is_shown_before_the_answer(model, capsys):
    assert run(model, "--max-tokens", "2") == 0
    head = capsys.readouterr().out.split("prompt  ")[0]
    assert "frozen" in head
    assert str(model) in head


def test_one_token_has_no_decode_speed(model, capsys):
    assert run(model, "--max-tokens", "1") == 0
    assert "tok/s" not in capsys.readouterr().out


def test_no_source_is_a_clear_error(monkeypatch, capsys):
    def unreachable(name, *_arguments, **_options):
        raise SourceError(f"{name}: no network and no local copy")

    monkeypatch.setattr(sources, "resolve", unreachable)
    assert cli.main(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "husky: error: smollm2: no network and no local copy\n"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--prompt", "  "], 1, "--prompt is empty"),
        (["--max-tokens", "0"], 2, "at least 1, found 0"),
    ],
)
def test_bad_input(model, capsys, words, code, says):
    assert run(model, *words) == code
    assert says in capsys.readouterr().err
