"""A Metal kernel body as what ``mx.fast.cuda_kernel`` takes.

The body becomes a function in a file of its own, which the kernel includes by absolute path: MLX
hashes a kernel's whole source text at every evaluation, so the text that it sees is two lines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from husky_mlx.kernel_signature import PORTABLE_ATTRIBUTES, Parameter, Signature
from husky_mlx.metal_text import (
    kernel_folder,
    replace_threadgroup_arrays,
    top_level_items,
    with_float_literals,
    without_comments,
    without_metal_includes,
)
from husky_mlx.paths import cache_dir, write_whole

_NO_FUNCTION = re.compile(r"\b(?:struct|class|enum|union|namespace)\b")
_TEMPLATE = re.compile(r"\s*(?:#[^\n]*\n\s*)*template\s*<")
_INLINE = re.compile(r"\b(?:static|inline|METAL_FUNC)\b")


@dataclass(frozen=True)
class CudaSource:
    """The ``header`` and ``source`` arguments of ``mx.fast.cuda_kernel``, and the included file.

    They hold for the signature that they were made from: the template values are written out, so
    the kernel is called without ``template``. Names of inputs and outputs are the body's.
    """

    header: str
    source: str
    file: Path


def translate(signature: Signature, header: str, source: str) -> CudaSource:
    """Translates a Metal header and body; writes the file to the cache unless it is there.

    Raises ValueError for a body that names what only Metal has.
    """
    text = _file_text(signature, header, source)
    name = f"kernel_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    file = cache_dir() / "cuda" / f"{name}.h"
    if not file.exists():
        write_whole(file, text.replace(_NAMESPACE, name).encode())
    values = ", ".join(outside(value) for _, _, value in signature.template)
    arguments = ", ".join(_argument(parameter) for parameter in signature.parameters)
    instance = f"::metal::{name}::body{f'<{values}>' if values else ''}"
    return CudaSource(f'#include "{file}"\n', f"  {instance}({arguments});\n", file)


# Stands for the namespace's name, which is the hash of the text around it.
_NAMESPACE = "husky_kernel"


def _file_text(signature: Signature, header: str, source: str) -> str:
    for parameter in signature.parameters:
        if parameter.role == "attribute" and parameter.name not in PORTABLE_ATTRIBUTES:
            raise ValueError(f"the body names {parameter.name}, which only Metal has")
    body = replace_threadgroup_arrays(
        with_float_literals(without_comments(source)),
        lambda element, name, dimensions, _: f"__shared__ {element} {name}{dimensions};",
    )
    parameters = ", ".join(parameter_declaration(parameter) for parameter in signature.parameters)
    return (
        f'#pragma once\n#include "{kernel_folder() / "prelude_cuda.h"}"\n'
        f"namespace metal {{ namespace {_NAMESPACE} {{\n"
        f'#line 1 "header"\n{device_header(header)}\n'
        f"{signature.template_declaration}__device__ __forceinline__ void body({parameters}) {{\n"
        f'#line 1 "body"\n{without_address_spaces(body)}\n}}\n'
        "} }\n"
    )


def device_header(header: str) -> str:
    """The helpers of a header as device functions, its tables in constant memory."""
    text = with_float_literals(without_metal_includes(without_comments(header)))
    items = []
    for head, rest in top_level_items(text):
        found = _TEMPLATE.match(head)
        start = _template_end(head, found.end()) if found else len(head) - len(head.lstrip())
        template, declaration = head[:start], head[start:]
        if _is_function(declaration):
            declaration = f" __device__ __forceinline__ {_INLINE.sub('', declaration)}"
        elif re.search(r"\bconstant\b", declaration):
            constant = "" if re.search(r"\bconstexpr\b", declaration) else "__constant__"
            declaration = re.sub(r"\bstatic\b", "", declaration)
            declaration = re.sub(r"\bconstant\b", constant, declaration, count=1)
        items.append(without_address_spaces(template + declaration + rest))
    return "".join(items)


def _is_function(declaration: str) -> bool:
    """Whether a declaration without its template parameters is one of a function."""
    before, parenthesis, _ = declaration.partition("(")
    return bool(parenthesis) and "=" not in before and not _NO_FUNCTION.search(before)


def _template_end(text: str, start: int) -> int:
    """Where the template parameters that are open at ``start`` have been closed."""
    depth, parentheses = 1, 0
    for position in range(start, len(text)):
        character = text[position]
        parentheses += (character == "(") - (character == ")")
        if parentheses == 0:
            depth += (character == "<") - (character == ">")
        if depth == 0:
            return position + 1
    raise ValueError(f"no end of the template parameters in: {text.strip()[:60]!r}")


def without_address_spaces(text: str) -> str:
    text = re.sub(r"\bconstant\b", "const", text)
    return re.sub(r"\b(?:device|threadgroup|thread)\b", "", text)


def parameter_declaration(parameter: Parameter) -> str:
    if parameter.role == "attribute":
        return f"{parameter.element} {parameter.name}"
    const = "" if parameter.role == "output" else "const "
    return f"{const}{parameter.element}{parameter.declarator} {parameter.name}"


def _argument(parameter: Parameter) -> str:
    """What MLX's CUDA kernel has under a parameter's name, as the body's parameter."""
    if parameter.role == "attribute":
        return f"::metal::attributes::{parameter.name}()"
    if parameter.role in ("shape", "strides"):
        return f"&{parameter.name}[0]"
    if parameter.role == "ndim":
        return parameter.name
    const = "const " if parameter.role == "input" else ""
    pointer = f"reinterpret_cast<{const}{outside(parameter.element)}*>({parameter.name})"
    # MLX passes every input as a pointer here; a 0-d one is a reference in Metal.
    return f"*{pointer}" if parameter.declarator == "&" else pointer


def outside(element: str) -> str:
    """A type or value of a body, as it is called outside namespace metal."""
    return f"::metal::{element}" if element.endswith("_t") else element


def kernel_arguments(
    source: CudaSource, name: str, input_names: Sequence[str], output_names: Sequence[str]
) -> dict:
    """The keyword arguments of ``mx.fast.cuda_kernel``."""
    return {
        "name": f"{name}_{source.file.stem.removeprefix('kernel_')}",
        "input_names": list(input_names),
        "output_names": list(output_names),
        "source": source.source,
        "header": source.header,
    }
