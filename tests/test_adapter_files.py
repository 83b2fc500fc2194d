"""Adapters by ``load(adapter_path=)`` and ``husky compile --adapter``: mlx-lm's and PEFT's."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from fixtures import FIX_B, PROMPT, mlx_weights, numpy_weights, quantize_weights, write_folder
from numpy_llama import logits as reference
from test_adapters import write_adapter

from husky_mlx import builds
from husky_mlx.compilation import compile_model
from husky_mlx.conversion import convert
from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.loading import load
from husky_mlx.quantization import Choice

SCALE = 20.0
KEYS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]


def logits(model) -> np.ndarray:
    return np.array(model(mx.array([PROMPT[:8]]))[0].astype(mx.float32))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("base") / "m", FIX_B, tokenizer=True)


@pytest.fixture
def adapter(base, tmp_path) -> Path:
    return write_adapter(tmp_path / "lora", model=mlx_lm.load(str(base))[0], keys=KEYS)


@pytest.fixture
def dora(base, tmp_path) -> Path:
    model = mlx_lm.load(str(base))[0]
    return write_adapter(tmp_path / "dora", model=model, keys=KEYS, fine_tune_type="dora")


def changed(folder: Path, name: str, value) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    if value is None:
        del config["lora_parameters"][name]
    else:
        config["lora_parameters"][name] = value
    (folder / "adapter_config.json").write_text(json.dumps(config))


def factors(folder: Path) -> dict[str, np.ndarray]:
    loaded = mx.load(str(folder / "adapters.safetensors"))
    return {name: np.array(value).astype(np.float64) for name, value in loaded.items()}


def merged(weights: dict[str, np.ndarray], folder: Path, dora: bool) -> dict[str, np.ndarray]:
    """W + scale (A B)T in float64, with DoRA's rows brought to their magnitude."""
    found = factors(folder)
    result = {name: value.astype(np.float64) for name, value in weights.items()}
    for name in [name for name in found if name.endswith("lora_a")]:
        path = name.removesuffix(".lora_a")
        weight = result[f"{path}.weight"]
        whole = weight + SCALE * (found[name] @ found[f"{path}.lora_b"]).T
        if dora:
            magnitude = np.linalg.norm(weight, axis=1) / np.linalg.norm(whole, axis=1)
            whole *= magnitude[:, None]
        result[f"{path}.weight"] = whole
    return result


def as_peft(source: Path, folder: Path, **config) -> Path:
    """The same adapter as PEFT writes it: factors transposed, scale = alpha / r."""
    tensors = {}
    for name, value in mx.load(str(source / "adapters.safetensors")).items():
        path, _, leaf = name.rpartition(".")
        kind = {"lora_a": "lora_A", "lora_b": "lora_B"}[leaf]
        tensors[f"base_model.model.{path}.{kind}.weight"] = mx.contiguous(value.T)
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    modules = [key.rpartition(".")[2] for key in KEYS]
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 160, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none", **config}))
    return folder


