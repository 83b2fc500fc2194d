"""Commands on a model, FIX-B: prompts, answers and errors as a user meets them; C123 and C124."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import husky
from server_fixture import write_fix_b

from husky_mlx import cli
from husky_mlx.contract import violations


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_fix_b(tmp_path_factory.mktemp("cli") / "fix-b")


class TestPrompts:
    """What text reaches generation, on FIX-B with its byte-level tokenizer."""

    @pytest.fixture
    def prompt_of(self, model, monkeypatch):
        import mlx_lm.generate  # noqa: F401

        assert violations() == []  # asked once a process, and of mlx-lm as it is
        kept = []

        def keep(_model, tokenizer, prompt, **_options):
            kept.append(tokenizer.decode(prompt))

        monkeypatch.setattr(sys.modules["mlx_lm.generate"], "generate", keep)

        def run(*words: str) -> str:
            common = ["--model", str(model), "--ignore-chat-template", "--verbose", "T"]
            assert cli.main(["generate", *common, *words]) == 0
            return kept.pop()

        return run

    @pytest.mark.parametrize(
        ("given", "arrives"),
        [
            ("--prompt=h\u00e9llo\\nworld", "h\u00e9llo\nworld"),
            ("--prompt=\u65e5\u672c\\t\u8a9e", "\u65e5\u672c\t\u8a9e"),
            # mlx-lm's rule: backslash-n and backslash-t are always escapes, in a path too.
            ("--prompt=C:\\new", "C:\new"),
            ("--prompt=-x", "-x"),
            ("--prompt=--debug", "--debug"),
        ],
    )
    def test_escapes_C123(self, prompt_of, given, arrives):
        assert prompt_of(given) == arrives

    def test_prompt_that_looks_like_our_option(self, prompt_of):
        assert prompt_of("--prompt", "--backend", "--max-context", "64") == "--backend"

    @pytest.mark.parametrize("text", ["one\ntwo\nthree\n", ""])
    def test_stdin_C123(self, prompt_of, monkeypatch, text):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert prompt_of("--prompt", "-") == text

    def test_an_empty_prompt_is_one_clear_error_C123(self, model):
        words = ["generate", "--model", str(model), "--ignore-chat-template", "--prompt", "-"]
        result = husky(*words, input="")
        assert result.returncode == 1
        assert [line for line in result.stderr.splitlines() if "prompt" in line] == [
            result.stderr.splitlines()[-1]
        ]
        assert result.stderr.splitlines()[-1].startswith("husky: error: ")


class TestProcess:
    """Real processes on FIX-B."""

    def test_generate_equals_mlx_lm(self, model):
        words = ["--model", str(model), "--prompt", "hello", "--max-tokens", "12"]
        ours = husky("generate", *words, "--verbose", "F")
        stock = subprocess.run(
            [sys.executable, "-m", "mlx_lm", "generate", *words, "--verbose", "F"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ours.returncode == 0, ours.stderr
        assert ours.stdout == stock.stdout
        assert stock.stdout.strip()

    def test_missing_model_is_one_line(self):
        result = husky("generate", "--model", "/no/such/folder", "--prompt", "x")
        assert result.returncode == 1
        assert result.stdout == ""
        lines = [line for line in result.stderr.splitlines() if "husky" in line]
        assert len(lines) == 1
        assert lines[0].startswith("husky: error: ")
        assert "/no/such/folder" in lines[0]

    def test_end_of_input_leaves_the_chat(self, model):
        result = husky("chat", "--model", str(model), stdin=subprocess.DEVNULL)
        assert result.returncode == 0
        assert "rror" not in result.stderr

    def test_no_hub_cache_is_an_empty_one(self, tmp_path):
        result = husky("manage", "--scan", env={"HF_HUB_CACHE": str(tmp_path / "none")})
        assert (result.returncode, result.stderr) == (0, "")
        assert "REPO ID" in result.stdout

    def test_prompt_over_the_limit_prints_nothing_but_the_error(self, model):
        words = ["--model", str(model), "--prompt", "hello", "--max-context", "2"]
        result = husky("generate", *words)
        assert (result.returncode, result.stdout) == (1, "")
        assert "max_context is 2" in result.stderr.splitlines()[-1]

    def test_no_bars_off_a_terminal(self, model):
        result = husky("generate", "--model", str(model), "--prompt", "x", "--max-tokens", "2")
        assert "it/s" not in result.stderr
        assert "\r" not in result.stderr

    def test_default_model_is_named(self):
        """Offline, so it is named and then reported as missing."""
        from mlx_lm.generate import DEFAULT_MODEL

        result = husky("generate", "--prompt", "x", env={"HF_HUB_CACHE": "/no/cache"})
        assert result.returncode == 1
        assert f"husky: no --model given: using {DEFAULT_MODEL}" in result.stderr.splitlines()

    def test_a_command_without_default_says_so(self, tmp_path):
        result = husky("convert", "--mlx-path", str(tmp_path / "out"))
        assert result.returncode == 2
        assert result.stderr.splitlines()[-1] == (
            "husky: error: no --model given, and this command has no default"
        )


class TestConvert:
    def test_existing_folder_is_refused_C124(self, model, tmp_path, monkeypatch, capsys):
        target = tmp_path / "out"
        target.mkdir()
        (target / "model-00001-of-00002.safetensors").write_bytes(b"older")
        monkeypatch.setattr(
            sys, "argv", ["husky-convert", "--model", str(model), "--mlx-path", str(target)]
        )
        assert cli.main_convert() == 1
        assert str(target) in capsys.readouterr().err
        assert [file.read_bytes() for file in target.iterdir()] == [b"older"]

    def test_interrupted_output_is_not_there_C124(self, model, tmp_path, monkeypatch):
        from husky_mlx import conversion

        def interrupt(*_arguments, **_options):
            raise KeyboardInterrupt

        monkeypatch.setattr(conversion, "save_config", interrupt)
        target = tmp_path / "out"
        assert cli.main(["convert", "--model", str(model), "--mlx-path", str(target)]) == 130
        assert list(tmp_path.iterdir()) == []

    def test_result_runs_on_mlx_lm_and_on_husky(self, model, tmp_path, capsys):
        target = tmp_path / "q4"
        words = ["--model", str(model), "--mlx-path", str(target), "-q", "--q-bits", "4"]
        assert cli.main(["convert", *words]) == 0
        config = json.loads((target / "config.json").read_text())
        assert config["model_type"] == "llama"
        assert config["quantization"]["bits"] == 4
        capsys.readouterr()
        answers = []
        for backend in ("husky", "mlx"):
            words = ["--model", str(target), "--prompt", "hello", "--max-tokens", "6"]
            assert cli.main(["generate", "--backend", backend, *words, "--verbose", "F"]) == 0
            answers.append(capsys.readouterr().out)
        assert answers[0] == answers[1] != ""


@pytest.mark.parametrize("name", ["nowhere.safetensors", "config.json"])
def test_a_prompt_cache_that_is_none_is_named(name, tmp_path, capsys):
    folder = write_fix_b(tmp_path)
    words = ["generate", "--model", str(folder), "--prompt", "a", "--prompt-cache-file"]
    assert cli.main([*words, str(folder / name)]) == 1
    assert f"{name}: not a saved prompt cache" in capsys.readouterr().err


def test_a_port_out_of_range_ends_the_server_before_it_starts(tmp_path, capsys):
    folder = write_fix_b(tmp_path)
    assert cli.main(["server", "--model", str(folder), "--port", "99999"]) == 2
    assert "--port must be from 0 to 65535, found 99999" in capsys.readouterr().err
