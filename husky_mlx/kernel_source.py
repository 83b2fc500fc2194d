"""The kernels' Metal sources as launches take them: header and body, small, for one platform.

A file of ``metal_kernels/`` begins with ``// inputs:``, ``// outputs:`` and ``// template:`` lines
(names in order), perhaps ``// cuda inputs:`` and so on with more names for CUDA only, then
``#include "x.h"`` lines, then the body of the kernel. MLX hashes the whole text at every
evaluation, so that comments, empty lines and what is for the other platform go.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from husky_mlx.metal_text import kernel_folder, without_comments

_DECLARATIONS = ("inputs", "outputs", "template")
_INCLUDE = re.compile(r'[ \t]*#include "([\w./]+)"[ \t]*')
# How sources tell the platforms apart.
_CUDA_MACRO = "MSL_CUDA"


@dataclass(frozen=True)
class KernelSource:
    """One kernel: the names of its parameters in order, its helpers and its body, as MLX has them.

    Line n of ``numbered_source`` is line n of the file; ``source`` is it without empty lines.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: tuple[str, ...]
    header: str
    source: str
    numbered_source: str


def names() -> list[str]:
    """The kernels that have a source."""
    return sorted(path.stem for path in kernel_folder().glob("*.metal"))


@functools.cache
def metal_prelude() -> str:
    """The helpers that the CUDA prelude and the emulator have anyway, for Metal."""
    return _compact(
        without_comments((kernel_folder() / "prelude_metal.h").read_text()).splitlines()
    )


@functools.cache
def kernel_source(op: str, *, cuda: bool = False, overlay: Path | None = None) -> KernelSource:
    """The source of kernel ``op``, for CUDA or for Metal and the emulator.

    Files in the folder ``overlay`` come before those of ``metal_kernels/``. Raises ValueError
    naming the file for a kernel that is not there, a declaration that is missing, an include that
    is not found or an ``#ifdef`` of anything but ``MSL_CUDA``.
    """
    folders = [kernel_folder()] if overlay is None else [overlay, kernel_folder()]
    path = _find(f"{op}.metal", folders)
    if path is None:
        raise ValueError(f"no kernel {op!r}: {folders[-1] / op}.metal does not exist")
    text = path.read_text()
    declared = {}
    for name in _DECLARATIONS:
        found = re.search(rf"(?m)^// {name}:(.*)$", text)
        if found is None:
            raise ValueError(f"{path}: no line '// {name}: ...'")
        declared[name] = tuple(found[1].split())
        more = re.search(rf"(?m)^// cuda {name}:(.*)$", text) if cuda else None
        if more is not None:
            declared[name] += tuple(more[1].split())
    lines = _for_platform(without_comments(text).splitlines(), path, cuda)
    seen: set[str] = set()
    header: list[str] = []
    for number, line in enumerate(lines):
        include = _INCLUDE.fullmatch(line)
        if include:
            header += _included(include[1], path, folders, cuda, seen)
            lines[number] = ""
    return KernelSource(
        **declared,
        header=_compact(header),
        source=_compact(lines),
        numbered_source="\n".join(lines),
    )


def _find(name: str, folders: list[Path]) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _included(
    name: str, includer: Path, folders: list[Path], cuda: bool, seen: set[str]
) -> list[str]:
    """A helper file's lines with its own includes in place, each file once."""
    if name in seen:
        return []
    seen.add(name)
    path = _find(name, folders)
    if path is None:
        raise ValueError(f"{includer}: includes {name}, which does not exist")
    lines: list[str] = []
    for line in _for_platform(without_comments(path.read_text()).splitlines(), path, cuda):
        include = _INCLUDE.fullmatch(line)
        lines += _included(include[1], path, folders, cuda, seen) if include else [line]
    return lines


def _for_platform(lines: list[str], path: Path, cuda: bool) -> list[str]:
    """``lines`` with the branches of ``#ifdef MSL_CUDA`` that are not taken blanked."""
    kept, taken = [], [True]
    for line in lines:
        words = line.split()
        directive = words[0] if words else ""
        if directive in ("#ifdef", "#ifndef"):
            if words[1:] != [_CUDA_MACRO]:
                raise ValueError(
                    f"{path}: {line.strip()}: only {_CUDA_MACRO} tells platforms apart"
                )
            taken.append(cuda == (directive == "#ifdef"))
        elif directive == "#else":
            taken[-1] = not taken[-1]
        elif directive == "#endif":
            taken.pop()
        else:
            kept.append(line if all(taken) else "")
            continue
        kept.append("")
    if len(taken) != 1:
        raise ValueError(f"{path}: an #ifdef without its #endif")
    return kept


def _compact(lines: list[str]) -> str:
    return "".join(f"{line.strip()}\n" for line in lines if line.strip())
