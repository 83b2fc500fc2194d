"""GGUF rows of raw bytes -> MLX arrays: plain floats, or affine groups of 32 in MLX's layout.

A block of 32 weights becomes one group: the codes are repacked, never requantised, so
``scale * code + bias`` gives exactly the numbers that the file stands for.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

GROUP_SIZE = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


def unpack(type_name: str, rows: np.ndarray) -> dict[str, mx.array]:
    """One tensor's ``{"weight": ...}``, with ``"scales"`` and ``"biases"`` when it is quantised.

    ``rows`` is uint8 (rows, bytes per row). Floats come back as (rows, columns) of their own type,
    quantised weights as uint32 (rows, columns * bits / 32) with float16 (rows, columns / 32).
    """
    if type_name == "BF16":
        return {"weight": mx.array(rows.view(np.uint16)).view(mx.bfloat16)}
    if type_name in ("F32", "F16"):
        return {"weight": mx.array(rows.view(f"<f{4 if type_name == 'F32' else 2}"))}
    codes, scales, biases = _GROUPS[type_name](rows)
    packed = np.ascontiguousarray(codes).reshape(len(rows), -1).view("<u4")
    # MLX allocates what a strided array spans, the gaps too.
    return {
        "weight": mx.array(packed),
        "scales": mx.array(np.ascontiguousarray(scales)),
        "biases": mx.array(np.ascontiguousarray(biases)),
    }


Groups = tuple[np.ndarray, np.ndarray, np.ndarray]


def _blocks(rows: np.ndarray, size: int, header: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (rows, groups, size - header) of codes and float16 (rows, groups, header / 2)."""
    blocks = rows.reshape(len(rows), -1, size)
    return blocks[..., header:], np.ascontiguousarray(blocks[..., :header]).view("<f2")


def _q4_0(rows: np.ndarray) -> Groups:
    codes, header = _blocks(rows, 18, 2)
    scales = header[..., 0]
    return _interleave(codes), scales, scales * np.float16(-8)


def _q4_1(rows: np.ndarray) -> Groups:
    codes, header = _blocks(rows, 20, 4)
    return _interleave(codes), header[..., 0], header[..., 1]


def _q8_0(rows: np.ndarray) -> Groups:
    codes, header = _blocks(rows, 34, 2)
    scales = header[..., 0]
    # int8 q is the uint8 q + 128, and that is its top bit flipped.
    return codes ^ np.uint8(0x80), scales, scales * np.float16(-128)


def _interleave(codes: np.ndarray) -> np.ndarray:
    """Nibbles from GGUF's order (byte j: elements j and j + 16) to MLX's (byte j: 2j and 2j + 1).

    uint8 (rows, groups, 16) to the same shape.
    """
    pairs = np.ascontiguousarray(codes).view("<u2")
    low = (pairs & 0x0F) | (pairs >> 4 & 0xF0)
    high = (pairs >> 4 & 0x0F) | (pairs >> 8 & 0xF0)
    return np.concatenate([low, high], axis=-1).astype(np.uint8)


_GROUPS: dict[str, Callable[[np.ndarray], Groups]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
