"""``husky convert``: the same tokens on every side, whole or absent, and each case of ``-q``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import test_gguf_tokenizer
from fixtures import FIX_A, FIX_B, PROMPT, mlx_weights, quantize_weights, write_folder
from gguf_files import Types, fix_a_tensors, write
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from safetensors import safe_open

from husky_mlx import cli, conversion, safetensors_writer, staging
from husky_mlx.conversion import Quantization
from husky_mlx.errors import OutputError
from husky_mlx.loading import load
from husky_mlx.stream import open_stream

ROOT = Path(__file__).resolve().parents[1]
WIDE = {**FIX_B, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}


def converted(source: Path, target: Path, **options) -> Path:
    return conversion.convert(source, target, notify=lambda text: None, **options)


def tokens(model, count: int = 8) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=count)]


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def fix_b(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("fix-b") / "model é", FIX_B, tokenizer=True)


@pytest.fixture(scope="module")
def fix_q(tmp_path_factory) -> Path:
    """FIX-Q, with a head that keeps its floats."""
    weights = quantize_weights(mlx_weights(FIX_B))
    for part in ("scales", "biases"):
        del weights[f"lm_head.{part}"]
    weights["lm_head.weight"] = mlx_weights(FIX_B)["lm_head.weight"]
    block = {"group_size": 64, "bits": 4}
    folder = tmp_path_factory.mktemp("fix-q") / "q"
    return write_folder(folder, FIX_B, weights, tokenizer=True, quantization=block)


def mixed_gguf(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FIX-A in four types, with a byte-level tokenizer and an embedding for each of its tokens."""
    kinds = {"attn_q": Types.Q4_1, "attn_v": Types.Q4_0, "ffn_down": Types.Q8_0}

    def whole_model(path, names, metadata):
        tensors = fix_a_tensors({"attn_k": Types.F16, "ffn_up": Types.Q4_1, **kinds})
        del tensors["output.weight"]
        table = np.random.default_rng(4).normal(0, 1, (len(names), 64)).astype(np.float32)
        tensors["token_embd.weight"] = (table, Types.Q8_0)
        return write(path, tensors, {"tokenizer.ggml.tokens": names, **metadata})

    monkeypatch.setattr(test_gguf_tokenizer, "write_tokenizer", whole_model)
    return test_gguf_tokenizer.byte_level_file(path, "llama-bpe")


