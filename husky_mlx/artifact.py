"""``husky.json``: what a folder that husky wrote holds, with a hash of every byte of it.

Neither times nor paths are in it: the same input and command give the same bytes. It is covered
too, by a hash of its own text, which has one spelling only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from husky_mlx.errors import ArtifactError

MANIFEST = "husky.json"
FORMAT = 1
MODEL, BUILD = "model", "build"
_HASHING_THREADS = 16
# Field of a manifest -> its types in JSON.
_FIELDS: dict[str, tuple[type, ...]] = {"files": (dict,), "source": (dict,)}
_BUILD_FIELDS: dict[str, tuple[type, ...]] = {
    "quant": (str,),
    "adapter": (str, type(None)),
    "target": (dict,),
    "layouts": (dict,),
    "tiles": (list,),
    "versions": (dict,),
}


def write_manifest(folder: Path, kind: str, facts: Mapping[str, Any]) -> None:
    """Hash every file of ``folder`` and write its ``husky.json``, with ``facts`` in it."""
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    digests = _digests(folder, names)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, digests, strict=True)
    }
    content = {**facts, "format": FORMAT, "kind": kind, "files": files}
    content["sha256"] = _own_digest(content)
    (folder / MANIFEST).write_text(_text(content), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The content of ``husky.json``, None for a folder without one.

    ArtifactError where a byte of it has changed, or for the format of another version.
    """
    path = folder / MANIFEST
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        content = json.loads(found)
        version = content["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged, {_AGAIN} ({error})") from error
    if version != FORMAT:
        raise ArtifactError(
            f"{path}: format {version!r}, this version of husky_mlx reads format {FORMAT}; {_AGAIN}"
        )
    if _text(content).encode() != found or content.get("sha256") != _own_digest(content):
        raise ArtifactError(f"{path}: it was changed after it had been written; {_AGAIN}")
    _check_fields(path, content)
    return content


def _check_fields(path: Path, content: Mapping[str, Any]) -> None:
    """Its hash says that a manifest is as it was written, not that this version wrote it."""
    kind = content.get("kind")
    if kind not in (MODEL, BUILD):
        raise ArtifactError(f"{path}: the kind is {kind!r}, expected {MODEL} or {BUILD}; {_AGAIN}")
    expected = _FIELDS | (_BUILD_FIELDS if kind == BUILD else {})
    wrong = [
        name for name, types in expected.items() if not isinstance(content.get(name, ...), types)
    ]
    if "files" not in wrong and not all(map(_is_listing, content["files"].values())):
        wrong.append("files")
    if wrong:
        raise ArtifactError(f"{path}: missing or not as expected: {', '.join(wrong)}; {_AGAIN}")


def _is_listing(facts: Any) -> bool:
    return (
        isinstance(facts, dict)
        and isinstance(facts.get("bytes"), int)
        and isinstance(facts.get("sha256"), str)
    )


def verify(folder: Path) -> dict[str, Any] | None:
    """Compare every file with ``husky.json``, the content of which is returned; None without one.

    Reads every byte, several files at a time, once a process unless a file changes meanwhile.
    ArtifactError names the first file that is missing,
    that is not as it was written, or that holds weights and is not listed.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    files: dict[str, dict[str, Any]] = manifest["files"]
    for name, facts in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise ArtifactError(
                f"{folder / name}: {MANIFEST} lists it and it is not there ({error.strerror}); "
                f"{_AGAIN}"
            ) from error
        if size != facts["bytes"]:
            raise ArtifactError(
                f"{folder / name}: expected {facts['bytes']:,} bytes, found {size:,}; {_AGAIN}"
            )
    extra = sorted({file.name for file in folder.glob("*.safetensors")} - set(files))
    if extra:
        raise ArtifactError(f"{folder / extra[0]}: weights that {MANIFEST} does not list; {_AGAIN}")
    state = (str(folder.absolute()), manifest["sha256"], *_times(folder, list(files)))
    if state in _verified:
        return manifest
    for (name, facts), digest in zip(files.items(), _digests(folder, list(files)), strict=True):
        if digest != facts["sha256"]:
            raise ArtifactError(
                f"{folder / name}: its SHA-256 is {digest}, expected {facts['sha256']}: it was "
                f"changed or damaged after it had been written; {_AGAIN}"
            )
    _verified.add(state)
    return manifest


_verified: set[tuple[str | int, ...]] = set()
_AGAIN = "convert or compile it again, or copy it again"


def _times(folder: Path, names: list[str]) -> list[int]:
    return [(folder / name).stat().st_mtime_ns for name in names]


def _digests(folder: Path, names: list[str]) -> list[str]:
    """SHA-256 of each file, in order. hashlib lets go of the interpreter, so threads add up."""
    with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda name: _digest(folder / name), names))


def _digest(path: Path) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error


def _own_digest(content: Mapping[str, Any]) -> str:
    text = _text({key: value for key, value in content.items() if key != "sha256"})
    return hashlib.sha256(text.encode()).hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
