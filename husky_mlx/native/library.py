"""Compiled programs on disk, by the hash of all that they depend on."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from husky_mlx.native.compiler import Compiler, headers
from husky_mlx.notices import notice
from husky_mlx.paths import cache_dir, one_at_a_time


def library(source: str, compiler: Compiler) -> Path:
    """The shared library of a source, compiled unless a sound one is in the cache.

    A cache folder that cannot be written is said once; the library then goes to a temporary
    folder for this process. NativeError where compiling fails.
    """
    folder, key = cache_dir() / "native", _key(source, compiler)
    path = folder / f"{key}.so"
    if _sound(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(folder / f"{key}.lock"):
            if not _sound(path):
                _build(source, compiler, path)
    except OSError as error:
        temporary = _temporary_folder(folder, error) / f"{key}.so"
        if not _sound(temporary):
            _build(source, compiler, temporary)
        return temporary
    return path


def _key(source: str, compiler: Compiler) -> str:
    digest = hashlib.sha256(repr((source, headers(), compiler.identity)).encode())
    return digest.hexdigest()[:32]


def _record(path: Path) -> Path:
    return path.with_suffix(".json")


def _facts(library_bytes: bytes) -> dict[str, object]:
    return {
        "size": len(library_bytes),
        "sha256": hashlib.sha256(library_bytes).hexdigest(),
    }


def _sound(path: Path) -> bool:
    """Whether a library is there and is what was written."""
    try:
        return json.loads(_record(path).read_text()) == _facts(path.read_bytes())
    except (OSError, ValueError):
        return False


def _build(source: str, compiler: Compiler, path: Path) -> None:
    """Compile beside ``path``, then put library and record in place, each in one step."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as name:
        work = Path(name)
        (work / "model.cpp").write_text(source)
        compiler.build(work / "model.cpp", work / "model.so")
        facts = json.dumps(_facts((work / "model.so").read_bytes()))
        (work / "model.json").write_text(facts)
        os.replace(work / "model.so", path)
        os.replace(work / "model.json", _record(path))


_temporary: list[Path] = []


def _temporary_folder(folder: Path, error: OSError) -> Path:
    if not _temporary:
        reason = error.strerror or error
        notice(f"{folder} cannot be written ({reason}): the program is compiled for this run only")
        _temporary.append(Path(tempfile.mkdtemp(prefix="husky-native-")))
        atexit.register(shutil.rmtree, _temporary[0], ignore_errors=True)
    return _temporary[0]
