"""What tensors a model must have, and every way in which a checkpoint differs from that."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import mlx.core as mx

from husky_mlx.config import LlamaConfig
from husky_mlx.errors import CheckpointError

_FLOATS = (mx.float16, mx.bfloat16, mx.float32)
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
MX_FORMATS = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")


def check_structure(config: LlamaConfig, weights: Mapping[str, mx.array], source: str) -> None:
    """Compare every tensor with what the config needs.

    Raises CheckpointError listing all mismatches: the number of layers, missing and extra tensors,
    shapes (expected and found), packed shapes that fit no bit width, and dtypes.
    """
    stored = {int(match[1]) for match in map(_LAYER.match, weights) if match}
    layers = [layer for layer in range(config.num_hidden_layers) if layer in stored]
    wrong = []
    if len(layers) < config.num_hidden_layers or len(stored) > len(layers):
        wrong.append(
            f"num_hidden_layers is {config.num_hidden_layers}, found tensors of {len(stored)} "
            f"layers{f' ({min(stored)} to {max(stored)})' if stored else ''}"
        )
    expected = expected_shapes(config, layers)
    packed = {
        name.removesuffix(".weight")
        for name, shape in expected.items()
        if len(shape) == 2 and f"{name.removesuffix('.weight')}.scales" in weights
    }
    for name, shape in expected.items():
        base = name.removesuffix(".weight")
        if name not in weights:
            because = " (tie_word_embeddings is false)" if name == "lm_head.weight" else ""
            wrong.append(f"{name} is missing{because}")
        elif base in packed:
            wrong += _packed_mismatch(base, shape, weights)
        else:
            wrong += _mismatch(name, shape, weights[name])
    companions = {f"{base}.{part}" for base in packed for part in ("scales", "biases")}
    wrong += [
        f"{name} is not part of this model"
        for name in weights
        if name not in expected and name not in companions and not _of_another_layer(name, layers)
    ]
    if wrong:
        raise CheckpointError(f"{source}: the tensors do not fit the config: {'; '.join(wrong)}")


def drop_unread(weights: Mapping[str, mx.array], tied: bool) -> dict[str, mx.array]:
    """Without what no Llama reads: rotary tables, and the head of a model with tied embeddings."""
    return {
        name: value
        for name, value in weights.items()
        if "rotary_emb.inv_freq" not in name and not (tied and name.startswith("lm_head."))
    }


def expected_shapes(
    config: LlamaConfig, layers: Collection[int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape before quantization, with all layers or only these."""
    hidden, wide = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (config.query_size, hidden, config.attention_bias),
        "self_attn.k_proj": (config.key_value_size, hidden, config.attention_bias),
        "self_attn.v_proj": (config.key_value_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, config.query_size, config.output_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    for layer in range(config.num_hidden_layers) if layers is None else layers:
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (hidden,)
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            shapes[f"{prefix}.self_attn.{norm}.weight"] = (config.head_dim,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes


def _of_another_layer(name: str, layers: Collection[int]) -> bool:
    match = _LAYER.match(name)
    return match is not None and int(match[1]) not in layers


def _mismatch(name: str, shape: tuple[int, ...], value: mx.array) -> list[str]:
    wrong = []
    if tuple(value.shape) != shape:
        found = tuple(value.shape)
        turned = " (transposed)" if len(shape) == 2 and found == shape[::-1] else ""
        wrong.append(f"{name} should have shape {shape}{_hint(name)}, found {found}{turned}")
    if value.dtype not in _FLOATS:
        names = ", ".join(map(_name, _FLOATS))
        wrong.append(f"{name} should be one of {names}, found {_name(value.dtype)}")
    return wrong


def _packed_mismatch(
    base: str, shape: tuple[int, ...], weights: Mapping[str, mx.array]
) -> list[str]:
    """Check a packed matrix, (rows, columns) before packing, against its words and scales."""
    rows, columns = shape
    words, scales = weights[f"{base}.weight"], weights[f"{base}.scales"]
    biases = weights.get(f"{base}.biases")
    if words.ndim != 2 or scales.ndim != 2 or words.dtype != mx.uint32:
        return [
            f"{base} should be packed uint32 of 2 dimensions with scales of 2, "
            f"found {_name(words.dtype)} {words.shape} and {scales.shape}"
        ]
    wrong = [
        f"{base}.{part} should have {rows} rows{_hint(base)}, found {value.shape[0]}"
        for part, value in (("weight", words), ("scales", scales))
        if value.shape[0] != rows
    ]
    bits = words.shape[1] * 32 / columns
    group = columns / scales.shape[1] if scales.shape[1] else 0
    layout = f"{words.shape[1]} words and {scales.shape[1]} scales a row for {columns} values"
    if scales.dtype == mx.uint8:
        if (bits, group) not in MX_FORMATS:
            wrong.append(f"{base} has {layout}: that is none of {list(MX_FORMATS.values())}")
        if biases is not None:
            wrong.append(f"{base}.biases is not part of a matrix with uint8 scales")
        return wrong
    if bits not in AFFINE_BITS or group not in AFFINE_GROUP_SIZES:
        wrong.append(
            f"{base} has {layout}: supported are {AFFINE_BITS} bits in groups of "
            f"{AFFINE_GROUP_SIZES}"
        )
    if scales.dtype not in _FLOATS:
        wrong.append(f"{base}.scales should be floats or uint8, found {_name(scales.dtype)}")
    if biases is None:
        wrong.append(f"{base}.biases is missing")
    elif (biases.shape, biases.dtype) != (scales.shape, scales.dtype):
        wrong.append(
            f"{base}.biases should be {_name(scales.dtype)} {scales.shape} as the scales, "
            f"found {_name(biases.dtype)} {biases.shape}"
        )
    return wrong


def _hint(name: str) -> str:
    return " (vocab_size)" if name.startswith(("lm_head", "model.embed_tokens")) else ""


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
