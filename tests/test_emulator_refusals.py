"""What Metal would refuse, planted: inputs written to, address spaces, sizes, other languages."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from kernel_bodies import BODIES, Case, assert_right
from planted_bugs import assert_reported, caught, run

from husky_mlx import emulator

# Inputs that are not to be written.


def test_write_to_an_input_through_a_cast():
    error, case = caught("append", "mutable_input(cache)", "(device T*)cache")
    assert_reported(
        error,
        "write to input",
        "thread ... of threadgroup ... writes to input 'cache' (at {}); mutable_input() is the way "
        "to update an input in place",
        case.line_of("target["),
    )


def test_mutable_input_of_an_output():
    error, _ = caught("append", "device T* target", "mutable_input(written);\ndevice T* target")
    assert_reported(error, "write to input", "mutable_input() was given a pointer into no input")


def test_assignment_to_an_input():
    error, case = caught("row_sum", "out[row] = sum;", "out[row] = sum;\nx[row] = T(0);")
    assert error.kind == "compile"
    assert f"body:{case.line_of('x[row] = T(0)')}:" in error.message


# Address spaces.


READ = "template <typename U>\ninline float read(const device U* p) { return float(p[0]); }\n"


def with_helper(body: str, old: str, new: str, header: str = READ) -> tuple[Case, Case]:
    case = BODIES[body](mx.float16)
    case.header = header
    return case, case.edited(old, new)


def test_small_input_given_to_a_device_helper():
    """An input of fewer than 8 elements is in `constant` memory."""
    case, wrong = with_helper("rms_norm", "float(eps[0])", "read(eps)")
    right = case.edited("float(weight[t])", "read(weight + t)")
    assert_right(right, run(right))
    with pytest.raises(emulator.EmulatorError) as error:
        run(wrong)
    assert error.value.kind == "address space"
    assert f"body:{wrong.line_of('read(eps)')}:" in error.value.message


@pytest.mark.parametrize(
    ("body", "old", "new"),
    [
        ("rms_norm", "? partial[lane]", "? read(partial)"),
        ("rms_norm", "const float total", "device float* p = partial;\nconst float total"),
        ("rms_norm", "const float total", "threadgroup T* p = out;\nconst float total"),
        ("gemv_4bit", "const float sum = simd_sum(sums[r])", "const float sum = read(sums)"),
        ("rms_norm", "const float total", "const T* p = x;\nconst float total"),
    ],
)
def test_pointer_into_another_address_space(body, old, new):
    case, wrong = with_helper(body, old, new)
    assert_right(case, run(case))
    with pytest.raises(emulator.EmulatorError) as error:
        run(wrong)
    assert error.value.kind == "address space"
    assert f"body:{wrong.line_of(new.partition(chr(10))[0])}:" in error.value.message


# Sizes.


def test_too_much_threadgroup_memory():
    error, _ = caught("attention", "merged[SIMDGROUPS][32];", "merged[SIMDGROUPS][1024];")
    assert_reported(
        error,
        "threadgroup memory",
        "32800 bytes of threadgroup memory with 'merged'; the limit is 32768",
    )


@pytest.mark.parametrize(
    ("grid", "threadgroup", "kind", "message"),
    [
        ((2048, 1, 1), (2048, 1, 1), "threadgroup size", "has 2048 threads; kernels take a multi"),
        (
            (48, 1, 1),
            (48, 1, 1),
            "threadgroup size",
            "has 48 threads; kernels take a multiple of 32",
        ),
        ((100, 1, 1), (32, 1, 1), "grid", "grid (100, 1, 1) is not a multiple of threadgroup (32"),
        ((0, 1, 1), (32, 1, 1), "grid", "grid (0, 1, 1) is not a multiple"),
    ],
)
def test_sizes_of_a_launch(grid, threadgroup, kind, message):
    error, _ = caught("swiglu", "T, 4>(y)", "T, 4>(y )", grid=grid, threadgroup=threadgroup)
    assert error.kind == kind
    assert message in error.message


def test_more_buffers_than_metal_has():
    names = [f"x{i}" for i in range(31)]
    call = {
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(32,)],
        "output_dtypes": [np.float32],
    }
    source = "out[thread_index_in_threadgroup] = x0[0];"
    inputs = [np.full(8, 3.0, np.float32)] * 31
    (out,) = emulator.metal_kernel("many", names[:30], ["out"], source)(inputs=inputs[:30], **call)
    assert (out == 3).all()
    with pytest.raises(emulator.EmulatorError, match=r"32 buffers .* Metal has 31") as error:
        emulator.metal_kernel("many", names, ["out"], source)(inputs=inputs, **call)
    assert error.value.kind == "arguments"


# What does not compile on a Mac or in CUDA.


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("T(a * r * float(weight[t]))", "a * r * float(weight[t])", "no viable overloaded '='"),
        ("rsqrt(total", "rsqrtf(total", "no member named 'rsqrtf'"),
        ("const float r =", "double d = 1;\nconst float r =", "poisoned"),
        ("const float r =", "float d = sqrtf(2.0f);\nconst float r =", "'sqrtf'"),
        (
            "const float r =",
            "float d = max(1, 2.0f);\nconst float r =",
            "call to 'max' is ambiguous",
        ),
        ("const float r =", "float d[row + 1];\nconst float r =", "variable length array"),
        ("thread_index_in_threadgroup", "thread_index_in_the_threadgroup", "undeclared identifier"),
        ("lane = thread_index_in_simdgroup", "lane = thread_index_in_quadgroup", "only Metal has"),
        ("partial[4];", "partial[4] = {0};", "name and dimensions only"),
        ("out[row * 256 + t] =", "out[row * 256 + t] = T(1.0f.x) +", "error:"),
    ],
)
def test_does_not_compile(old, new, message):
    error, _ = caught("rms_norm", old, new, dtype=mx.bfloat16)
    assert error.kind == "compile"
    assert message in error.message


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("256 / int(weight[0] * T(0))", "integer division by zero or overflow (at {})"),
        ("(1 << int(row + 32))", "shift by ..., outside the width of its type (at {})"),
    ],
)
def test_undefined_arithmetic(new, message):
    error, case = caught("rms_norm", "total / 256", f"total / float({new})")
    assert_reported(error, "undefined arithmetic", message, case.line_of("const float r ="))