class TestLoad:
    def test_a_missing_dropout_is_none_C109(self, base, adapter):
        expected = logits(load(str(base), adapter_path=str(adapter))[0])
        changed(adapter, "dropout", None)
        found = logits(load(str(base), adapter_path=str(adapter))[0])
        np.testing.assert_array_equal(found, expected)
        assert np.abs(found - logits(load(str(base))[0])).max() > 0.1

    def test_alpha_in_place_of_scale_is_explained_C109(self, base, adapter):
        changed(adapter, "scale", None)
        changed(adapter, "alpha", 16)
        with pytest.raises(CheckpointError, match=r"has no scale: mlx-lm's scale is alpha / rank"):
            load(str(base), adapter_path=str(adapter))

    @pytest.mark.parametrize("config", [{}, {"use_rslora": True, "lora_alpha": 20 * 8**0.5}])
    def test_pefts_adapters_are_converted_C110(self, config, base, adapter, tmp_path):
        peft = as_peft(adapter, tmp_path / "peft", **config)
        found = logits(load(str(base), adapter_path=str(peft))[0])
        expected = logits(load(str(base), adapter_path=str(adapter))[0])
        np.testing.assert_allclose(found, expected, atol=1e-4)

    @pytest.mark.parametrize(
        ("config", "says"),
        [
            ({"peft_type": "IA3"}, "peft_type is 'IA3', supported is 'LORA'"),
            ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
            ({"bias": "all"}, "bias is 'all'"),
        ],
    )
    def test_other_kinds_of_peft_are_refused_by_name_C110(
        self, config, says, base, adapter, tmp_path
    ):
        peft = as_peft(adapter, tmp_path / "peft", **config)
        with pytest.raises(UnsupportedModel, match=says):
            load(str(base), adapter_path=str(peft))

    def test_half_a_pair_is_an_error_C111(self, base, adapter):
        file = str(adapter / "adapters.safetensors")
        tensors = dict(mx.load(file).items())
        mx.eval(tensors)
        del tensors["model.layers.0.mlp.down_proj.lora_b"]
        mx.save_safetensors(file, tensors)
        with pytest.raises(CheckpointError, match=r"half a pair: model\.layers\.0\.mlp\.down_proj"):
            load(str(base), adapter_path=str(adapter))

    def test_rank_and_keys_that_do_not_fit_are_listed_C111(self, base, adapter):
        changed(adapter, "rank", 4)
        with pytest.raises(CheckpointError) as error:
            load(str(base), adapter_path=str(adapter))
        message = str(error.value)
        assert (
            message.count(str(adapter)) == 2
            and str(Path(tempfile.gettempdir(), "tmp")) not in message
        )
        assert message.count("does not match") == 12 and "(64, 8)" in message
        changed(adapter, "keys", ["self_attn.qq_proj"])
        with pytest.raises(CheckpointError, match="not an adapter parameter"):
            load(str(base), adapter_path=str(adapter))

    @pytest.mark.parametrize(
        ("damage", "says"),
        [
            (lambda f: (f / "adapter_config.json").unlink(), "so this is not an adapter"),
            (lambda f: (f / "adapter_config.json").write_text("{"), "not readable as JSON"),
            (lambda f: (f / "adapter_config.json").write_text("{}"), "num_layers or lora_param"),
            (lambda f: (f / "adapters.safetensors").unlink(), "expected the adapter's weights"),
            (lambda f: (f / "adapters.safetensors").write_bytes(b"x"), "MLX cannot read it"),
            (lambda f: mx.save_safetensors(str(f / "adapters.safetensors"), {}), "nothing in it"),
        ],
    )
    def test_damaged_adapters_are_named(self, damage, says, base, adapter):
        damage(adapter)
        with pytest.raises(CheckpointError, match=says) as error:
            load(str(base), adapter_path=str(adapter))
        assert str(adapter) in str(error.value)


