"""Planted bugs in memory and its order: each is reported with its kind, place and line."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest
from kernel_bodies import BODIES, FENCE, assert_right, exact
from planted_bugs import assert_reported, caught, run

from husky_mlx import emulator

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


# Out of bounds.


def test_read_past_the_end_of_an_input():
    error, case = caught("attention", "t < live[0];", "t <= 48;", grid=(512, 1, 1))
    line = case.line_of("float2(k[lane])")
    assert_reported(
        error,
        "out of bounds",
        "read of 4 bytes at byte ... of input 'keys', which has 12288, by thread ... of "
        "threadgroup ... (at {})",
        line,
    )


def test_read_before_the_start_of_an_input():
    error, case = caught("row_sum", "x[row * x_shape[1] + i]", "x[int(row * x_shape[1]) + i - 1]")
    assert_reported(
        error,
        "out of bounds",
        "read of 2 bytes at byte -2 of input 'x', which has 960, by thread 0 of threadgroup 0 "
        "(at {})",
        case.line_of("sum += float(x["),
    )


def test_read_far_outside_every_input():
    error, case = caught("row_sum", "x[row * x_shape[1] + i]", "x[(1ul << 44) + i]")
    assert_reported(
        error,
        "out of bounds",
        "read of 2 bytes outside every buffer by thread ... of threadgroup ... (at {})",
        case.line_of("sum += float(x["),
    )


def test_write_past_the_end_of_an_output():
    error, case = caught("swiglu", "(device vec<T, 4>*)out)[i]", "(device vec<T, 4>*)out)[i + 1]")
    assert_reported(
        error,
        "out of bounds",
        "write of 8 bytes at byte 512 of output 'out', which has 512, by thread 31 of threadgroup "
        "1 (at {})",
        case.line_of("vec<T, 4>(y)"),
    )


def test_write_past_the_end_of_a_cache():
    slot = mx.array([10], mx.int32)
    case = BODIES["append"](mx.float16)
    inputs = [*case.call["inputs"][:2], slot]
    error, case = caught("append", "d == 0", "d == 0u", inputs=inputs)
    assert_reported(
        error,
        "out of bounds",
        "write of 2 bytes at byte ... of input 'cache', which has 1280, by thread ... of "
        "threadgroup 1 (at {})",
        case.line_of("target["),
    )


def test_index_past_a_threadgroup_array():
    error, case = caught("rms_norm", "partial[4];", "partial[3];")
    assert_reported(
        error,
        "out of bounds",
        "index 3 of an array of type 'float[3]' (at {})",
        case.line_of("partial[simdgroup] ="),
    )


def test_pointer_past_a_threadgroup_array():
    error, case = caught(
        "rms_norm", "partial[simdgroup] = squares;", "*(&partial[0] + 4 * simdgroup) = squares;"
    )
    assert_reported(
        error,
        "out of bounds",
        "write of 4 bytes at byte ... of threadgroup array 'partial', which has 16, by thread ... "
        "of threadgroup ... (at {})",
        case.line_of("*(&partial[0]"),
    )


def test_index_past_a_thread_array():
    error, case = caught("gemv_4bit", "float sums[ROWS];", "float sums[ROWS - 1];")
    assert_reported(
        error,
        "out of bounds",
        "index 1 of an array of type 'float[1]' (at {})",
        case.line_of("sums[r] = 0.0f;"),
    )


def test_misaligned_vector():
    shifted = "(const device vec<T, 4>*)(up + 1))[i % 2]"
    error, case = caught("swiglu", "(const device vec<T, 4>*)up)[i]", shifted)
    assert_reported(
        error,
        "misaligned access",
        "an address used as ... is off its 8-byte alignment by 2 (at {})",
        case.line_of(shifted),
    )


# Races.


def test_missing_barrier():
    error, case = caught("rms_norm", BARRIER, "")
    assert_reported(
        error,
        "race",
        "... of element ... of threadgroup array 'partial' by thread ... of threadgroup ... (at "
        "...) and ... by thread ... of threadgroup ... (at ...): no barrier orders them",
    )
    # Which of the two comes first is the order of threads.
    places = {f"body line {case.line_of(p)}" for p in ("partial[simdgroup] =", "partial[lane]")}
    assert set(re.findall(r"body line \d+", error.message)) == places
    assert {"read", "write"} <= set(error.message.split())


@pytest.mark.parametrize(
    "instead",
    [
        "threadgroup_barrier(mem_flags::mem_none);",
        "threadgroup_barrier(mem_flags::mem_device);",
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
    ],
)
def test_barrier_that_does_not_order_it(instead):
    error, _ = caught("rms_norm", BARRIER, instead)
    assert_reported(
        error,
        "race",
        "... of element ... of threadgroup array 'partial' by thread ... no barrier orders them",
    )


def test_missing_barrier_before_memory_is_reused():
    """Written again for the next round while others still read the last one."""
    case = BODIES["rms_norm"](mx.float16)
    twice = case.edited(
        "const float total =",
        f"float again = partial[lane % 4];\n{BARRIER}\n"
        f"if (lane == 0) {{ partial[simdgroup] = squares + 0.0f; }}\n{BARRIER}\n"
        "const float total = 0.0f * again +",
    )
    assert_right(twice, run(twice))
    missing = twice.edited(f"[lane % 4];\n{BARRIER}", "[lane % 4];\n")
    with pytest.raises(emulator.EmulatorError) as error:
        run(missing)
    assert error.value.kind == "race"
    assert "threadgroup array 'partial'" in error.value.message


def test_simd_operation_orders_no_memory():
    """Lanes of one simdgroup exchange through memory: that takes a simdgroup_barrier."""
    source = """
