"""Every command in README.md and in the notebooks' texts runs, shortened, on models that are here.

A command that stands in neither RUNS nor ELSEWHERE fails the test: new ones need a line there. The
cells of the notebooks are run by test_notebooks.py.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from server_fixture import write_fix_b

from husky_mlx import cli, sources
from husky_mlx.errors import SourceError
from husky_mlx.native import NativeError, compiler

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
# Models of the hub and of examples: FIX-B stands in for them, as a llama or as a mistral.
LLAMAS = ("mlx-community/Llama-3.2-3B-Instruct-4bit", "./my-model")
MISTRALS = ("mistralai/Mistral-7B-Instruct-v0.3",)
START_SECONDS = 60


@dataclass(frozen=True)
class Run:
    """How a command runs here: other words in place of some, more words behind, and what it shows.

    ``real``: on SmolLM2 itself, by the native program; else FIX-B stands in for it too. ``alone``:
    in a cache folder of its own. ``typed``: lines on stdin.
    """

    shows: str
    more: str = ""
    instead: dict[str, str] = field(default_factory=dict)
    real: bool = False
    alone: bool = False
    typed: tuple[str, ...] = ()


SHORT = "-p 4 -g 3 -n 1"
FEW = "--length 16 --tokens 16 --calibrate calibration.txt"
OURS = f"{FEW} --model my-model"
SHAPE = {"NAME": "smollm2-135m"}
SMALLER = dict.fromkeys(("llama-3.2-1b", "llama-3.1-8b"), "smollm2-135m")
RUNS = {
    "husky demo": Run("decode ", "--max-tokens 8", real=True),
    'husky generate --model smollm2 --prompt "What is the capital of France?"': Run(
        "Generation: 8 tokens", "--max-tokens 8", real=True
    ),
    "husky chat --model mlx-community/Llama-3.2-3B-Instruct-4bit": Run(
        "", "--max-tokens 4", typed=("hello", "q")
    ),
    "husky server --model ./my-model --port 8080": Run("my-model"),
    "husky models mistralai/Mistral-7B-Instruct-v0.3": Run("mistral"),
    "husky plan llama-3.1-8b --target m1 --memory 16gb": Run("fits: "),
    "husky doctor": Run("fail"),
    "husky doctor --model smollm2": Run("fastest", alone=True),
    "husky bench --model smollm2": Run("decode, tok/s", SHORT),
    "husky bench --model smollm2 --json": Run('"decode_tps"', f"{SHORT} --engines husky"),
    "husky bench --model smollm2 -p 512 -g 128 -n 5 --engines husky,mlx-lm,llama.cpp": Run(
        "decode, tok/s", f"{SHORT} --engines husky"
    ),
    "husky bench -b 1,2,4,8": Run("8 sequences", f"{SHORT} --model smollm2"),
    "husky bench --predict m1,m4max --shape llama-3.1-8b": Run("PREDICTED"),
    "husky bench --predict m1-8c,m2pro-19c,m3pro-18c,m4-10c,m4max-40c,m5-10c "
    "--shape llama-3.1-8b": Run("PREDICTED"),
    "husky bench --shape NAME -p 1024 -g 512 -n 5 --engines husky,mlx-lm,mlx-lm-loop": Run(
        "decode, tok/s", "-p 2 -g 2 -n 1 --engines husky", SHAPE
    ),
    "husky bench --shape llama-3.2-1b --bits 16 -p 1024 -g 512 -n 3 --engines husky,mlx-lm": Run(
        "decode, tok/s", "-p 2 -g 2 -n 1 --engines husky", SMALLER
    ),
    "husky bench --shape llama-3.1-8b -p 128,1024,4096 -g 16 -n 5 "
    "--engines mlx-lm-bf16,mlx-lm,husky": Run(
        "decode, tok/s", "-p 2 -g 2 -n 1 --engines husky", SMALLER
    ),
    "husky bench --shape llama-3.2-1b -p 128,1024 -g 16 -n 5 "
    "--engines mlx-lm-bf16,mlx-lm,husky": Run(
        "decode, tok/s", "-p 2 -g 2 -n 1 --engines husky", SMALLER
    ),
    "husky bench --shape llama-3.1-8b --bits 8 -p 1024 -g 16 -n 3 "
    "--engines mlx-lm-bf16,mlx-lm,husky": Run(
        "decode, tok/s", "-p 2 -g 2 -n 1 --engines husky", SMALLER
    ),
    "husky convert --model mistralai/Mistral-7B-Instruct-v0.3 --output mistral.hky": Run(""),
    "husky compile mistral.hky --target m3pro --quant 4bit": Run("predicted"),
    'husky generate --model mistral.hky --prompt "Hello"': Run(
        "Generation: 4 tokens", "--max-tokens 4"
    ),
    "husky eval --model smollm2 --recipes 4bit,4bit-uniform,auto --budget 4.5 "
    "--rounding rtn,gptq": Run("KL", f"{FEW} --recipes 4bit,auto"),
    "husky eval --model mistral.hky --compare mistral.hky/builds/m3pro-4bit --json found.json "
    "--plot kl.png": Run("KL", "--length 16 --tokens 16 --no-speed"),
    "husky eval --tokens 512 --recipes 3bit-uniform --rounding rtn,gptq,awq": Run("KL", OURS),
    "husky eval --tokens 512 --recipes auto --rounding gptq --budget 3.5": Run(
        "KL", f"{OURS} --rounding rtn"
    ),
    "husky eval --tokens 512 --recipes 4bit-uniform --rounding rtn,gptq,awq --group-size 128": Run(
        "KL", f"{OURS} --rounding rtn"
    ),
    "husky eval --tokens 512 --recipes auto --rounding gptq --budget 4.4507 --group-size 128": Run(
        "KL", f"{OURS} --rounding rtn"
    ),
    'husky cache-prompt --model smollm2 --prompt "$(cat README.md)" '
    "--prompt-cache-file readme.safetensors": Run("", instead={"$(cat README.md)": "A text."}),
    "husky generate --model smollm2 --prompt-cache-file readme.safetensors "
    '--prompt "What is it?"': Run("Generation: 4 tokens", "--max-tokens 4"),
}
BY_CI = "makes an environment: .ci/run does the same"
GPU = "needs a GPU: test_bench_ops.py runs it in the emulator"
ELSEWHERE = {
    "python3 -m venv .venv": BY_CI,
    ". .venv/bin/activate": BY_CI,
    'pip install -e ".[cpu]"': BY_CI,
    'pip install -e ".[cpu,test]"': BY_CI,
    'uv pip install -e ".[cpu]"': "installs: .ci/run does it with pip",
    'pip install -e ".[bench]"': "installs, and is large",
    'pip install -e ".[cpu,notebooks]"': "installs, and is large",
    "pytest": "is what runs this",
    "pytest -n 0": "is what runs this",
    "pre-commit install": "writes into .git",
    "jupyter lab notebooks": "starts a browser: test_notebooks.py runs what it opens",
    "husky bench ops --model llama-3.2-1b": GPU,
}
PROGRAMS = ("husky", "pip", "uv", "pytest", "pre-commit", "jupyter", "python", "python3")


def blocks(language: str) -> list[str]:
    """The fenced blocks of README.md in ``language``, in order."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", README)


