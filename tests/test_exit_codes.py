"""One code a kind of error, whichever command meets it: 2 for a wrong command line, as argparse has
it, and 1 for what failed."""

from __future__ import annotations

import pytest
from fixtures import write_folder

from husky_mlx import bench_run, cli

SHAPE = "--shape smollm2-135m"
# "M" stands for a model that is there, "none" is not.
USAGE = {
    "a command that there is not": ["answer"],
    "an option that there is not": [
        *("demo --x", "models --x", "plan m --x", "doctor --x", "convert --x", "compile m --x"),
        *("cache --x", "bench --x", "bench ops --x", "eval --x", "generate --x", "server --x"),
    ],
    "no model where one is needed": [
        *("convert", "compile", "plan", "convert --model", "cache-prompt --prompt-cache-file f")
    ],
    "a recipe that there is not": ["compile M --quant 9bit", "eval --model M --recipes 9bit"],
    "a recipe without its budget": ["compile M --quant auto", "eval --model M --recipes auto"],
    "a budget that no recipe takes": [
        "compile M --quant 4bit --budget 4",
        "eval --model M --recipes 4bit --budget 4",
    ],
    "a budget that is none": [
        "compile M --quant auto --budget nan",
        "eval --model M --recipes auto --budget nan",
    ],
    "a rounding that there is not": [
        "compile M --rounding up",
        "eval --model M --rounding up",
    ],
    "bits or groups that there are not": [
        *("convert --model M -q --q-bits 7", "convert --model M -q --q-group-size 3"),
        *(f"bench {SHAPE} --bits 7", "bench ops --bits 7", "plan M --bits 7 --target m1"),
        "eval --model M --group-size 3",
    ],
    "a chip that there is not": [
        *("compile M --target m99", "plan M --target m99", "bench --model M --predict m99"),
        "plan M --target m1-99c",
    ],
    "a size of memory that is none": [
        *("compile M --memory much", "plan M --target m1 --memory much"),
        "bench --model M --predict m1 --memory much",
    ],
    "a memory that the chip is not sold with": [
        *("compile M --target m1 --memory 99gb", "plan M --target m1 --memory 99gb"),
        "bench --model M --predict m1 --memory 99gb",
    ],
    "a number out of its range": [
        *("demo --max-tokens 0", "generate --model M --prompt a --max-tokens 0"),
        *("plan M --target m1 --context 0", "generate --model M --max-context 0"),
        *("generate --model M --prompt a --max-kv-size 3", "demo --model M --max-kv-size 3"),
        *("bench --model M -p 0", "bench --model M --top-p 2", "bench --model M --temp -1"),
        *("generate --model M --prompt a --temp -1", "server --model M --port 70000"),
        *("bench ops --context 0", "eval --model M --length 1"),
    ],
    "options that exclude each other": [
        *("convert --model M -q -d", "bench --model M --bits 4", "bench --memory 16gb"),
        *("bench --predict m1 -b 2", f"bench {SHAPE} --prompt-file none", "bench --backend mlx"),
    ],
}
FAILURES = {
    "a model that is not there": [
        *("demo --model ./none", "models ./none", "plan ./none --target m1", "compile ./none"),
        *("convert --model ./none", "bench --model ./none", "eval --model ./none"),
        *("generate --model ./none --prompt a", "server --model ./none", "doctor --model ./none"),
        "bench --predict m1 --model ./none",
    ],
    "a text that is not there": [
        *("eval --model M --text none", "eval --model M --calibrate none"),
        *("bench --model M --prompt-file none",),
        "compile M --output b --rounding gptq --calibrate none",
    ],
    "a place where nothing can be written": [
        *("convert --model M --output file/b", "compile M --output file/b"),
        *("eval --model M --json file/b", "bench --model M --plot file/b.png"),
    ],
    "an output that is there already": [
        *("convert --model M --output M", "compile M --output M"),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codes")
    write_folder(folder / "M", tokenizer=True)
    (folder / "file").write_text("no folder")
    return folder


def lines(kinds):
    return [
        pytest.param(line, id=f"{kind}: {line}") for kind, found in kinds.items() for line in found
    ]


@pytest.fixture
def code_of(folder, monkeypatch, capsys):
    """Run a line where M and the file are, and return its exit code; stderr says why."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(bench_run, "roofs_apart", pytest.fail)

    def run(line: str) -> int:
        code = cli.main(line.split())
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        if not line.startswith("doctor"):  # where a finding is on stdout
            assert ": error: " in shown.err
        return code

    return run


@pytest.mark.parametrize("line", lines(USAGE))
def test_a_wrong_command_line_ends_with_2(line, code_of):
    assert code_of(line) == 2


@pytest.mark.parametrize("line", lines(FAILURES))
def test_what_failed_ends_with_1(line, code_of):
    assert code_of(line) == 1