class TestCompile:
    @pytest.mark.parametrize("kind", ["lora", "dora"])
    def test_fused_at_full_precision_before_quantizing(self, kind, base, tmp_path, request):
        folder = request.getfixturevalue({"lora": "adapter"}.get(kind, kind))
        choice = Choice("4bit-uniform", adapter=str(folder))
        made = compile_model(base, "sm_90", choice, tmp_path / "out", notify=pytest.fail)
        found = builds.read_build(made.path).weights
        expected = merged(numpy_weights(FIX_B), folder, kind == "dora")
        for name, value in expected.items():
            if value.ndim == 2:
                stem = name.removesuffix("weight")
                parts = [found[stem + part] for part in ("weight", "scales", "biases")]
                own = mx.quantize(mx.array(value.astype(np.float32)), 64, 4)
                restored, nearest = (
                    np.array(mx.dequantize(*each, group_size=64, bits=4)) for each in (parts, own)
                )
                # A code may fall to the other side of a half.
                off = np.abs(restored - nearest) > 1e-4
                assert off.mean() < 1e-3
        assert made.path.name == "out"

    @pytest.mark.parametrize("kind", ["lora", "dora"])
    def test_floats_compute_what_the_adapter_does_beside_them(self, kind, base, tmp_path, request):
        folder = request.getfixturevalue({"lora": "adapter"}.get(kind, kind))
        source = convert(base, tmp_path / "m.hky", notify=pytest.fail)
        choice = Choice("keep", adapter=str(folder))
        made = compile_model(source, "cpu", choice, notify=pytest.fail)
        assert made.path.name == f"cpu-keep+{kind}"
        found = logits(load(str(made.path))[0])
        expected = reference(
            FIX_B, merged(numpy_weights(FIX_B), folder, kind == "dora"), PROMPT[:8]
        )
        np.testing.assert_allclose(found, expected, atol=1e-4)
        beside = logits(load(str(base), adapter_path=str(folder))[0])
        np.testing.assert_allclose(found, beside, atol=1e-4)

    def test_a_quantized_base_keeps_its_bits(self, tmp_path, base, adapter):
        packed = quantize_weights(mlx_weights(FIX_B), 8)
        block = {"group_size": 64, "bits": 8}
        q8 = write_folder(tmp_path / "q8", FIX_B, packed, tokenizer=True, quantization=block)
        choice = Choice(adapter=str(adapter))
        made = compile_model(q8, "cpu", choice, tmp_path / "out", notify=pytest.fail)
        config = json.loads((made.path / "config.json").read_text())
        assert config["quantization"] == {**block, "mode": "affine"}
        found = builds.read_build(made.path).weights
        untouched = "model.layers.0.mlp.up_proj.weight"
        assert mx.array_equal(found[untouched], packed[untouched])
        beside = logits(load(str(q8), adapter_path=str(adapter))[0])
        assert np.abs(logits(load(str(made.path))[0]) - beside).max() < 0.1

    def test_load_with_quant_fuses_and_without_keeps_it_beside(
        self, base, adapter, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path / "cache"))
        fused, _ = load(str(base), quant="8bit", adapter_path=str(adapter))
        plain, _ = load(str(base), quant="8bit")
        beside, _ = load(str(base), adapter_path=str(adapter))
        assert type(fused.model.layers[0].self_attn.q_proj).__name__ == "QuantizedLinear"
        assert type(beside.model.layers[0].self_attn.q_proj).__name__ == "LoRALinear"
        assert np.abs(logits(fused) - logits(beside)).max() < 0.1
        assert np.abs(logits(plain) - logits(beside)).max() > 0.3
        assert len(list((tmp_path / "cache" / "builds").iterdir())) == 2

    def test_an_adapter_beside_a_build(self, base, adapter, tmp_path):
        source = convert(base, tmp_path / "m.hky", notify=pytest.fail)
        compile_model(source, "cpu", Choice("8bit"), notify=pytest.fail)
        model, _ = load(str(source), adapter_path=str(adapter))
        assert "LoRALinear" in str(model.plan)
        beside = logits(load(str(base), adapter_path=str(adapter))[0])
        assert np.abs(logits(model) - beside).max() < 0.1

    def test_a_full_fine_tune_is_refused_by_name(self, base, adapter):
        config = {"fine_tune_type": "full", "num_layers": 2, "lora_parameters": {}}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModel, match="`husky fuse` makes a model of it"):
            compile_model(base, "cpu", Choice(adapter=str(adapter)), "/none")


@pytest.mark.parametrize("field", ["num_layers", "scale"])
def test_words_where_numbers_belong_are_named(field, base, adapter):
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    (config if field == "num_layers" else config["lora_parameters"])[field] = "x"
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{field} is 'x', expected a number"):
        load(str(base), adapter_path=str(adapter))
