"""The emulator runs Metal bodies right, whatever the order, and wraps them as MLX does."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from kernel_bodies import BODIES, DTYPES, assert_close, assert_right

from husky_mlx import emulator
from husky_mlx.emulator import compiler
from husky_mlx.errors import HuskyError

TWICE = "const uint i = thread_position_in_grid.x;\nout[i] = T(2) * x[i];"
ONE_GROUP = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1)}


def twice(x, **call):
    kernel = emulator.metal_kernel("twice", ["x"], ["out"], TWICE)
    return kernel(
        inputs=[x],
        template=[("T", call.pop("dtype", x.dtype))],
        **{**ONE_GROUP, "output_shapes": [(32,)], "output_dtypes": [x.dtype], **call},
    )[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("body", BODIES)
def test_body_against_float64(body, dtype):
    case = BODIES[body](DTYPES[dtype])
    kernel = emulator.metal_kernel(**case.parts)
    outputs = kernel(**case.call)
    assert_right(case, outputs)
    assert set(outputs.updated) == set(case.updated)
    for name, expected in case.updated.items():
        assert_close(outputs.updated[name], expected, f"{case.name}: {name}")


@pytest.mark.parametrize("body", ["rms_norm", "attention", "append"])
def test_order_does_not_matter(body):
    case = BODIES[body](mx.float16)
    kernel = emulator.metal_kernel(**case.parts)
    outputs = [kernel(**case.call, seed=seed)[0] for seed in range(4)]
    for other in outputs[1:]:
        assert mx.array_equal(outputs[0], other)


def test_seed_changes_the_order():
    """A body that writes down in which order its threads came: legal Metal, and no two alike."""
    kernel = emulator.metal_kernel(
        "order",
        ["x"],
        ["out"],
        """
threadgroup atomic_int next;
const uint t = thread_index_in_threadgroup;
if (t == 0) { atomic_store_explicit(&next, 0, memory_order_relaxed); }
threadgroup_barrier(mem_flags::mem_threadgroup);
out[t] = atomic_fetch_add_explicit(&next, 1, memory_order_relaxed);
""",
    )
    call = {**ONE_GROUP, "output_shapes": [(32,)], "output_dtypes": [np.int32]}
    x = np.zeros(8, np.int32)
    orders = [kernel(inputs=[x], check="fast", seed=seed, **call)[0] for seed in (1, 2)]
    for order in orders:
        assert sorted(order) == list(range(32))
    assert not np.array_equal(orders[0], orders[1])
    with pytest.raises(emulator.EmulatorError, match=r"bytes of output 'out' depend on the order"):
        kernel(inputs=[x], **call)


@pytest.mark.parametrize("body", BODIES)
def test_fast_check_gives_the_same(body):
    case = BODIES[body](mx.bfloat16)
    kernel = emulator.metal_kernel(**case.parts)
    full, fast = kernel(**case.call), kernel(**case.call, check="fast")
    assert all(mx.array_equal(a, b) for a, b in zip(full, fast, strict=True))


def test_outputs_are_of_the_library_of_their_dtype():
    x = np.arange(32, dtype=np.float16)
    assert isinstance(twice(x), np.ndarray)
    assert np.array_equal(twice(x), 2 * x)
    found = twice(x, output_dtypes=[mx.float16], dtype=mx.float16)
    assert isinstance(found, mx.array)
    assert np.array_equal(np.array(found), 2 * x)


@pytest.mark.parametrize(
    "dtype",
    ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"],
)
def test_integers(dtype):
    x = np.arange(32, dtype=dtype)
    assert np.array_equal(twice(x), 2 * x)


def test_facts_about_inputs():
    """Shapes, strides, dimensions, a 0-d input by reference, small ones in `constant`."""
    kernel = emulator.metal_kernel(
        "facts",
        ["x", "small", "number"],
        ["out"],
        """
