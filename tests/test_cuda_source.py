"""Metal bodies as CUDA: they compile, load whole vectors, and give the right results on a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from kernel_bodies import BODIES, DTYPES, Case, assert_close, assert_right

from husky_mlx import cuda_source, device, emulator
from husky_mlx.metal_text import kernel_folder

MX_TYPES = {"float16_t": "__half", "bfloat16_t": "__nv_bfloat16"}
# What MLX's own header gives a custom kernel, as far as these bodies use it.
PREAMBLE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long int64_t;
template <class T> struct Ten {
  T values[10];
  __device__ const T& operator[](int i) const { return values[i]; }
};
using Shape = Ten<int32_t>;
using Strides = Ten<int64_t>;
"""


def translated(case: Case) -> cuda_source.CudaSource:
    signature = emulator.metal_kernel(**case.parts).signature(
        case.call["inputs"], case.call["output_dtypes"], case.call["template"]
    )
    return cuda_source.translate(signature, case.header, case.source)


def cuda_text(case: Case) -> str:
    """The kernel around a translated body, as MLX writes it."""
    made = translated(case)
    signature = emulator.metal_kernel(**case.parts).signature(
        case.call["inputs"], case.call["output_dtypes"], case.call["template"]
    )
    parameters = []
    for parameter in signature.buffers:
        kind = MX_TYPES.get(parameter.element, parameter.element)
        parameters.append(
            {
                "input": f"const {kind}* {parameter.name}",
                "output": f"{kind}* {parameter.name}",
                "shape": f"const __grid_constant__ Shape {parameter.name}",
                "strides": f"const __grid_constant__ Strides {parameter.name}",
                "ndim": f"const __grid_constant__ int {parameter.name}",
            }[parameter.role]
        )
    return (
        f"{made.header}namespace mlx::core::cu {{\n"
        f"__global__ void {case.name}({', '.join(parameters)}) {{\n{made.source}}}\n}}\n"
    )


def nvcc(text: str, tmp_path: Path, *options: str) -> str:
    """Compiles for an H200; returns the PTX when that is asked for."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    source, output = tmp_path / "kernel.cu", tmp_path / "kernel.out"
    source.write_text(PREAMBLE + text)
    flags = ["-arch=sm_90a", "-std=c++17", "-Werror", "all-warnings", *options]
    reply = subprocess.run(
        ["nvcc", *flags, "-o", str(output), str(source)], capture_output=True, text=True
    )
    assert reply.returncode == 0, reply.stderr
    return output.read_text() if "-ptx" in options else ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_body_compiles_with_nvcc(dtype, tmp_path):
    text = "".join(cuda_text(make(DTYPES[dtype])) for make in BODIES.values())
    nvcc(text, tmp_path, "-cubin")


@pytest.mark.parametrize(
    ("dtype", "load"), [("float32", "v4"), ("float16", "v2"), ("bfloat16", "v2")]
)
def test_four_elements_are_one_load(dtype, load, tmp_path):
    """8 bytes of half4 and bfloat4, 16 of float4, each by one instruction."""
    ptx = nvcc(cuda_text(BODIES["swiglu"](DTYPES[dtype])), tmp_path, "-ptx")
    loads = re.findall(r"ld\.global\.(?:nc\.)?([.\w]+)", ptx)
    assert [kind for kind in loads if kind.startswith("v")] == loads, loads
    assert len(loads) == 2
    assert all(kind.startswith(f"{load}.") and kind.endswith("32") for kind in loads), loads
    stores = re.findall(r"st\.global\.([.\w]+)", ptx)
    assert len(stores) == 1
    assert stores[0].startswith("v"), stores


def nvidia_packages() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []


def cuda_headers() -> Path | None:
    """The folder of cuda_bf16.h, of a toolkit or of NVIDIA's packages."""
    toolkits = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    found = [Path(folder) / "include" for folder in toolkits if folder]
    found += [path for folder in nvidia_packages() for path in folder.glob("*/include")]
    return next((folder for folder in found if (folder / "cuda_bf16.h").is_file()), None)


