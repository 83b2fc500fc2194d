"""Where files of ours live on this machine."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from husky_mlx.errors import OutputError


def cache_dir() -> Path:
    """$HUSKY_CACHE_DIR, or the platform's cache folder for husky_mlx."""
    chosen = os.environ.get("HUSKY_CACHE_DIR")
    return Path(os.path.expanduser(chosen or platformdirs.user_cache_dir("husky_mlx")))


def cache_is_unusable(reason: object) -> str:
    """What to tell a user whose cache folder cannot be written, for the reason given."""
    name = "HUSKY_CACHE_DIR" if os.environ.get("HUSKY_CACHE_DIR") else "the cache folder"
    advice = "set HUSKY_CACHE_DIR to another folder"
    return f"{name} {cache_dir()} cannot be written ({reason}); {advice}"


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def not_writable(folder: Path) -> str | None:
    """Why nothing can be written there; None where it can, after trying."""
    try:
        with tempfile.TemporaryFile(dir=existing(folder)):
            return None
    except OSError as error:
        return error.strerror or str(error)


def child_environment() -> dict[str, str]:
    """The environment in which another Python finds this package, from a checkout too."""
    here = str(Path(__file__).resolve().parent.parent)
    path = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, and its folder if need be, in one step: another process reads all of it, or
    what was there before. Raises OSError, and leaves nothing behind, nor when it is interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".husky-", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise


def write_figure(figure: Any, path: Path) -> None:
    """A matplotlib figure as a PNG, by ``write_whole``."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_whole(path, picture.getvalue())


def require_writable(path: Path, option: str) -> None:
    """Raise OutputError where the file that ``option`` names could not be written: it is written
    last, after what may take hours. Its folder is made then."""
    place = path.absolute().parent
    while not place.exists() and place != place.parent:
        place = place.parent
    if path.is_dir():
        reason = "it is a folder, expected the name of a file"
    elif not place.is_dir():
        reason = f"{place} is a file, not a folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        reason = f"{place} cannot be written"
    else:
        return
    raise OutputError(f"{option} {path}: {reason}")


@contextlib.contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """One process or thread at a time, where the file system has locks; elsewhere all of them.

    Raises OSError where the file ``lock`` cannot be opened.
    """
    with lock.open("w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
