"""Kernels' machine code in MLX's own cache: the names by which MLX looks for it, and the code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from husky_mlx import cuda_binary, cuda_source, device, kernel_signature, nvrtc
from husky_mlx.kernel_signature import ArrayType
from husky_mlx.kernel_source import kernel_source, names

# What MLX 0.32.4 printed on an H200 (verbose=True) for the kernel of `seeded` below.
PRINTED = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_seeded(
    const float* x,
    float* y) {
if (threadIdx.x < 8) y[threadIdx.x] = x[threadIdx.x];
}

} // namespace mlx::core::cu
"""
HASHES = """
#include <functional>
#include <iostream>
#include <iterator>
#include <string>
int main() {
  std::string text(std::istreambuf_iterator<char>(std::cin), {});
  for (std::size_t n = 0; n <= text.size(); n++) {
    std::cout << std::hash<std::string>{}(text.substr(0, n)) << "\\n";
  }
}
"""


def signature_of(op: str) -> tuple[cuda_source.CudaSource, kernel_signature.Signature]:
    """A kernel of ours, translated for inputs of 64 by 64 and template values of little meaning."""
    source = kernel_source(op, cuda=True)
    element = {"tokens": "uint32_t", "constants": "uint32_t", "place": "int32_t"}
    element |= {"partials": "float", "best_values": "float", "best_indices": "uint32_t"}
    element |= {"queries": "float16_t", "attended": "float16_t", "tickets": "uint32_t"}
    values = {"T": mx.float16, "OUT": mx.float16, "BITS": 4, "GROUP": 32, "K": 64, "N": 64, "D": 64}
    values |= {"ROWS": 16, "SIMDGROUPS": 2, "KSPLIT": 1, "UNROLL": 1, "HEADS": 2, "KV_HEADS": 1}
    values |= {
        "NORM": True,
        "INTEGER": True,
        "QUERIES": 2,
        "LANES": 8,
        "VECTORS": 2,
        "PARTS": 2,
        "SPLITS": 2,
    }
    signature = kernel_signature.build(
        op,
        source.inputs,
        [ArrayType(element.get(name, "float16_t"), (1, 1, 64, 64)) for name in source.inputs],
        source.outputs,
        [element.get(name, "float") for name in source.outputs],
        source.source,
        [(name, values.get(name, 1)) for name in source.template],
    )
    return cuda_source.translate(signature, source.header, source.source), signature


