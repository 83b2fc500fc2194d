"""The native program's matrix products against float64, in every format and for every CPU level."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import platform
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from husky_mlx.native import NativeError, compiler
from husky_mlx.native.library import library
from husky_mlx.native.storage import memory_of

C_TYPES = {mx.float16: "Half", mx.bfloat16: "BFloat", mx.float32: "float"}
# bits, group size, dtype, rows, columns: rows that fill no vector, odd numbers of groups of 32.
FORMATS = [
    (4, 32, mx.float16, 37, 96),
    (4, 64, mx.bfloat16, 19, 192),
    (4, 128, mx.float32, 5, 640),
    (4, 32, mx.float16, 33, 1056),
    (8, 32, mx.bfloat16, 37, 32),
    (8, 64, mx.float32, 17, 704),
    (8, 128, mx.float16, 3, 384),
    (16, 32, mx.float16, 21, 70),
    (16, 32, mx.bfloat16, 1, 131),
    (16, 32, mx.float32, 40, 300),
]
IDS = [f"{bits}-{group}-{C_TYPES[dtype]}" for bits, group, dtype, _, _ in FORMATS]
QUANTISED = [index for index, (bits, *_) in enumerate(FORMATS) if bits < 16]
# One by one, and the kernel of many with every remainder of its tiles.
TOKENS = (1, 3, 4, 17, 29)
LEVELS = {
    "native": None,
    "AVX2": ("-march=x86-64-v3",),
    "AVX-VNNI": ("-march=x86-64-v3", "-mavxvnni"),
    "AVX-512 without VNNI": ("-march=x86-64-v4",),
    "portable": ("-march=x86-64",),
}
# As /proc/cpuinfo names them.
NEEDS = {"AVX-VNNI": {"avx_vnni"}, "AVX-512 without VNNI": {"avx512f", "avx512vl", "avx512bw"}}
CPU_INFO = Path("/proc/cpuinfo")

SOURCE = """
#include <stdlib.h>
#include "matmul.h"
using namespace husky;

template <typename M, bool INTEGER>
void product(const Tensor& tensor, const float* values, int tokens, float* out) {
  using X = Activations<M::COLUMNS>;
  char* memory = (char*)aligned_alloc(64, round_up(X::bytes(tokens), 64));
  char* unpacked = (char*)aligned_alloc(64, round_up(unpacked_bytes(M::COLUMNS), 64));
  memset(memory, 0, X::bytes(tokens));
  const X x(memory, tokens);
  for (int t = 0; t < tokens; ++t) {
    memcpy(x.row(t), values + t * M::COLUMNS, M::COLUMNS * sizeof(float));
    if constexpr (INTEGER) x.template quantise<M::BITS == 4 ? SPLIT : NATURAL>(t);
  }
  multiply<M, INTEGER>(tensor, 0, M::ROWS, x, 0, tokens, unpacked, out, round_up(M::ROWS, LANES));
  free(memory);
  free(unpacked);
}

