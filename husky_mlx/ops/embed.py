"""Token ids to the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from husky_mlx.device import activation_dtype
from husky_mlx.kernels import TAKE_CUDA_TEXT, ArraySpec, launch
from husky_mlx.matrix import Matrix
from husky_mlx.ops.gemv import Platform
from husky_mlx.places import SIZE
from husky_mlx.policy import policy
from husky_mlx.tiles import EmbedShape


def embed(tokens: mx.array, embedding: Callable[[mx.array], mx.array]) -> mx.array:
    """(B, L) token ids -> (B, L, hidden) in the activation dtype."""
    x = embedding(tokens)
    return x.astype(activation_dtype(x.dtype))


def embed_kernel(
    tokens: mx.array,
    before: mx.array,
    place: mx.array,
    length: int,
    table: Matrix,
    tickets: int,
    platform: Platform,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """(M,) uint32 token ids -> (M, hidden) in the table's dtype, the place of the next step, and on
    CUDA ``tickets`` zeros of uint32 for attention.

    ``place`` (16,) int32 moves on by ``length`` tokens. ``before`` is not read: it makes the
    launch, and all that depends on it, wait for its writer.
    """
    shape = EmbedShape(m=tokens.shape[0], width=table.columns)
    tile = policy("embed", shape, table.bits, platform.chip)
    outputs: list[ArraySpec] = [((shape.m, shape.width), table.dtype), ((SIZE,), mx.int32)]
    template = {**table.template, "N": table.rows, "D": shape.width, "LENGTH": length}
    if platform.backend in TAKE_CUDA_TEXT:
        outputs.append(((tickets,), mx.uint32))
        template["TICKETS"] = tickets
    embedded, following, *zeros = launch(
        "embed",
        {"tokens": tokens, "before": before, "place": place, "constants": table.constants},
        outputs,
        template,
        tile.grid(shape),  # type: ignore[arg-type]
        tile.threadgroup,
        platform.backend,
    )
    return embedded, following, zeros[0] if zeros else None
