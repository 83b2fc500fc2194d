"""Rotary embedding by a frozen description, for one or many positions."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from husky_mlx.rope import Rope


@dataclass(frozen=True, eq=False)
class Rotation:
    """``(x, offset=) -> x`` rotated, for x of shape (B, heads, L, head_dim).

    ``offset`` is the position of the first token: an int, or an array of shape () or (B,).
    """

    # Neither a closure nor a partial of MLX's function: models are copied and pickled whole.
    rope: Rope
    head_dim: int
    freqs: mx.array | None

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        if self.rope.magnitude != 1.0:
            x = x * self.rope.magnitude
        return mx.fast.rope(
            x,
            self.head_dim,
            traditional=self.rope.traditional,
            base=self.rope.theta if self.freqs is None else None,
            scale=self.rope.position_scale,
            offset=offset,
            freqs=self.freqs,
        )


def rotation(rope: Rope, head_dim: int) -> Rotation:
    """The rotation of heads of ``head_dim``."""
    table = rope.wavelength_table(head_dim)
    return Rotation(rope, head_dim, None if table is None else mx.array(table))
