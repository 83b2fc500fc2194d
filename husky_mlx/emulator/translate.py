"""The C++ text of a kernel: once to run it, once for the compiler to check its address spaces."""

from __future__ import annotations

import re

from husky_mlx.emulator.errors import EmulatorError
from husky_mlx.kernel_signature import PORTABLE_ATTRIBUTES, Parameter, Signature
from husky_mlx.metal_text import (
    replace_threadgroup_arrays,
    with_float_literals,
    without_comments,
    without_metal_includes,
)

# kMaxArrays of runtime/state.h.
MOST_THREADGROUP_ARRAYS = 64
# C++ that Metal does not have.
_POISON = "#pragma GCC poison double goto virtual new delete throw try catch dynamic_cast typeid\n"
_VECTOR_CONSTRUCTOR = re.compile(
    r"\b(float|half|bfloat|int|uint|short|ushort|char|uchar|long|ulong|bool)([234])\s*\("
)
_GENERIC_CONSTRUCTOR = re.compile(r"\bvec\s*<([^<>;]*)>\s*\(")


def runnable(signature: Signature, header: str, source: str) -> str:
    """The program of the kernel, with ``emulator_thread`` as its entry."""

    def declare(element: str, name: str, dimensions: str, index: int) -> str:
        if index >= MOST_THREADGROUP_ARRAYS:
            raise ValueError(f"more than {MOST_THREADGROUP_ARRAYS} threadgroup arrays")
        array = f"emulator::threadgroup_array<{element} {dimensions}, {index}>"
        return f'auto& {name} = {array}("{name}");'

    arguments = []
    pointers = 0
    for parameter in signature.parameters:
        if parameter.role == "attribute":
            arguments.append(_attribute(parameter))
        else:
            arguments.append(_buffer(parameter, pointers))
            pointers += 1
    return (
        '#include "metal_emulator.h"\n'
        + _POISON
        + "#define device\n#define threadgroup\n#define thread\n#define constant const\n"
        + _function(signature, header, source, declare)
        + 'extern "C" void emulator_thread(void* const* buffers, const EmulatorThread* at) {\n'
        + f"  body{signature.template_values}({', '.join(arguments)});\n"
        + "}\n"
    )


def address_spaces(signature: Signature, header: str, source: str) -> str:
    """The same kernel with real address spaces, for ``-fsyntax-only``.

    They are clang's ``address_space`` attribute, which the instrumentation of a running program
    does not follow, and vectors are the compiler's own, which take no constructor calls.
    """

    def declare(element: str, name: str, dimensions: str, index: int) -> str:
        kind = f"threadgroup_type_{index}"
        return (
            f"using {kind} = {element} {dimensions}; "
            f"threadgroup {kind}& {name} = *(threadgroup {kind}*)1;"
        )

    text = _function(signature, header, source, declare)
    text = _VECTOR_CONSTRUCTOR.sub(r"make_vector<\1, \2>(", text)
    text = _GENERIC_CONSTRUCTOR.sub(r"make_vector<\1>(", text)
    return (
        '#include "metal_address_spaces.h"\n'
        "#define device __attribute__((address_space(1)))\n"
        "#define constant const __attribute__((address_space(2)))\n"
        "#define threadgroup __attribute__((address_space(3)))\n"
        "#define thread\n" + text + f"auto instance = &body{signature.template_values};\n"
    )


def _function(signature: Signature, header: str, source: str, declare) -> str:
    """Header and body as C++ text, the body as ``void body(...)``."""
    for parameter in signature.parameters:
        if parameter.role == "attribute" and parameter.name not in PORTABLE_ATTRIBUTES:
            raise EmulatorError(
                "compile",
                f"the body names {parameter.name}, which only Metal has; the portable thread "
                f"attributes are {', '.join(sorted(PORTABLE_ATTRIBUTES))}",
            )
    try:
        body = replace_threadgroup_arrays(without_comments(source), declare)
    except ValueError as error:
        raise EmulatorError("compile", str(error)) from error
    header = without_metal_includes(without_comments(header))
    parameters = ", ".join(parameter.declaration for parameter in signature.parameters)
    return (
        f'#line 1 "header"\n{with_float_literals(header)}\n'
        f"{signature.template_declaration}void body({parameters}) {{\n"
        f'#line 1 "body"\n{with_float_literals(body)}\n}}\n'
    )


def _attribute(parameter: Parameter) -> str:
    value = f"at->{parameter.name}"
    return f"emulator::uint3({value})" if parameter.element == "uint3" else value


def _buffer(parameter: Parameter, index: int) -> str:
    const = "" if parameter.role == "output" else "const "
    pointer = f"static_cast<{const}{parameter.element}*>(buffers[{index}])"
    return f"*{pointer}" if parameter.declarator == "&" else pointer
