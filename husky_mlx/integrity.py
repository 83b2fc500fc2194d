"""Whether the files of a model are whole, as far as they can tell.

Each kind of artifact has a row in ``KINDS``: whether a path is one, and what is wrong with it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from husky_mlx import checkpoint, gguf, sources
from husky_mlx.config import LlamaConfig
from husky_mlx.errors import CheckpointError
from husky_mlx.loading import refuse_foreign_quantization
from husky_mlx.structure import check_structure, drop_unread

_SHA256 = re.compile(r"[0-9a-f]{64}")


def problems(path: Path) -> list[str]:
    """What is wrong with the files of a model, a sentence each. Empty for what is whole.

    UnsupportedModel for one that we do not read.
    """
    found: list[str] = []
    for is_one, check in KINDS:
        if is_one(path):
            try:
                found += check(path)
            except CheckpointError as error:
                found.append(str(error))
    return found


def _safetensors(folder: Path) -> Iterable[str]:
    """The header of every file against its length, and the tensors against the config."""
    found = checkpoint.read(folder)
    refuse_foreign_quantization(found.config, str(folder))
    config = LlamaConfig.from_dict(found.config, str(folder / "config.json"))
    check_structure(config, drop_unread(found.weights, config.tie_word_embeddings), str(folder))
    return ()


def _hub_files(folder: Path) -> Iterator[str]:
    """Files in the hub's cache are links to files that are named by their hash."""
    for file in sorted(folder.glob("*.safetensors")):
        expected = file.resolve().name
        if _SHA256.fullmatch(expected) and (found := sha256(file)) != expected:
            yield f"{file}: its SHA-256 is {found}, expected {expected}; delete it"


def _gguf(path: Path) -> Iterator[str]:
    """The table of tensors against the file's length; for the model of the demo, its hash."""
    gguf.read_config(path)
    for model in sources.ALIASES.values():
        if path == model.cache_path and (found := sha256(path)) != model.sha256:
            yield f"{path}: its SHA-256 is {found}, expected {model.sha256}; delete it"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


KINDS: list[tuple[Callable[[Path], bool], Callable[[Path], Iterable[str]]]] = [
    (lambda path: path.is_dir(), _safetensors),
    (lambda path: path.is_dir(), _hub_files),
    (lambda path: path.suffix == ".gguf", _gguf),
]
