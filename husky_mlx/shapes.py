"""Models of published dimensions with random weights: speed without a download.

The dimensions are those of the ``config.json`` published with each checkpoint:
meta-llama/Llama-3.2-1B, meta-llama/Llama-3.2-3B, meta-llama/Llama-3.1-8B,
mistralai/Mistral-7B-v0.3, Qwen/Qwen2.5-7B, Qwen/Qwen3-8B and HuggingFaceTB/SmolLM2-135M. The text
is noise, the work is real.
"""

from __future__ import annotations

import copy
import math
import zlib

import mlx.core as mx
import numpy as np

from husky_mlx.config import LlamaConfig
from husky_mlx.errors import HuskyError
from husky_mlx.structure import expected_shapes


def _llama3_rope(factor: float) -> dict:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def llama_config(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    vocabulary: int,
    *,
    tied: bool,
    context: int,
    rope_theta: float,
    rope_scaling: dict | None = None,
    model_type: str = "llama",
) -> dict:
    """The ``config.json`` of a Llama of these dimensions."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
    }


# hidden, layers, heads, key/value heads, head_dim, MLP width, vocabulary
_CONFIGS = {
    "llama-3.2-1b": llama_config(
        *(2048, 16, 32, 8, 64, 8192, 128256),
        tied=True,
        context=131072,
        rope_theta=500000.0,
        rope_scaling=_llama3_rope(32.0),
    ),
    "llama-3.2-3b": llama_config(
        *(3072, 28, 24, 8, 128, 8192, 128256),
        tied=True,
        context=131072,
        rope_theta=500000.0,
        rope_scaling=_llama3_rope(32.0),
    ),
    "llama-3.1-8b": llama_config(
        *(4096, 32, 32, 8, 128, 14336, 128256),
        tied=False,
        context=131072,
        rope_theta=500000.0,
        rope_scaling=_llama3_rope(8.0),
    ),
    "mistral-7b": llama_config(
        *(4096, 32, 32, 8, 128, 14336, 32768),
        tied=False,
        context=32768,
        rope_theta=1000000.0,
        model_type="mistral",
    ),
    "qwen2.5-7b": llama_config(
        *(3584, 28, 28, 4, 128, 18944, 152064),
        tied=False,
        context=131072,
        rope_theta=1000000.0,
        model_type="qwen2",
    ),
    "qwen3-8b": llama_config(
        *(4096, 36, 32, 8, 128, 12288, 151936),
        tied=False,
        context=40960,
        rope_theta=1000000.0,
        model_type="qwen3",
    ),
    "smollm2-135m": llama_config(
        *(576, 30, 9, 3, 64, 1536, 49152),
        tied=True,
        context=8192,
        rope_theta=100000.0,
    ),
}
SHAPES = tuple(_CONFIGS)


def shape_config(name: str) -> dict:
    """The ``config.json`` of a named shape (one of ``SHAPES``), as a fresh dict."""
    return copy.deepcopy(_CONFIGS[name])


def quantized(config: dict, bits: int, group_size: int) -> dict:
    """A copy of a ``config.json`` that says so many bits, in MLX's affine layout; 16: as it is."""
    if bits == 16:
        return dict(config)
    return {**config, "quantization": {"group_size": group_size, "bits": bits}}


def parameter_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """mlx-lm's parameter names with their unquantised shapes, (outputs, inputs)."""
    return expected_shapes(LlamaConfig.from_dict(config))


def random_weights(
    config: dict, bits: int, group_size: int, dtype: mx.Dtype, seed: int
) -> dict[str, mx.array]:
    """Random weights under mlx-lm's names, evaluated one matrix at a time.

    ``bits`` 4 or 8: affine ``.weight`` (uint32, packed), ``.scales`` and ``.biases`` (``dtype``)
    in groups of ``group_size``. ``bits`` 16: ``.weight`` of ``dtype``. Norms are ones, biases
    zeros. Every weight has mean 0 and, averaged over groups, variance 1/inputs, which keeps a
    stream of unit variance near it through any number of layers. The same seed gives the same
    weights in any process on any device. HuskyError where the groups do not fit the rows.
    """
    shapes = parameter_shapes(config)
    for name, shape in shapes.items():
        if len(shape) == 2 and shape[1] % group_size:
            raise HuskyError(
                f"{name}: a row of {shape[1]} weights is not a multiple of group_size {group_size}"
            )
    weights: dict[str, mx.array] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = (mx.zeros if name.endswith(".bias") else mx.ones)(shape, dtype)
            continue
        packed, scales, biases = _random_affine(
            shape, bits if bits < 16 else 8, group_size, dtype, (seed, zlib.crc32(name.encode()))
        )
        if bits < 16:
            stem = name.removesuffix(".weight")
            weights |= {name: packed, f"{stem}.scales": scales, f"{stem}.biases": biases}
        else:
            weights[name] = mx.dequantize(packed, scales, biases, group_size, 8)
            mx.eval(weights[name])
    return weights


def _random_affine(
    shape: tuple[int, ...], bits: int, group_size: int, dtype: mx.Dtype, seed: tuple[int, int]
) -> tuple[mx.array, mx.array, mx.array]:
    rows, columns = shape
    source = np.random.default_rng(seed)
    words = rows * columns * bits // 32
    packed = source.bit_generator.random_raw(-(-words // 2)).view(np.uint32)[:words]
    levels = 2**bits - 1
    # Quants are uniform on 0..levels; group scales within 0.5..1.5 of the even one have a mean
    # square of 13/12.
    even = math.sqrt(12 / ((levels + 1) ** 2 - 1) / columns / (13 / 12))
    scales = source.uniform(0.5, 1.5, (rows, columns // group_size)).astype(np.float32) * even
    arrays = (
        mx.array(packed.reshape(rows, -1)),
        mx.array(scales).astype(dtype),
        mx.array(scales * (-levels / 2)).astype(dtype),
    )
    mx.eval(arrays)
    return arrays
