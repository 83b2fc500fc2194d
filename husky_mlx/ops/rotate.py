"""Rotary embedding by a frozen description, for one or many positions."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from husky_mlx.rope import Rope

Rotation = Callable[..., mx.array]


def rotation(rope: Rope, head_dim: int) -> Rotation:
    """A function ``(x, offset=) -> x`` rotated, for x of shape (B, heads, L, head_dim).

    ``offset`` is the position of the first token: an int, or an array of shape () or (B,).
    """
    table = rope.wavelength_table(head_dim)
    freqs = None if table is None else mx.array(table)

    # Not a partial of MLX's function, which cannot be copied: mlx-lm deep-copies whole models.
    def rotate(x: mx.array, offset: int | mx.array) -> mx.array:
        return mx.fast.rope(
            x,
            head_dim,
            traditional=rope.traditional,
            base=rope.theta if table is None else None,
            scale=rope.position_scale,
            offset=offset,
            freqs=freqs,
        )

    return rotate