@pytest.fixture(scope="module")
def hash_program(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("hash")
    (folder / "hash.cpp").write_text(HASHES)
    subprocess.run(["g++", "-o", folder / "hash", folder / "hash.cpp"], check=True)
    return folder / "hash"


@settings(max_examples=20, deadline=None)
@given(data=st.binary(max_size=40))
def test_the_hash_is_that_of_the_standard_library(hash_program, data):
    reply = subprocess.run([hash_program], input=data, capture_output=True, check=True)
    wanted = [int(line) for line in reply.stdout.split()]
    assert [cuda_binary.standard_hash(data[:n]) for n in range(len(data) + 1)] == wanted


def test_the_text_is_what_mlx_makes():
    source = cuda_source.CudaSource(
        "", "if (threadIdx.x < 8) y[threadIdx.x] = x[threadIdx.x];", Path("unused")
    )
    signature = kernel_signature.build(
        "seeded", ["x"], [ArrayType("float", (8,))], ["y"], ["float"], source.source
    )
    assert cuda_binary.mlx_text("custom_kernel_seeded", source, signature) == PRINTED


@pytest.mark.skipif(device.target() != "cuda", reason="needs MLX's CUDA build")
def test_mlx_takes_our_binary(tmp_path, capfd):
    """The text for a kernel of ours is the one that MLX prints, shape facts included; and what is
    computed is what the binary says."""
    source, signature = signature_of("attention_decode")
    kernel = mx.fast.cuda_kernel(
        name="pinned",
        input_names=["queries", "keys", "values", "place", "tickets"],
        output_names=["attended", "partials"],
        header=source.header,
        source=source.source,
    )
    kernel(
        inputs=[
            *[mx.zeros((1, 1, 64, 64), mx.float16)] * 3,
            *[mx.zeros((1, 1, 64, 64), dtype) for dtype in (mx.int32, mx.uint32)],
        ],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(8,), (8,)],
        output_dtypes=[mx.float16, mx.float32],
        verbose=True,
    )
    printed = capfd.readouterr().out.split("```\n", 1)[1].rsplit("\n```", 1)[0]
    assert printed == cuda_binary.mlx_text("custom_kernel_pinned", source, signature)

    body = "if (threadIdx.x < 8) y[threadIdx.x] = x[threadIdx.x];"
    twice = cuda_source.CudaSource("", "((float*)y)[threadIdx.x] = 2;", tmp_path)
    signature = kernel_signature.build(
        "", ["x"], [ArrayType("float", (8,))], ["y"], ["float"], body
    )
    own = cuda_binary.own_text(twice, signature)
    code = nvrtc.compile_cubin(own, cuda_binary.architecture())
    text = cuda_binary.mlx_text(
        "custom_kernel_planted", cuda_source.CudaSource("", body, tmp_path), signature
    )
    cuda_binary.put("custom_kernel_planted", text, code)
    kernel = mx.fast.cuda_kernel(name="planted", input_names=["x"], output_names=["y"], source=body)
    (y,) = kernel(
        inputs=[mx.zeros((8,))],
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
        output_shapes=[(8,)],
        output_dtypes=[mx.float32],
    )
    assert y.tolist() == [2.0] * 8
    for path in cuda_binary.folder().glob("custom_kernel_planted_*"):
        path.unlink()


@pytest.mark.parametrize("op", names())
def test_every_kernel_compiles_without_mlxs_headers(op, tmp_path, monkeypatch):
    if nvrtc.library() is None or not nvrtc.include_folders():
        pytest.skip("NVRTC or the CUDA headers are not installed")
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path))
    code = nvrtc.compile_cubin(cuda_binary.own_text(*signature_of(op)), "sm_90a")
    assert code.startswith(b"\x7fELF") and b"husky_kernel" in code


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that counts, and MLX's folder for this test's own."""
    calls = []

    def compile_cubin(text, architecture):
        calls.append((text, architecture))
        return b"code"

    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "mlx"))
    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(cuda_binary, "architecture", lambda: "sm_90a")
    return calls


def test_a_kernel_is_compiled_once_and_named_in_the_other_file(compiler, tmp_path):
    made = signature_of("o_proj_add")
    for _ in range(2):
        cuda_binary.provide("o_proj", *made)
    assert [architecture for _, architecture in compiler] == ["sm_90a"]
    text = cuda_binary.mlx_text("custom_kernel_o_proj", *made)
    stem = f"custom_kernel_o_proj_{cuda_binary.standard_hash(text.encode()):x}"
    found = {path.name: path.read_bytes() for path in (tmp_path / "mlx").iterdir()}
    assert found == {
        f"{stem}.ptx": b"code",
        f"{stem}.txt": b"mlx::core::cu::custom_kernel_o_proj\thusky_kernel\n",
    }


def test_without_a_compiler_or_a_folder_mlx_compiles(compiler, tmp_path, monkeypatch):
    made = signature_of("o_proj_add")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "file" / "mlx"))
    cuda_binary.provide("o_proj", *made)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "mlx"))

    def refuse(text, architecture):
        raise nvrtc.NvrtcError("no")

    monkeypatch.setattr(nvrtc, "compile_cubin", refuse)
    cuda_binary.provide("o_proj", *made)
    assert not (tmp_path / "mlx").exists()


def test_a_source_that_does_not_compile_is_refused_with_the_log():
    if nvrtc.library() is None:
        pytest.skip("NVRTC is not installed")
    with pytest.raises(nvrtc.NvrtcError, match='identifier "wrong" is undefined'):
        nvrtc.compile_cubin('extern "C" __global__ void f() { wrong; }', "sm_90a")