const uint t = thread_index_in_threadgroup;
int value = 0;
if (t < 3) { value = x_shape[t]; }
if (t >= 3 && t < 6) { value = int(x_strides[t - 3]); }
if (t == 6) { value = x_ndim; }
if (t == 7) { value = number + small[0]; }
out[t] = value;
""",
    )
    (out,) = kernel(
        inputs=[np.zeros((2, 3, 5), np.float32), np.array([40], np.int32), 2],
        output_shapes=[(32,)],
        output_dtypes=[np.int32],
        **ONE_GROUP,
    )
    assert out[:8].tolist() == [2, 3, 5, 15, 5, 1, 3, 42]


def test_views_are_made_contiguous_or_refused():
    x = np.arange(64, dtype=np.float32)[::2]
    assert np.array_equal(twice(x), 2 * x)
    kernel = emulator.metal_kernel("twice", ["x"], ["out"], TWICE, ensure_row_contiguous=False)
    with pytest.raises(emulator.EmulatorError, match=r"input 'x' has strides \(8,\)"):
        kernel(
            inputs=[x],
            template=[("T", np.float32)],
            output_shapes=[(32,)],
            output_dtypes=[np.float32],
            **ONE_GROUP,
        )


def test_inputs_of_the_caller_stay():
    case = BODIES["append"](mx.float32)
    cache = np.array(case.call["inputs"][1])
    before = cache.copy()
    call = {**case.call, "inputs": [case.call["inputs"][0], cache, case.call["inputs"][2]]}
    outputs = emulator.metal_kernel(**case.parts)(**call)
    assert np.array_equal(cache, before)
    assert not np.array_equal(outputs.updated["cache"], before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_floats_round_as_mlx(dtype):
    """Each operation rounds to the type, to nearest even: the same bits as MLX's own."""
    a = mx.random.normal((32,), key=mx.random.key(1)).astype(DTYPES[dtype])
    b = mx.random.normal((32,), key=mx.random.key(2)).astype(DTYPES[dtype])
    kernel = emulator.metal_kernel(
        "arithmetic",
        ["a", "b"],
        ["out"],
        "const uint i = thread_index_in_threadgroup;\nout[i] = (a[i] * b[i] + a[i]) / b[i] - b[i];",
    )
    (out,) = kernel(
        inputs=[a, b], output_shapes=[(32,)], output_dtypes=[a.dtype], template=[], **ONE_GROUP
    )
    with mx.stream(mx.cpu):
        product = a * b
        mx.eval(product)
        total = product + a
        mx.eval(total)
        quotient = total / b
        mx.eval(quotient)
        assert mx.array_equal(out, quotient - b)


def test_simd_operations_against_numpy():
    x = np.random.default_rng(0).integers(-50, 50, 32).astype(np.int32)
    operations = {
        "simd_sum(v)": np.full(32, x.sum()),
        "simd_max(v)": np.full(32, x.max()),
        "simd_min(v)": np.full(32, x.min()),
        "simd_xor(v)": np.full(32, np.bitwise_xor.reduce(x)),
        "simd_prefix_inclusive_sum(v)": np.cumsum(x),
        "simd_prefix_exclusive_sum(v)": np.cumsum(x) - x,
        "simd_broadcast(v, 5)": np.full(32, x[5]),
        "simd_broadcast_first(v)": np.full(32, x[0]),
        "simd_shuffle(v, 31 - lane)": x[::-1],
        "simd_shuffle_xor(v, 3)": x[np.arange(32) ^ 3],
        "simd_shuffle_down(v, 1)": np.append(x[1:], -1),
        "simd_shuffle_up(v, 1)": np.append(-1, x[:-1]),
        "quad_sum(v)": x.reshape(8, 4).sum(1).repeat(4),
        "quad_broadcast(v, 2)": x.reshape(8, 4)[:, 2].repeat(4),
        "int(simd_any(v > 45))": np.full(32, int((x > 45).any())),
        "int(simd_all(v > -51))": np.ones(32),
    }
    source = ["const uint lane = thread_index_in_simdgroup;", "const int v = x[lane];"]
    source += [f"out[{32 * i} + lane] = {text};" for i, text in enumerate(operations)]
    kernel = emulator.metal_kernel("operations", ["x"], ["out"], "\n".join(source))
    shape = (len(operations), 32)
    (out,) = kernel(inputs=[x], output_shapes=[shape], output_dtypes=[np.int32], **ONE_GROUP)
    for found, (text, expected) in zip(out, operations.items(), strict=True):
        assert found.tolist() == expected.tolist(), text


