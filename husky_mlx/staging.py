"""Folders that are written whole or not at all, and the room on the disk that they need."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from husky_mlx.artifact import MANIFEST
from husky_mlx.errors import HuskyError, OutputError
from husky_mlx.memory import megabytes

_PARTIAL = ".husky-partial-"
_SPARE = 16 << 20  # for what is written beside the weights


def check_output(path: Path, overwrite: bool) -> None:
    """Raise OutputError unless a new folder may be written at ``path``.

    ``overwrite`` replaces what husky wrote before, and nothing else.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink():
        raise OutputError(f"{path} is a link: name the folder it points to, or choose another name")
    if not overwrite:
        raise OutputError(f"{path} exists already: choose another name, or give --overwrite")
    if not (path / MANIFEST).is_file():
        raise OutputError(
            f"{path}: --overwrite replaces only folders that husky wrote, and there is no "
            f"{MANIFEST} in it"
        )


def require_disk(path: Path, needed: int) -> None:
    """Raise OutputError if ``needed`` bytes do not fit where ``path`` will be."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed + _SPARE > free:
        raise OutputError(
            f"{path} needs {megabytes(needed + _SPARE)} of disk, but {megabytes(free)} are free "
            f"there: free some, or choose another disk"
        )


@contextlib.contextmanager
def whole_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A new folder to fill, which becomes ``path`` by one rename when the block ends.

    An exception leaves nothing behind. A process that is killed leaves a hidden folder beside
    ``path``, which the next one there removes. OutputError where nothing can be written.
    """
    check_output(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        staged = path.parent / f"{_PARTIAL}{os.getpid()}-{path.name}"
        staged.mkdir()
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written: {error.strerror}: {error.filename}"
        ) from error
    try:
        yield staged
        check_output(path, overwrite)
        replaced = path.parent / f"{_PARTIAL}{os.getpid()}-old-{path.name}"
        if path.exists():
            os.rename(path, replaced)
        try:
            os.rename(staged, path)
        except BaseException:
            if replaced.exists() and not path.exists():
                os.rename(replaced, path)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        if isinstance(error, HuskyError):
            raise
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _remove_abandoned(path: Path) -> None:
    pattern = re.compile(rf"{re.escape(_PARTIAL)}(\d+)-(?:old-)?{re.escape(path.name)}")
    for found in path.parent.iterdir():
        match = pattern.fullmatch(found.name)
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(found, ignore_errors=True)
