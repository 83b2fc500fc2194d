"""GGUF reading: names, row order, packed layouts, refusals. The writer is the `gguf` package."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf as gguf_package
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from fixtures import PROMPT as LONG_PROMPT
from fixtures import QWEN2, QWEN3, numpy_weights
from gguf_files import FIX_A, GGUF_NAMES, Types, fix_a_tensors, fix_a_weights, write, write_qwen
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.rope_utils import Llama3RoPE

from husky_mlx import gguf
from husky_mlx.errors import CheckpointError, HuskyError, UnsupportedModel
from husky_mlx.gguf_blocks import unpack
from husky_mlx.gguf_file import GGUFFile
from husky_mlx.loading import load

PROMPT = np.array([[47, 50, 73, 91, 6, 16, 3, 95, 12]])
BLOCK_LINEARS = {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}


def logits(weights: dict[str, mx.array], config: dict) -> np.ndarray:
    """mlx-lm's own model over the given weights."""
    model = llama.Model(llama.ModelArgs.from_dict(config))
    quantized = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    if quantized:

        def predicate(path: str, module: nn.Module) -> bool | dict:
            if path not in quantized:
                return False
            words, groups = weights[f"{path}.weight"].shape[1], weights[f"{path}.scales"].shape[1]
            return {"group_size": 32, "bits": words // groups}

        nn.quantize(model, 32, 4, class_predicate=predicate)
    model.load_weights(list(weights.items()), strict=True)
    return np.array(model(mx.array(PROMPT)).astype(mx.float32))


def dequantized(weights: dict[str, mx.array], name: str, bits: int) -> np.ndarray:
    stem = name.removesuffix(".weight")
    parts = [weights[f"{stem}.{part}"] for part in ("weight", "scales", "biases")]
    return np.array(mx.dequantize(*parts, group_size=32, bits=bits).astype(mx.float32))


def through_file(array: np.ndarray, kind: Types) -> np.ndarray:
    """What the file stands for, by the `gguf` package's own reading."""
    return gguf_package.quants.dequantize(gguf_package.quants.quantize(array, kind), kind)


@pytest.mark.parametrize("kind", [Types.F32, Types.F16, Types.BF16])
def test_float_files_give_the_original_logits_C115(tmp_path: Path, kind: Types) -> None:
    path = write(tmp_path / "a.gguf", fix_a_tensors(dict.fromkeys(BLOCK_LINEARS, kind)))
    originals = {
        name: through_file(array, kind) if "proj" in name else array
        for name, array in fix_a_weights().items()
    }
    weights = gguf.read_weights(path)
    assert weights.keys() == originals.keys()
    for name, original in originals.items():
        np.testing.assert_array_equal(np.array(weights[name].astype(mx.float32)), original, name)
    dtype = {Types.F32: mx.float32, Types.F16: mx.float16, Types.BF16: mx.bfloat16}[kind]
    assert weights["model.layers.1.self_attn.k_proj.weight"].dtype == dtype
    expected = logits({name: mx.array(array) for name, array in originals.items()}, FIX_A)
    np.testing.assert_allclose(logits(weights, gguf.read_config(path)), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "bits"), [(Types.Q4_0, 4), (Types.Q4_1, 4), (Types.Q8_0, 8)], ids=lambda v: str(v)
)
def test_packed_rows_move_with_their_scales_C115(tmp_path: Path, kind: Types, bits: int) -> None:
    path = write(tmp_path / "a.gguf", fix_a_tensors(dict.fromkeys(BLOCK_LINEARS, kind)))
    weights = gguf.read_weights(path)
    for name, original in fix_a_weights().items():
        if "proj" in name:
            found = dequantized(weights, name, bits)
            np.testing.assert_allclose(found, through_file(original, kind), atol=1e-3, err_msg=name)


