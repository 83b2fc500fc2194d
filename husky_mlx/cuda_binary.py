"""Machine code of kernels, where MLX looks for it before it compiles.

MLX compiles a custom kernel anew in every process: 1.5 s each on an H200's host, most of it for
headers that ours do not read. It keeps its own kernels as files, though, and looks there for every
kernel, by name and a hash of its text. So ours are compiled here, in a fifth of a second each, and
put there. ``mx.fast.precompiled_cuda_kernel`` would take them too, but MLX hashes those 10 to 30 KB
at every launch. Where ours cannot be compiled or kept, MLX finds no file and compiles.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

from husky_mlx import chips, nvrtc
from husky_mlx.cuda_source import CudaSource
from husky_mlx.kernel_signature import Parameter, Signature
from husky_mlx.metal_text import kernel_folder
from husky_mlx.paths import write_whole

_ENTRY = "husky_kernel"
_MLX_TYPES = {"float16_t": "__half", "bfloat16_t": "__nv_bfloat16"}
# mlx::core::Shape and Strides of a kernel: ten numbers, by value.
_FACTS = {"shape": "Shape", "strides": "Strides", "ndim": "int"}
_OWN_FACTS = {"shape": "Numbers<int>", "strides": "Numbers<long long>", "ndim": "int"}


@functools.cache
def compiled_for() -> str | None:
    """What a binary depends on besides its text, as part of a name; None: there are none here."""
    # Elsewhere another standard library computes the hash.
    if sys.platform != "linux" or nvrtc.library() is None:
        return None
    digest = hashlib.sha256()
    for path in sorted((kernel_folder() / "prelude").glob("*")):
        digest.update(path.read_bytes())
    digest.update((kernel_folder() / "prelude_cuda.h").read_bytes())
    compiler = nvrtc.version().replace(".", "_")
    return f"{architecture()}_nvrtc{compiler}_{digest.hexdigest()[:8]}"


def provide(
    name: str, source: CudaSource, signature: Signature, threads: int | None = None
) -> str | None:
    """See to it that MLX finds a binary for the kernel that it will call ``name``.

    ``threads``: of a threadgroup, whose registers must suffice for all of them. None if the binary
    is there, else the reason why MLX would have to compile.
    """
    function = f"custom_kernel_{name}"
    text = mlx_text(function, source, signature)
    if _files(function, text)[0].exists():
        return None
    try:
        own = own_text(source, signature, threads)
        put(function, text, nvrtc.compile_cubin(own, architecture()))
    except (OSError, nvrtc.NvrtcError) as error:
        return str(error)
    return None


def put(function: str, text: str, code: bytes) -> None:
    """Write the files in which MLX finds ``code`` for the kernel ``function`` of that ``text``."""
    binary, names = _files(function, text)
    # The names first: MLX takes a binary that is there and then asks for the function in it.
    write_whole(names, f"mlx::core::cu::{function}\t{_ENTRY}\n".encode())
    write_whole(binary, code)


def folder() -> Path:
    """MLX's folder of compiled kernels."""
    chosen = os.environ.get("MLX_PTX_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(tempfile.gettempdir()) / "mlx" / str(mx.__version__) / "ptx"  # type: ignore[attr-defined]


def mlx_text(function: str, source: CudaSource, signature: Signature) -> str:
    """The text that MLX 0.32 makes of a custom kernel, which names its file."""
    lines = []
    for parameter in signature.buffers:
        element = _MLX_TYPES.get(parameter.element, parameter.element)
        if parameter.role in _FACTS:
            element = f"const __grid_constant__ {_FACTS[parameter.role]}"
        else:
            element = f"{'const ' if parameter.role == 'input' else ''}{element}*"
        lines.append(f"    {element} {parameter.name}")
    parameters = ",\n".join(lines)
    return (
        '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
        f"{source.header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n"
        f"__global__ void {function}(\n{parameters}) {{\n{source.source}\n}}\n\n"
        "} // namespace mlx::core::cu\n"
    )


def own_text(source: CudaSource, signature: Signature, threads: int | None = None) -> str:
    """The same kernel without MLX's headers, under a name that needs no mangling."""
    parameters = ", ".join(_own_parameter(parameter) for parameter in signature.buffers)
    bounds = "" if threads is None else f"__launch_bounds__({threads}, 1) "
    return (
        f"{source.header}template <typename T> struct Numbers {{\n  T values[10];\n"
        "  __device__ const T& operator[](int i) const { return values[i]; }\n};\n"
        f'extern "C" __global__ void {bounds}{_ENTRY}({parameters}) {{\n{source.source}\n}}\n'
    )


def standard_hash(data: bytes) -> int:
    """``std::hash<std::string>`` of GNU's C++ library on 64 bits: MurmurHash64A (public domain,
    Austin Appleby), seeded with 0xc70f6907 and with a loop that ends on whole words."""
    multiplier, bits = 0xC6A4A7935BD1E995, (1 << 64) - 1
    whole = len(data) // 8 * 8
    state = 0xC70F6907 ^ (len(data) * multiplier & bits)
    for start in range(0, whole, 8):
        word = int.from_bytes(data[start : start + 8], "little") * multiplier & bits
        word = (word ^ (word >> 47)) * multiplier & bits
        state = (state ^ word) * multiplier & bits
    if whole < len(data):
        state = (state ^ int.from_bytes(data[whole:], "little")) * multiplier & bits
    state = (state ^ (state >> 47)) * multiplier & bits
    return state ^ (state >> 47)


def _files(function: str, text: str) -> tuple[Path, Path]:
    """A kernel's binary and the file of its names. MLX splits names of over 245 characters."""
    stem = f"{function}_{standard_hash(text.encode()):x}"
    return folder() / f"{stem}.ptx", folder() / f"{stem}.txt"


def _own_parameter(parameter: Parameter) -> str:
    if parameter.role in _OWN_FACTS:
        return f"const __grid_constant__ {_OWN_FACTS[parameter.role]} {parameter.name}"
    return f"{'const ' if parameter.role == 'input' else ''}void* {parameter.name}"


@functools.cache
def architecture() -> str:
    """``sm_90a``: the device's own, with what only it has, as MLX compiles."""
    capability = chips.detect().generation
    return f"sm_{capability}{'a' if capability >= 90 else ''}"
