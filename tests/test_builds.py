"""Which build of a model is loaded, what is said of others, and that damage is caught."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import compiled_builds
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from compiled_builds import compiled, converted, logits, quietly, tokens
from fixtures import FIX_B
from hypothesis import given, settings
from hypothesis import strategies as st
from test_adapters import write_adapter

from husky_mlx import builds, chips, memory
from husky_mlx.conversion import convert
from husky_mlx.errors import ArtifactError, CheckpointError, HuskyError, MemoryLimitError
from husky_mlx.loading import load

hky = pytest.fixture(scope="module")(compiled_builds.hky)
copy = pytest.fixture(compiled_builds.copy)


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
