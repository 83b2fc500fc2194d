"""``husky compile --tune``: the tiles that are fastest on the GPU that is here.

From the policy's tile of each product of a one-token step, one figure of it after the other is
changed as long as that is faster; where it may be computed in whole numbers or in floats, once more
from the same tile with the other kind, whose best may have other figures. Every candidate is
compared with MLX's operations first.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx

from husky_mlx.bench_ops import compare
from husky_mlx.bench_ops_cases import Case, Cases
from husky_mlx.bench_ops_timing import Chain, Stopwatch, launches_of
from husky_mlx.chips import Chip
from husky_mlx.errors import HuskyError
from husky_mlx.launches import GROUP_OF_OP
from husky_mlx.model import Model
from husky_mlx.ops.gemv import Platform, TileKey
from husky_mlx.policy import MAX_THREADS, THREADGROUP_BYTES, policy
from husky_mlx.tile_table import HEAD
from husky_mlx.tiles import GemvTile

OPS = (*GROUP_OF_OP, HEAD)
ROUNDS = 5
# A candidate has to win by this much: less is noise.
MARGIN = 0.97
# Rows of a simdgroup, and of one on CUDA's matrix units.
_ROWS, _MATRIX_ROWS = (2, 4, 8), (16, 32, 64)
_SIMDGROUPS = (2, 4, 8, 16)
_UNROLLS = (1, 2, 4, 8)

Measure = Callable[[Case], float]


class _Chosen(dict[TileKey, GemvTile]):
    """The tiles of a platform while one product of it is tuned: it learns which that is."""

    def __init__(self, chip: Chip):
        super().__init__()
        self._chip = chip
        self.key: TileKey | None = None
        self.candidate: GemvTile | None = None

    def get(self, key: TileKey, default: Any = None) -> GemvTile:
        self.key = key
        tile = self.candidate or policy(*key, self._chip)
        assert isinstance(tile, GemvTile)
        return tile


def tune(
    model: Model, chip: Chip, backend: str, measure: Measure | None = None
) -> dict[TileKey, GemvTile]:
    """The tiles that beat the policy's, by what they are for.

    ``measure``: microseconds of a case's kernel; on the GPU, cold memory included, unless given.
    """
    measure = measure or _timer(backend)
    chosen = _Chosen(chip)
    cases = Cases(model, Platform(chip, backend, chosen), rows=1, contexts=())
    found: dict[TileKey, GemvTile] = {}
    for op in OPS:
        for case in cases.of(op):
            chosen.key = chosen.candidate = None
            usual = _microseconds(case, measure)
            key = chosen.key
            if usual is None or key is None:
                continue  # the self-test of the model says what is wrong with the kernel
            own = policy(*key, chip)
            assert isinstance(own, GemvTile)
            took = functools.partial(_with, chosen, case, measure)
            best, tile = _climb(own, usual, took, key, chip)
            other = _in_other_numbers(own, key, chip)
            first = None if other is None else took(other)
            if other is not None and first is not None:
                reached, other = _climb(other, first, took, key, chip)
                if reached < MARGIN * best:
                    tile = other
            if tile != own:
                found[key] = tile
            mx.clear_cache()
    return found


def _climb(
    tile: GemvTile,
    best: float,
    took: Callable[[GemvTile], float | None],
    key: TileKey,
    chip: Chip,
) -> tuple[float, GemvTile]:
    """The tile that changes of one figure after the other lead to, and its microseconds."""
    for candidates in _figures(key, chip):
        for candidate in candidates(tile):
            found = took(candidate)
            if found is not None and found < MARGIN * best:
                best, tile = found, candidate
    return best, tile


def _in_other_numbers(tile: GemvTile, key: TileKey, chip: Chip) -> GemvTile | None:
    """The tile with floats for whole numbers, or the other way round; None where the kernels have
    one kind only or it does not fit."""
    other = replace(tile, integer=not tile.integer)
    has_it = _on_matrix_units(key, chip) and key[2] < 16 and _fits(other, key, chip)
    return other if has_it else None


def _on_matrix_units(key: TileKey, chip: Chip) -> bool:
    return chip.target == "cuda" and key[1].itemsize == 2


def _fits(tile: GemvTile, key: TileKey, chip: Chip) -> bool:
    shape = key[1]
    return (
        tile.threadgroup[0] <= MAX_THREADS
        and tile.threadgroup_bytes(shape) <= THREADGROUP_BYTES[chip.target]
        and shape.k % tile.k_split == 0
    )


def _with(chosen: _Chosen, case: Case, measure: Measure, candidate: GemvTile) -> float | None:
    chosen.candidate = candidate
    return _microseconds(case, measure)


def _microseconds(case: Case, measure: Measure) -> float | None:
    """None for a tile that does not compile or gives other results."""
    try:
        compare(case)
        return measure(case)
    except (HuskyError, RuntimeError, ValueError):
        return None


def _timer(backend: str) -> Measure:
    watch = Stopwatch()

    def measure(case: Case) -> float:
        compiled = backend != "emulator"
        chain = Chain(case.op, case.ours, launches_of(case.bytes), watch, compiled)
        return statistics.median(chain.microseconds() for _ in range(ROUNDS))

    return measure


def _figures(key: TileKey, chip: Chip) -> list[Callable[[GemvTile], Iterator[GemvTile]]]:
    """One after the other: how K is split among how many simdgroups, the unrolling, the rows."""

    def splits(now: GemvTile) -> Iterator[GemvTile]:
        for simdgroups in _SIMDGROUPS:
            for k_split in [split for split in _SIMDGROUPS if split <= simdgroups]:
                yield replace(now, simdgroups=simdgroups, k_split=k_split)
            yield replace(now, simdgroups=simdgroups, k_split=1)

    def unrolls(now: GemvTile) -> Iterator[GemvTile]:
        for unroll in _UNROLLS:
            yield replace(now, unroll=unroll)

    def rows(now: GemvTile) -> Iterator[GemvTile]:
        for count in _MATRIX_ROWS if _on_matrix_units(key, chip) else _ROWS:
            yield replace(now, rows=count)

    def fitting(figure: Callable[[GemvTile], Iterator[GemvTile]]) -> Any:
        return lambda now: (each for each in figure(now) if each != now and _fits(each, key, chip))

    return [fitting(figure) for figure in (splits, unrolls, rows)]