def words_of(command: str) -> tuple[str, ...]:
    return tuple(shlex.split(command, comments=True))


def fenced() -> list[tuple[str, ...]]:
    """The commands of the ``sh`` blocks, in order."""
    lines = "\n".join(blocks("sh")).splitlines()
    found = [
        tuple(command)
        for line in lines
        for is_and, command in itertools.groupby(words_of(line), lambda word: word == "&&")
        if not is_and
    ]
    return list(dict.fromkeys(found))


def spans() -> list[tuple[str, ...]]:
    """The pieces of code inside the texts that begin with a program's name."""
    texts = [re.sub(r"(?ms)^```.*?^```$", "", README)]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    code = [" ".join(piece.split()) for text in texts for piece in re.findall(r"`([^`]+)`", text)]
    return list(dict.fromkeys(words_of(piece) for piece in code if piece.split()[0] in PROGRAMS))


def is_mention(words: tuple[str, ...]) -> bool:
    """A command's name, with options but no values: nothing that could run as it stands."""
    return words[0] == "husky" and all(word.startswith("-") for word in words[names(words) :])


def names(words: tuple[str, ...]) -> int:
    """How many words the program's and the command's names are."""
    if words[1].startswith("-"):
        return 1
    return 3 if words[1:3] == ("bench", "ops") else 2


COMMANDS = list(dict.fromkeys([*fenced(), *(span for span in spans() if not is_mention(span))]))
MENTIONS = [span for span in spans() if is_mention(span)]
RUN_BY_WORDS = {words_of(command): run for command, run in RUNS.items()}
ELSEWHERE_BY_WORDS = {words_of(command): reason for command, reason in ELSEWHERE.items()}


def test_commands_are_known():
    """Both ways: no command without its line here, no line here without its command."""
    assert set(COMMANDS) == set(RUN_BY_WORDS) | set(ELSEWHERE_BY_WORDS)
    assert not set(RUN_BY_WORDS) & set(ELSEWHERE_BY_WORDS)