threadgroup float slot[32];
const uint lane = thread_index_in_simdgroup;
slot[lane] = x[lane];
simdgroup_barrier(mem_flags::mem_threadgroup);
out[lane] = slot[31 - lane];
"""
    x = np.arange(32, dtype=np.float32)
    call = {
        "inputs": [x],
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(32,)],
        "output_dtypes": [np.float32],
    }
    (out,) = emulator.metal_kernel("reverse", ["x"], ["out"], source)(**call)
    assert np.array_equal(out, x[::-1])
    wrong = source.replace("simdgroup_barrier(mem_flags::mem_threadgroup)", "simd_sum(1.0f)")
    with pytest.raises(emulator.EmulatorError, match="no barrier orders them") as error:
        emulator.metal_kernel("reverse", ["x"], ["out"], wrong)(**call)
    assert error.value.kind == "race"


def test_two_threadgroups_write_one_output():
    error, case = caught("row_sum", "out[row] = sum;", "out[row % 4] = sum;")
    line = case.line_of("out[row % 4]")
    assert_reported(
        error,
        "race",
        "write of element ... of output 'out' by thread ... of threadgroup ... (at {}) and write "
        "by thread ... of threadgroup ... (at {}): no barrier orders them",
        line,
        line,
    )


def test_two_heads_append_to_one_row():
    error, case = caught("append", "(head * cache_shape[1] + slot[0])", "(slot[0])")
    line = case.line_of("target[")
    assert_reported(
        error,
        "race",
        "write of element ... of input 'cache' by thread ... of threadgroup ... (at {}) and write "
        "by thread ... of threadgroup ... (at {}): no barrier orders them",
        line,
        line,
    )


def test_appended_row_is_read_in_the_same_launch():
    error, _ = caught(
        "append", "float(row[head * 32 + d])", "float(cache[(head ^ 1) * 320 + 6 * 32 + d])"
    )
    assert_reported(error, "race", "... of input 'cache' by ... no barrier orders them")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{FENCE}\n  before[0]", "before[0]"),
        (f"relaxed);\n  {FENCE}", "relaxed);"),
        ("threadgroup_barrier(mem_flags::mem_device);", BARRIER),
        (" | mem_flags::mem_device);", ");"),
    ],
    ids=["no release", "no acquire", "no barrier before", "no barrier after"],
)
def test_what_another_threadgroup_wrote_is_not_ordered(old, new):
    error, case = caught("handover", old, new)
    assert_reported(
        error,
        "race",
        "read of element ... of output 'partials' by thread ... of threadgroup ... (at {}) and "
        "write by thread ... of threadgroup ... (at {}): no barrier orders them",
        case.line_of("sum += partials"),
        case.line_of("partials[part * 64 + d] ="),
    )


# Divergence.


def test_barrier_in_a_branch():
    error, case = caught(
        "row_sum", "sum = simd_sum(sum);", f"sum = simd_sum(sum); if (lane < 16) {{ {BARRIER} }}"
    )
    line = case.line_of(BARRIER)
    assert_reported(
        error,
        "divergent barrier",
        "threads that have to meet are at different places in threadgroup (..., 0, 0): threads "
        f"0-15 wait at threadgroup_barrier (body line {line}); threads 16-31 have returned; "
        f"threads 32-47 wait at threadgroup_barrier (body line {line}); threads 48-63 have "
        "returned",
    )


def test_thread_that_returns_before_a_barrier():
    error, case = caught("rms_norm", BARRIER, f"if (t > 40) return;\n{BARRIER}")
    assert_reported(
        error,
        "divergent barrier",
        "threads that have to meet are at different places in threadgroup (..., 0, 0): threads "
        f"0-40 wait at threadgroup_barrier (body line {case.line_of(BARRIER)}); threads 41-127 "
        "have returned",
    )


def test_simdgroup_barrier_in_a_branch():
    error, _ = caught(
        "row_sum",
        "sum = simd_sum(sum);",
        "sum = simd_sum(sum); if (lane == 3) { simdgroup_barrier(mem_flags::mem_none); }",
    )
    assert error.kind == "divergent barrier"
    assert "threads 3-3 wait at simdgroup_barrier" in error.message


def test_simd_operation_in_a_branch():
    error, case = caught("row_sum", "sum = simd_sum(sum);", "if (lane < 8) sum = simd_sum(sum);")
    line = case.line_of("simd_sum")
    assert_reported(
        error,
        "divergent simd operation",
        "threads that have to meet are at different places in threadgroup (..., 0, 0): threads 0-7 "
        f"wait at simd_sum (body line {line}); threads 8-31 have returned; ...",
    )


def test_different_simd_operations_in_two_branches():
    error, case = caught(
        "row_sum",
        "sum = simd_sum(sum);",
        "if (lane < 16) { sum = simd_sum(sum);\n} else { sum = simd_max(sum); }",
    )
    first, second = case.line_of("simd_sum"), case.line_of("simd_max")
    assert second == first + 1
    assert_reported(
        error,
        "divergent simd operation",
        "threads that have to meet are at different places in threadgroup (..., 0, 0): threads "
        f"0-15 wait at simd_sum (body line {first}); threads 16-31 wait at simd_max (body line "
        f"{second}); ...",
    )


@pytest.mark.parametrize("edit", ["if (lane < 8) sum = simd_sum(sum);", "if (lane < 8) return;"])
def test_fast_check_sees_divergence_too(edit):
    case = BODIES["row_sum"](mx.float32)
    assert_right(case, run(case, check="fast"))
    new = edit if "return" not in edit else f"{edit} sum = simd_sum(sum);"
    with pytest.raises(emulator.EmulatorError) as error:
        run(case.edited("sum = simd_sum(sum);", new), check="fast")
    assert error.value.kind == "divergent simd operation"


# Memory that nothing has written.


def test_unwritten_output():
    error, _ = caught(
        "rms_norm", "out[row * 256 + t + 128] =", "if (t < 127) out[row * 256 + t + 128] ="
    )
    assert_reported(
        error,
        "unwritten output",
        "8 of 2048 bytes of output 'out' are never written, the first in element 255",
    )


def test_threadgroup_memory_read_but_not_written():
    case = BODIES["rms_norm"](mx.float16).edited("partial[4];", "partial[5];")
    assert_right(case, run(case))
    case = case.edited("lane < 4 ?", "lane < 5 ?")
    with pytest.raises(emulator.EmulatorError) as error:
        run(case)
    assert_reported(
        error.value,
        "uninitialised read",
        "thread ... of threadgroup ... reads element 4 of threadgroup array 'partial', which "
        "nothing has written (at {})",
        case.line_of("partial[lane]"),
    )


def test_output_read_before_it_is_written():
    error, case = caught("row_sum", "out[row] = sum;", "out[row] += sum;")
    assert_reported(
        error,
        "uninitialised read",
        "thread ... of threadgroup ... reads element ... of output 'out', which nothing has "
        "written (at {})",
        case.line_of("out[row] += sum;"),
    )


def test_uninitialised_accumulator_is_no_number():
    """Not an error, but never by luck the right result: variables start as NaN."""
    case = BODIES["gemv_4bit"](mx.float32)
    assert_right(case, run(case))
    (out,) = run(case.edited("sums[r] = 0.0f;", ""))
    assert np.isnan(exact(out)).all()