@given(
    codes=st.lists(st.integers(0, 255), min_size=32, max_size=32),
    scale=st.floats(-4, 4, width=16),
    minimum=st.floats(-4, 4, width=16),
)
@settings(max_examples=60, deadline=None)
def test_blocks_by_hand_C116(codes: list[int], scale: float, minimum: float) -> None:
    """Each block decoded one weight at a time from the format's definition."""
    header = struct.pack("<e", scale)
    nibbles = bytes(codes[:16])
    low_then_high = [code & 15 for code in nibbles] + [code >> 4 for code in nibbles]
    blocks = {
        ("Q4_0", 4): (header + nibbles, [scale * (code - 8) for code in low_then_high]),
        ("Q4_1", 4): (
            header + struct.pack("<e", minimum) + nibbles,
            [scale * code + minimum for code in low_then_high],
        ),
        ("Q8_0", 8): (
            header + bytes(codes),
            [scale * (code - 256 if code > 127 else code) for code in codes],
        ),
    }
    for (kind, bits), (block, expected) in blocks.items():
        rows = np.frombuffer(block * 4, np.uint8).reshape(2, -1)
        parts = unpack(kind, rows)
        assert parts["weight"].shape == (2, 64 * bits // 32)
        assert parts["scales"].shape == parts["biases"].shape == (2, 2)
        # In float64, because the file's meaning has no rounding of the product.
        words = np.array(parts["weight"])
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        found = (words[..., None] >> shifts & (2**bits - 1)).reshape(2, 2, 32).astype(np.float64)
        found *= np.array(parts["scales"], np.float64)[..., None]
        found += np.array(parts["biases"], np.float64)[..., None]
        np.testing.assert_allclose(found, np.tile(expected, (2, 2, 1)), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "kind",
    ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"],
)
def test_other_types_are_refused_by_tensor_and_type_C117(tmp_path: Path, kind: str) -> None:
    other = Types[kind]
    elements, size = gguf_package.GGML_QUANT_SIZES[other]
    tensors = fix_a_tensors()
    # 256 columns, so that a K-quant has whole blocks.
    rows = np.zeros((64, 256 // elements * size), np.uint8)
    tensors["blk.0.ffn_down.weight"] = (rows, other)
    tensors["blk.1.ffn_down.weight"] = (rows, other)
    path = write(tmp_path / "a.gguf", tensors)
    for read in (gguf.read_config, gguf.read_weights):
        with pytest.raises(UnsupportedModel) as raised:
            read(path)
        for layer in (0, 1):
            assert f"blk.{layer}.ffn_down.weight is {kind}" in str(raised.value)


def test_a_type_without_a_name_is_refused_by_number_C117(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", fix_a_tensors())
    content = bytearray(path.read_bytes())
    # name, then dimension count and two dimensions, then the type.
    at = content.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 16
    content[at : at + 4] = struct.pack("<I", 77)
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"blk\.1\.ffn_up\.weight is type 77"):
        gguf.read_weights(path)


def test_no_output_tensor_means_tied_C118(tmp_path: Path) -> None:
    tensors = fix_a_tensors()
    assert gguf.read_config(write(tmp_path / "head.gguf", tensors))["tie_word_embeddings"] is False
    del tensors["output.weight"]
    tied = write(tmp_path / "tied.gguf", tensors)
    config = gguf.read_config(tied)
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in gguf.read_weights(tied)


def test_only_a_needed_type_blocks_C118(tmp_path: Path) -> None:
    rows = np.zeros((96, 210), np.uint8)
    tensors = fix_a_tensors()
    unneeded = {**tensors, "blk.0.attn_rot_embd.weight": (rows, Types.Q6_K)}
    path = write(tmp_path / "unneeded.gguf", unneeded)
    assert gguf.read_weights(path).keys() == fix_a_weights().keys()
    # A head that is there is used, so its type counts.
    path = write(tmp_path / "head.gguf", {**tensors, "output.weight": (rows, Types.Q6_K)})
    with pytest.raises(UnsupportedModel, match=r"output\.weight is Q6_K"):
        gguf.read_weights(path)


def test_mixed_types_keep_their_own_bits_C121(tmp_path: Path) -> None:
    kinds = {
        "output": Types.F16,
        "attn_output": Types.Q4_0,
        "attn_q": Types.Q4_0,
        "attn_k": Types.Q4_0,
        "attn_v": Types.Q4_0,
        "ffn_down": Types.Q8_0,
    }
    tensors = fix_a_tensors(kinds)
    path = write(tmp_path / "a.gguf", tensors)
    config = gguf.read_config(path)
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 8},
        "model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 8},
    }
    weights = gguf.read_weights(path)
    assert weights["lm_head.weight"].dtype == mx.float16
    assert weights["model.norm.weight"].dtype == mx.float32
    originals = fix_a_weights()
    expected = {
        name: mx.array(through_file(array, tensors[GGUF_NAMES[name]][1]))
        for name, array in originals.items()
    }
    np.testing.assert_allclose(
        logits(weights, config), logits(expected, FIX_A), atol=2e-2, rtol=1e-2
    )


def test_config_fields(tmp_path: Path) -> None:
    config = gguf.read_config(write(tmp_path / "a.gguf", fix_a_tensors()))
    assert {name: config[name] for name in FIX_A} == FIX_A
    assert config["rope_scaling"] is None
    assert "quantization" not in config and "eos_token_id" not in config
    assert config["torch_dtype"] == "float32"


def test_key_length_and_window(tmp_path: Path) -> None:
    """Mistral Nemo's heads are narrower than hidden / heads."""
    metadata = {
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 8,
        "llama.rope.dimension_count": 8,
        "llama.attention.sliding_window": 32,
    }
    config = gguf.read_config(write(tmp_path / "a.gguf", fix_a_tensors(), metadata))
    assert config["head_dim"] == 8
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 32)