@pytest.mark.parametrize("words", MENTIONS, ids=shlex.join)
def test_mentioned_options_exist(words, capsys):
    command, options = words[1 : names(words)], words[names(words) :]
    # Without options the list of commands will do: some need packages to say more.
    assert cli.main([*command, "--help"] if options else ["--help"]) == 0
    shown = capsys.readouterr().out
    if options:
        assert set(options) <= set(re.findall(r"--?\w[\w-]*", shown))
    else:
        assert f"\n  {' '.join(command):<15}" in shown


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        compiler.find()
        return sources.resolve("smollm2")
    except (NativeError, SourceError) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where commands run, in README.md's order: some read what others wrote."""
    folder = tmp_path_factory.mktemp("readme")
    write_fix_b(folder / "my-model")
    write_fix_b(folder / "my-mistral", model_type="mistral")
    (folder / "calibration.txt").write_text(README[:40])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if words in RUN_BY_WORDS], ids=shlex.join
)
def test_command_runs(words, folder, request, monkeypatch, capfd):
    run = RUN_BY_WORDS[words]
    monkeypatch.chdir(folder)
    if run.real:
        request.getfixturevalue("smollm2")
        monkeypatch.delenv("HUSKY_NATIVE")
    if run.alone:
        monkeypatch.setenv("HUSKY_CACHE_DIR", str(folder / "cache"))
    instead = dict.fromkeys(LLAMAS, "my-model") | dict.fromkeys(MISTRALS, "my-mistral")
    instead |= run.instead | ({} if run.real else {"smollm2": "my-model"})
    argv = [instead.get(word, word) for word in (*words[1:], *shlex.split(run.more))]
    if argv[0] == "server":
        assert run.shows in models_served(argv)
        return
    typed = iter(run.typed)
    monkeypatch.setattr("builtins.input", lambda *_: next(typed))
    assert cli.main(argv) == 0, capfd.readouterr().err
    assert run.shows in capfd.readouterr().out
    assert next(typed, None) is None


def models_served(argv: list[str]) -> list[str]:
    """What a server started by ``argv``, on a free port, says that it serves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [*argv, "--port", str(port)]
    server = subprocess.Popen([sys.executable, "-m", "husky_mlx", *argv], stderr=subprocess.PIPE)
    end = time.monotonic() + START_SECONDS
    try:
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer,
            ):
                return [Path(model["id"]).name for model in json.load(answer)["data"]]
            assert server.poll() is None and time.monotonic() < end, "the server did not start"
            time.sleep(0.1)
    finally:
        server.terminate()
        server.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_runs(number, smollm2, monkeypatch):
    """On SmolLM2; the comment on the last line of a block is what that line prints."""
    monkeypatch.delenv("HUSKY_NATIVE")
    code = blocks("python")[number].replace(LLAMAS[0], "smollm2").replace("=64", "=16")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, f"README.md, python block {number}", "exec"), {})
    shown = re.search(r"# on a CPU (.*), \.\.\.\}\n\Z", code)
    if shown:
        assert output.getvalue().splitlines()[-1].startswith(shown[1])
    assert "Paris" in output.getvalue() or "capital" not in code


def test_predicted_table_is_what_its_command_prints(capsys):
    command = next(words for words in RUN_BY_WORDS if "m5-10c" in " ".join(words))
    assert cli.main([*command[1:], "--markdown"]) == 0
    printed = table(capsys.readouterr().out, "predicted")
    (header, *rows) = table(README, "predicted, at most")
    kept = [0, 1, 3, 4, 5, 7]
    assert rows == [[row[column] for column in kept] for row in printed[1:]]
    # One column is there for the first token: its roof has nothing to do with the bits.
    assert all(row[6] == row[7] for row in printed[1:])
    assert header[2:4] == printed[0][3:5]


def table(text: str, first: str) -> list[list[str]]:
    """The cells of the Markdown table that begins with the cell ``first``, header and rows."""
    (lines,) = re.findall(rf"(?m)^\| {first} \|.*\n(?:\|.*\n)+", text)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines()]
    return [row for row in rows if set("".join(row)) - {"-"}]


def test_files_that_are_named_exist():
    files = {path.name for path in ROOT.joinpath("husky_mlx").rglob("*") if path.is_file()}
    reading = README.split("## Reading the code")[1].split("\n## ")[0]
    named = re.findall(r"`([\w*]+\.py)`", reading)
    assert named
    for name in named:
        pattern = re.compile(name.replace(".", r"\.").replace("*", r"\w*"))
        assert any(pattern.fullmatch(file) for file in files), name
    for folder in re.findall(r"`([\w/]+)/`", reading):
        assert (ROOT / "husky_mlx" / folder).is_dir() or (ROOT / folder).is_dir(), folder


def test_links_lead_somewhere():
    headings = [line.lstrip("# ").lower() for line in README.splitlines() if line.startswith("#")]
    anchors = {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in anchors
        else:
            assert target.startswith("https://") or (ROOT / target).exists()
