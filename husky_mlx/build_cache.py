"""The builds that ``load(quant=...)`` keeps in the cache folder, and ``husky cache``."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from importlib.metadata import version
from pathlib import Path

from husky_mlx import __version__, compilation
from husky_mlx.artifact import MANIFEST, read_manifest
from husky_mlx.builds import find_build
from husky_mlx.errors import ArtifactError, OutputError
from husky_mlx.memory import megabytes
from husky_mlx.notices import notice
from husky_mlx.paths import cache_dir, cache_is_unusable, not_writable
from husky_mlx.quantization import Choice
from husky_mlx.targets import this_machine

_WEIGHTS = ("*.safetensors", "*.json", "*.gguf")


def cached_build(path: Path, quant: str, adapter: str | None) -> Path:
    """A build of a model for this machine: one that is in its folder, or one kept in the cache.

    Made now where there is none, after one line that says how many bytes are written where.
    """
    choice = Choice(recipe=quant, adapter=adapter)
    choice.check()
    if adapter is None:
        found, _ = find_build(path, quant)
        if found is not None:
            return found
    folder = _folder(path, choice)
    try:
        if read_manifest(folder) is not None:
            return folder
    except ArtifactError as error:
        notice(f"{error}: making it again")
        shutil.rmtree(folder)
    return compilation.compile_model(
        path,
        "auto",
        choice,
        folder,
        announce=lambda size: notice(f"writing {megabytes(size)} to {folder}"),
        notify=notice,
    ).path


def _folder(path: Path, choice: Choice) -> Path:
    """Named by everything that a build is made from; files count by name, size and time."""
    here = this_machine()
    parts = [path, *([] if choice.adapter is None else [Path(choice.adapter)])]
    facts = [
        [_state(part.expanduser()) for part in parts],
        [choice.recipe, here.target, here.name],
        [__version__, version("mlx"), version("mlx-lm")],
    ]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    name = path.absolute().name.removesuffix(".gguf").removesuffix(".hky")
    return cache_dir() / "builds" / f"{name}-{choice.recipe}-{digest}"


def _state(path: Path) -> list[list[str | int]]:
    files = [path] if path.is_file() else sorted({f for each in _WEIGHTS for f in path.glob(each)})
    return [[str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


DESCRIPTION = "What husky keeps in its cache folder: downloads, programs, verdicts, builds."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``husky cache``."""
    parser.add_argument("--clear", action="store_true", help="delete the builds of load(quant=...)")


def run(args: argparse.Namespace) -> int:
    """Print what is there with its size, or clear it. Raises OutputError for a folder in which
    nothing could be kept, OSError where a build cannot be deleted."""
    root = cache_dir()
    if reason := not_writable(root):
        raise OutputError(cache_is_unusable(reason))
    if args.clear:
        freed = _size(root / "builds")
        if (root / "builds").exists():
            shutil.rmtree(root / "builds")
        print(f"{root / 'builds'}: {megabytes(freed)} cleared")
        return 0
    print(f"{root}: {megabytes(_size(root))}")
    entries = sorted(root.iterdir()) if root.is_dir() else []
    for entry in [e for e in entries if e.name != "builds"]:
        print(f"  {entry.name}: {megabytes(_size(entry))}")
    for manifest in sorted(root.glob(f"builds/*/{MANIFEST}")):
        print(f"  builds/{manifest.parent.name}: {megabytes(_size(manifest.parent))}")
    return 0


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
