"""The native program on 64-bit ARM, cross-compiled and run by QEMU, against mlx-lm."""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from test_native import VARIANTS, Variant, judge, native_model, tokens_of

from husky_mlx.native import emit, storage
from husky_mlx.native.compiler import _FLAGS, _HERE

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LEVELS = {
    "plain": "armv8-a",
    "dot products": "armv8.2-a+dotprod+fp16",
    "mixed signs": "armv8.6-a",
}
CAPACITY = 64
# Reads what is at the addresses, then the tokens of each call until there are none; writes the
# logits of each call's last token.
MAIN = """
#include <cstdio>
#include <cstdlib>

static void* read_bytes(size_t count) {
  void* memory = aligned_alloc(64, (count + 63) / 64 * 64 + 64);
  if (fread(memory, 1, count, stdin) != count) abort();
  return memory;
}
static long long number() {
  long long value;
  if (fread(&value, sizeof(value), 1, stdin) != 1) abort();
  return value;
}

int main() {
  const long long arrays = number();
  const void** addresses = (const void**)calloc(arrays, sizeof(void*));
  for (long long i = 0; i < arrays; ++i)
    if (const long long size = number()) addresses[i] = read_bytes(size);
  CacheRows rows[Shape::LAYERS];
  const long long capacity = number();
  for (auto& row : rows) {
    const size_t size = sizeof(Shape::KV) * Shape::KV_HEADS * capacity * Shape::HEAD_DIM;
    row = {calloc(1, size), calloc(1, size), capacity, 0, 0, 1 << 30};
  }
  long long position = 0;
  while (const long long count = number()) {
    const int* tokens = (const int*)read_bytes(count * sizeof(int));
    static float logits[Shape::Head::ROWS];
    for (auto& row : rows) row.slot = position, row.live = position + count;
    const Call call = {addresses, rows, tokens, logits, nullptr, position, (int)count, 1};
    if (const int result = husky_forward(&call, 2)) return result;
    fwrite(logits, sizeof(float), Shape::Head::ROWS, stdout);
    position += count;
  }
}
"""

pytestmark = pytest.mark.skipif(
    platform.machine() == "aarch64" or not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"for machines that are no ARM, with {COMPILER} and {EMULATOR}",
)
CASES = {
    name: VARIANTS[name]
    for name in ("4 bit", "8 bit, tied, odd vocabulary", "biases, 16 bit cache")
} | {
    "qwen3": Variant({"model_type": "qwen3", "head_dim": 32}),
    "plain float16": VARIANTS["plain float16, linear rope"],
}


def program_for_arm(model, variant: Variant, exact: bool, level: str, folder: Path) -> Path:
    source = emit.emit(model.args, storage.model_format(model), variant.kv_dtype, exact)
    (folder / "program.cpp").write_text(source + MAIN)
    flags = [flag for flag in _FLAGS if flag != "-fPIC"]
    command = [COMPILER, *flags, f"-march={level}", "-static", "-I", str(_HERE)]
    subprocess.run(
        [*command, str(folder / "program.cpp"), "-o", str(folder / "program")],
        check=True,
        capture_output=True,
    )
    return folder / "program"


def run(program: Path, model, calls: list[list[int]]) -> np.ndarray:
    parts = []
    arrays = storage.arrays_in_order(model)
    parts.append(struct.pack("<q", len(arrays)))
    for array in arrays:
        data = b"" if array is None else storage.memory_of(array[...]).tobytes()
        parts += [struct.pack("<q", len(data)), data]
    parts.append(struct.pack("<q", CAPACITY))
    for tokens in calls:
        parts += [struct.pack("<q", len(tokens)), np.array(tokens, np.int32).tobytes()]
    parts.append(struct.pack("<q", 0))
    done = subprocess.run(
        [EMULATOR, "-cpu", "max", str(program)], input=b"".join(parts), capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.float32).reshape(len(calls), -1)


def cases():
    """Products of whole numbers have an instruction at each level, those of floats have not."""
    for name, variant in CASES.items():
        yield pytest.param(name, "plain", True, id=f"{name}, floats")
        for level in LEVELS if variant.bits else ():
            yield pytest.param(name, level, False, id=f"{name}, {level}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level", "exact"), cases())
def test_logits_are_mlx_lms(name, level, exact, tmp_path):
    """Of a prompt, of a piece that goes on and of single tokens."""
    variant = CASES[name]
    model, stock = native_model(variant), judge(variant)
    mx.eval(model.parameters())
    vocabulary = model.args.vocab_size
    calls = [tokens_of(29, vocabulary), [5, 9, 2], [7], [11]]
    program = program_for_arm(model, variant, exact, LEVELS[level], tmp_path)
    found = run(program, model, calls)
    whole = np.array(stock(mx.array([[token for call in calls for token in call]])))[0]
    ends = np.cumsum([len(call) for call in calls]) - 1
    size = np.abs(whole).max()
    limit = {mx.float32: 5e-6, mx.float16: 1e-3}[variant.kv_dtype]
    assert np.abs(found - whole[ends]).max() <= (limit if exact else max(limit, 2e-4)) * size
