"""Checkpoints that another library quantized, in MLX's own layout: GPTQ, AWQ, compressed-tensors
and fp8.

Integers are kept, in MLX's affine form ``scale * code + bias``; fp8 becomes plain floats, since
MLX multiplies no fp8 with such scales. AWQ goes through mlx-lm's transform, which has one for no
other of these. Everything stays lazy, so that a tensor is read when it is used. Sources of the
layouts: AutoGPTQ's ``qlinear_cuda_old.py``, compressed-tensors' ``pack_to_int32`` and vLLM's
``fp8_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import _transform_awq_weights

from husky_mlx.config import LlamaConfig
from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.structure import expected_shapes

Weights = dict[str, mx.array]
# Quantization methods whose tensors are already in MLX's own layout.
_MLX_METHODS = (None, "mxfp4", "mxfp8")
_WHOLE_BITS = (2, 4, 8)  # as many codes in each 32-bit word, none across two
_GROUP_SIZES = (128, 64, 32)
# What a runtime that also quantizes activations would take; weights do without.
_ACTIVATION_SCALES = (".input_scale", ".output_scale", ".input_zero_point")


def settings_of(config: Mapping[str, Any], source: str) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a checkpoint that is not in MLX's layout, else None."""
    settings = config.get("quantization_config") or {}
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{source}: quantization_config must be an object, found {settings}")
    if config.get("quantization") or settings.get("quant_method") in _MLX_METHODS:
        return None
    return settings


def check_layout(settings: Mapping[str, Any], source: str) -> None:
    """Raise UnsupportedModel for a layout that ``to_mlx`` does not know, by what it says itself."""
    method = settings.get("quant_method")
    wrong = None
    if method == "gptq":
        if settings.get("bits") not in _WHOLE_BITS:
            wrong = f"GPTQ of {settings.get('bits')!r} bits, supported are {_WHOLE_BITS}"
    elif method == "awq":
        version = str(settings.get("version", "gemm")).lower()
        if settings.get("bits", settings.get("w_bit", 4)) != 4 or version != "gemm":
            wrong = f"AWQ of {settings.get('bits')!r} bits, version {version!r}, not 4 bits, gemm"
    elif method == "compressed-tensors":
        if settings.get("format") not in ("pack-quantized", "float-quantized"):
            wrong = (
                f"compressed-tensors (format {settings.get('format')!r}), supported are "
                "'pack-quantized' and 'float-quantized'"
            )
    elif method not in ("fp8", "fbgemm_fp8"):
        layout = f" (format {settings['format']!r})" if settings.get("format") else ""
        wrong = (
            f"quant_method is {method!r}{layout}, supported are MLX's own layouts, 'gptq', 'awq', "
            "'compressed-tensors' and 'fp8'"
        )
    if wrong is not None:
        raise UnsupportedModel(
            source,
            [f"quantization_config: {wrong}: take the unquantized model, with `husky convert -q`"],
        )


def to_mlx(config: dict[str, Any], weights: Weights, source: str) -> None:
    """Rewrite a checkpoint that another library quantized; nothing is done to any other.

    ``config`` loses ``quantization_config``: what was packed is read from the shapes. Raises
    UnsupportedModel for layouts outside the list, CheckpointError where tensors do not fit it.
    """
    settings = settings_of(config, source)
    if settings is None:
        return
    check_layout(settings, source)
    for name in [name for name in weights if name.endswith(_ACTIVATION_SCALES)]:
        del weights[name]
    method = settings.get("quant_method")
    try:
        if method == "awq":
            _awq(settings, weights, source)
        elif method == "gptq":
            _each(weights, ".qweight", _gptq, settings, source)
            _drop_zero_biases(config, weights, source)
        elif settings.get("format") == "pack-quantized":
            _each(weights, ".weight_packed", _packed_integers, settings, source)
        else:
            _fp8(config, settings, weights, source)
    except KeyError as error:
        raise CheckpointError(f"{source}: {error.args[0]} is missing ({method})") from None
    del config["quantization_config"]


def _awq(settings: Mapping[str, Any], weights: Weights, source: str) -> None:
    _require_some(weights, ".qweight", source)
    group_size = settings.get("group_size", settings.get("q_group_size", 128))
    try:
        changed, _ = _transform_awq_weights(weights, {"bits": 4, "group_size": group_size})
    except ValueError as error:
        raise CheckpointError(f"{source}: mlx-lm's AWQ transform: {error}") from error
    weights.clear()
    weights.update(changed)


def _each(
    weights: Weights,
    ending: str,
    rewrite: Callable[[str, Weights, Mapping[str, Any], str], Weights],
    settings: Mapping[str, Any],
    source: str,
) -> None:
    for name in _require_some(weights, ending, source):
        base = name.removesuffix(ending)
        parts = rewrite(base, weights, settings, source)
        weights.update({f"{base}.{part}": value for part, value in parts.items()})


def _require_some(weights: Weights, ending: str, source: str) -> list[str]:
    found = sorted(name for name in weights if name.endswith(ending))
    if not found:
        raise CheckpointError(
            f"{source}: quantization_config promises packed weights, found no tensor named "
            f"*{ending}"
        )
    return found