extern "C" __attribute__((visibility("default"))) int lanes() { return LANES; }
extern "C" __attribute__((visibility("default")))
void multiply_case(int which, int exact, const Tensor* tensor, const float* x, int tokens,
                   float* out) {
  switch (which) {
CASES
  }
}
"""


def source() -> str:
    cases = []
    for index, (bits, group, dtype, rows, columns) in enumerate(FORMATS):
        if bits == 16:
            call = f"product<Dense<{rows}, {columns}, {C_TYPES[dtype]}>, false>"
            cases.append(f"    case {index}: return {call}(*tensor, x, tokens, out);")
        else:
            matrix = f"Affine<{rows}, {columns}, {bits}, {group}, {C_TYPES[dtype]}>"
            arguments = "(*tensor, x, tokens, out)"
            cases.append(
                f"    case {index}: return exact ? product<{matrix}, false>{arguments}\n"
                f"                               : product<{matrix}, true>{arguments};"
            )
    return SOURCE.replace("CASES", "\n".join(cases))


@functools.cache
def kernels(level: str) -> ctypes.CDLL:
    try:
        found = compiler.find()
    except NativeError as error:
        pytest.skip(str(error))
    flags = LEVELS[level]
    if flags is not None:
        if platform.machine() not in ("x86_64", "AMD64") or "ziglang" in found.command:
            pytest.skip("the levels are those of x86 compilers")
        needed = NEEDS.get(level, set())
        if not needed <= set(re.findall(r"\w+", CPU_INFO.read_text()) if needed else ()):
            pytest.skip(f"this CPU has no {needed}")
        found = dataclasses.replace(
            found, flags=(*found.flags[:-1], *flags), identity=found.identity + level
        )
    return ctypes.CDLL(str(library(source(), found)))


@functools.cache
def weights(index: int) -> tuple[list[mx.array], np.ndarray, np.ndarray]:
    """A format's arrays, their values in float64, and the largest magnitude of its two terms."""
    bits, group, dtype, rows, columns = FORMATS[index]
    rng = np.random.default_rng(index)
    if bits == 16:
        dense = mx.array(rng.normal(0, 0.1, (rows, columns))).astype(dtype)
        values = np.array(dense.astype(mx.float32), np.float64)
        return [dense], values, np.abs(values)
    codes = rng.integers(0, 2**bits, (rows, columns), dtype=np.uint32)
    each = 32 // bits
    shifts = np.arange(each, dtype=np.uint32) * bits
    words = (codes.reshape(rows, -1, each) << shifts).sum(axis=-1, dtype=np.uint32)
    step = 0.3 / (2**bits - 1)
    scales = rng.uniform(0.5, 1.5, (rows, columns // group)) * rng.choice([-step, step])
    arrays = [mx.array(scales).astype(dtype), mx.array(scales * -(2**bits) / 2).astype(dtype)]
    s, b = (
        np.repeat(np.array(array.astype(mx.float32), np.float64), group, axis=1) for array in arrays
    )
    return [mx.array(words), *arrays], codes * s + b, codes * np.abs(s) + np.abs(b)


def multiply(level: str, index: int, x: np.ndarray, *, exact: bool) -> np.ndarray:
    arrays = [memory_of(array) for array in weights(index)[0]]
    addresses = (ctypes.c_void_p * 4)(*(array.ctypes.data for array in arrays))
    library = kernels(level)
    rows, lanes = FORMATS[index][3], library.lanes()
    x = np.ascontiguousarray(x, np.float32)
    out = np.full((len(x), -(-rows // lanes) * lanes), np.nan, np.float32)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, out)]
    library.multiply_case(index, exact, ctypes.byref(addresses), pointers[0], len(x), pointers[1])
    return out[:, :rows]


def bound(index: int, x: np.ndarray, *, exact: bool) -> np.ndarray:
    """activations.h's bound, and 1e-6 of all magnitudes added up for float32's rounding."""
    _, values, magnitude = weights(index)
    x = np.abs(x.astype(np.float64))
    rounding = 1e-6 * (x @ magnitude.T)
    if exact:
        return rounding + 1e-37
    largest = x.reshape(len(x), -1, 32).max(-1)
    # 1e-30: what is smaller counts as zero.
    half_steps = np.maximum(largest / 65024 * 1.0001, 1e-30)
    rounding += 1e-6 * np.repeat(largest, 32, axis=1) @ magnitude.T
    return half_steps @ np.abs(values).reshape(len(values), -1, 32).sum(-1).T + rounding


def check(level: str, index: int, x: np.ndarray, *, exact: bool) -> None:
    wanted = x.astype(np.float64) @ weights(index)[1].T
    error = np.abs(multiply(level, index, x, exact=exact) - wanted)
    allowed = bound(index, x, exact=exact)
    worst = np.unravel_index((error / allowed).argmax(), error.shape)
    assert (error <= allowed).all(), f"{error[worst]:.3e} > {allowed[worst]:.3e} at {worst}"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("index", range(len(FORMATS)), ids=IDS)
def test_float_products(index, level):
    for tokens in TOKENS:
        x = np.random.default_rng(tokens).standard_normal((tokens, FORMATS[index][4]))
        check(level, index, x.astype(np.float32), exact=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("index", QUANTISED, ids=[IDS[index] for index in QUANTISED])
def test_integer_products(index, level):
    for tokens in TOKENS:
        x = np.random.default_rng(tokens).standard_normal((tokens, FORMATS[index][4]))
        check(level, index, x.astype(np.float32), exact=False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("index", QUANTISED, ids=[IDS[index] for index in QUANTISED])
@pytest.mark.parametrize("largest", [127, 32512])
def test_whole_numbers_lose_nothing(index, level, largest):
    """Activations that are their own integers: only float rounding is left."""
    columns = FORMATS[index][4]
    x = np.random.default_rng(5).integers(-largest, largest + 1, (6, columns)).astype(np.float32)
    x[:, ::32] = np.random.default_rng(6).choice([-largest, largest], (6, columns // 32))
    wanted = x.astype(np.float64) @ weights(index)[1].T
    for rows in (slice(0, 1), slice(0, 6)):
        found = multiply(level, index, x[rows], exact=False)
        assert (np.abs(found - wanted[rows]) <= 1e-6 * np.abs(x[rows]) @ weights(index)[2].T).all()


@settings(max_examples=60, deadline=None)
@given(
    index=st.sampled_from(QUANTISED),
    tokens=st.sampled_from([1, 2, 5, 13]),
    exponents=st.lists(st.sampled_from([None, -45, -20, -3, 0, 3, 20, 34]), min_size=1, max_size=9),
    spike=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_integer_products_of_any_magnitude(index, tokens, exponents, spike, seed):
    """Groups of zeros, tiny and huge ones side by side, and one outlier in a group."""
    columns = FORMATS[index][4]
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, columns // 32, 32))
    for group in range(columns // 32):
        exponent = exponents[group % len(exponents)]
        x[:, group] *= 0.0 if exponent is None else 10.0**exponent
    if spike:
        x[:, :, 7] *= 1000
    check("native", index, x.reshape(tokens, columns).astype(np.float32), exact=False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none_and_in_its_token(value, level):
    for index in QUANTISED:
        x = np.ones((5, FORMATS[index][4]), np.float32)
        x[2, 9] = value
        for rows in (slice(0, 3), slice(0, 5)):
            found = multiply(level, index, x[rows], exact=False)
            assert not np.isfinite(found[2]).any()
            assert np.isfinite(np.delete(found, 2, axis=0)).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("index", QUANTISED, ids=[IDS[index] for index in QUANTISED])
def test_the_documented_bound_is_reached_but_not_passed(index, level):
    """All activations the same part of a step away from a whole one, and all in the direction of
    their weight: the errors add up."""
    row, columns = FORMATS[index][3] - 1, FORMATS[index][4]
    signs = np.where(weights(index)[1][row] < 0, -1.0, 1.0)
    steps = np.random.default_rng(7).integers(0, 32511, columns).astype(np.float64)
    for part in (0.1, 0.49, 0.51, 0.9):
        x = (steps + part) * signs
        x[::32] = 32512
        x = x[None].astype(np.float32)
        wanted = x.astype(np.float64) @ weights(index)[1][row]
        error = np.abs(multiply(level, index, x, exact=False)[:, row] - wanted)
        allowed = bound(index, x, exact=False)[:, row]
        assert error <= allowed
        # One in 32 is exact.
        others = np.abs(np.delete(weights(index)[1][row], np.arange(0, columns, 32)))
        assert error >= 0.9 * min(part, 1 - part) * others.sum()