def test_stop_tokens_are_all_that_the_file_names(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(90)] + ["<|eot_id|>", "<|im_end|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 90 + [3, 1],
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.bos_token_id": 4,
    }
    config = gguf.read_config(write(tmp_path / "a.gguf", fix_a_tensors(), metadata))
    # <|im_end|> is an ordinary token here, so it may appear in a reply.
    assert config["eos_token_id"] == [5, 7, 90]
    assert config["bos_token_id"] == 4
    metadata["tokenizer.ggml.eos_token_id"] = 92
    path = write(tmp_path / "b.gguf", fix_a_tensors(), metadata)
    with pytest.raises(CheckpointError, match="eos_token_id is 92; the file has 92 tokens"):
        gguf.read_config(path)


def test_vocabulary_sizes_must_agree(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(97)]}
    with pytest.raises(CheckpointError, match=r"96 rows.*97 entries"):
        gguf.read_config(write(tmp_path / "a.gguf", fix_a_tensors(), metadata))
    with pytest.raises(CheckpointError, match=r"96 rows.*vocab_size is 95"):
        gguf.read_config(write(tmp_path / "b.gguf", fix_a_tensors(), {"llama.vocab_size": 95}))


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """The divisors of RoPE's frequencies, from mlx-lm's implementation of the scaling."""
    scaling = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = Llama3RoPE(head_dim, 131072, False, theta, scaling)
    plain = theta ** (np.arange(0, head_dim, 2) / head_dim)
    return (np.array(rope._freqs) / plain).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequency_factors_become_rope_scaling(tmp_path: Path, factor: float) -> None:
    factors = llama3_factors(500000.0, 16, factor)
    assert factors[0] == 1 and len(set(factors.tolist())) > 2
    tensors = {**fix_a_tensors(), "rope_freqs.weight": (factors, Types.F32)}
    metadata = {"llama.rope.freq_base": 500000.0}
    path = write(tmp_path / "a.gguf", tensors, metadata)
    assert gguf.read_config(path)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in gguf.read_weights(path))
    tensors["rope_freqs.weight"] = (factors * np.linspace(1, 1.01, 8, dtype=np.float32), Types.F32)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        gguf.read_config(write(tmp_path / "b.gguf", tensors, metadata))


def test_frequency_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    tensors = {**fix_a_tensors(), "rope_freqs.weight": (np.ones(8, np.float32), Types.F32)}
    assert gguf.read_config(write(tmp_path / "a.gguf", tensors))["rope_scaling"] is None


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "none"}, None),
    ],
)
def test_rope_scaling_metadata(tmp_path: Path, metadata: dict, expected: dict | None) -> None:
    path = write(tmp_path / "a.gguf", fix_a_tensors(), metadata)
    assert gguf.read_config(path)["rope_scaling"] == expected


@pytest.mark.parametrize("architecture", ["qwen2moe", "gemma3", "mistral3"])
def test_other_architectures_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    path = write(tmp_path / "a.gguf", fix_a_tensors(), architecture=architecture)
    for read in (gguf.read_config, gguf.read_weights):
        with pytest.raises(UnsupportedModel, match=f"general.architecture is '{architecture}'"):
            read(path)


def test_fields_outside_the_family_are_listed_together(tmp_path: Path) -> None:
    metadata = {
        "llama.expert_count": 8,
        "llama.attention.scale": 0.5,
        "llama.rope.dimension_count": 8,
        "llama.feed_forward_length": [128, 256],
    }
    with pytest.raises(UnsupportedModel) as raised:
        gguf.read_config(write(tmp_path / "a.gguf", fix_a_tensors(), metadata))
    for field in ("expert_count is 8", "attention.scale is 0.5", "rope.dimension_count is 8"):
        assert field in str(raised.value)
    assert "feed_forward_length differs from layer to layer: [128, 256]" in str(raised.value)


def test_equal_per_layer_values_are_one_value(tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [128, 128]}
    config = gguf.read_config(write(tmp_path / "a.gguf", fix_a_tensors(), metadata))
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, 128)


