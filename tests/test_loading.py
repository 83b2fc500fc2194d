"""``load``: mlx-lm's signature, our switches, what is printed, tokenizers, packed formats."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from fixtures import FIX_A, FIX_B, PROMPT, mlx_weights, numpy_weights, quantize_weights
from fixtures import write_folder as write
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_sampler
from numpy_llama import logits, stepwise_logits

import husky_mlx
from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.loading import build_model, load
from husky_mlx.model import Model

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
BLOCK = "model.layers.{}.self_attn.{}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("loading") / "fix-b", FIX_B, tokenizer=True)


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "m"))


def test_signature_starts_with_mlx_lm_s_own():
    theirs = list(inspect.signature(mlx_lm.load).parameters.values())
    ours = list(inspect.signature(husky_mlx.load).parameters.values())
    for mine, stock in zip(ours, theirs, strict=False):
        assert (mine.name, mine.kind, mine.default) == (stock.name, stock.kind, stock.default)
    extra = ours[len(theirs) :]
    assert [p.name for p in extra] == [
        "backend",
        "max_context",
        "max_kv_size",
        "fallback",
        "quant",
        "verbose",
        "warm",
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in extra)


def test_dir_lists_what_can_be_imported():
    listed = dir(husky_mlx)
    assert {"load", "generate", "stream_generate", "__version__", *mlx_lm.__all__} <= set(listed)
    assert all(hasattr(husky_mlx, name) for name in listed)


def test_every_name_of_mlx_lm_imports_from_here():
    for module in pkgutil.walk_packages(husky_mlx.__path__, "husky_mlx."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    ours = {"load", "generate", "stream_generate"}
    for name in mlx_lm.__all__:
        found = getattr(husky_mlx, name)
        if name in ours:
            assert isinstance(found, FunctionType) and found.__module__.startswith("husky_mlx.")
        elif name != "__version__":
            assert found is getattr(mlx_lm, name)
    assert ours < set(mlx_lm.__all__)
    assert husky_mlx.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        husky_mlx.nothing  # noqa: B018


@pytest.mark.parametrize(
    "argument, variable, expected",
    [
        (None, None, Model),
        ("husky", None, Model),
        ("mlx", None, llama.Model),
        (None, "mlx", llama.Model),
        (None, "husky", Model),
        (None, "", Model),
        ("husky", "mlx", Model),
        ("mlx", "husky", llama.Model),
    ],
)
def test_backend_argument_beats_the_environment(folder, monkeypatch, argument, variable, expected):
    monkeypatch.delenv("HUSKY_BACKEND", raising=False)
    if variable is not None:
        monkeypatch.setenv("HUSKY_BACKEND", variable)
    model, _ = load(str(folder), backend=argument)
    assert type(model) is expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backend": "cuda"}, r"backend must be one of \('husky', 'mlx'\), found 'cuda'"),
        ({"fallback": "husky"}, "fallback must be None or 'mlx', found 'husky'"),
        ({"max_context": 0}, "max_context must be a whole number from 1 up, found 0"),
        ({"max_context": 2.5}, "max_context must be a whole number from 1 up, found 2.5"),
        ({"max_kv_size": 4}, "max_kv_size must be a whole number from 5 up, found 4"),
    ],
)
def test_impossible_options_are_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        load(str(folder), **options)


def test_fallback_takes_what_is_unsupported_and_nothing_else(copied):
    write(copied, FIX_B, rope_scaling=DYNAMIC)
    with pytest.raises(UnsupportedModel, match="'dynamic'"):
        load(str(copied))
    model, tokenizer = load(str(copied), fallback="mlx")
    assert type(model) is llama.Model
    assert tokenizer.encode("the") == [257]
    (copied / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(str(copied), fallback="mlx")


def test_fallback_leaves_a_supported_model_alone(folder):
    model, _ = load(str(folder), fallback="mlx")
    assert type(model) is Model


@pytest.mark.parametrize("value, frozen", [("1", 0), ("yes", 0), ("0", 4), ("off", 4), ("", 4)])
def test_husky_eager_turns_the_frozen_step_off(folder, monkeypatch, value, frozen):
    monkeypatch.setenv("HUSKY_EAGER", value)
    model, _ = load(str(folder))
    result = stepwise_logits(model, PROMPT[:8], prompt=4)
    assert model.plan.counts["frozen"] == frozen
    assert ("HUSKY_EAGER is set" in str(model.plan)) == (frozen == 0)
    expected = logits(FIX_B, numpy_weights(FIX_B), PROMPT[:8])
    np.testing.assert_allclose(result, expected, atol=3e-5)


@pytest.mark.parametrize("backend", ["husky", "mlx"])
def test_return_config_is_mlx_lm_s(folder, backend):
    *_, config = load(str(folder), return_config=True, backend=backend)
    *_, stock = mlx_lm.load(str(folder), return_config=True)
    assert config == stock == json.loads((folder / "config.json").read_text())


def test_model_config_overrides_the_file(folder):
    fields = {"rope_theta": 500.0}
    model, _, config = load(str(folder), model_config=fields, return_config=True)
    assert config["rope_theta"] == 500.0
    expected = logits({**FIX_B, **fields}, numpy_weights(FIX_B), PROMPT[:8])
    np.testing.assert_allclose(stepwise_logits(model, PROMPT[:8], 4), expected, atol=3e-5)
    with pytest.raises(CheckpointError, match="num_hidden_layers is 3, found tensors of 2"):
        load(str(folder), model_config={"num_hidden_layers": 3})


def test_lazy_reads_no_weights(folder):
    mx.clear_cache()
    before = mx.get_active_memory()
    model, _ = load(str(folder), lazy=True)
    weights = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    assert mx.get_active_memory() - before < weights // 20
    result = stepwise_logits(model, PROMPT[:8], 4)
    assert mx.get_active_memory() - before >= weights
    expected = logits(FIX_B, numpy_weights(FIX_B), PROMPT[:8])
    np.testing.assert_allclose(result, expected, atol=3e-5)


def test_the_plan_says_what_runs_in_plain_words(folder, monkeypatch):
    frozen, _ = load(str(folder), max_kv_size=32)
    head, step = str(frozen.plan).splitlines()
    assert "cache of the first 4 and last 28 tokens" in head and "activations: float32" in head
    assert "decode: frozen step" in step and "batches of more than 4 rows: plain MLX" in step
    lazy, _ = load(str(folder), lazy=True)
    assert "built at the first decode" in str(lazy.plan) and "first 4" not in str(lazy.plan)
    monkeypatch.setenv("HUSKY_EAGER", "1")
    eager, _ = load(str(folder))
    head, step = str(eager.plan).splitlines()
    assert "activations: float32" in head
    assert "eager (HUSKY_EAGER is set)" in step
    assert "frozen" not in step and "batches" not in step


def test_the_plan_names_a_sliding_window():
    config = {**FIX_B, "model_type": "mistral", "sliding_window": 8}
    model = build_model(config, mlx_weights(config))
    assert "sliding window of 8 tokens" in str(model.plan)


def test_verbose_is_one_line_and_silence_is_silence(folder, capfd):
    model, tokenizer = load(str(folder), verbose=True)
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith("\n")
    assert "cpu" in err and "frozen step" in err and "batches of more than 4 rows" in err
    model, tokenizer = load(str(folder))
    husky_mlx.generate(model, tokenizer, "the", max_tokens=4)
    sampler = make_sampler(temp=0.7, top_p=0.9)
    husky_mlx.generate(model, tokenizer, "the", max_tokens=4, sampler=sampler)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "options, reason",
    [({"backend": "mlx"}, "backend is mlx"), ({"fallback": "mlx"}, "rope_type is 'dynamic'")],
)
def test_verbose_says_that_mlx_lm_runs_and_why(copied, capfd, options, reason):
    if "fallback" in options:
        write(copied, FIX_B, rope_scaling=DYNAMIC)
    load(str(copied), verbose=True, **options)
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "mlx-lm's model class" in err and reason in err


def test_a_fresh_process_prints_nothing(folder):
    code = (
        "from husky_mlx import load, generate\n"
        f"generate(*load({str(folder)!r}), 'the', max_tokens=3)"
    )
    root = Path(husky_mlx.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("config.json", '{"model_type": "llama"}', ["config.json", "hidden_size is missing"]),
        ("tokenizer.json", "{", ["tokenizer.json", "not readable as JSON"]),
        ("tokenizer.json", "[]", ["tokenizer.json", "expected a JSON object, found list"]),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', ["no tokenizer can be built from"]),
        ("tokenizer_config.json", "{", ["tokenizer_config.json", "not readable as JSON"]),
    ],
)
def test_damaged_files_are_named(copied, name, content, parts):
    (copied / name).write_text(content)
    with pytest.raises(CheckpointError) as error:
        load(str(copied))
    for part in [str(copied), *parts]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "removed", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]]
)
def test_missing_tokenizer_says_what_is_expected(copied, removed):
    for name in removed:
        (copied / name).unlink()
    with pytest.raises(CheckpointError) as error:
        load(str(copied))
    assert f"{copied}: no tokenizer can be built from" in str(error.value)
    assert "expected tokenizer.json or tokenizer.model" in str(error.value)


def test_tokenizer_takes_its_settings_and_stop_tokens(folder):
    _, tokenizer = load(str(folder), tokenizer_config={"eos_token": "<|eot|>"})
    assert tokenizer.eos_token_ids == {261, 262}, "the config's and the tokenizer's"


def dequantized(packed: dict[str, mx.array], formats: dict[str, dict]) -> dict[str, np.ndarray]:
    """Float32 weights of packed ones; ``formats`` gives bits, group and mode of each matrix."""
    result = {}
    for name, value in packed.items():
        base, _, part = name.rpartition(".")
        if part == "weight" and base in formats:
            biases = packed.get(f"{base}.biases")
            value = mx.dequantize(value, packed[f"{base}.scales"], biases, **formats[base])
        if part not in ("scales", "biases"):
            result[name] = np.array(value.astype(mx.float32))
    return result


def pack(weights: dict[str, mx.array], formats: dict[str, dict]) -> dict[str, mx.array]:
    packed = {}
    for name, value in weights.items():
        base = name.removesuffix(".weight")
        if base not in formats:
            packed[name] = value
            continue
        for part, array in zip(
            ("weight", "scales", "biases"), mx.quantize(value, **formats[base]), strict=False
        ):
            packed[f"{base}.{part}"] = array
    return packed


def check_packed(config: dict, formats: dict[str, dict], **fields) -> Model:
    """12 decoded tokens of the packed model against numpy on the dequantized weights."""
    packed = pack(mlx_weights(config), formats)
    expected = logits(config, dequantized(packed, formats), PROMPT[:16])
    model = build_model({**config, **fields}, packed)
    result = stepwise_logits(model, PROMPT[:16], prompt=4)
    assert model.plan.counts["frozen"] == 12
    np.testing.assert_allclose(result, expected, atol=1e-3)
    modules = dict(model.named_modules())
    for base, spec in formats.items():
        module = modules[base]
        assert {name: getattr(module, name) for name in spec} == spec
    return model


def matrices(config: dict) -> list[str]:
    return [n.removesuffix(".weight") for n, v in numpy_weights(config).items() if v.ndim == 2]


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_bit_width_and_group_loads_C038(bits, group_size):
    config = {**FIX_A, "hidden_size": 128} if group_size == 128 else FIX_A
    spec = {"bits": bits, "group_size": group_size}
    model = check_packed(config, dict.fromkeys(matrices(config), spec), quantization=spec)
    assert "not fused" not in str(model.plan)


@pytest.mark.parametrize("group_size", [32, 64])
def test_matrices_that_the_group_does_not_divide_stay_float_C038(group_size):
    config = {**FIX_A, "intermediate_size": 160}
    spec = {"bits": 4, "group_size": group_size}
    packed = quantize_weights(mlx_weights(config), **spec)
    formats = {name.removesuffix(".scales"): spec for name in packed if name.endswith(".scales")}
    down = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert all((name in formats) == (160 % group_size == 0) for name in down)
    check_packed(config, formats)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """mlx-lm's own recipe mixed_3_6 on 8 layers of width 128."""
    place = tmp_path_factory.mktemp("mixed")
    config = {**FIX_B, "hidden_size": 128, "num_hidden_layers": 8}
    source = write(place / "float", config, tokenizer=True)
    mlx_lm.convert(
        str(source),
        str(place / "m"),
        quantize=True,
        q_group_size=64,
        quant_predicate="mixed_3_6",
        dtype="float32",
    )
    return place / "m"


