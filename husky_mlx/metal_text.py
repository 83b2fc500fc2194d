"""Metal Shading Language text, as far as it has to be read to become C++ or CUDA.

Where the kernel sources are, and the few rewrites that no macro can do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

_FLOAT_WITHOUT_SUFFIX = re.compile(
    r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])"
)
_THREADGROUP_STATEMENT = re.compile(r"(^|[;{}])([ \t\n]*)threadgroup\s+([^;]*);", re.MULTILINE)
_DECLARED_TYPE = re.compile(r"(?:const\s+)?[\w:]+(?:\s*<[^;]*?>)?(?=[\s])")
_DECLARATOR = re.compile(r"\s*(\w+)\s*((?:\[.*\])?)\s*", re.DOTALL)


def kernel_folder() -> Path:
    """The folder of the kernel sources: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "metal_kernels"
    return inside if inside.is_dir() else package.parent / "metal_kernels"


def without_comments(text: str) -> str:
    """``text`` with its comments blanked; line numbers stay."""
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def without_metal_includes(text: str) -> str:
    """``text`` without ``#include <metal_...>``: the vocabulary is already there."""
    return re.sub(r"(?m)^[ \t]*#[ \t]*include[ \t]*<metal_\w+>", "", text)


def with_float_literals(text: str) -> str:
    """``1.0`` as ``1.0f``: Metal has no double, so that is what it means there."""
    return _FLOAT_WITHOUT_SUFFIX.sub(r"\1f", text)


def replace_threadgroup_arrays(body: str, declare: Callable[[str, str, str, int], str]) -> str:
    """``body`` with each ``threadgroup T name[N];`` replaced by ``declare(T, name, "[N]", index)``.

    Storage and pointers look alike there (``threadgroup T* p`` is left alone), which is why a macro
    cannot do it. Raises ValueError for an initialiser, which neither Metal nor CUDA has for arrays.
    """
    count = 0

    def replace(found: re.Match[str]) -> str:
        nonlocal count
        declaration = found[3]
        kind = _DECLARED_TYPE.match(declaration)
        if kind is None or "(" in declaration.split("[")[0] or _is_pointer(declaration, kind.end()):
            return found[0]
        declared = []
        for declarator in split_top_level(declaration[kind.end() :]):
            parts = _DECLARATOR.fullmatch(declarator)
            if parts is None:
                raise ValueError(f"threadgroup {declaration}: name and dimensions only, no values")
            declared.append(declare(kind[0].strip(), parts[1], parts[2], count))
            count += 1
        return found[1] + found[2] + " ".join(declared) + "\n" * declaration.count("\n")

    return _THREADGROUP_STATEMENT.sub(replace, body)


def _is_pointer(declaration: str, type_end: int) -> bool:
    return declaration[type_end:].lstrip().startswith(("*", "&")) or "*" in re.sub(
        r"\[.*?\]|<.*?>", "", declaration.split("=")[0]
    )


def split_top_level(text: str, separator: str = ",") -> list[str]:
    """``text`` split at separators outside all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "<([{") - (character in ">)]}")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def top_level_items(text: str) -> Iterator[tuple[str, str]]:
    """The declarations of a header, in order, as (head, rest): together they are ``text`` again.

    ``head`` goes up to the ``{`` or ``;`` that ends it at namespace scope, ``rest`` is the
    bracketed block with what closes it, or empty. Comments must be gone.
    """
    start = position = 0
    while position < len(text):
        character = text[position]
        if character == ";":
            yield text[start : position + 1], ""
            start = position = position + 1
        elif character == "{":
            end = _matching_brace(text, position)
            yield text[start:position], text[position:end]
            start = position = end
        else:
            position += 1
    yield text[start:], ""


def _matching_brace(text: str, start: int) -> int:
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return position + 1
    raise ValueError(f"no closing brace for: {text[start : start + 60]!r}")