def nvrtc_library() -> ctypes.CDLL | None:
    found = [path for folder in nvidia_packages() for path in folder.glob("*/lib/libnvrtc.so.*")]
    for name in [str(path) for path in found] + ["libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_body_compiles_with_nvrtc_as_mlx_calls_it(dtype):
    library, include = nvrtc_library(), cuda_headers()
    if library is None or include is None:
        pytest.skip("NVRTC or the CUDA headers are not installed")
    text = PREAMBLE + "".join(cuda_text(make(DTYPES[dtype])) for make in BODIES.values())
    program = ctypes.c_void_p()
    assert not library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
    )
    options = [
        "--device-as-default-execution-space",
        "--gpu-architecture=sm_90a",
        f"--include-path={include}",
        f"--include-path={include / 'cccl'}",
    ]
    result = library.nvrtcCompileProgram(
        program,
        len(options),
        (ctypes.c_char_p * len(options))(*(option.encode() for option in options)),
    )
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    library.nvrtcGetProgramLog(program, log)
    assert result == 0, log.value.decode()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("body", BODIES)
def test_body_on_a_gpu_against_float64(body, dtype):
    if device.target() != "cuda":
        pytest.skip("MLX's default device is no CUDA GPU")
    case = BODIES[body](DTYPES[dtype])
    kernel = mx.fast.cuda_kernel(
        **cuda_source.kernel_arguments(
            translated(case), case.name, case.input_names, case.output_names
        )
    )
    outputs = kernel(**{k: v for k, v in case.call.items() if k != "template"})
    mx.eval(outputs)
    assert_right(case, outputs)
    for name, expected in case.updated.items():
        array = case.call["inputs"][case.input_names.index(name)]
        assert_close(array, expected, f"{case.name}: {name}")


def test_the_hashed_text_is_short():
    """Prelude, helpers and body are included: MLX hashes the rest at every evaluation."""
    made = translated(BODIES["attention"](mx.float16))
    assert re.fullmatch(r'#include "/.*/cuda/kernel_\w+\.h"\n', made.header)
    assert len(made.header) + len(made.source) < 1000
    assert "simd_sum" in made.file.read_text()


def test_one_text_one_file_one_name():
    case = BODIES["rms_norm"](mx.float16)
    first, again = translated(case), translated(case)
    other = translated(case.edited("total / 256", "total / 255"))
    wider = translated(BODIES["rms_norm"](mx.float32))
    assert first == again
    assert len({made.file for made in (first, other, wider)}) == 3
    names = [
        cuda_source.kernel_arguments(made, "rms_norm", ["x"], ["out"])["name"]
        for made in (first, other, wider)
    ]
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (
            "constant float TABLE[2] = {1.0, .5};",
            "__constant__ float TABLE[2] = {1.0f, .5f};",
        ),
        ("constant constexpr int N = 4;", "constexpr int N = 4;"),
        ("static constant constexpr int N = 4;", "constexpr int N = 4;"),
        (
            "inline float f(device float* p) { return p[0]; }",
            "__device__ __forceinline__ float f( float* p) { return p[0]; }",
        ),
        (
            "template <typename T, int N = (2 > 1)>\nstatic T f(constant T* p);",
            "template <typename T, int N = (2 > 1)> __device__ __forceinline__ T f(const T* p);",
        ),
        (
            "template <typename T>\nMETAL_FUNC T f(threadgroup T* p) { return p[0]; }",
            "template <typename T> __device__ __forceinline__ T f( T* p) { return p[0]; }",
        ),
        ("struct Pair { float a; };", "struct Pair { float a; };"),
        ("#include <metal_math>\nint f() { return 1; }", "__device__ __forceinline__ int f()"),
    ],
)
def test_header(header, expected):
    case = BODIES["row_sum"](mx.float32)
    case.header = header
    made = " ".join(translated(case).file.read_text().split())
    assert " ".join(expected.split()) in made


def test_body():
    """Storage becomes shared memory; pointers and casts lose their address space."""
    case = BODIES["row_sum"](mx.float32)
    case.source += """
threadgroup float one[4], two[2][N * (3 + 1)];
threadgroup float* pointer = one;
const device float* input = (const device float*)x;  // threadgroup float no[1];
"""
    made = translated(case).file.read_text()
    assert "__shared__ float one[4]; __shared__ float two[2][N * (3 + 1)];" in made
    assert re.search(r"^ *float\* pointer = one;$", made, re.MULTILINE)
    assert re.search(r"^const +float\* input = \(const +float\*\)x; *$", made, re.MULTILINE)


def test_what_only_metal_has_is_refused():
    case = BODIES["row_sum"](mx.float32)
    case.source += "\nuint q = quadgroup_index_in_threadgroup;"
    with pytest.raises(ValueError, match="names quadgroup_index_in_threadgroup, which only Metal"):
        translated(case)


def test_the_folder_of_the_kernels_is_found():
    assert (kernel_folder() / "prelude_cuda.h").is_file()
    assert (kernel_folder() / "prelude_metal.h").is_file()
