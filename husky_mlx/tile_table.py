"""The launch choices of a build: the tile of each product of a decode step, as it was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from husky_mlx.chips import Chip
from husky_mlx.launches import GROUP_OF_OP, NORMED
from husky_mlx.matrix import kernels_take
from husky_mlx.ops.gemv import TileKey
from husky_mlx.pack import Layout
from husky_mlx.places import MAX_ROWS
from husky_mlx.policy import policy
from husky_mlx.tiles import GemvShape, GemvTile

HEAD = "rms_lm_head"


def products(layouts: Mapping[str, Layout], tied: bool) -> list[TileKey]:
    """Every product of a step, for each number of rows that a step may have."""
    ops = {group: op for op, group in GROUP_OF_OP.items()}
    found: dict[TileKey, None] = {}
    for group, layout in layouts.items():
        head = group == ("embed_tokens" if tied else "lm_head")
        op = HEAD if head else ops.get(group.rpartition(".")[2])
        dtype, shape = layout.parts.get("scales", layout.parts["weight"])
        bits = layout.bits or 16
        if op is None or not kernels_take(bits, layout.group_size or 32, layout.mode):
            continue
        columns = shape[1] * (layout.group_size or 1)
        norm = op == HEAD or op in NORMED
        for rows in range(1, MAX_ROWS + 1):
            shape_ = GemvShape(rows, sum(layout.rows), columns, norm, itemsize=dtype.size)
            found[op, shape_, bits] = None
    return list(found)


def tile_table(
    layouts: Mapping[str, Layout],
    tied: bool,
    chip: Chip,
    tuned: Mapping[TileKey, GemvTile] | None = None,
) -> list[dict[str, Any]]:
    """The policy's tiles for a chip, or ``tuned`` ones, JSON-able; none for the CPU, which has a
    program instead."""
    if chip.target not in ("metal", "cuda"):
        return []
    table = []
    for op, shape, bits in products(layouts, tied):
        tile = (tuned or {}).get((op, shape, bits)) or policy(op, shape, bits, chip)
        table.append({"op": op, "bits": bits, "shape": asdict(shape), "tile": asdict(tile)})
    return table


def from_json(table: Sequence[Mapping[str, Any]]) -> dict[TileKey, GemvTile]:
    """The tiles of a table by what they are for."""
    return {
        (each["op"], GemvShape(**each["shape"]), each["bits"]): GemvTile(**each["tile"])
        for each in table
    }
