"""The door that every kernel launch goes through, and the sources that it reads."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from husky_mlx import device, kernels
from husky_mlx.kernel_source import kernel_source, names
from husky_mlx.metal_text import kernel_folder

TABLE = mx.arange(40 * 32, dtype=mx.float32).reshape(40, 32)
PLACE = mx.zeros((16,), mx.int32)


def embed(tokens=(3, 39), backend="emulator", **changes):
    arguments = {
        "inputs": {
            "tokens": mx.array(tokens, mx.uint32),
            "before": TABLE,
            "place": PLACE,
            "constants": TABLE.view(mx.uint32),
        },
        "outputs": [((len(tokens), 32), mx.float32), ((16,), mx.int32)],
        "template": {"T": mx.float32, "N": 40, "D": 32, "BITS": 16, "GROUP": 32, "LENGTH": 1},
        "grid": (32, len(tokens), 1),
        "threadgroup": (32, 1, 1),
        **changes,
    }
    return kernels.launch("embed", backend=backend, **arguments)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder for sources of this test's own, read instead of the package's."""
    monkeypatch.setattr("husky_mlx.kernel_source.kernel_folder", lambda: tmp_path)
    for cache in (kernel_source, kernels._kernel):
        cache.cache_clear()
    yield tmp_path
    for cache in (kernel_source, kernels._kernel):
        cache.cache_clear()


def test_a_launch_returns_what_the_kernel_computes():
    rows, _ = embed((3, 39))
    np.testing.assert_array_equal(np.array(rows), np.arange(1280.0).reshape(40, 32)[[3, 39]])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"inputs": {"tokens": TABLE}},
            "inputs: missing before, place, constants; not declared none",
        ),
        (
            {
                "template": {
                    "T": mx.float32,
                    "N": 40,
                    "D": 32,
                    "BITS": 16,
                    "GROUP": 32,
                    "LENGTH": 1,
                    "ROWS": 4,
                }
            },
            "template: missing none; not declared ROWS",
        ),
        ({"outputs": []}, "has 2 outputs, 0 given"),
        ({"grid": (33, 2, 1)}, "must be a multiple of the threadgroup"),
        ({"threadgroup": (16, 1, 1)}, "multiple of 32 threads"),
        ({"backend": "vulkan"}, "backend 'vulkan': one of metal, cuda, emulator"),
    ],
)
def test_launches_that_do_not_fit_are_refused(changes, says):
    with pytest.raises(ValueError) as error:
        embed(**changes)
    assert says in str(error.value)


def test_a_kernel_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"no kernel .nonsense.: .*nonsense\.metal does"):
        kernels.launch("nonsense", {}, [], {}, (32, 1, 1), (32, 1, 1), "emulator")


@pytest.mark.skipif(device.target() != "cpu", reason="MLX's default device has kernels")
def test_the_cpu_build_has_no_backend_of_its_own():
    with pytest.raises(ValueError, match="backend='emulator'"):
        embed(backend=None)


def test_launches_are_recorded_in_order_with_their_arrays():
    with kernels.record() as outer:
        embed((1,))
        with kernels.record() as inner:
            rows, _ = embed((2, 5))
    embed((4,))
    assert [launch.inputs["tokens"].tolist() for launch in outer] == [[1], [2, 5]]
    assert len(inner) == 1 and inner[0].op == "embed" and inner[0].backend == "emulator"
    assert inner[0].outputs["embedded"] is rows
    assert inner[0].grid == (32, 2, 1) and inner[0].template["BITS"] == 16


def test_another_threads_launches_are_not_recorded():
    with kernels.record() as launches:
        thread = threading.Thread(target=embed)
        thread.start()
        thread.join()
    assert launches == []


CHAIN = """// inputs: x
// outputs: y
// template:
y[thread_position_in_grid.x] = 2.0f * x[thread_position_in_grid.x];
"""