class TestRoundTrip:
    @pytest.mark.parametrize("source", ["fix_b", "fix_q"])
    def test_the_same_tokens_here_and_in_plain_mlx_lm(self, source, request, tmp_path):
        source = request.getfixturevalue(source)
        out = converted(source, tmp_path / "out.hky")
        expected = tokens(mlx_lm.load(str(source))[0])
        assert tokens(mlx_lm.load(str(out))[0]) == expected
        assert tokens(load(str(out))[0]) == expected

    def test_a_gguf_file_of_mixed_types(self, tmp_path, monkeypatch):
        source = mixed_gguf(tmp_path / "m.gguf", monkeypatch)
        out = converted(source, tmp_path / "m.hky")
        ours, tokenizer = load(str(source))
        stock, theirs = mlx_lm.load(str(out))
        assert tokens(load(str(out))[0]) == tokens(stock) == tokens(ours)
        text = "the cat in the hat, 1234!"
        assert theirs.encode(text) == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
        assert theirs.eos_token_ids == tokenizer.eos_token_ids
        norm = mx.load(str(out / "model.safetensors"))["model.norm.weight"]
        assert norm.dtype == mx.float16, "as the scales: one dtype throughout"

    def test_every_value_and_file_name_is_mlx_lms(self, fix_b, tmp_path, monkeypatch):
        """Each tensor in a file of its own, as mlx-lm cuts them at 0 bytes."""
        from mlx_lm.utils import make_shards

        def small(weights):
            return make_shards(weights, 0)

        monkeypatch.setattr(safetensors_writer, "make_shards", small)
        out = converted(fix_b, tmp_path / "out.hky")
        index = json.loads((out / "model.safetensors.index.json").read_text())
        names = sorted(file.name for file in out.glob("model*.safetensors"))
        assert names == [f"model-{i:05d}-of-00021.safetensors" for i in range(1, 22)]
        assert sorted(index["weight_map"].values()) == names
        assert index["metadata"]["total_size"] == open_stream(fix_b).nbytes
        for name, value in mlx_weights(FIX_B).items():
            assert mx.array_equal(mx.load(str(out / index["weight_map"][name]))[name], value)
        assert tokens(mlx_lm.load(str(out))[0]) == tokens(mlx_lm.load(str(fix_b))[0])

    def test_other_files_that_a_tokenizer_may_need_come_along(self, fix_b, tmp_path):
        source = write_folder(tmp_path / "m", FIX_B, tokenizer=True)
        for name in ("vocab.txt", "generation_config.json", "tokenization_x.py", "notes.md"):
            (source / name).write_text("{}")
        names = {file.name for file in converted(source, tmp_path / "o").iterdir()}
        assert {"vocab.txt", "generation_config.json", "tokenization_x.py"} < names
        assert "notes.md" not in names

    @pytest.mark.parametrize("source", ["fix_b", "fix_q"])
    def test_the_same_command_gives_the_same_bytes(self, source, request, tmp_path):
        source = request.getfixturevalue(source)
        folders = [converted(source, tmp_path / name) for name in ("one.hky", "two.hky")]
        first, second = (
            {file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders
        )
        assert first == second
        text = first["husky.json"].decode()
        assert str(tmp_path) not in text and source.name in text


class TestWhole:
    def test_killed_leaves_no_folder_and_the_next_run_cleans_up(self, fix_b, tmp_path):
        code = (
            "import os, signal, sys; from husky_mlx import conversion\n"
            "conversion.write_tokenizer = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "conversion.convert(sys.argv[1], sys.argv[2])"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", code, str(fix_b), str(tmp_path / "out.hky")]
        assert subprocess.run(words, env=environment).returncode == -signal.SIGKILL
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(".husky-partial-")
        converted(fix_b, tmp_path / "out.hky")
        assert [file.name for file in tmp_path.iterdir()] == ["out.hky"]

    @pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
    def test_interrupted_leaves_nothing(self, sent, fix_b, tmp_path):
        code = (
            "import os, sys; from husky_mlx import cli, conversion\n"
            f"conversion.write_tokenizer = lambda *_: os.kill(os.getpid(), {int(sent)})\n"
            "sys.exit(cli.main(['convert', '--model', sys.argv[1], '--output', sys.argv[2]]))"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", code, str(fix_b), str(tmp_path / "out.hky")]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (130, "") and "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_cannot_be_replaced_stays(self, fix_b, tmp_path, monkeypatch):
        path = converted(fix_b, tmp_path / "out.hky")
        before = (path / "husky.json").read_bytes()
        rename = os.rename

        def failing(source, target):
            if target == path and "-old-" not in str(source):
                raise OSError(5, "Input/output error")
            rename(source, target)

        monkeypatch.setattr(staging.os, "rename", failing)
        with pytest.raises(OutputError, match="Input/output error"):
            converted(fix_b, path, overwrite=True)
        assert (path / "husky.json").read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_a_full_disk_is_said_before_anything_is_written(self, fix_b, tmp_path, monkeypatch):
        usage = staging.shutil.disk_usage(tmp_path)._replace(free=20_000_000)
        monkeypatch.setattr(staging.shutil, "disk_usage", lambda place: usage)
        converted(fix_b, tmp_path / "fits")
        monkeypatch.setattr(staging, "_SPARE", 19_700_000)
        with pytest.raises(OutputError, match="needs 20 MB of disk, but 20 MB are free there"):
            converted(fix_b, tmp_path / "new" / "out.hky")
        assert [file.name for file in tmp_path.iterdir()] == ["fits"]

    def test_overwrite_replaces_what_husky_wrote_and_nothing_else(self, fix_b, fix_q, tmp_path):
        target = converted(fix_b, tmp_path / "out")
        with pytest.raises(OutputError, match="exists already"):
            converted(fix_q, target)
        converted(fix_q, target, overwrite=True)
        assert config_of(target)["quantization"]["bits"] == 4
        for other in (tmp_path, fix_b):
            with pytest.raises(OutputError, match="only folders that husky wrote"):
                converted(fix_q, other, overwrite=True)
        link = tmp_path / "link"
        link.symlink_to(target)
        with pytest.raises(OutputError, match="is a link"):
            converted(fix_q, link, overwrite=True)

    def test_a_failure_keeps_what_was_there(self, fix_b, tmp_path, monkeypatch):
        target = converted(fix_b, tmp_path / "out")
        before = (target / "husky.json").read_bytes()
        monkeypatch.setattr(conversion, "write_tokenizer", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            converted(fix_b, target, overwrite=True)
        assert [file.name for file in tmp_path.iterdir()] == ["out"]
        assert (target / "husky.json").read_bytes() == before

    def test_a_parent_that_is_a_file(self, fix_b, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OutputError, match="cannot be written"):
            converted(fix_b, tmp_path / "file" / "out.hky")


DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint8]


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text("abcä.", min_size=1, max_size=6),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=3)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 200),
)
def test_files_are_what_safetensors_reads(tmp_path_factory, tensors, largest):
    folder = tmp_path_factory.mktemp("shards")
    values = {
        name: mx.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
        for name, (dtype, shape) in tensors.items()
    }
    files = safetensors_writer.write_shards(folder, values, values.__getitem__, "w", largest)
    for name, value in values.items():
        with safe_open(folder / files[name], framework="numpy") as file:
            assert name in list(file.keys())
        found = mx.load(str(folder / files[name]))[name]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert mx.array_equal(found, value)


