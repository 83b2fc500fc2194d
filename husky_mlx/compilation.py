"""A model packed for one chip: ``x.hky/builds/<target>-<quant>/``, which loads as it lies there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import save_config

from husky_mlx import __version__, conversion, device, sources
from husky_mlx.artifact import BUILD, MANIFEST, read_manifest, write_manifest
from husky_mlx.builds import BUILDS, read_build
from husky_mlx.chips import Chip
from husky_mlx.loading import build_model
from husky_mlx.model import Model
from husky_mlx.notices import notice
from husky_mlx.ops.gemv import TileKey
from husky_mlx.packed import Packing, layouts_as_json, plan_packing, write_packed
from husky_mlx.progress import bytes_bar
from husky_mlx.quantization import Choice, open_source, quantize
from husky_mlx.requantize import Change, losses
from husky_mlx.staging import check_output, require_disk, whole_folder
from husky_mlx.stream import Stream
from husky_mlx.targets import parse_target, this_machine
from husky_mlx.tile_table import tile_table
from husky_mlx.tiles import GemvTile
from husky_mlx.tuning import tune as tune_tiles

_HALF = (mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Compiled:
    """Where a build is, for which chip, and what became of each matrix."""

    path: Path
    chip: Chip
    changes: list[Change]
    nbytes: int


def compile_model(
    source: str | Path,
    target: str = "auto",
    choice: Choice | None = None,
    output: str | Path | None = None,
    *,
    memory: int | None = None,
    overwrite: bool = False,
    tune: bool = False,
    announce: Callable[[int], None] = lambda size: None,
    notify: Callable[[str], None] = notice,
) -> Compiled:
    """Write a build of a model. ``source``: what ``load`` takes; for a .hky folder the build goes
    inside it unless ``output`` names a folder.

    ``target``: as ``targets.parse_target`` takes it, with the machine's ``memory`` in GB. One
    matrix and the buffer of its group are in memory at a time, and all of the model if there is
    calibration. ``tune`` times tiles on the GPU here, which must be the target; what it finds
    differs from run to run. The folder appears whole or not at all. ``announce`` gets the bytes
    before they are written. Raises OutputError where it cannot be written, ValueError for names,
    and what ``load`` does for the source.
    """
    choice = choice or Choice()
    choice.check()
    label, chip = parse_target(target, notify, memory)
    path = sources.resolve(str(source), notify=notify)
    opened = open_source(path, choice.adapter)
    manifest = read_manifest(path) if path.is_dir() else None
    quant = choice.name(opened.stored)
    if output is None:
        if manifest is None:
            raise ValueError(f"{path} is no .hky folder: give --output, or run husky convert first")
        output = path / BUILDS / f"{label}-{quant}"
    if tune and (chip != this_machine() or chip.target == "cpu"):
        raise ValueError(f"--tune times kernels on this machine's GPU, which is not {label}")
    folder = Path(output).expanduser()
    check_output(folder, overwrite)
    changes: list[Change] = []
    stream = quantize(opened, choice, report=changes.append, notify=notify)
    widened = _widened(stream, chip)
    outline = {
        name: mx.zeros(value.shape, widened.get(name, value.dtype))
        for name, value in stream.outline.items()
    }
    model = build_model(dict(stream.config), dict(outline), lazy=True)
    frequencies = mx.array(stream.args.rope.frequencies(stream.args.head_dim))
    packing = plan_packing(model, frequencies)
    require_disk(folder, packing.nbytes)
    announce(packing.nbytes)
    with whole_folder(folder, overwrite=overwrite) as staged:
        with bytes_bar(f"{label}-{quant}", packing.nbytes) as advance:
            write_packed(staged, packing, model, stream, frequencies, widened, advance)
        save_config(dict(stream.config), staged / "config.json")
        conversion.write_tokenizer(path, staged)
        name = conversion.source_name(str(source), path, None)
        if manifest is not None:
            name |= {"sha256": manifest["sha256"]}
        adapter = None if choice.adapter is None else Path(choice.adapter).absolute().name
        facts: dict[str, Any] = {"source": name, "quant": quant, "adapter": adapter}
        facts |= _facts(label, chip, packing, stream)
        write_manifest(staged, BUILD, facts)
        if tune:
            layouts, tied = packing.layouts, stream.args.tie_word_embeddings
            facts["tiles"] = tile_table(layouts, tied, chip, _tuned(staged, chip))
            (staged / MANIFEST).unlink()
            write_manifest(staged, BUILD, facts)
    if (lost := losses(changes)) is not None:
        notify(lost)
    stored = [replace(change, nbytes=_bytes_of(change, outline)) for change in changes]
    return Compiled(folder, chip, stored, packing.nbytes)


def _widened(stream: Stream, chip: Chip) -> dict[str, mx.Dtype]:
    """Parameter -> the dtype in which the chip's program takes it, where that is wider: the CPU
    computes in float32 and would widen scales and biases each time it loads them."""
    return {
        name: mx.float32
        for name, value in stream.outline.items()
        if chip.target == "cpu" and name.endswith((".scales", ".biases")) and value.dtype in _HALF
    }


def _bytes_of(change: Change, outline: Mapping[str, mx.array]) -> int:
    names = [f"{change.tensor.path}.{part}" for part in ("weight", "scales", "biases")]
    return sum(outline[name].nbytes for name in names if name in outline)


def _tuned(folder: Path, chip: Chip) -> dict[TileKey, GemvTile]:
    built = read_build(folder)
    model = build_model(built.config, built.weights, lazy=True, source=str(folder))
    assert isinstance(model, Model)
    model.prepare(built.ready)
    return tune_tiles(model, chip, device.target())


def _facts(label: str, chip: Chip, packing: Packing, stream: Stream) -> dict[str, Any]:
    return {
        "target": {"label": label, **asdict(chip)},
        "layouts": layouts_as_json(packing.layouts),
        "tiles": tile_table(packing.layouts, stream.args.tie_word_embeddings, chip),
        "versions": {"husky_mlx": __version__, "mlx": version("mlx"), "mlx-lm": version("mlx-lm")},
    }