@pytest.mark.parametrize("map_kept", [True, False])
def test_mixed_recipe_with_and_without_its_map_C034(mixed, tmp_path, map_kept):
    folder = Path(shutil.copytree(mixed, tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    formats = {
        name.removesuffix(".scales"): {"bits": 3, "group_size": 64}
        for name in mx.load(str(folder / "model.safetensors"))
        if name.endswith(".scales")
    }
    for name, spec in config["quantization"].items():
        if isinstance(spec, dict):
            formats[name] = {"bits": spec["bits"], "group_size": spec["group_size"] or 64}
    assert {spec["bits"] for spec in formats.values()} == {3, 6}
    assert formats[BLOCK.format(0, "v_proj")]["bits"] == 6
    assert formats[BLOCK.format(0, "q_proj")]["bits"] == 3
    if not map_kept:
        config["quantization"] = config["quantization_config"] = {"group_size": 64, "bits": 3}
        (folder / "config.json").write_text(json.dumps(config))
    packed = mx.load(str(folder / "model.safetensors"))
    expected = logits(config, dequantized(packed, formats), PROMPT[:10])
    model, _ = load(str(folder))
    np.testing.assert_allclose(stepwise_logits(model, PROMPT[:10], 4), expected, atol=1e-3)
    assert "not fused: layers.0.qkv" in str(model.plan), "q has 3 bits, v has 6"
    layer = model.layers[0].self_attn
    assert (layer.q_proj.bits, layer.v_proj.bits) == (3, 6)


def test_three_bit_widths_in_one_group_stay_unfused_C034():
    formats = {base: {"bits": 3, "group_size": 64} for base in matrices(FIX_A)}
    formats[BLOCK.format(1, "q_proj")] = {"bits": 4, "group_size": 64}
    formats[BLOCK.format(1, "v_proj")] = {"bits": 6, "group_size": 32}
    model = check_packed(FIX_A, formats)
    notes = [line for line in str(model.plan).splitlines() if line.startswith("not fused")]
    assert len(notes) == 1 and "layers.1.qkv" in notes[0], "layer 0 and both gate_up are fused"


@pytest.mark.parametrize("mode, bits", [("mxfp4", 4), ("mxfp8", 8)])
def test_mx_formats_with_an_affine_head_C045(mode, bits):
    formats = {base: {"bits": bits, "group_size": 32, "mode": mode} for base in matrices(FIX_A)}
    formats["lm_head"] = {"bits": 8, "group_size": 64, "mode": "affine"}
    block = {"group_size": 32, "bits": bits, "mode": mode, "lm_head": formats["lm_head"]}
    check_packed(FIX_A, formats, quantization=block)


def test_an_error_reaches_other_processes_whole():
    error = UnsupportedModel("config.json", ["one thing", "another"])
    other = pickle.loads(pickle.dumps(error))
    assert str(other) == str(error) and other.differences == error.differences
