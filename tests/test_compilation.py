"""``husky compile`` and its builds: what they hold, which one is loaded, and what is said."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from fixtures import FIX_B, PROMPT, mlx_weights, quantize_weights, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from test_adapters import write_adapter

import husky_mlx.pack
from husky_mlx import (
    builds,
    chips,
    cli,
    compilation,
    compilation_command,
    memory,
    targets,
    tile_table,
)
from husky_mlx.compilation import compile_model
from husky_mlx.conversion import Quantization, convert
from husky_mlx.errors import (
    ArtifactError,
    CheckpointError,
    HuskyError,
    MemoryLimitError,
    OutputError,
)
from husky_mlx.fused import fused_weights
from husky_mlx.launches import launch_lines
from husky_mlx.loading import build_model, load, read_tokenizer
from husky_mlx.ops import gemv
from husky_mlx.ops.gemv import Platform, gemv_tile
from husky_mlx.policy import policy
from husky_mlx.quantization import Choice

ROOT = Path(__file__).resolve().parents[1]
TIED = {**FIX_B, "tie_word_embeddings": True}
HALF = {"torch_dtype": "float16"}


def converted(folder: Path, config: dict = FIX_B, **options) -> Path:
    source = write_folder(folder / "source", config, mlx_weights(config), tokenizer=True)
    return convert(source, folder / "m.hky", notify=lambda text: None, **options)


def quietly(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(str(folder), **options)


def logits(model) -> np.ndarray:
    return np.array(model(mx.array([PROMPT[:8]]))[0])


def tokens(model) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=8)]


def compiled(source: Path, target: str = "cpu", quant: str | None = None, **options) -> Path:
    choice = Choice(recipe=quant, **options)
    return compile_model(source, target, choice, notify=lambda text: None).path


@pytest.fixture(scope="module")
def hky(tmp_path_factory) -> Path:
    return converted(tmp_path_factory.mktemp("compile"))


@pytest.fixture
def copy(hky, tmp_path) -> Path:
    """The folder without the builds of other tests."""
    return Path(shutil.copytree(hky, tmp_path / "m.hky", ignore=lambda *_: ["builds"]))


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


class TestChoosing:
    def test_the_build_for_this_machine_is_taken(self, copy):
        model, _ = quietly(copy)
        assert model.model.embed_tokens.weight.dtype == mx.float32
        compiled(copy, "m3pro", "8bit")
        compiled(copy, "cpu", "4bit-uniform")
        model, _ = quietly(copy)
        assert type(model.lm_head) is nn.QuantizedLinear and model.lm_head.bits == 4

    def test_several_are_listed(self, copy):
        for recipe in ("4bit", "8bit"):
            compiled(copy, "cpu", recipe)
        with pytest.raises(ArtifactError, match="several builds are for this machine") as error:
            load(str(copy))
        assert all(str(copy / "builds" / f"cpu-{name}") in str(error.value) for name in RECIPE_TWO)
        assert quietly(copy, quant="8bit")[0].lm_head.bits == 8
        assert quietly(copy / "builds" / "cpu-4bit")[0].model.layers[0].mlp.up_proj.bits == 4

    def test_none_that_fits_means_the_models_own_weights_and_a_warning(self, copy):
        compiled(copy, "m3pro", "4bit")
        with pytest.warns(UserWarning, match=r"no build is for this machine \(cpu\), found m3pro"):
            model, _ = load(str(copy))
        assert type(model.lm_head) is nn.Linear

    def test_a_build_for_another_chip_runs_and_says_so(self, copy, tmp_path):
        build = compiled(copy, "m3pro", "4bit")
        with pytest.warns(UserWarning, match="compiled for m3pro and this is cpu: its weights"):
            model, _ = load(str(build))
        shutil.move(build, tmp_path / "kept")
        np.testing.assert_array_equal(
            logits(model), logits(quietly(compiled(copy, quant="4bit"))[0])
        )

    def test_an_older_format_is_said_and_the_models_own_weights_taken(self, copy):
        build = compiled(copy, "cpu", "4bit")
        path = build / "husky.json"
        path.write_text(path.read_text().replace('"format": 1,', '"format": 0,'))
        with pytest.warns(UserWarning, match="format 0, this version .* the model's own weights"):
            assert type(load(str(copy))[0].lm_head) is nn.Linear
        with pytest.raises(ArtifactError, match="format 0, this version of husky_mlx reads"):
            load(str(build))

    @pytest.mark.parametrize(
        ("target", "device", "fits"),
        [
            ("m3pro", {"device_name": "Apple M3 Pro", "architecture": "applegpu_g15s"}, True),
            ("m3pro-18c", {"device_name": "Apple M3 Pro", "architecture": "applegpu_g15s"}, True),
            ("m3max", {"device_name": "Apple M3 Pro", "architecture": "applegpu_g15s"}, False),
            ("cpu", {"device_name": "Apple M3 Pro", "architecture": "applegpu_g15s"}, False),
            ("cuda", {"device_name": "NVIDIA H200", "architecture": "sm_90"}, True),
            ("sm_90", {"device_name": "NVIDIA H200", "architecture": "sm_90"}, True),
            ("sm_80", {"device_name": "NVIDIA H200", "architecture": "sm_90"}, False),
        ],
    )
    def test_fitting_is_by_chip_whose_cores_mlx_does_not_know(
        self, target, device, fits, copy, monkeypatch
    ):
        build = compiled(copy, target, "4bit")
        monkeypatch.setattr(builds, "this_machine", lambda: chips.detect(device))
        assert builds.find_build(copy)[0] == (build if fits else None)

    def test_rotary_frequencies_of_another_version(self, copy, monkeypatch):
        from husky_mlx.rope import Rope

        build = compiled(copy, "cpu", "8bit")
        old = Rope.frequencies
        monkeypatch.setattr(Rope, "frequencies", lambda self, dim: [x * 2 for x in old(self, dim)])
        with pytest.raises(ArtifactError, match="its rotary frequencies are not those"):
            load(str(build))

    def test_a_build_of_other_weights_or_with_an_adapter_is_not_taken(self, hky, copy, tmp_path):
        other = converted(tmp_path / "other", {**FIX_B, "rms_norm_eps": 1e-6})
        shutil.copytree(compiled(other, "cpu", "8bit"), copy / "builds" / "cpu-8bit")
        with pytest.warns(UserWarning, match="not taken, it was compiled from other weights"):
            assert type(load(str(copy))[0].lm_head) is nn.Linear
        shutil.rmtree(copy / "builds")
        adapter = write_adapter(tmp_path / "lora", model=mlx_lm.load(str(copy))[0])
        compiled(copy, "cpu", "8bit", adapter=str(adapter))
        assert type(quietly(copy)[0].lm_head) is nn.Linear
        assert quietly(copy / "builds" / "cpu-8bit+lora")[0].lm_head.bits == 8

    def test_what_reads_checkpoints_says_what_a_build_is(self, copy):
        build = compiled(copy, "cpu", "8bit")
        with pytest.raises(CheckpointError, match="a build of husky compile, whose weights are"):
            convert(build, copy.parent / "out", notify=pytest.fail)

    def test_one_that_does_not_fit_in_memory_is_not_read(self, copy, monkeypatch):
        build = compiled(copy, "cpu", "8bit")
        monkeypatch.setattr(memory, "memory_limit", lambda: mx.get_active_memory() + 50_000)
        before = mx.get_active_memory()
        with pytest.raises(MemoryLimitError, match=f"Loading {re.escape(str(build))} needs"):
            load(str(build))
        assert mx.get_active_memory() == before

    def test_mlx_lms_class_runs_a_build_too(self, copy):
        build = compiled(copy, "cpu", "8bit")
        model, _ = load(str(build), backend="mlx")
        assert type(model).__module__ == "mlx_lm.models.llama"
        assert tokens(model) == tokens(quietly(build)[0])


RECIPE_TWO = ("4bit", "8bit")


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    small = {**FIX_B, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return compiled(converted(tmp_path_factory.mktemp("flip"), small), "cpu", "4bit")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_in_a_build_is_caught(build, data):
    path = data.draw(st.sampled_from(sorted(build.iterdir())))
    content = path.read_bytes()
    where = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[where] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(changed)
        with pytest.raises(HuskyError) as error:
            load(str(build))
    finally:
        path.write_bytes(content)
    assert str(path) in str(error.value)


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


class TestTiles:
    @pytest.mark.parametrize("chip", ["m1", "m4max-40c", "sm_90"])
    def test_a_build_has_a_tile_for_every_product_of_a_step(self, chip, copy):
        build = compiled(copy, chip, "4bit")
        stored = json.loads((build / "husky.json").read_text())["tiles"]
        tiles = tile_table.from_json(stored)
        there = chips.parse(chip)[0]
        assert tiles == {key: policy(*key, there) for key in tiles}
        asked = set()

        class Recording(dict):
            def get(self, key):
                asked.add(key)
                return tiles[key]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _ = load(str(build))
        frequencies = mx.array(model.args.rope.frequencies(model.args.head_dim))
        made = fused_weights(model.args, husky_mlx.pack.pack(model, frequencies))
        platform = Platform(there, "emulator", Recording())
        launch_lines(made, platform)
        for rows in (2, 3, 4):
            gemv_tile("o_proj_add", rows, made.layers[0].o_proj, platform)
        assert len(asked) > 6

    def test_a_tile_of_a_build_replaces_the_policys(self, copy):
        m1 = chips.parse("m1")[0]
        (key, tile), *_ = tile_table.from_json(
            json.loads((compiled(copy, "m1", "4bit") / "husky.json").read_text())["tiles"]
        ).items()
        other = type(tile)(8, 4, 1, 2, norm=tile.norm)

        class Matrix:
            rows, columns, bits, dtype = key[1].n, key[1].k, key[2], mx.float32

        found = gemv_tile(
            key[0], key[1].m, Matrix, Platform(m1, "metal", {key: other}), key[1].norm
        )
        assert found == other != gemv_tile(key[0], key[1].m, Matrix, Platform(m1, "metal"), True)

    def test_tuning_takes_what_is_faster_right_and_fits(self, copy, monkeypatch):
        """On the emulator, with figures of its own: fewer simdgroups and more unrolling win."""
        from husky_mlx import tuning

        m1 = chips.parse("m1")[0]
        wide = {**FIX_B, "head_dim": 16}
        model = build_model(wide, quantize_weights(mlx_weights(wide), 4, 32))
        used: list = []
        launched = gemv.launch_gemv

        def launch(op, matrix, tile, *rest, **options):
            used.append(tile)
            return launched(op, matrix, tile, *rest, **options)

        for module in list(sys.modules.values()):
            if getattr(module, "launch_gemv", None) is launched:
                monkeypatch.setattr(module, "launch_gemv", launch)

        def measure(case):
            case.ours.step(0, *case.ours.state)
            return used[-1].simdgroups * 10 - used[-1].unroll

        monkeypatch.setattr(tuning, "OPS", ("o_proj_add",))
        found = tuning.tune(model, m1, "emulator", measure)
        ((op, shape, bits), tile), *_ = found.items()
        assert (op, shape.n, shape.k, bits) == ("o_proj_add", 64, 64, 4)
        assert tile.simdgroups == 2 and tile != policy(op, shape, bits, m1)
        table = tile_table.tile_table({}, False, m1, found)
        assert table == []
        none = tuning.tune(model, m1, "emulator", lambda case: 1.0)
        assert none == {}

    def test_tuning_needs_the_targets_gpu(self, copy):
        for target in ("cpu", "m3pro"):
            with pytest.raises(ValueError, match="--tune times kernels on this machine's GPU"):
                compile_model(copy, target, tune=True, notify=lambda text: None)


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
