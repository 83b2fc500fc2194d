"""``husky compile``: what a build holds, its recipes, how it is written, and what is said."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import compiled_builds
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from compiled_builds import compiled, converted, logits, quietly, tokens
from fixtures import FIX_B, write_folder

import husky_mlx.pack
from husky_mlx import builds, chips, cli, compilation_command, targets
from husky_mlx.compilation import compile_model
from husky_mlx.conversion import Quantization, convert
from husky_mlx.errors import OutputError
from husky_mlx.loading import load, read_tokenizer
from husky_mlx.quantization import Choice

hky = pytest.fixture(scope="module")(compiled_builds.hky)
copy = pytest.fixture(compiled_builds.copy)


ROOT = Path(__file__).resolve().parents[1]


TIED = {**FIX_B, "tie_word_embeddings": True}


HALF = {"torch_dtype": "float16"}


RECIPES = {
    "8bit": {"bits": 8},
    "4bit-uniform": {"bits": 4},
    "2bit-uniform": {"bits": 2},
    "mixed_3_6": {"recipe_name": "mixed_3_6"},
}


class TestContent:
    @pytest.mark.parametrize("config", [FIX_B, TIED], ids=["untied", "tied"])
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_it_computes_what_the_converted_folder_does(self, recipe, config, tmp_path):
        """``convert -q`` is held against mlx-lm's own in test_conversion.py."""
        source = converted(tmp_path, config)
        twin = tmp_path / "twin"
        quantization = Quantization.of(**RECIPES[recipe])
        convert(source, twin, quantization=quantization, notify=lambda text: None)
        expected, _ = load(str(twin))
        built, tokenizer = quietly(compiled(source, "cpu", recipe))
        np.testing.assert_array_equal(logits(built), logits(expected))
        assert tokens(built) == tokens(expected) == tokens(mlx_lm.load(str(twin))[0])
        assert tokenizer.encode("the") == [257]

    def test_biases_windows_and_scaled_rope(self, tmp_path):
        config = {
            **FIX_B,
            "model_type": "mistral",
            "attention_bias": True,
            "mlp_bias": True,
            "sliding_window": 16,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        }
        source = converted(tmp_path, config)
        assert tokens(quietly(compiled(source, "cpu", "fp16"))[0]) == tokens(
            load(str(convert(source, tmp_path / "h", dtype="float16")))[0]
        )

    @pytest.mark.parametrize("recipe", ["4bit", "keep", "mixed_3_6"])
    def test_loading_joins_packs_and_widens_nothing(self, recipe, tmp_path, monkeypatch):
        source = converted(tmp_path, {**FIX_B, **HALF})
        build = compiled(source, "cpu", recipe)

        def never(*arguments, **options):
            raise AssertionError("done again while loading")

        for place, name in ((husky_mlx.pack, "join"), (mx, "concatenate")):
            monkeypatch.setattr(place, name, never)
        gc.collect()
        mx.clear_cache()  # or MLX would take buffers that are larger than asked for
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        model, _ = quietly(build)
        stored = sum(file.stat().st_size for file in build.glob("packed*.safetensors"))
        assert mx.get_peak_memory() - before < stored * 1.02, "what is read is what is held"
        fused = "not fused" not in str(model.plan)
        assert fused == (recipe != "mixed_3_6")

    def test_scales_are_as_the_cpu_takes_them_and_as_stored_elsewhere(self, tmp_path):
        source = converted(tmp_path, {**FIX_B, **HALF})
        for target, dtype in (("cpu", "float32"), ("m1", "float16")):
            build = compiled(source, target, "4bit")
            manifest = json.loads((build / "husky.json").read_text())
            parts = {name: kind for name, kind, _ in manifest["layouts"]["layers.1.qkv"]["parts"]}
            assert parts == {
                "weight": "uint32",
                "scales": dtype,
                "biases": dtype,
                "norm": dtype,
                "frequencies": "float32",
            }

    def test_mlx_lm_reads_the_folder_around_it(self, copy):
        expected = tokens(mlx_lm.load(str(copy))[0])
        build = compiled(copy, "cpu", "8bit")
        assert not list(build.glob("model*.safetensors"))
        assert tokens(mlx_lm.load(str(copy))[0]) == expected

    def test_the_same_command_gives_the_same_bytes(self, copy):
        found = []
        for _ in range(2):
            build = compiled(copy, "m3pro", "mixed_4_6")
            found.append({file.name: file.read_bytes() for file in build.iterdir()})
            shutil.rmtree(build)
        assert found[0] == found[1]
        text = found[0]["husky.json"].decode()
        assert str(copy.parent) not in text and "20" + "26" not in text

    def test_files_are_small_enough_to_be_hashed_side_by_side(self, copy, monkeypatch):
        from husky_mlx import packed

        monkeypatch.setattr(packed, "LARGEST_FILE", 20_000)
        build = compiled(copy, "cpu", "8bit")
        files = sorted(file.name for file in build.glob("*.safetensors"))
        assert len(files) > 3 and files[0] == f"packed-00001-of-{len(files):05d}.safetensors"
        shutil.copytree(build, copy.parent / "moved")
        assert tokens(quietly(copy.parent / "moved")[0]) == tokens(quietly(build)[0])


