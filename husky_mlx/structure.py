"""What tensors a model must have, and every way in which a checkpoint differs from that."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from husky_mlx.config import LlamaConfig
from husky_mlx.errors import CheckpointError

_FLOATS = (mx.float16, mx.bfloat16, mx.float32)


def check_structure(config: LlamaConfig, weights: Mapping[str, mx.array], source: str) -> None:
    """Compare every tensor with what the config needs.

    Raises CheckpointError listing all mismatches: missing and extra tensors, shapes (expected and
    found), packed shapes that fit no bit width, and dtypes.
    """
    expected = expected_shapes(config)
    wrong = []
    for name, shape in expected.items():
        base = name.removesuffix(".weight")
        if name not in weights:
            because = " (tie_word_embeddings is false)" if name == "lm_head.weight" else ""
            wrong.append(f"{name} is missing{because}")
        elif f"{base}.scales" in weights:
            wrong += _packed_mismatch(base, shape, weights)
        else:
            wrong += _mismatch(name, shape, weights[name], _FLOATS)
    companions = {
        f"{name.removesuffix('.weight')}.{part}"
        for name in expected
        for part in ("scales", "biases")
    }
    wrong += [
        f"{name} is not part of this model"
        for name in weights
        if name not in expected and name not in companions
    ]
    if wrong:
        raise CheckpointError(f"{source}: {len(wrong)} tensors do not fit: {'; '.join(wrong)}")


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape before quantization, for every tensor of the model."""
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
        "self_attn.o_proj": (hidden, config.query_size, config.attention_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (hidden,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes


def _mismatch(
    name: str, shape: tuple[int, ...], value: mx.array, dtypes: tuple[mx.Dtype, ...]
) -> list[str]:
    wrong = []
    if tuple(value.shape) != shape:
        hint = " (vocab_size)" if name.startswith(("lm_head", "model.embed_tokens")) else ""
        wrong.append(f"{name} should have shape {shape}{hint}, found {tuple(value.shape)}")
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("mlx.core.") for dtype in dtypes)
        found = str(value.dtype).removeprefix("mlx.core.")
        wrong.append(f"{name} should be one of {names}, found {found}")
    return wrong


def _packed_mismatch(
    base: str, shape: tuple[int, ...], weights: Mapping[str, mx.array]
) -> list[str]:
    """Check a packed matrix, (rows, columns) before packing, against its words and scales."""
    rows, columns = shape
    packed, scales = weights[f"{base}.weight"], weights[f"{base}.scales"]
    if packed.ndim != 2 or scales.ndim != 2 or packed.dtype != mx.uint32:
        return [
            f"{base} should be packed uint32 of 2 dimensions, found {packed.dtype} {packed.shape}"
        ]
    wrong = []
    if packed.shape[0] != rows or scales.shape[0] != rows:
        hint = " (vocab_size)" if base in ("lm_head", "model.embed_tokens") else ""
        wrong.append(f"{base} should have {rows} rows{hint}, found {packed.shape[0]}")
    bits = packed.shape[1] * 32 / columns
    if bits not in (2, 3, 4, 5, 6, 8):
        wrong.append(
            f"{base} has {packed.shape[1]} words a row: no bit width packs {columns} values so"
        )
    if scales.shape[1] == 0 or columns % scales.shape[1]:
        wrong.append(f"{base} has {scales.shape[1]} scales a row for {columns} values")
    biases = weights.get(f"{base}.biases")
    if scales.dtype == mx.uint8:
        return wrong  # the mx formats have no biases
    if biases is None or biases.shape != scales.shape:
        found = "none" if biases is None else str(tuple(biases.shape))
        wrong.append(f"{base}.biases should have shape {tuple(scales.shape)}, found {found}")
    return wrong
