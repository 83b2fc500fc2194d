"""Builds on disk: which one is for this machine, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from husky_mlx import __version__, artifact, checkpoint
from husky_mlx.artifact import BUILD, MANIFEST, read_manifest
from husky_mlx.checkpoint import Checkpoint
from husky_mlx.config import LlamaConfig
from husky_mlx.errors import ArtifactError
from husky_mlx.layout import split
from husky_mlx.memory import require_memory
from husky_mlx.ops.gemv import TileKey
from husky_mlx.pack import Layout, Ready
from husky_mlx.packed import layouts_from_json, read_packed
from husky_mlx.policy import policy
from husky_mlx.targets import this_machine
from husky_mlx.tile_table import from_json
from husky_mlx.tiles import GemvTile

BUILDS = "builds"


@dataclass
class Build(Checkpoint):
    """A build that has been read: ``weights`` are views of the buffers in ``ready``; ``tiles`` are
    those that the policy would not choose."""

    ready: dict[str, Ready]
    tiles: dict[TileKey, GemvTile]


def find_build(path: Path, quant: str | None = None) -> tuple[Path | None, list[str]]:
    """The build to load for a folder: itself if it is one, or the one in it for this machine.

    ``quant`` leaves those of that name, as ``compilation`` writes it. The second value says what a
    user should know where there are builds and none fits. Raises ArtifactError, listing them, where
    several fit.
    """
    if not path.is_dir():
        return None, []
    manifest = read_manifest(path)
    if manifest is None:
        return None, []
    if manifest["kind"] == BUILD:
        return path, []
    found = sorted(path.glob(f"{BUILDS}/*/{MANIFEST}"))
    notes: list[str] = []
    fitting: list[Path] = []
    others: list[Path] = []
    for file in found:
        try:
            facts = read_manifest(file.parent)
        except ArtifactError as error:
            notes.append(f"{error}; taking the model's own weights")
            continue
        assert facts is not None
        if facts["source"].get("sha256") not in (None, manifest["sha256"]):
            notes.append(f"{file.parent}: not taken, it was compiled from other weights")
            continue
        # With an adapter it is another model, which has to be asked for.
        if facts["adapter"] is not None or (quant is not None and facts["quant"] != quant):
            continue
        (fitting if fits_here(facts) else others).append(file.parent)
    if len(fitting) > 1:
        listed = ", ".join(map(str, fitting))
        raise ArtifactError(f"{path}: several builds are for this machine: load one of {listed}")
    if not fitting and others and quant is None:
        listed = ", ".join(folder.name for folder in others)
        notes.append(
            f"{path}: no build is for this machine ({this_machine().name}), found {listed}: taking "
            "its own weights, which are packed now (husky compile makes a build)"
        )
    return (fitting[0] if fitting else None), notes


def fits_here(facts: Mapping[str, Any]) -> bool:
    """Whether a build was made for the chip that MLX computes on; MLX does not know its cores."""
    here, target = this_machine(), facts["target"]
    if target.get("label") == "cuda":
        return here.target == "cuda"
    return (target.get("target"), target.get("name")) == (here.target, here.name)


def read_build(folder: Path, model_config: Mapping[str, Any] | None = None) -> Build:
    """Check every byte of a build, then read it.

    A build for another chip, or with tiles of another version, is read all the same: its tiles
    are left out, and the notes say so. ArtifactError for one that is damaged, MemoryLimitError
    for one that does not fit.
    """
    facts = artifact.verify(folder)
    assert facts is not None
    config = {**checkpoint.read_config(folder), **(model_config or {})}
    try:
        layouts, table = layouts_from_json(facts["layouts"]), from_json(facts["tiles"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{folder / MANIFEST}: its layouts or tiles are not those of this version of "
            f"husky_mlx ({error}); compile it again"
        ) from error
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    require_memory(size, f"Loading {folder}", "A smaller model or fewer bits would fit.")
    weights, ready = read_packed(folder, layouts)
    _check_frequencies(folder, LlamaConfig.from_dict(config, str(folder)), layouts, ready)
    notes = []
    tiles: dict[TileKey, GemvTile] = {}
    here = this_machine()
    if not fits_here(facts):
        notes.append(
            f"it was compiled for {facts['target'].get('label')} and this is {here.name}: its "
            "weights serve here too, its launch choices are left out"
        )
    elif (
        facts["versions"].get("husky_mlx") == __version__
        and facts["target"].get("name") == here.name
    ):
        tiles = {key: tile for key, tile in table.items() if tile != policy(*key, here)}
    return Build(config, weights, False, notes, ready, tiles)


def _check_frequencies(
    folder: Path, args: LlamaConfig, layouts: Mapping[str, Layout], ready: Mapping[str, Ready]
) -> None:
    """Those of the rotary embedding are in the buffers: others would turn wrongly."""
    expected = np.array(args.rope.frequencies(args.head_dim), np.float32)
    for group, layout in layouts.items():
        if "frequencies" in layout.parts:
            views = split(ready[group].fused.buffer, list(layout.parts.values()))
            stored = np.array(views[list(layout.parts).index("frequencies")])
            if not np.array_equal(stored, expected):
                raise ArtifactError(
                    f"{folder}: its rotary frequencies are not those of this version of husky_mlx; "
                    "compile it again"
                )
            return