class TestRecipes:
    def test_defaults_are_4bit_for_floats_and_keep_for_quantized(self, copy, tmp_path):
        assert compiled(copy).name == "cpu-4bit"
        q4 = convert(copy, tmp_path / "q.hky", quantization=Quantization.of())
        build = compiled(q4)
        assert build.name == "cpu-keep"
        np.testing.assert_array_equal(logits(quietly(build)[0]), logits(quietly(q4)[0]))

    def test_raising_bits_is_refused_and_leaves_nothing(self, copy, tmp_path):
        q4 = convert(copy, tmp_path / "q.hky", quantization=Quantization.of())
        with pytest.raises(ValueError, match=r"would raise the bits of 16 matrices.*'keep'"):
            compiled(q4, "cpu", "8bit")
        with pytest.raises(ValueError, match="would raise the bits"):
            compiled(q4, "cpu", "bf16")
        assert not (q4 / "builds").exists()

    def test_lowering_bits_warns_with_the_measured_error(self, copy, tmp_path, capsys):
        q8 = convert(copy, tmp_path / "q.hky", quantization=Quantization.of(8))
        assert cli.main(["compile", str(q8), "--target", "cpu", "--quant", "4bit"]) == 0
        captured = capsys.readouterr()
        assert "14 matrices were quantized already and quantized again" in captured.err
        worst = float(re.search(r"off by up to ([\d.]+)%", captured.err)[1])
        assert 5 < worst < 15, "4 bits over numbers of 8"
        # The embedding keeps its 8 bits, exactly.
        assert re.search(r"embedding \(1\) +8 bit affine group 64 +\S+ +0\.00%", captured.out)

    def test_the_same_bits_in_other_groups_are_kept(self, copy, tmp_path):
        q4 = convert(copy, tmp_path / "q.hky", quantization=Quantization.of(4, 32))
        build = compiled(q4, "cpu", "4bit-uniform")
        block = json.loads((build / "config.json").read_text())["quantization"]
        assert block == {"group_size": 32, "bits": 4, "mode": "affine"}

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"recipe": "5bits"}, "unknown recipe '5bits', expected one of keep"),
            ({"recipe": "auto"}, "'auto' and a budget in bits per weight need each other"),
            ({"recipe": "4bit", "budget": 4.0}, "need each other"),
            ({"recipe": "4bit", "calibration": "x.txt"}, "changes nothing here"),
        ],
    )
    def test_choices_that_make_no_sense(self, options, says):
        with pytest.raises(ValueError, match=re.escape(says)):
            compile_model("/none", "cpu", Choice(**options))

    @pytest.mark.parametrize("rounding", ["gptq", "awq"])
    def test_calibrated_roundings(self, rounding, copy, tmp_path):
        """What they round to is tested in test_rounding.py; here it arrives, and is kept."""
        from husky_mlx.calibrate_forward import FloatLlama
        from husky_mlx.calibrate_text import calibration_sequences
        from husky_mlx.calibrate_weights import FloatWeights
        from husky_mlx.rounding_model import round_model

        text = tmp_path / "text.txt"
        text.write_text("the thin man in the hat and the ant in the inn " * 40)
        build = compiled(copy, "m1", "3bit-uniform", rounding=rounding, calibration=str(text))
        assert build.name == f"m1-3bit-uniform-{rounding}"
        source = FloatWeights(copy)
        tokenizer = read_tokenizer(copy)
        ids = calibration_sequences(tokenizer, {"": text.read_text()})
        config = json.loads((build / "config.json").read_text())
        block = config["quantization"]
        assert (block["bits"], block["group_size"]) == (3, 64)
        allocation = {
            t.path: compilation_command.fitting(3, t.shape[1], 64) for t in source.tensors
        }
        llama = FloatLlama(source.args, source)
        found = builds.read_build(build).weights
        for part in round_model(llama, allocation, rounding, ids, mx.float32):
            for name, value in part.items():
                assert mx.array_equal(found[name], value), name

    def test_auto_spends_the_budget(self, copy, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text("the thin man in the hat and the ant in the inn " * 40)
        build = compiled(copy, "m1", "auto", budget=5.0, calibration=str(text))
        assert build.name == "m1-auto-5bpw"
        from husky_mlx import recipe
        from husky_mlx.calibrate_weights import FloatWeights

        source = FloatWeights(convert(copy, tmp_path / "f", dtype="float16"))
        found = builds.read_build(build)
        block = found.config["quantization"]
        specs = {}
        for tensor in source.tensors:
            own = block.get(tensor.path, block)
            spec = None if own is False else recipe.QuantSpec(own["bits"], own["group_size"])
            specs[tensor.path] = spec
        assert 4.0 < recipe.bits_per_weight(source.tensors, specs) <= 5.0


class TestWriting:
    def test_killed_leaves_no_build(self, copy):
        code = (
            "import os, signal, sys; from husky_mlx import compilation\n"
            "compilation.save_config = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "compilation.compile_model(sys.argv[1], 'cpu')"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code, str(copy)], env=environment)
        assert done.returncode == -signal.SIGKILL
        assert not (copy / "builds" / "cpu-4bit").exists()
        assert type(quietly(copy)[0].lm_head) is nn.Linear
        compiled(copy)
        assert [folder.name for folder in (copy / "builds").iterdir()] == ["cpu-4bit"]

    def test_an_existing_build_is_kept_without_overwrite(self, copy):
        build = compiled(copy)
        before = (build / "husky.json").read_bytes()
        with pytest.raises(OutputError, match="exists already"):
            compiled(copy)
        compile_model(copy, "cpu", overwrite=True)
        assert (build / "husky.json").read_bytes() == before

    def test_any_source_with_an_output(self, copy, tmp_path):
        source = write_folder(tmp_path / "plain", FIX_B, tokenizer=True)
        with pytest.raises(ValueError, match=r"no \.hky folder: give --output"):
            compiled(source)
        made = compile_model(source, "cpu", Choice("8bit"), tmp_path / "out", notify=pytest.fail)
        np.testing.assert_array_equal(
            logits(quietly(made.path)[0]), logits(quietly(compiled(copy, quant="8bit"))[0])
        )

    def test_the_table_and_the_predicted_ceiling(self, copy, capsys):
        words = ["--target", "m4max-40c", "--quant", "4bit"]
        assert cli.main(["compile", str(copy), *words]) == 0
        out = " ".join(capsys.readouterr().out.split())
        # 2 layers: 4 x 64 x 64 / 2 attention and 3 x 64 x 128 MLP weights; a head of 264 x 64.
        layers, head = 2 * (12288 + 24576), 264 * 64
        build = layers * (4 + 64 / 64) / 8 + head * (8 + 64 / 64) / 8  # float32 scales and biases
        uniform = (layers + head) * 4.5 / 8
        speeds = [f"{546e9 / size:,.0f} tok/s" for size in (build, uniform, (layers + head) * 2)]
        assert (
            "predicted ceiling of decode at 546 GB/s, all of it for weights: this build "
            f"{speeds[0]}, uniform 4 bit {speeds[1]}, fp16 {speeds[2]}"
        ) in out

    @pytest.mark.parametrize("recipe, slow", [("3bit-uniform", True), ("4bit-uniform", False)])
    def test_a_format_without_a_kernel_is_said(self, copy, capsys, recipe, slow):
        assert cli.main(["compile", str(copy), "--target", "cpu", "--quant", recipe]) == 0
        assert ("runs on plain MLX operations, slower" in capsys.readouterr().out) == slow

    def test_targets_list_what_there_is(self, copy, capsys):
        assert cli.main(["compile", str(copy), "--target", "m9"]) == 2
        assert "or auto, cuda, cpu" in capsys.readouterr().err
        assert cli.main(["compile", str(copy), "--target", "m3max", "--memory", "64gb"]) == 0
        made = json.loads((copy / "builds" / "m3max-4bit" / "husky.json").read_text())
        assert made["target"]["cores"] == 40
        assert cli.main(["compile", "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "On Metal the GPU code itself is still compiled" in text and "mixed_3_6" in text


def test_targets_by_name(monkeypatch):
    said: list[str] = []
    assert targets.parse_target("auto", said.append) == ("cpu", targets.CPU)
    assert targets.parse_target("CPU", said.append)[0] == "cpu"
    assert targets.parse_target("cuda", said.append)[0] == "cuda" and len(said) == 1
    here = chips.detect({"device_name": "NVIDIA H200", "architecture": "sm_90"})
    monkeypatch.setattr(targets, "this_machine", lambda: here)
    assert targets.parse_target("cuda", said.append) == ("sm_90", here)
    newer = chips.Chip("Apple M9 Ultra+", "metal", 21, 5, 60)
    monkeypatch.setattr(targets, "this_machine", lambda: newer)
    assert targets.parse_target("auto", said.append) == ("applem9ultra", newer)
