"""Broken checkpoints on disk: load and convert list every difference, expected and found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from fixtures import FIX_B, mlx_weights, write_folder

from husky_mlx.conversion import convert
from husky_mlx.errors import CheckpointError
from husky_mlx.loading import load

LAYER = "model.layers.1"
ATTENTION = [f"model.layers.{i}.self_attn" for i in range(2)]
MLP = [f"model.layers.{i}.mlp" for i in range(2)]
Weights = dict[str, mx.array]


def shape(name: str, expected: tuple, found: tuple, hint: str = "") -> str:
    return f"{name}.weight should have shape {expected}{hint}, found {found}"


def remove(*names: str) -> Callable[[Weights], None]:
    return lambda weights: [weights.pop(name) for name in names] and None


def rename(old: str, new: str) -> Callable[[Weights], None]:
    return lambda weights: weights.update({new: weights.pop(old)})


def put(name: str, change: Callable[[mx.array], mx.array]) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: change(weights[name])})


# What is broken -> fields of config.json, the change of the weights, every sentence of the error.
BROKEN: dict[str, tuple[dict, Callable[[Weights], object], list[str]]] = {
    "a layer too many in the config": (
        {"num_hidden_layers": 3},
        lambda weights: None,
        ["num_hidden_layers is 3, found tensors of 2 layers (0 to 1)"],
    ),
    "a layer too few in the config": (
        {"num_hidden_layers": 1},
        lambda weights: None,
        ["num_hidden_layers is 1, found tensors of 2 layers (0 to 1)"],
    ),
    "a layer that is not there": (
        {},
        lambda weights: [weights.pop(n) for n in list(weights) if n.startswith("model.layers.0")],
        ["num_hidden_layers is 2, found tensors of 1 layers (1 to 1)"],
    ),
    "query heads": (
        {"num_attention_heads": 8, "head_dim": 16},
        lambda weights: None,
        [
            sentence
            for name in ATTENTION
            for sentence in (
                shape(f"{name}.q_proj", (128, 64), (64, 64)),
                shape(f"{name}.o_proj", (64, 128), (64, 64)),
            )
        ],
    ),
    "key and value heads": (
        {"num_key_value_heads": 1},
        lambda weights: None,
        [
            shape(f"{name}.{part}", (16, 64), (32, 64))
            for name in ATTENTION
            for part in ("k_proj", "v_proj")
        ],
    ),
    "head_dim": (
        {"head_dim": 8},
        lambda weights: None,
        [
            sentence
            for name in ATTENTION
            for sentence in (
                shape(f"{name}.q_proj", (32, 64), (64, 64)),
                shape(f"{name}.k_proj", (16, 64), (32, 64)),
                shape(f"{name}.v_proj", (16, 64), (32, 64)),
                shape(f"{name}.o_proj", (64, 32), (64, 64)),
            )
        ],
    ),
    "the width of the MLP": (
        {"intermediate_size": 96},
        lambda weights: None,
        [
            sentence
            for name in MLP
            for sentence in (
                shape(f"{name}.gate_proj", (96, 64), (128, 64)),
                shape(f"{name}.up_proj", (96, 64), (128, 64)),
                shape(f"{name}.down_proj", (64, 96), (64, 128)),
            )
        ],
    ),
    "the vocabulary": (
        {"vocab_size": 270},
        lambda weights: None,
        [
            shape(name, (270, 64), (264, 64), " (vocab_size)")
            for name in ("model.embed_tokens", "lm_head")
        ],
    ),
    "missing tensors": (
        {},
        remove(f"{LAYER}.mlp.up_proj.weight", "model.norm.weight"),
        ["model.norm.weight is missing", f"{LAYER}.mlp.up_proj.weight is missing"],
    ),
    "extra tensors": (
        {},
        lambda weights: weights.update({f"{LAYER}.mlp.router.weight": mx.zeros((2, 64))}),
        [f"{LAYER}.mlp.router.weight is not part of this model"],
    ),
    "a renamed tensor": (
        {},
        rename(f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.self_attn.dense.weight"),
        [
            f"{LAYER}.self_attn.o_proj.weight is missing",
            f"{LAYER}.self_attn.dense.weight is not part of this model",
        ],
    ),
    "a transposed tensor": (
        {},
        put(f"{LAYER}.mlp.down_proj.weight", lambda value: mx.contiguous(value.T)),
        [shape(f"{LAYER}.mlp.down_proj", (64, 128), (128, 64)) + " (transposed)"],
    ),
    "integers in place of floats": (
        {},
        put(f"{LAYER}.mlp.down_proj.weight", lambda value: value.astype(mx.int32)),
        [f"{LAYER}.mlp.down_proj.weight should be one of float16, bfloat16, float32, found int32"],
    ),
    "no head where embeddings are not tied": (
        {},
        remove("lm_head.weight"),
        ["lm_head.weight is missing (tie_word_embeddings is false)"],
    ),
    "biases that the config does not know": (
        {},
        lambda weights: weights.update({f"{LAYER}.self_attn.q_proj.bias": mx.zeros((64,))}),
        [f"{LAYER}.self_attn.q_proj.bias is not part of this model"],
    ),
    "several at once": (
        {"vocab_size": 270},
        remove(f"{LAYER}.input_layernorm.weight"),
        [
            shape("model.embed_tokens", (270, 64), (264, 64), " (vocab_size)"),
            shape("lm_head", (270, 64), (264, 64), " (vocab_size)"),
            f"{LAYER}.input_layernorm.weight is missing",
        ],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_difference_is_listed(case, tmp_path):
    fields, change, sentences = BROKEN[case]
    weights = mlx_weights(FIX_B)
    change(weights)
    folder = write_folder(tmp_path / "m", FIX_B, weights, tokenizer=True, **fields)
    for read in (load, lambda path: convert(path, tmp_path / "out", notify=pytest.fail)):
        with pytest.raises(CheckpointError) as error:
            read(str(folder))
        start = f"{folder}: the tensors do not fit the config: "
        assert str(error.value).startswith(start)
        assert str(error.value).removeprefix(start).split("; ") == sentences
    assert not (tmp_path / "out").exists()


def test_a_shard_of_another_model(tmp_path):
    """Layer 1 comes from a wider one: each of its tensors is listed."""
    wide = {**FIX_B, "hidden_size": 128}
    folder = write_folder(tmp_path / "m", FIX_B, tokenizer=True)
    (folder / "model.safetensors").unlink()
    own, other = mlx_weights(FIX_B), mlx_weights(wide)
    parts = [
        {name: value for name, value in own.items() if not name.startswith(LAYER)},
        {name: value for name, value in other.items() if name.startswith(LAYER)},
    ]
    index = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        mx.save_safetensors(str(folder / file), part)
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError) as error:
        load(str(folder))
    message = str(error.value)
    assert message.count("should have shape") == len(parts[1]) == 9
    assert shape(f"{LAYER}.self_attn.q_proj", (64, 64), (128, 128)) in message


@pytest.mark.parametrize("length", [0, 7, 5000, -1])
def test_a_truncated_file_is_named(length, tmp_path):
    folder = write_folder(tmp_path / "m", FIX_B, tokenizer=True)
    file: Path = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    for read in (load, lambda path: convert(path, tmp_path / "out", notify=pytest.fail)):
        with pytest.raises(CheckpointError, match="truncated or not a safetensors file") as error:
            read(str(folder))
        assert str(file) in str(error.value)


def test_a_stored_head_of_a_tied_model_is_left_out_everywhere(tmp_path):
    folder = write_folder(tmp_path / "m", FIX_B, tokenizer=True, tie_word_embeddings=True)
    out = convert(folder, tmp_path / "out", notify=pytest.fail)
    assert "lm_head.weight" not in mx.load(str(out / "model.safetensors"))
    found, expected = (load(str(path))[0](mx.array([[1, 2, 3]])) for path in (out, folder))
    assert mx.array_equal(found, expected)
