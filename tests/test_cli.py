"""The command line: dispatch, exit codes, our options beside mlx-lm's."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys

import pytest
from cli_process import ROOT, husky

from husky_mlx import cli, forward
from husky_mlx.errors import HuskyError


@pytest.fixture
def received(monkeypatch) -> dict:
    """Replace mlx-lm's generate command by one that keeps what it was given."""
    import mlx_lm.generate  # noqa: F401

    module = sys.modules["mlx_lm.generate"]
    kept: dict = {}

    def main() -> None:
        kept["args"] = module.setup_arg_parser().parse_args()
        kept["argv"] = list(sys.argv)

    monkeypatch.setattr(module, "main", main)
    return kept


class TestOptions:
    """``take_own`` separates our options from mlx-lm's without knowing its commands."""

    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", "-p")
    parser.add_argument("--extra-eos-token", nargs="+")
    parser.add_argument("--max-kv-size", type=int)
    parser.add_argument("--trust-remote-code", action="store_true")

    @pytest.mark.parametrize(
        ("words", "own", "rest"),
        [
            ("--backend mlx --prompt hi", "--backend mlx", "--prompt hi"),
            ("--prompt hi --backend=mlx --debug", "--backend=mlx --debug", "--prompt hi"),
            ("--prompt=-x --debug", "--debug", "--prompt=-x"),
            ("--prompt --backend", "", "--prompt=--backend"),
            ("-p --debug --debug", "--debug", "-p=--debug"),
            ("--prompt=--backend", "", "--prompt=--backend"),
            ("--prompt --backend=mlx", "", "--prompt=--backend=mlx"),
            ("--prompt backend --max-context 9", "--max-context 9", "--prompt backend"),
            ("--extra-eos-token a b --backend mlx", "--backend mlx", "--extra-eos-token a b"),
            ("--trust-remote-code --debug", "--debug", "--trust-remote-code"),
            ("--max-kv-size 5", "", "--max-kv-size 5"),
            ("-- --debug", "", "-- --debug"),
            ("--backend", "--backend", ""),
        ],
    )
    def test_beside_theirs(self, words, own, rest):
        assert forward.take_own(words.split(), self.parser) == (own.split(), rest.split())

    def test_a_value_with_spaces_stays_one_word(self):
        words = ["--prompt", "--backend mlx", "--debug"]
        assert forward.take_own(words, self.parser) == (["--debug"], words[:2])

    def test_before_the_command_the_rest_is_untouched(self):
        words = ["--backend", "mlx", "--debug", "generate", "--debug", "--prompt", "--backend"]
        assert forward.take_own(words) == (words[:3], words[3:])

    def test_window_is_ours_where_the_command_has_none(self):
        theirs = argparse.ArgumentParser()
        assert forward.take_own(["--max-kv-size", "7"], theirs) == (["--max-kv-size", "7"], [])


