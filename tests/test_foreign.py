"""Checkpoints that another library quantized: packed here by hand, read as the same numbers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from fixtures import (
    FIX_A,
    FIX_B,
    PROMPT,
    QWEN2,
    QWEN3,
    numpy_weights,
    write_folder,
    write_tokenizer,
)
from numpy_llama import logits

from husky_mlx import checkpoint
from husky_mlx.conversion import convert
from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.loading import load

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Codes = tuple[np.ndarray, np.ndarray, np.ndarray]


def codes_of(weight: np.ndarray, bits: int, group: int, symmetric: bool) -> Codes:
    """(out, in) floats -> codes (out, in), zeros and float16 scales (out, groups)."""
    grouped = weight.reshape(len(weight), -1, group)
    top = 2**bits - 1
    low, high = grouped.min(-1), grouped.max(-1)
    if symmetric:
        high = np.abs(grouped).max(-1)
        low = -high
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.clip(np.round(-low / scales.astype(np.float32)), 1, top)
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    quotient = grouped / scales[..., None].astype(np.float32)
    codes = np.clip(np.round(quotient) + zeros[..., None], 0, top)
    return codes.reshape(weight.shape).astype(np.uint32), zeros.astype(np.uint32), scales


def values_of(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """What the codes stand for, in float64."""
    grouped = codes.reshape(len(codes), -1, group).astype(np.float64) - zeros[..., None]
    return (grouped * scales[..., None].astype(np.float64)).reshape(codes.shape)


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """uint32 codes (rows, n) -> int32 (rows, n * bits / 32), the first one lowest or in order."""
    per_word = 32 // bits
    words = codes.reshape(len(codes), -1, per_word)
    packed = np.zeros(words.shape[:2], np.uint32)
    for place in range(per_word):
        source = place if order is None else order[place]
        packed |= words[..., source] << np.uint32(bits * place)
    return packed.view(np.int32)


def gptq(base: str, codes: Codes, bits: int, version: int = 1) -> dict[str, np.ndarray]:
    values, zeros, scales = codes
    stored = zeros - 1 if version == 1 else zeros
    columns = values.shape[1]
    return {
        f"{base}.qweight": np.ascontiguousarray(pack(np.ascontiguousarray(values), bits).T),
        f"{base}.qzeros": pack(np.ascontiguousarray(stored.T), bits),
        f"{base}.scales": np.ascontiguousarray(scales.T),
        f"{base}.g_idx": (np.arange(columns) // (columns // zeros.shape[1])).astype(np.int32),
    }


def awq(base: str, codes: Codes, bits: int) -> dict[str, np.ndarray]:
    values, zeros, scales = codes
    return {
        f"{base}.qweight": pack(np.ascontiguousarray(values.T), bits, AWQ_ORDER),
        f"{base}.qzeros": pack(np.ascontiguousarray(zeros.T), bits, AWQ_ORDER),
        f"{base}.scales": np.ascontiguousarray(scales.T),
    }


def packed_integers(base: str, codes: Codes, bits: int) -> dict[str, np.ndarray]:
    values, zeros, scales = codes
    parts = {
        f"{base}.weight_packed": pack(values, bits),
        f"{base}.weight_scale": scales,
        f"{base}.weight_shape": np.array(values.shape, np.int64),
    }
    if (zeros != 2 ** (bits - 1)).any():
        parts[f"{base}.weight_zero_point"] = np.ascontiguousarray(
            pack(np.ascontiguousarray(zeros.T), bits).T
        )
    return parts


def foreign(
    folder: Path, settings: dict, packed, bits: int = 4, symmetric=False, group=GROUP, config=FIX_B
):
    """A model with packed projections, and the weights that these stand for."""
    weights, meant = dict(numpy_weights(config)), dict(numpy_weights(config))
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        codes = codes_of(weights.pop(name), bits, group, symmetric)
        meant[name] = values_of(*codes, group).astype(np.float32)
        weights |= packed(name.removesuffix(".weight"), codes, bits)
    arrays = {name: mx.array(value) for name, value in weights.items()}
    return write_folder(folder, config, arrays, True, quantization_config=settings), meant


def check_logits(folder: Path, meant: dict[str, np.ndarray], config=FIX_B, **options) -> None:
    expected = logits(config, meant, PROMPT[:8])
    # float16 scales and biases: a bias is off by up to half a unit of its last place.
    found = load(str(folder), **options)[0](mx.array([PROMPT[:8]]))[0]
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, atol=3e-3)


CASES = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq, {}),
    "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8}, gptq, {"bits": 8}),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda *args: gptq(*args, version=2),
        {},
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP}, awq, {}),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        packed_integers,
        {"symmetric": True},
    ),
    "compressed-tensors with zeros": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        packed_integers,
        {},
    ),
    "compressed-tensors, a scale a row": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        packed_integers,
        {"symmetric": True, "group": 64},
    ),
}


def test_gptqs_biases_of_zeros_are_left_out_and_others_are_not(tmp_path):
    """AutoGPTQ writes them for matrices that have none."""
    path = "model.layers.0.self_attn.o_proj.bias"
    for value in (0.0, 0.5):

        def with_bias(base, *codes):
            parts = gptq(base, *codes)
            if base.endswith("o_proj"):
                parts[f"{base}.bias"] = np.full(64, value, np.float16)  # noqa: B023
            return parts

        folder, meant = foreign(tmp_path / str(value), CASES["gptq"][0], with_bias)
        if value == 0.0:
            check_logits(folder, meant)
        else:
            with pytest.raises(CheckpointError, match=f"{path} is not part of this model"):
                load(str(folder))


@pytest.mark.parametrize("family", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize("case", ["gptq", "awq", "compressed-tensors with zeros"])
def test_biases_of_qkv_and_norms_of_heads_are_kept(case, family, tmp_path):
    config = {**family, **{key: FIX_B[key] for key in ("vocab_size", "eos_token_id")}}
    settings, packed, options = CASES[case]
    folder, meant = foreign(tmp_path / "m", settings, packed, config=config, **options)
    check_logits(folder, meant, config)
    check_logits(convert(folder, tmp_path / "m.hky", notify=pytest.fail), meant, config)


def test_gptq_under_a_config_that_the_caller_corrects(tmp_path):
    """Which biases a model has is asked of the corrected config, and a wrong one is named."""
    folder, meant = foreign(tmp_path / "m", *CASES["gptq"][:2])
    config = json.loads((folder / "config.json").read_text())
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": dynamic}))
    check_logits(folder, meant, model_config={"rope_scaling": None})
    assert "rope_type is 'dynamic'" in refusal(folder)


@pytest.mark.parametrize("case", CASES)
def test_packed_integers_are_the_numbers_that_they_stand_for_C030(case, tmp_path):
    settings, packed, options = CASES[case]
    folder, meant = foreign(tmp_path / "m", settings, packed, **options)
    check_logits(folder, meant)
    found = checkpoint.read(folder)
    path = "model.layers.0.self_attn.k_proj"
    parts = [found.weights[f"{path}.{part}"] for part in ("weight", "scales", "biases")]
    group = 64 // parts[1].shape[1]
    value = np.array(mx.dequantize(*parts, group, options.get("bits", 4)))
    assert np.abs(value - meant[f"{path}.weight"]).max() < 2e-3


@pytest.mark.parametrize("case", ["gptq", "awq", "compressed-tensors with zeros"])
def test_converted_they_run_on_plain_mlx_lm(case, tmp_path):
    settings, packed, options = CASES[case]
    folder, meant = foreign(tmp_path / "m", settings, packed, **options)
    out = convert(folder, tmp_path / "m.hky", notify=pytest.fail)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"]["bits"] == 4 and config["quantization"]["group_size"] == GROUP
    check_logits(out, meant)
    stock, _ = mlx_lm.load(str(out))
    expected = logits(FIX_B, meant, PROMPT[:8])
    found = stock(mx.array([PROMPT[:8]]))[0]
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, atol=0.01)


E4M3 = np.array(
    [
        (-1.0) ** (code >> 7)
        * (
            (code & 7) / 8 * 2.0**-6
            if not code >> 3 & 15
            else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3 & 15) - 7)
        )
        for code in range(256)
    ]
)  # the OCP 8-bit format: 4 bits of exponent with bias 7, 3 of mantissa, no infinities
E4M3[[127, 255]] = np.nan


def fp8_folder(folder: Path, settings: dict, block: tuple[int, int] | None, name: str):
    """FIX-B with fp8 projections, written byte by byte, and the weights that they stand for."""
    rng = np.random.default_rng(3)
    weights, meant = dict(numpy_weights(FIX_B)), dict(numpy_weights(FIX_B))
    raw: dict[str, tuple[str, np.ndarray]] = {}
    for key in list(weights):
        if not key.endswith("_proj.weight"):
            raw[key] = ("F32", weights[key])
            continue
        codes = rng.choice(np.r_[0:127, 128:255], weights[key].shape).astype(np.uint8)
        rows, columns = codes.shape
        if block is None:
            scales = np.full((), 0.001, np.float32)
            full = np.full(codes.shape, np.float32(0.001))
        else:
            shape = (-(-rows // block[0]), -(-columns // block[1]))
            scales = rng.uniform(0.0005, 0.002, shape).astype(np.float32)
            full = np.kron(scales, np.ones(block, np.float32))[:rows, :columns]
        meant[key] = (E4M3[codes] * full).astype(np.float32)
        raw[key], raw[f"{key}{name}"] = ("F8_E4M3", codes), ("F32", scales)
    header, body = {}, b""
    for key, (dtype, value) in raw.items():
        start, body = len(body), body + value.tobytes()
        header[key] = {
            "dtype": dtype,
            "shape": list(value.shape),
            "data_offsets": [start, len(body)],
        }
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    config = {**FIX_B, "torch_dtype": "float32", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder, meant


@pytest.mark.parametrize(
    ("settings", "block", "name"),
    [
        ({"quant_method": "fp8", "weight_block_size": [48, 32]}, (48, 32), "_scale_inv"),
        ({"quant_method": "fp8"}, None, "_scale"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            (1, 128),
            "_scale",
        ),
    ],
    ids=["blocks", "a matrix", "rows"],
)
def test_fp8_is_written_out_C032(settings, block, name, tmp_path):
    folder, meant = fp8_folder(tmp_path / "m", settings, block, name)
    expected = logits(FIX_B, meant, PROMPT[:8])
    for path in (folder, convert(folder, tmp_path / "m.hky", notify=pytest.fail)):
        found = np.array(load(str(path))[0](mx.array([PROMPT[:8]]))[0])
        np.testing.assert_allclose(found, expected, atol=3e-4)


def refusal(folder: Path, kind: type[Exception] = UnsupportedModel) -> str:
    with pytest.raises(kind) as error:
        load(str(folder))
    assert str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("companion", [True, False])
def test_fp8_that_is_none_is_not_loaded_silently_C032(companion, tmp_path):
    """The case as it was reported: float weights whose config says fp8."""
    weights = {name: mx.array(value) for name, value in numpy_weights(FIX_A).items()}
    if companion:
        weights["model.layers.0.mlp.up_proj.weight_scale_inv"] = mx.ones((1, 1))
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write_folder(tmp_path / "m", FIX_A, weights, quantization_config=settings)
    assert "promises fp8 weights and there are none" in refusal(folder, CheckpointError)


def test_fp8_without_scales_names_the_tensor_C032(tmp_path):
    folder, _ = fp8_folder(tmp_path / "m", {"quant_method": "fp8"}, None, "_scal")
    assert "layers.0.mlp.down_proj.weight_scale is missing" in refusal(folder, CheckpointError)


def test_sorted_columns_are_refused_C030(tmp_path):
    def act_order(base, codes, bits):
        parts = gptq(base, codes, bits)
        parts[f"{base}.g_idx"] = parts[f"{base}.g_idx"][::-1].copy()
        return parts

    folder, _ = foreign(tmp_path / "m", CASES["gptq"][0], act_order)
    assert "g_idx sorts the columns by activation (desc_act)" in refusal(folder)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits, supported are (2, 4, 8)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "AWQ of 8 bits"),
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm'"),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized"},
            "compressed-tensors (format 'int-quantized')",
        ),
    ],
)
def test_other_layouts_are_refused_by_name_C029(settings, says, tmp_path):
    folder = write_folder(tmp_path / "m", FIX_A, quantization_config=settings)
    message = refusal(folder)
    assert says in message and "take the unquantized model" in message


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_config_that_promises_what_is_not_there_C029(method, tmp_path):
    settings = {"quant_method": method, "bits": 4, "format": "pack-quantized"}
    folder = write_folder(tmp_path / "m", FIX_A, quantization_config=settings)
    assert "promises packed weights" in refusal(folder, CheckpointError)
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    folder = write_folder(tmp_path / "f", FIX_A, quantization_config=settings)
    assert "promises fp8 weights" in refusal(folder, CheckpointError)


def test_a_missing_companion_is_named(tmp_path):
    def without_zeros(base, codes, bits):
        parts = gptq(base, codes, bits)
        del parts[f"{base}.qzeros"]
        return parts

    folder, _ = foreign(tmp_path / "m", CASES["gptq"][0], without_zeros)
    assert "layers.0.mlp.down_proj.qzeros is missing (gptq)" in refusal(folder, CheckpointError)
