"""``load(quant=...)``, which keeps its builds, and ``husky cache``."""

from __future__ import annotations

import os
import re
from pathlib import Path

import compiled_builds
import mlx.core as mx
import numpy as np
import pytest
from compiled_builds import compiled, logits, quietly
from fixtures import FIX_B, mlx_weights, quantize_weights, write_folder

from husky_mlx import cli, compilation
from husky_mlx.loading import load

hky = pytest.fixture(scope="module")(compiled_builds.hky)
copy = pytest.fixture(compiled_builds.copy)


class TestCache:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_any_source_is_compiled_once_and_kept(self, tmp_path, cache, capsys, monkeypatch):
        source = write_folder(tmp_path / "m é", FIX_B, tokenizer=True)
        first, _ = load(str(source), quant="8bit")
        (kept,) = (cache / "builds").iterdir()
        size = sum(file.stat().st_size for file in kept.glob("packed*"))
        said = capsys.readouterr().err
        written = int(re.search(r"husky: writing ([\d,]+) bytes to", said)[1].replace(",", ""))
        assert str(kept) in said and 0 <= size - written < 4096, "all but the file's header"
        monkeypatch.setattr(compilation, "compile_model", pytest.fail)
        again, _ = quietly(source, quant="8bit")
        np.testing.assert_array_equal(logits(first), logits(again))
        assert first.lm_head.bits == 8

    def test_changed_weights_and_other_recipes_are_other_builds(self, tmp_path, cache):
        source = write_folder(tmp_path / "m", FIX_B, tokenizer=True)
        load(str(source), quant="8bit")
        load(str(source), quant="4bit")
        write_folder(tmp_path / "m", FIX_B, mlx_weights(FIX_B, seed=1), tokenizer=True)
        changed, _ = load(str(source), quant="8bit")
        assert len(list((cache / "builds").iterdir())) == 3
        expected = quantize_weights(mlx_weights(FIX_B, seed=1), 8)["lm_head.weight"]
        assert mx.array_equal(changed.lm_head.weight, expected)

    def test_a_build_in_the_folder_is_taken_first(self, copy, cache):
        compiled(copy, "cpu", "8bit")
        assert quietly(copy, quant="8bit")[0].lm_head.bits == 8
        assert not cache.joinpath("builds").exists()

    def test_a_kept_build_of_an_older_format_is_made_again(self, copy, cache, capsys):
        load(str(copy), quant="8bit")
        (kept,) = (cache / "builds").iterdir()
        text = (kept / "husky.json").read_text()
        (kept / "husky.json").write_text(text.replace('"format": 1,', '"format": 0,'))
        assert load(str(copy), quant="8bit")[0].lm_head.bits == 8
        assert "format 0, this version" in capsys.readouterr().err
        assert (kept / "husky.json").read_text() == text

    def test_the_command_lists_and_clears(self, copy, cache, capsys):
        assert cli.main(["cache"]) == 0
        assert capsys.readouterr().out.strip() == f"{cache}: 0 bytes"
        load(str(copy), quant="8bit")
        (cache / "other.bin").write_bytes(b"x" * 1000)
        capsys.readouterr()
        assert cli.main(["cache"]) == 0
        out = capsys.readouterr().out
        assert "other.bin: 1,000 bytes" in out and "builds/m-8bit-" in out
        assert cli.main(["cache", "--clear"]) == 0
        assert [file.name for file in cache.iterdir()] == ["other.bin"]

    @pytest.mark.parametrize("place", ["file", "file/below", "closed", "n" * 300])
    @pytest.mark.parametrize("options", [[], ["--clear"]])
    def test_a_folder_where_nothing_can_be_kept_is_an_error(
        self, tmp_path, monkeypatch, capsys, place, options
    ):
        (tmp_path / "file").write_text("in the way")
        (tmp_path / "closed").mkdir(mode=0o500)
        if place == "closed" and os.access(tmp_path / "closed", os.W_OK):
            pytest.skip("root may write anywhere")
        monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path / place))
        assert cli.main(["cache", *options]) == 1
        shown = capsys.readouterr()
        named = f"husky: error: HUSKY_CACHE_DIR {tmp_path / place} cannot be written ("
        assert shown.out == "" and shown.err.startswith(named)
        assert shown.err.endswith("set HUSKY_CACHE_DIR to another folder\n")
        assert (tmp_path / "file").read_text() == "in the way"
