"""The last edge: final norm and the vocabulary projection."""

from __future__ import annotations

import mlx.core as mx

from husky_mlx.kernels import launch
from husky_mlx.matrix import Matrix
from husky_mlx.ops.gemv import Platform, float_bits, launch_gemv, normed
from husky_mlx.pack import Projections

ARGMAX_SIMDGROUPS = 8


def rms_lm_head(x: mx.array, norm: mx.array, eps: float, head: Projections) -> mx.array:
    """(B, 1, hidden) -> logits (B, 1, vocabulary)."""
    (logits,) = head(mx.fast.rms_norm(x, norm, eps))
    return logits


def rms_lm_head_kernel(x: mx.array, eps: float, matrix: Matrix, platform: Platform) -> mx.array:
    """(M, hidden) -> logits (M, vocabulary); ``matrix`` has the norm."""
    logits, _ = _head("rms_lm_head", x, eps, matrix, platform)
    return logits


def rms_lm_head_argmax_kernel(
    x: mx.array, eps: float, matrix: Matrix, platform: Platform
) -> tuple[mx.array, mx.array]:
    """(M, hidden) -> logits (M, vocabulary) and the ids of the largest, (M,) uint32."""
    logits, best = _head("rms_lm_head_argmax", x, eps, matrix, platform)
    m, count = best[0].shape
    threads = 32 * ARGMAX_SIMDGROUPS
    (tokens,) = launch(
        "argmax_combine",
        {"best_values": best[0], "best_indices": best[1]},
        [((m,), mx.uint32)],
        {"COUNT": count, "SIMDGROUPS": ARGMAX_SIMDGROUPS},
        (m * threads, 1, 1),
        (threads, 1, 1),
        platform.backend,
    )
    return logits, tokens


def _head(
    op: str, x: mx.array, eps: float, matrix: Matrix, platform: Platform
) -> tuple[mx.array, list[mx.array]]:
    m = x.shape[0]
    x, tile = normed("rms_lm_head", x, eps, matrix, platform)
    threadgroups = -(-matrix.rows // tile.outputs)
    best = [((m, threadgroups), mx.float32), ((m, threadgroups), mx.uint32)]
    logits, *found = launch_gemv(
        op,
        matrix,
        tile,
        threadgroups,
        {"x": x},
        [((m, matrix.rows), matrix.dtype), *(best if op.endswith("argmax") else [])],
        {"N": matrix.rows, "M": m, "OUT": matrix.dtype, "EPS_BITS": float_bits(eps)},
        platform,
    )
    return logits, found