def test_simdgroup_matrix_against_numpy():
    a, b = (np.random.default_rng(s).standard_normal((8, 8)).astype(np.float32) for s in (0, 1))
    kernel = emulator.metal_kernel(
        "matrix",
        ["a", "b"],
        ["out"],
        """
simdgroup_matrix<float, 8, 8> left, right;
simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
simdgroup_load(left, a, 8);
simdgroup_load(right, b, 8, ulong2(0, 0), true);
simdgroup_multiply_accumulate(sum, left, right, sum);
simdgroup_store(sum, out, 8);
""",
    )
    (out,) = kernel(inputs=[a, b], output_shapes=[(8, 8)], output_dtypes=[np.float32], **ONE_GROUP)
    assert np.abs(out - (a.astype(np.float64) @ b.T + 1)).max() < 1e-5


def mlx_text(capfd, kernel, inputs, template, dtypes, tmp_path):
    """The Metal function that MLX itself writes, which it prints while a graph is exported."""

    def call(*arrays):
        return kernel(
            inputs=list(arrays),
            template=template,
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(4,)] * len(dtypes),
            output_dtypes=dtypes,
            verbose=True,
        )

    capfd.readouterr()
    mx.export_function(str(tmp_path / "graph"), call, *inputs)
    return capfd.readouterr().out.split("```\n")[1].rstrip("\n")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("body", BODIES)
def test_signature_is_mlx_s(body, dtype, capfd, tmp_path):
    case = BODIES[body](DTYPES[dtype])
    inputs, template = case.call["inputs"], case.call["template"]
    dtypes = case.call["output_dtypes"]
    ours = emulator.metal_kernel(**case.parts).signature(inputs, dtypes, template)
    theirs = mlx_text(capfd, mx.fast.metal_kernel(**case.parts), inputs, template, dtypes, tmp_path)
    assert ours.metal(case.header, case.source).rstrip("\n") == theirs


def test_signature_of_every_kind_of_parameter_is_mlx_s(capfd, tmp_path):
    parts = {
        "name": "kinds",
        "input_names": ["a", "b", "c"],
        "output_names": ["p", "q"],
        "source": "// a_shape a_strides a_ndim c_shape thread_index_in_simdgroup grid_origin\n"
        "p[0] = a[0] + b + c[0];",
    }
    inputs = [mx.zeros((2, 4)), mx.array(1, mx.int64), mx.zeros((7,), mx.uint8)]
    template = [("FLAG", True), ("OTHER", False), ("N", 12), ("T", mx.uint16)]
    dtypes = [mx.bool_, mx.int8]
    ours = emulator.metal_kernel(**parts).signature(inputs, dtypes, template)
    theirs = mlx_text(capfd, mx.fast.metal_kernel(**parts), inputs, template, dtypes, tmp_path)
    assert ours.metal("", parts["source"]).rstrip("\n") == theirs


def test_compiled_kernels_are_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path))
    x = np.arange(32, dtype=np.float32)
    twice(x)
    monkeypatch.setattr(compiler, "_start", lambda *_: pytest.fail("compiled again"))
    assert np.array_equal(twice(x), 2 * x)


def test_two_processes_share_an_empty_cache(tmp_path):
    program = (
        "import numpy as np\n"
        "from husky_mlx import emulator\n"
        f"kernel = emulator.metal_kernel('twice', ['x'], ['out'], {TWICE!r})\n"
        "x = np.arange(32, dtype=np.float32)\n"
        "(y,) = kernel(inputs=[x], template=[('T', x.dtype)], grid=(32, 1, 1),\n"
        "              threadgroup=(32, 1, 1), output_shapes=[(32,)], output_dtypes=[x.dtype])\n"
        "assert (y == 2 * x).all()\n"
    )
    environment = {**os.environ, "HUSKY_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in processes:
        _, output = process.communicate()
        assert process.returncode == 0, output
    assert not list((tmp_path / "emulator").glob(".build-*"))


@pytest.fixture
def fresh_compiler_search():
    compiler.command.cache_clear()
    yield
    compiler.command.cache_clear()


def test_no_compiler_says_what_to_install(monkeypatch, fresh_compiler_search):
    monkeypatch.delenv("HUSKY_CLANG", raising=False)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    with pytest.raises(HuskyError, match=r"needs clang 16 or newer: pip install ziglang .*HUSKY_C"):
        compiler.command()


def test_chosen_compiler_that_is_not_there(monkeypatch, fresh_compiler_search):
    monkeypatch.setenv("HUSKY_CLANG", "/nowhere/clang++")
    with pytest.raises(HuskyError, match=r"HUSKY_CLANG=/nowhere/clang\+\+: no such program"):
        compiler.command()