def test_a_replay_feeds_each_launch_the_new_outputs(sources):
    """The chain is replayed from another input, so that an old array in between would show."""
    (sources / "twice.metal").write_text(CHAIN)
    x = mx.ones((32,))
    arguments = {"template": {}, "grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    arguments["outputs"] = [((32,), mx.float32)]
    with kernels.record() as launches:
        (y,) = kernels.launch("twice", {"x": x}, backend="emulator", **arguments)
        kernels.launch("twice", {"x": y}, backend="emulator", **arguments)
    x[...] = 5.0
    first, second = kernels.replay(launches, "emulator")
    assert first[0].tolist() == [10.0] * 32
    assert second[0].tolist() == [20.0] * 32


def test_an_input_that_is_written_in_place_changes_for_all_its_holders(sources):
    (sources / "append.metal").write_text(
        "// inputs: cache\n// outputs: done\n// template:\n"
        "mutable_input(cache)[thread_position_in_grid.x] = 7.0f;\n"
        "done[thread_position_in_grid.x] = 1;\n"
    )
    cache = mx.zeros((64,))
    holder = [cache]
    kernels.launch(
        "append",
        {"cache": cache},
        [((32,), mx.int32)],
        {},
        (32, 1, 1),
        (32, 1, 1),
        backend="emulator",
    )
    assert holder[0].tolist() == [7.0] * 32 + [0.0] * 32


def test_cuda_kernels_are_translated_once_and_called_without_template(monkeypatch):
    """What MLX would get: a stub stands for its CUDA build."""
    built, calls = [], []

    def cuda_kernel(**arguments):
        built.append(arguments)

        def call(**call):
            calls.append(call)
            return [
                mx.zeros(shape, dtype)
                for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
            ]

        return call

    def embed_on_cuda(tokens, dtype=mx.float32):
        template = {"T": dtype, "N": 40, "D": 32, "BITS": 16, "GROUP": 32, "LENGTH": 1}
        outputs = [((len(tokens), 32), dtype), ((16,), mx.int32), ((16,), mx.uint32)]
        more = {"outputs": outputs, "template": {**template, "TICKETS": 16}}
        return embed(tokens, backend="cuda", **more)

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    kernels._kernel.cache_clear()
    for tokens in ((1,), (2,), (1, 2, 3)):
        rows, *_ = embed_on_cuda(tokens)
        assert rows.shape == (len(tokens), 32)
    embed_on_cuda((3, 39), mx.float16)
    kernels._kernel.cache_clear()

    assert len(built) == 2 and len(calls) == 4
    assert built[0]["input_names"] == ["tokens", "before", "place", "constants"]
    assert built[0]["output_names"] == ["embedded", "following", "tickets"]
    assert built[0]["name"] != built[1]["name"]
    # MLX hashes this at every evaluation.
    assert len(built[0]["header"] + built[0]["source"]) < 1024
    included = built[0]["header"].split('"')[1]
    assert "embedded" in Path(included).read_text()
    assert all("template" not in call and len(call["inputs"]) == 4 for call in calls)


def test_sources_are_small_and_keep_the_files_line_numbers(sources):
    (sources / "a.h").write_text('#include "b.h"\ninline int one() { return 1; }  // a\n')
    (sources / "b.h").write_text("// b\n\n  inline int two() { return 2; }\n")
    (sources / "op.metal").write_text(
        "// inputs: x y\n// outputs: z\n// template: T N\n"
        '#include "a.h"\n#include "b.h"\n// why\nz[0] = T(one());  // here\n\n/* gone */\n'
    )
    source = kernel_source("op")
    assert (source.inputs, source.outputs, source.template) == (("x", "y"), ("z",), ("T", "N"))
    assert source.header == "inline int two() { return 2; }\ninline int one() { return 1; }\n"
    assert source.source == "z[0] = T(one());\n"
    assert source.numbered_source.splitlines()[6].strip() == "z[0] = T(one());"


def test_cuda_may_have_more_parameters_behind_the_others(sources):
    (sources / "op.metal").write_text(
        "// inputs: x\n// outputs: z\n// template: T\n"
        "// cuda inputs: tickets\n// cuda outputs: partials more\nz[0] = x[0];\n"
    )
    metal, cuda = kernel_source("op"), kernel_source("op", cuda=True)
    assert (metal.inputs, metal.outputs, metal.template) == (("x",), ("z",), ("T",))
    assert (cuda.inputs, cuda.template) == (("x", "tickets"), ("T",))
    assert cuda.outputs == ("z", "partials", "more")


def test_each_platform_gets_its_own_branch(sources):
    (sources / "cuda.h").write_text("inline int word() { return 4; }\n")
    (sources / "op.metal").write_text(
        "// inputs: x\n// outputs: z\n// template:\n"
        '#ifdef MSL_CUDA\n#include "cuda.h"\nz[0] = 1;\n#else\nz[0] = 2;\n#endif\nz[1] = 3;\n'
    )
    metal, cuda = kernel_source("op"), kernel_source("op", cuda=True)
    assert (metal.header, metal.source) == ("", "z[0] = 2;\nz[1] = 3;\n")
    assert (cuda.header, cuda.source) == (
        "inline int word() { return 4; }\n",
        "z[0] = 1;\nz[1] = 3;\n",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("// inputs: x\n// template:\n", "op.metal: no line '// outputs: ...'"),
        ('// inputs:\n// outputs:\n// template:\n#include "gone.h"\n', "includes gone.h"),
        ("// inputs:\n// outputs:\n// template:\n#ifdef DEBUG\n#endif\n", "#ifdef DEBUG"),
        ("// inputs:\n// outputs:\n// template:\n#ifdef MSL_CUDA\n", "without its #endif"),
    ],
)
def test_damaged_sources_are_refused_by_name(sources, text, says):
    (sources / "op.metal").write_text(text)
    with pytest.raises(ValueError) as error:
        kernel_source("op")
    assert says in str(error.value)


def test_every_kernel_reads_for_both_platforms_and_names_no_input_twice():
    assert {"attention_decode", "attention_combine", "embed"} <= set(names())
    for op in names():
        for cuda in (False, True):
            source = kernel_source(op, cuda=cuda)
            parameters = source.inputs + source.outputs + source.template
            assert len(set(parameters)) == len(parameters), op
            assert "//" not in source.header + source.source, op


def test_the_readme_of_the_kernels_says_what_each_does():
    folder = kernel_folder()
    rows = re.findall(r"(?m)^\| (`[^|]*) \| ", (folder / "README.md").read_text(encoding="utf-8"))
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(path.stem for path in folder.glob("*.metal"))