class TestDispatch:
    def test_command_list_is_that_of_mlx_lm(self):
        from mlx_lm import cli as theirs

        source = inspect.getsource(theirs.main)
        found = forward.commands()
        assert {"generate", "server", "lora", "awq"} <= set(found)
        assert all(f'"{name}"' in source for name in found)
        assert source.split("subpackages")[0].count('",') == len(found)
        assert found["awq"] == "mlx_lm.quant.awq"
        assert found["generate"] == "mlx_lm.generate"

    def test_forwarded_words_and_program_name(self, received):
        assert cli.main(["generate", "--backend", "mlx", "--prompt", "--backend"]) == 0
        assert received["args"].prompt == "--backend"
        assert received["argv"][0] == "husky generate"
        assert not {"backend", "debug", "max_context"} & set(vars(received["args"]))

    @pytest.mark.parametrize("place", ["before", "after"])
    def test_options_reach_load_from_both_sides(self, received, monkeypatch, place):
        from husky_mlx import dropin

        kept = []
        monkeypatch.setattr(dropin.DropIn, "uninstall", _spy(dropin.DropIn.uninstall, kept))
        ours = ["--backend", "mlx", "--max-context", "64", "--max-kv-size", "32"]
        words = [*ours, "generate"] if place == "before" else ["generate", *ours]
        assert cli.main([*words, "--model", "m"]) == 0
        (installed,) = kept
        assert (installed.backend, installed.max_context, installed.max_kv_size) == ("mlx", 64, 32)
        assert received["args"].max_kv_size == 32

    def test_window_is_dropped_with_a_draft_model(self, received, monkeypatch, capsys):
        from husky_mlx import dropin

        kept = []
        monkeypatch.setattr(dropin.DropIn, "uninstall", _spy(dropin.DropIn.uninstall, kept))
        words = ["generate", "--model", "m", "--draft-model", "d", "--max-kv-size", "8"]
        assert cli.main(words) == 0
        assert kept[0].max_kv_size is None
        assert "no effect together with --draft-model" in capsys.readouterr().err

    def test_hyphens_are_underscores(self, capsys):
        assert cli.main(["cache-prompt", "--help"]) == 0
        assert "usage: husky cache_prompt" in capsys.readouterr().out

    def test_sys_argv_and_argparse_are_put_back(self, received):
        argv, parse_args = sys.argv, argparse.ArgumentParser.parse_args
        assert cli.main(["generate", "--prompt", "x", "--no-such-option"]) == 2
        assert sys.argv is argv
        assert argparse.ArgumentParser.parse_args is parse_args

    def test_missing_package_is_named(self, monkeypatch, capsys):
        monkeypatch.setattr(forward, "commands", lambda: {"evaluate": "mlx_lm.no_such_module"})
        assert cli.main(["evaluate"]) == 1
        assert capsys.readouterr().err == (
            "husky: error: husky evaluate needs the package 'mlx_lm.no_such_module', "
            "which is not installed\n"
        )

    @pytest.mark.parametrize(
        ("command", "package"), [("perplexity", "datasets"), ("evaluate", "lm-eval")]
    )
    def test_extra_package_is_named_before_a_model_is_looked_for(
        self, monkeypatch, capsys, command, package
    ):
        monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
        for module in ("mlx_lm.evaluate", "mlx_lm.perplexity"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        assert cli.main([command, "--model", "/no/such/folder"]) == 1
        assert capsys.readouterr().err == (
            f"husky: error: husky {command} needs the package {package!r}, which is not "
            f"installed: pip install {package}\n"
        )

    def test_convert_script_names_itself(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["husky-convert"])
        assert cli.main_convert() == 2
        assert capsys.readouterr().err == (
            "husky-convert: error: no --model given, and this command has no default\n"
        )
        monkeypatch.setattr(sys, "argv", ["husky-convert", "--no-such-option"])
        assert cli.main_convert() == 2
        assert capsys.readouterr().err.startswith("usage: husky-convert ")


class TestExitCodes:
    def test_unknown_command_suggests(self, capsys):
        assert cli.main(["genrate"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("husky: error: unknown command 'genrate'; did you mean generate")
        assert error.count("\n") == 1

    @pytest.mark.parametrize(
        "words",
        [
            ["--no-such-option", "generate"],
            ["--backend", "torch", "generate"],
            ["generate", "--backend", "torch"],
            ["generate", "--max-context", "0"],
            ["generate", "--max-tokens", "many"],
            ["models", "--backend", "mlx"],
            ["demo", "--max-tokens"],
        ],
    )
    def test_usage(self, words, capsys):
        assert cli.main(words) == 2
        assert "husky" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (HuskyError("first\n  second"), "husky: error: first second\n"),
            (OSError("gone"), "husky: error: gone\n"),
            (KeyError("factor"), "husky: error: KeyError: 'factor'\n"),
            (RuntimeError(), "husky: error: RuntimeError: \n"),
        ],
    )
    def test_failure_is_one_line(self, monkeypatch, capsys, error, line):
        def fail(*_):
            raise error

        monkeypatch.setattr(forward, "commands", fail)
        assert cli.main(["generate"]) == 1
        assert capsys.readouterr().err == line

    @pytest.mark.parametrize("words", [["--debug", "generate"], ["generate", "--debug"]])
    def test_debug_shows_the_traceback(self, monkeypatch, capsys, words):
        missing = "/no/such/model"
        assert cli.main([*words, "--model", missing]) == 1
        error = capsys.readouterr().err
        assert "Traceback" in error
        assert error.splitlines()[-1].startswith("husky: error: ")

    def test_interrupted(self, monkeypatch):
        def interrupt():
            raise KeyboardInterrupt

        monkeypatch.setattr(forward, "commands", interrupt)
        assert cli.main(["generate"]) == 130

    @pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (3, 3), ("why", 1)])
    def test_system_exit_of_a_command(self, monkeypatch, code, expected):
        def leave():
            raise SystemExit(code)

        monkeypatch.setattr(forward, "commands", leave)
        assert cli.main(["generate"]) == expected

    def test_closed_pipe_is_quiet(self):
        process = subprocess.Popen(
            [sys.executable, "-m", "husky_mlx", "models"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait() == 1

    def test_compile_names_itself(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["husky-compile", "/no/such/folder"])
        assert cli.main_compile() == 1
        assert (
            capsys.readouterr().err
            == "husky-compile: error: /no/such/folder: no such file or folder\n"
        )


class TestHelp:
    def test_overview_lists_every_command(self, capsys):
        assert cli.main([]) == 0
        bare = capsys.readouterr().out
        assert cli.main(["--help"]) == 0
        assert capsys.readouterr().out == bare
        rows = {line.split()[0] for line in bare.splitlines() if line.startswith("  ")}
        assert {"demo", "models", "bench", *forward.commands()} <= rows

    def test_every_known_command_has_a_line(self):
        assert set(forward.commands()) <= {*cli._DESCRIPTIONS, *cli._OURS}

    def test_command_help_names_ours(self, capsys):
        assert cli.main(["generate", "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert text.startswith("usage: husky generate ")
        assert "--prompt-cache-file" in text
        assert "--backend {husky,mlx}" in text
        assert "--max-context N" in text
        assert ".gguf" in text

    def test_help_without_a_model_claims_none(self, capsys):
        assert cli.main(["manage", "--help"]) == 0
        text = capsys.readouterr().out
        assert ".gguf" not in text and "--backend" not in text and "--debug" in text

    def test_help_is_nothing_but_help(self, capsys):
        assert cli.main(["fuse", "--help"]) == 0
        assert capsys.readouterr().out.startswith("usage: husky fuse ")

    def test_version(self):
        from importlib.metadata import version

        import husky_mlx

        result = husky("--version")
        assert result.returncode == 0
        assert result.stdout.splitlines() == [
            f"husky_mlx {husky_mlx.__version__}",
            f"mlx {version('mlx')}",
            f"mlx-lm {version('mlx-lm')}",
        ]

    @pytest.mark.parametrize("word", ["--help", "--version"])
    def test_light_answers_import_neither_mlx_nor_mlx_lm(self, word):
        code = (
            "import sys; from husky_mlx.cli import main; main([sys.argv[1]]); "
            "print(sorted({'mlx', 'mlx_lm', 'transformers', 'numpy'} & set(sys.modules)))"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, word], capture_output=True, text=True, cwd=ROOT
        )
        assert result.stdout.splitlines()[-1] == "[]"


def _spy(function, kept: list):
    def call(self, *arguments):
        kept.append(self)
        return function(self, *arguments)

    return call


@pytest.mark.parametrize(
    "words, message",
    [
        (["generate", "--prompt", "a\udcff"], "an argument is not UTF-8 text"),
        (["--max-context", "1e5", "generate"], "must be a whole number from 1 up, found '1e5'"),
        (["generate", "--prompt", "a", "--temp", "nan"], "--temp must be a number from 0 up"),
        (["generate", "--prompt", "a", "--temp", "-1"], "--temp must be a number from 0 up"),
        (["bench", "-p", "\u00b2"], "expected a number from 1 up"),
    ],
)
def test_values_that_no_model_can_take_are_usage_errors(words, message, capsys):
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


def test_a_warning_is_one_line_without_a_place_in_the_code():
    driver = (
        "import sys, warnings; from husky_mlx import cli; "
        "cli._run = lambda *words: warnings.warn('take\\ncare') or 0; sys.exit(cli.main([]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", driver], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert (run.returncode, run.stderr) == (0, "husky: warning: take care\n")
