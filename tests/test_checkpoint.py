"""Checkpoint files as they are found: shards, leftovers, damage, other formats."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from fixtures import FIX_A, FIX_B, PROMPT, mlx_weights, numpy_weights, quantize_weights
from fixtures import write_folder as write
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_llama import logits

from husky_mlx import checkpoint
from husky_mlx.errors import CheckpointError, HuskyError, UnsupportedModel
from husky_mlx.loading import build_model, load

UP_PROJ = "model.layers.0.mlp.up_proj"


def shards(folder: Path, index: bool = True, tokenizer: bool = False) -> Path:
    """FIX-B in two files, layer 1 and the norm in the second."""
    write(folder, FIX_B, tokenizer=tokenizer)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    files: list[dict[str, mx.array]] = [{}, {}]
    for name, value in mlx_weights(FIX_B).items():
        part = int(name.startswith(("model.layers.1", "model.norm")))
        files[part][name] = value
        weight_map[name] = f"model-0000{part + 1}-of-00002.safetensors"
    for part, content in enumerate(files, start=1):
        mx.save_safetensors(str(folder / f"model-0000{part}-of-00002.safetensors"), content)
    if index:
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
        (folder / checkpoint.INDEX).write_text(text)
    return folder


def tokens_of(folder: Path) -> np.ndarray:
    model, _ = load(str(folder))
    return np.array(model(mx.array([PROMPT[:8]]))[0])


def expected_logits() -> np.ndarray:
    return logits(FIX_B, numpy_weights(FIX_B), PROMPT[:8])


def refusal(folder: Path) -> str:
    """The message of the one error, which names a path inside ``folder``; nothing is written."""
    before = sorted(folder.rglob("*")) if folder.exists() else []
    with pytest.raises(CheckpointError) as error:
        load(str(folder))
    assert str(folder) in str(error.value)
    assert (sorted(folder.rglob("*")) if folder.exists() else []) == before
    return str(error.value)


@pytest.mark.parametrize("index", [True, False])
def test_two_shards_with_and_without_an_index_C025(tmp_path, index):
    folder = shards(tmp_path / "m", index, tokenizer=True)
    np.testing.assert_allclose(tokens_of(folder), expected_logits(), atol=3e-5)


def test_missing_shard_is_named_C025(tmp_path):
    folder = shards(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = refusal(folder)
    assert "model-00002-of-00002.safetensors, not there (incomplete download?)" in message
    assert "model-00001-of-00002" not in message


def test_stale_index_beside_a_complete_file_loads_and_warns_C025(tmp_path):
    folder = shards(tmp_path / "m", tokenizer=True)
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), mlx_weights(FIX_B))
    with pytest.warns(UserWarning, match=r"index.json names files that are not there") as caught:
        result = tokens_of(folder)
    assert len(caught) == 1
    np.testing.assert_allclose(result, expected_logits(), atol=3e-5)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("{", "not readable as JSON"),
        ("[1]", "expected a JSON object, found list"),
        ('{"weight_map": [1]}', "weight_map must give a file name for each tensor"),
        ('{"weight_map": {"a": 1}}', "weight_map must give a file name for each tensor"),
    ],
)
def test_damaged_index_is_named(tmp_path, text, sentence):
    folder = shards(tmp_path / "m")
    (folder / checkpoint.INDEX).write_text(text)
    message = refusal(folder)
    assert str(folder / checkpoint.INDEX) in message and sentence in message


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"{", "not readable as JSON"),
        (b"\xff\xfe\x00", "not readable as JSON"),
        (b"[" * 100_000, "not readable as JSON"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (None, "no such file, so this is not a model"),
    ],
)
def test_damaged_config_is_named(tmp_path, content, sentence):
    folder = write(tmp_path / "m", FIX_B)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    message = refusal(folder)
    assert str(folder / "config.json") in message and sentence in message


def test_damaged_generation_config_is_ignored_as_in_mlx_lm(tmp_path):
    folder = write(tmp_path / "m", FIX_B)
    (folder / "generation_config.json").write_text("{")
    assert checkpoint.read_config(folder)["eos_token_id"] == 261
    (folder / "generation_config.json").write_text('{"eos_token_id": [261, 262]}')
    assert checkpoint.read_config(folder)["eos_token_id"] == [261, 262]


def test_missing_folder(tmp_path):
    with pytest.raises(HuskyError, match="no such file or folder") as error:
        load(str(tmp_path / "nothing"))
    assert str(tmp_path / "nothing") in str(error.value)


def test_lfs_pointer_C027(tmp_path):
    folder = write(tmp_path / "m", FIX_B)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 270000\n"
    (folder / "model.safetensors").write_text(pointer)
    message = refusal(folder)
    assert f"{folder / 'model.safetensors'}: a Git LFS pointer" in message
    assert "git lfs pull" in message


def test_truncated_weights_C027(tmp_path):
    folder = write(tmp_path / "m", FIX_B)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    message = refusal(folder)
    assert f"{file}: truncated" in message and "download it again" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.safetensors", "x.gguf"])
def test_other_weight_formats_C027(tmp_path, name):
    folder = write(tmp_path / "m", FIX_B)
    (folder / "model.safetensors").rename(folder / name)
    assert refusal(folder).endswith(f"expected model*.safetensors, found {name}")


def test_no_weights_at_all_C027(tmp_path):
    folder = write(tmp_path / "m", FIX_B)
    (folder / "model.safetensors").unlink()
    assert refusal(folder).endswith("expected model*.safetensors, found no weights at all")


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_key_does_not_recast_stored_weights_C028(tmp_path, field):
    folder = write(tmp_path / "m", FIX_B, tokenizer=True, **{field: "bfloat16"})
    model, _ = load(str(folder))
    assert model.model.norm.weight.dtype == mx.float32
    np.testing.assert_allclose(tokens_of(folder), expected_logits(), atol=3e-5)


def foreign(config: dict, **extra: mx.array) -> UnsupportedModel:
    with pytest.raises(UnsupportedModel) as error:
        build_model({**FIX_A, **config}, mlx_weights(FIX_A) | extra, source="here")
    assert len(error.value.differences) == 1
    return error.value


def test_compressed_tensors_are_refused_with_their_format_C029():
    block = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    message = str(foreign({"quantization_config": block}))
    assert "'compressed-tensors' (format 'float-quantized')" in message
    assert "convert the unquantized model" in message


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_awq_and_gptq_are_refused_by_name_C030(method):
    base = "model.layers.0.mlp.up_proj"
    packed = {f"{base}.qweight": mx.zeros((64, 16), mx.int32), f"{base}.scales": mx.ones((2, 128))}
    block = {"quant_method": method, "bits": 4, "group_size": 32}
    message = str(foreign({"quantization_config": block}, **packed))
    assert f"quantization_config.quant_method is {method!r}" in message
    assert "not in model" not in message and "qweight" not in message


@pytest.mark.parametrize("companion", [True, False])
def test_fp8_is_refused_with_and_without_its_scales_C032(companion):
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    extra = {f"{UP_PROJ}.weight_scale_inv": mx.ones((1, 1))} if companion else {}
    message = str(foreign({"quantization_config": block}, **extra))
    assert "quant_method is 'fp8'" in message and "convert the unquantized model" in message


def test_float_weights_with_a_leftover_quantization_block_C033():
    config = {**FIX_A, "quantization_config": {"bits": 4, "group_size": 64}}
    result = build_model(config, mlx_weights(FIX_A))(mx.array([PROMPT[:8]]))[0]
    expected = logits(FIX_A, numpy_weights(FIX_A), PROMPT[:8])
    np.testing.assert_allclose(np.array(result), expected, atol=3e-5)


@pytest.mark.parametrize(
    "block",
    [
        {"quantization": None},
        {"quantization": {"group_size": 64, "bits": None}},
        {"quantization": {"group_size": 32, "bits": 8}},
    ],
)
def test_bits_come_from_the_packed_shapes_C033(block):
    packed = quantize_weights(mlx_weights(FIX_A))
    dequantized = {}
    for name, value in packed.items():
        base, _, part = name.rpartition(".")
        if part == "weight" and f"{base}.scales" in packed:
            parts = (value, packed[f"{base}.scales"], packed[f"{base}.biases"])
            value = mx.dequantize(*parts, group_size=64, bits=4)
        if part not in ("scales", "biases"):
            dequantized[name] = np.array(value)
    result = build_model({**FIX_A, **block}, packed)(mx.array([PROMPT[:8]]))[0]
    expected = logits(FIX_A, dequantized, PROMPT[:8])
    np.testing.assert_allclose(np.array(result), expected, atol=1e-3)


def test_quantization_block_that_is_no_object_C033():
    with pytest.raises(CheckpointError, match="here: quantization_config must be an object"):
        build_model({**FIX_A, "quantization_config": 4}, mlx_weights(FIX_A), source="here")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    small = {**FIX_B, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return write(tmp_path_factory.mktemp("whole") / "m", small, tokenizer=True)


def load_damaged(whole: Path, name: str, content: bytes) -> None:
    """Load a copy with one file replaced: right, or one error that names the folder."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "m"
        shutil.copytree(whole, folder)
        (folder / name).write_bytes(content)
        before = sorted(folder.rglob("*"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(str(folder))
        except (HuskyError, ValueError, OSError) as error:
            assert str(folder) in str(error), f"{type(error).__name__}: {error}"
        assert sorted(folder.rglob("*")) == before


@st.composite
def damage(draw, length: int):
    """(kind, where, byte) for a file of ``length`` bytes; heads and headers are hit more often."""
    where = draw(st.integers(0, min(length, 400) - 1) | st.integers(0, length - 1))
    return draw(st.sampled_from(["flip", "cut", "digit"])), where, draw(st.integers(0, 255))


def damaged(content: bytes, kind: str, where: int, byte: int) -> bytes:
    if kind == "cut":
        return content[:where]
    new = b"%d" % (byte % 10) if kind == "digit" else bytes([byte])
    return content[:where] + new + content[where + 1 :]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_damaged_bytes_load_or_are_refused_by_file(whole, name):
    content = (whole / name).read_bytes()

    @settings(max_examples=60, deadline=None)
    @given(damage(len(content)))
    def check(where):
        load_damaged(whole, name, damaged(content, *where))

    check()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["F16", "BF16", "F64", "I32", "U8", "F8_E4M3", "F8_E8M0", "I4", "C64", "Z9"]),
    st.lists(st.integers(0, 40), max_size=3),
)
def test_any_tensor_header_loads_or_is_refused_by_file(whole, dtype, shape):
    content = (whole / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["model.norm.weight"].update(dtype=dtype, shape=shape)
    changed = json.dumps(header).encode()
    content = len(changed).to_bytes(8, "little") + changed + content[8 + size :]
    load_damaged(whole, "model.safetensors", content)


@pytest.mark.parametrize(
    "replace, reason",
    [
        (lambda file: file.symlink_to("nowhere"), "a link to nothing"),
        (lambda file: file.mkdir(), "not a regular file"),
        (lambda file: os.mkfifo(file), "not a regular file"),
    ],
    ids=["broken link", "folder", "pipe"],
)
def test_weights_that_are_no_file_are_named(replace, reason, tmp_path):
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.unlink()
    replace(file)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {reason}"):
        checkpoint.read(tmp_path)