class TestQuantize:
    @pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
    @pytest.mark.parametrize("group_size", [32, 64, 128])
    def test_every_width_equals_mlx_lms_and_its_own_floats_C038(self, bits, group_size, tmp_path):
        wide = {**FIX_B, "hidden_size": 128, "num_hidden_layers": 1}
        source = write_folder(tmp_path / "m", wide, tokenizer=True)
        quantization = Quantization.of(bits, group_size)
        out = converted(source, tmp_path / "q", quantization=quantization)
        entry = config_of(out)["quantization"]
        assert (entry["bits"], entry["group_size"]) == (bits, group_size)
        for name, value in mlx_weights(wide).items():
            if value.ndim == 2:
                found = mx.load(str(out / "model.safetensors"))
                expected = mx.quantize(value, group_size, bits)
                stem = name.removesuffix("weight")
                for part, array in zip(("weight", "scales", "biases"), expected, strict=True):
                    assert mx.array_equal(found[stem + part], array)
        plain = converted(out, tmp_path / "d", dequantize=True)
        ours = load(str(out))[0](mx.array([PROMPT[:8]]))
        assert mx.abs(ours - load(str(plain))[0](mx.array([PROMPT[:8]]))).max() < 1e-3
        assert len(tokens(mlx_lm.load(str(out))[0], 12)) == 12

    def test_rows_that_groups_do_not_divide_C035(self, tmp_path):
        narrow = {**FIX_B, "intermediate_size": 96}
        source = write_folder(tmp_path / "m", narrow, tokenizer=True)
        said: list[str] = []
        quantization = Quantization.of(4, 64)
        out = conversion.convert(
            source, tmp_path / "q", quantization=quantization, notify=said.append
        )
        assert said == [
            "model.layers.0.mlp.down_proj and 1 more stored in groups of 32: groups of 64 do not "
            "divide the rows"
        ]
        entry = config_of(out)["quantization"]
        down = {"group_size": 32, "bits": 4, "mode": "affine"}
        assert entry["model.layers.1.mlp.down_proj"] == down and entry["group_size"] == 64
        plain = converted(out, tmp_path / "d", dequantize=True)
        found, expected = (load(str(p))[0](mx.array([PROMPT[:8]])) for p in (out, plain))
        assert mx.abs(found - expected).max() < 1e-3

    def test_rows_that_no_group_divides_stay_floats_C035(self, tmp_path):
        odd = {**FIX_B, "intermediate_size": 80}
        source = write_folder(tmp_path / "m", odd, tokenizer=True)
        out = converted(source, tmp_path / "q", quantization=Quantization.of())
        assert config_of(out)["quantization"]["model.layers.0.mlp.down_proj"] is False
        assert tokens(load(str(out))[0]) == tokens(mlx_lm.load(str(out))[0])

    def test_python_and_the_command_line_write_the_same_C037(self, tmp_path):
        source = write_folder(tmp_path / "m", WIDE, tokenizer=True)
        for words, options, group in (
            (["--quant-predicate", "mixed_4_6"], {"recipe_name": "mixed_4_6"}, 64),
            (["--q-mode", "mxfp4"], {"mode": "mxfp4"}, 32),
        ):
            mine = converted(source, tmp_path / "py", quantization=Quantization.of(**options))
            target = tmp_path / "cli"
            line = ["convert", "--hf-path", str(source), "--mlx-path", str(target), "-q", *words]
            assert cli.main(line) == 0
            assert (mine / "husky.json").read_bytes() == (target / "husky.json").read_bytes()
            block = config_of(mine)["quantization"]
            entries = [block, *(value for value in block.values() if isinstance(value, dict))]
            assert {entry["group_size"] for entry in entries} == {group}
            for folder in (mine, target):
                staging.shutil.rmtree(folder)

    def test_mixed_bits_are_mlx_lms_own_C034(self, tmp_path):
        from mlx_lm.convert import convert as stock_convert

        source = write_folder(tmp_path / "m", WIDE, tokenizer=True)
        mixed = Quantization.of(recipe_name="mixed_3_6")
        mine = converted(source, tmp_path / "py", quantization=mixed)
        stock_convert(
            str(source),
            str(tmp_path / "stock"),
            quantize=True,
            q_group_size=64,
            quant_predicate="mixed_3_6",
        )
        ours, theirs = (
            mx.load(str(folder / "model.safetensors")) for folder in (mine, tmp_path / "stock")
        )
        assert ours.keys() == theirs.keys()
        assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)
        (mine / "husky.json").unlink()
        config = config_of(mine)
        for key in ("quantization", "quantization_config"):
            config[key] = {"group_size": 64, "bits": 3}
        expected = tokens(load(str(mine))[0])
        (mine / "config.json").write_text(json.dumps(config))
        assert tokens(load(str(mine))[0]) == expected == tokens(mlx_lm.load(str(mine))[0])

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["--q-bits", "7"], "the bits must be one of (2, 3, 4, 5, 6, 8), found 7"),
            (["--q-bits", "0"], "the bits must be one of (2, 3, 4, 5, 6, 8), found 0"),
            (["--q-group-size", "16"], "the group size must be one of (32, 64, 128), found 16"),
            (["--q-group-size", "0"], "the group size must be one of (32, 64, 128), found 0"),
            (["--q-mode", "mxfp4", "--q-bits", "8"], "the bits of mxfp4 must be 4, found 8"),
            (["--q-mode", "mxfp8", "--q-group-size", "64"], "of mxfp8 must be 32, found 64"),
        ],
    )
    def test_widths_that_do_not_exist_C039(self, words, says, tmp_path, capsys):
        """No file is read: the model is not there at all."""
        line = ["convert", "--model", "/none", "--output", str(tmp_path / "q"), "-q", *words]
        assert cli.main(line) == 2
        assert says in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_raising_bits_is_refused_and_lowering_is_measured_C040(self, fix_q, tmp_path):
        with pytest.raises(ValueError, match="has 4 bit already and 8 bit hold nothing more"):
            converted(fix_q, tmp_path / "q8", quantization=Quantization.of(8))
        said: list[str] = []
        lower = Quantization.of(3, 64)
        out = conversion.convert(fix_q, tmp_path / "q3", quantization=lower, notify=said.append)
        assert config_of(out)["quantization"]["bits"] == 3
        (warning,) = said
        found = mx.load(str(out / "model.safetensors"))
        name = warning.partition("square, ")[2].rstrip(")")
        before = mx.load(str(fix_q / "model.safetensors"))
        floats = [
            np.array(
                mx.dequantize(*(x[f"{name}.{part}"] for part in PARTS), group_size=64, bits=bits)
            ).astype(np.float64)
            for x, bits in ((before, 4), (found, 3))
        ]
        error = np.linalg.norm(floats[1] - floats[0]) / np.linalg.norm(floats[0])
        assert f"off by up to {error:.2%}" in warning
        assert warning.startswith("15 matrices were quantized already")

    def test_dequantizing_floats_is_said_and_both_at_once_refused_C040(self, fix_b, tmp_path):
        said: list[str] = []
        out = conversion.convert(fix_b, tmp_path / "d", dequantize=True, notify=said.append)
        assert said == [f"{fix_b} is not quantized: there is nothing to dequantize"]
        assert tokens(load(str(out))[0]) == tokens(load(str(fix_b))[0])
        with pytest.raises(ValueError, match="either quantize or dequantize"):
            converted(fix_b, tmp_path / "x", dequantize=True, quantization=Quantization.of())

    @pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
    def test_mx_formats_with_an_affine_head_C045(self, mode, fix_b, tmp_path):
        out = converted(fix_b, tmp_path / "q", quantization=Quantization.of(mode=mode))
        weights = dict(mx.load(str(out / "model.safetensors")))
        head = mx.quantize(mlx_weights(FIX_B)["lm_head.weight"], 64, 8)
        weights |= {f"lm_head.{part}": value for part, value in zip(PARTS, head, strict=True)}
        config = config_of(out)
        config["quantization"]["lm_head"] = {"group_size": 64, "bits": 8, "mode": "affine"}
        del config["quantization_config"]
        mixed = write_folder(tmp_path / "mixed", config, weights, tokenizer=True)
        for folder in (out, mixed, converted(mixed, tmp_path / "again")):
            assert tokens(load(str(folder))[0]) == tokens(mlx_lm.load(str(folder))[0])