def test_unknown_tensors_are_listed(tmp_path: Path) -> None:
    extra = (np.ones((4, 32), np.float32), Types.F32)
    tensors = {**fix_a_tensors(), "blk.0.ffn_gate_inp.weight": extra, "v.patch.weight": extra}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_inp\.weight, v\.patch\.weight"):
        gguf.read_weights(write(tmp_path / "a.gguf", tensors))


def test_missing_field_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", fix_a_tensors(), {"llama.block_count": None})
    with pytest.raises(CheckpointError, match=r"llama\.block_count is missing"):
        gguf.read_config(path)


def test_attention_bias_rows_follow_their_weights(tmp_path: Path) -> None:
    tensors = fix_a_tensors()
    bias = np.arange(64, dtype=np.float32)
    # llama.cpp's order within the first head of 16: 0, 8, 1, 9, ...
    stored = bias.reshape(4, 2, 8).transpose(0, 2, 1).reshape(-1)
    tensors["blk.0.attn_q.bias"] = (stored, Types.F32)
    path = write(tmp_path / "a.gguf", tensors)
    assert gguf.read_config(path)["attention_bias"] is True
    found = gguf.read_weights(path)["model.layers.0.self_attn.q_proj.bias"]
    np.testing.assert_array_equal(np.array(found), bias)


# llama.cpp's greedy tokens after LONG_PROMPT (xllamacpp 2026.10, the file below).
QWEN_TOKENS = {
    "qwen2": [5, 12, 5, 12, 61, 5, 12, 5, 12, 61, 5, 12],
    "qwen3": [5, 29, 21, 65, 51, 28, 25, 89, 58, 72, 45, 73],
}


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=QWEN_TOKENS)
def test_a_qwen_gives_llama_cpps_tokens(tmp_path: Path, config: dict) -> None:
    weights = numpy_weights(config)
    path = write_qwen(tmp_path / "a.gguf", config, weights)
    found = gguf.read_weights(path)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(np.array(found[name]), value)
    model = load(str(path))[0]
    tokens = [int(t) for t, _ in generate_step(mx.array(LONG_PROMPT), model, max_tokens=12)]
    assert tokens == QWEN_TOKENS[config["model_type"]]


def test_a_qwens_window_is_refused(tmp_path: Path) -> None:
    """Which layers have it the file does not say."""
    path = write_qwen(tmp_path / "a.gguf", QWEN2, numpy_weights(QWEN2), sliding_window=8)
    with pytest.raises(UnsupportedModel, match=r"qwen2\.attention\.sliding_window is 8"):
        gguf.read_config(path)


def test_split_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", fix_a_tensors(), {"split.count": 3})
    with pytest.raises(UnsupportedModel, match="one of 3 parts of a split GGUF"):
        gguf.read_weights(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all", b"GGUF" + b"\xff" * 40])
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.gguf"):
        gguf.read_config(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf"):
        gguf.read_config(tmp_path / "none.gguf")


def test_every_truncation_is_one_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", fix_a_tensors()).read_bytes()
    header_end = GGUFFile(tmp_path / "a.gguf").tensors["token_embd.weight"].start
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, header_end, 37), header_end, len(whole) - 32, len(whole) // 2]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            gguf.read_weights(cut)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_headers_never_escape_as_other_errors(tmp_path_factory, data) -> None:
    folder = tmp_path_factory.getbasetemp()
    source = folder / "whole.gguf"
    if not source.exists():
        write(source, fix_a_tensors(), {"tokenizer.ggml.tokens": ["a", "b"]})
    content = bytearray(source.read_bytes())
    header_end = min(tensor.start for tensor in GGUFFile(source).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        weights = gguf.read_weights(damaged)
    except HuskyError as error:
        assert "damaged.gguf" in str(error)
    else:
        assert weights


@pytest.mark.parametrize(
    "key, value",
    [
        ("tokenizer.ggml.model", [1, 2]),
        ("tokenizer.ggml.scores", 5),
        ("tokenizer.ggml.merges", "text"),
        ("tokenizer.ggml.add_bos_token", [1, 2]),
        ("tokenizer.chat_template", ["a", "b"]),
        ("llama.vocab_size", [1, 2]),
        ("llama.rope.scaling.type", [1, 2]),
        ("llama.rope.scaling.factor", "text"),
        ("llama.expert_count", [1, 2]),
        ("split.count", "text"),
        ("general.alignment", True),
    ],
)
def test_metadata_of_another_type_is_named(key, value, tmp_path):
    path = write(tmp_path / "a.gguf", fix_a_tensors(), {key: value})
    with pytest.raises(CheckpointError, match=f"{key} is "):
        gguf.read_config(path)