def _gptq(base: str, weights: Weights, settings: Mapping[str, Any], source: str) -> Weights:
    """qweight int32 (in * bits / 32, out), codes in order along in; qzeros int32
    (groups, out * bits / 32), each one less than the zero in the first format; scales (groups,
    out)."""
    bits = settings["bits"]
    words, scales = weights.pop(f"{base}.qweight"), weights.pop(f"{base}.scales").T
    columns, groups = words.shape[0] * 32 // bits, scales.shape[1]
    if (order := weights.pop(f"{base}.g_idx", None)) is not None:
        expected = np.arange(columns) // (columns // groups)
        if not np.array_equal(np.array(order), expected):
            raise UnsupportedModel(
                source,
                [
                    f"{base}.g_idx sorts the columns by activation (desc_act), whose groups MLX "
                    "cannot store: convert the unquantized model"
                ],
            )
    zeros = _unpack(weights.pop(f"{base}.qzeros"), bits).T
    if settings.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = zeros + 1
    return _affine(words.T.view(mx.uint32), scales, zeros, columns, base, source)


def _drop_zero_biases(config: Mapping[str, Any], weights: Weights, source: str) -> None:
    """AutoGPTQ gives some models' matrices biases that they have not, of zeros."""
    expected = expected_shapes(LlamaConfig.from_dict(config, str(Path(source, "config.json"))))
    for name in [name for name in weights if name.endswith(".bias") and name not in expected]:
        if not mx.any(weights[name]).item():
            del weights[name]


def _packed_integers(
    base: str, weights: Weights, settings: Mapping[str, Any], source: str
) -> Weights:
    """weight_packed int32 (out, in * bits / 32), codes in order; weight_scale (out, groups);
    weight_zero_point int32 (out * bits / 32, groups), absent where it is the middle."""
    words, scales = weights.pop(f"{base}.weight_packed"), weights.pop(f"{base}.weight_scale")
    shape = np.array(weights.pop(f"{base}.weight_shape")).tolist()
    if f"{base}.weight_g_idx" in weights:
        raise UnsupportedModel(
            source, [f"{base}.weight_g_idx sorts the columns by activation: convert another model"]
        )
    columns = shape[1]
    bits = words.shape[1] * 32 // columns
    if bits not in _WHOLE_BITS or words.shape != (shape[0], columns * bits // 32):
        raise CheckpointError(
            f"{source}: {base}.weight_packed should hold {tuple(shape)} of {_WHOLE_BITS} bits, "
            f"found {words.shape} words"
        )
    if scales.ndim != 2:
        raise UnsupportedModel(source, [f"{base}.weight_scale is one for the whole matrix"])
    packed_zeros = weights.pop(f"{base}.weight_zero_point", None)
    middle = mx.full(scales.shape, 1 << (bits - 1), mx.uint32)
    zeros = middle if packed_zeros is None else _unpack(packed_zeros.T, bits).T[: shape[0]]
    return _affine(words.view(mx.uint32), scales, zeros, columns, base, source)


def _unpack(words: mx.array, bits: int) -> mx.array:
    """int32 (rows, words) -> uint32 codes (rows, words * 32 / bits), in order."""
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    codes = (words.view(mx.uint32)[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(words.shape[0], -1)


def _affine(
    words: mx.array, scales: mx.array, zeros: mx.array, columns: int, base: str, source: str
) -> Weights:
    """(code - zero) * scale as code * scale + bias; MLX's group sizes divide wider groups."""
    group = columns // scales.shape[1]
    own = next((size for size in _GROUP_SIZES if group % size == 0), None)
    if own is None or columns % scales.shape[1] or scales.shape != zeros.shape:
        raise UnsupportedModel(
            source,
            [
                f"{base} has {scales.shape} scales and {zeros.shape} zeros for {columns} columns; "
                f"supported are groups of multiples of {_GROUP_SIZES[-1]}"
            ],
        )
    biases = (-scales.astype(mx.float32) * zeros).astype(scales.dtype)
    repeats = group // own
    return {
        "weight": mx.contiguous(words),
        "scales": mx.repeat(scales, repeats, axis=1),
        "biases": mx.repeat(biases, repeats, axis=1),
    }


def _fp8(
    config: Mapping[str, Any], settings: Mapping[str, Any], weights: Weights, source: str
) -> None:
    """uint8 (out, in) of E4M3 with ``weight_scale_inv`` a block or ``weight_scale`` a row or
    matrix, both of which multiply."""
    dtype = getattr(mx, str(config.get("dtype") or config.get("torch_dtype")), mx.bfloat16)
    packed = sorted(name for name, value in weights.items() if value.dtype == mx.uint8)
    if not packed:
        raise CheckpointError(
            f"{source}: quantization_config promises fp8 weights and there are none: it is wrong, "
            "or the weights are"
        )
    for name in packed:
        weight = weights[name]
        scale = weights.pop(f"{name}_scale_inv", None)
        if scale is None:
            scale = weights.pop(f"{name}_scale")
        if not mx.issubdtype(scale.dtype, mx.floating):
            raise UnsupportedModel(source, [f"{name} has scales of {scale.dtype}"])
        rows, columns = weight.shape
        if scale.size == 1:
            factors = scale.reshape(1, 1)
        else:
            block = settings.get("weight_block_size") or [1, columns]
            expected = (-(-rows // block[0]), -(-columns // block[1]))
            if scale.reshape(scale.shape[0], -1).shape != expected:
                raise CheckpointError(
                    f"{source}: {name} should have scales of {expected}, found {scale.shape}"
                )
            factors = scale.reshape(expected)
            factors = mx.repeat(mx.repeat(factors, block[0], 0)[:rows], block[1], 1)[:, :columns]
        full = mx.from_fp8(weight, dtype=mx.float32) * factors.astype(mx.float32)
        weights[name] = full.astype(dtype)
    if left := sorted(name for name in weights if name.endswith(("_scale_inv", "weight_scale"))):
        raise CheckpointError(
            f"{source}: {left[0]} belongs to an fp8 weight, and "
            f"{left[0].rsplit('_scale', 1)[0]} is none"
        )