PARTS = ("weight", "scales", "biases")


class TestDtype:
    @pytest.mark.parametrize(
        ("keys", "expected", "notices"),
        [
            ({"dtype": "bfloat16"}, mx.bfloat16, 0),
            ({"torch_dtype": "bfloat16"}, mx.bfloat16, 0),
            ({"dtype": "bfloat16", "torch_dtype": "float16"}, mx.bfloat16, 1),
            ({}, mx.float32, 0),
        ],
    )
    def test_the_config_decides_and_scales_follow_C028(self, keys, expected, notices, tmp_path):
        source = write_folder(tmp_path / "m", FIX_B, tokenizer=True, **keys)
        said: list[str] = []
        quantization = Quantization.of()
        out = conversion.convert(
            source, tmp_path / "q", quantization=quantization, notify=said.append
        )
        weights = mx.load(str(out / "model.safetensors"))
        assert {value.dtype for value in weights.values()} == {expected, mx.uint32}
        assert len(said) == notices

    def test_an_asked_one_is_written_into_the_config(self, tmp_path):
        source = write_folder(tmp_path / "m", FIX_B, tokenizer=True, torch_dtype="float32")
        out = converted(source, tmp_path / "h", dtype="float16")
        assert config_of(out)["torch_dtype"] == "float16"
        weights = mx.load(str(out / "model.safetensors"))
        assert {value.dtype for value in weights.values()} == {mx.float16}

    @pytest.mark.parametrize("value", [1e5, float("nan")])
    def test_what_float16_cannot_hold_is_refused_by_name(self, value, tmp_path):
        weights = mlx_weights(FIX_B)
        weights["model.norm.weight"] = mx.full((64,), value)
        source = write_folder(tmp_path / "m", FIX_B, weights, tokenizer=True)
        with pytest.raises(ValueError, match=r"model\.norm\.weight has values up to .* bfloat16"):
            converted(source, tmp_path / "h", dtype="float16")
        assert not (tmp_path / "h").exists()


def test_another_family_goes_to_mlx_lm_with_a_notice(tmp_path, capsys):
    config = {**FIX_B, "model_type": "gemma", "head_dim": 16, "tie_word_embeddings": True}
    source = write_folder(tmp_path / "m", config, mlx_weights(config), tokenizer=True)
    target = tmp_path / "out"
    assert cli.main(["convert", "--model", str(source), "--mlx-path", str(target), "-q"]) == 0
    assert "mlx-lm converts this one: model_type is 'gemma'" in capsys.readouterr().err
    assert config_of(target)["quantization"]["bits"] == 4


def test_mlx_lms_converter_is_there_when_asked(fix_b, tmp_path):
    target = tmp_path / "out"
    line = ["convert", "--backend", "mlx", "--model", str(fix_b), "--mlx-path", str(target)]
    assert cli.main(line) == 0
    assert (target / "README.md").exists() and not (target / "husky.json").exists()


def test_fix_a_has_no_tokenizer_and_converts(tmp_path):
    """mlx-lm reports that where somebody wants to talk to it."""
    out = converted(write_folder(tmp_path / "m", FIX_A), tmp_path / "out")
    assert config_of(out)["vocab_size"] == 96
