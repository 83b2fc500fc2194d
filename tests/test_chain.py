"""The table of a single launch: run row by row in the emulator it gives what plain MLX gives, and
its text compiles."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import mlx.core as mx
import pytest
from emulated_kernels import fast_emulator
from fixtures import FIX_A, PROMPT, QWEN3
from fused_models import decode, expected, weights_of
from gemv_reference import EMULATED_MMA

from husky_mlx import chain, chips, cuda_chain, device, emulator, frozen, loading, single_launch
from husky_mlx.chain import POINTERS, REGION, SHAPE_SIZE, SHAPES, ChainError
from husky_mlx.cuda_binary import own_text
from husky_mlx.fused import FusedGraph, fused_weights
from husky_mlx.kernel_source import kernel_source
from husky_mlx.kernels import Launch
from husky_mlx.loading import build_model
from husky_mlx.ops import embed
from husky_mlx.ops.gemv import Platform
from husky_mlx.policy import chain_memory
from husky_mlx.turns import SIZE, Turns

H200 = replace(chips.parse("sm_90")[0], cores=132)
fast_emulator = pytest.fixture(fast_emulator)


class Table:
    """Stands for the kernel: takes a chain's rows one after the other, each as one launch in the
    emulator, on arrays that it finds where the row says."""

    def __init__(self, made: chain.Chain, launches: list[Launch]):
        self.made, self.launches = made, launches

    def __call__(self, *, inputs, output_shapes, output_dtypes, grid, threadgroup):
        assert grid == (H200.cores * cuda_chain.BLOCK_THREADS, 1, 1)
        assert threadgroup == (cuda_chain.BLOCK_THREADS, 1, 1)
        outside = list(inputs[: len(self.made.inputs)])
        outside += [None] * len(self.made.outputs)
        scratch: dict[int, mx.array] = {}

        def find(place):
            return outside[place] if place >= 0 else scratch[place]

        for record, launch in zip(self.made.records, self.launches, strict=True):
            phase = self.made.phases[record[0]]
            assert phase.op == launch.op
            names = [p.name for p in phase.signature.buffers if p.role in ("input", "output")]
            places = dict(zip(names, record[POINTERS:], strict=False))
            source = kernel_source(phase.op, cuda=True, overlay=EMULATED_MMA)
            given = [find(places[name]) for name in source.inputs]
            facts = [p for p in phase.signature.buffers if p.role == "shape"]
            for i, fact in enumerate(facts):
                shape, start = find(places[fact.array]).shape, SHAPES + i * SHAPE_SIZE
                assert record[start : start + len(shape)] == shape
            kernel = emulator.metal_kernel(
                phase.op,
                source.inputs,
                source.outputs,
                source.numbered_source,
                header=source.header,
            )
            threads = (phase.threads, 1, 1)
            results = kernel(
                inputs=given,
                template=[(name, launch.template[name]) for name in source.template],
                grid=tuple(n * of for n, of in zip(record[1:4], threads, strict=True)),
                threadgroup=threads,
                output_shapes=[array.shape for array in launch.outputs.values()],
                output_dtypes=[array.dtype for array in launch.outputs.values()],
                threadgroup_memory=chain_memory(H200),
            )
            for name, array in results.updated.items():
                find(places[name])[...] = array
            for name, array in zip(source.outputs, results, strict=True):
                if places[name] >= 0:
                    outside[places[name]] = array
                else:
                    scratch[places[name]] = array
        last = [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)][-3:]
        last[-2] = inputs[-3] + 1  # the next turn
        return [*outside[len(self.made.inputs) :], *last]


@pytest.fixture
def single(monkeypatch, fast_emulator):
    """Models decode by single launches; the tables that they were made of."""
    tables: list[Table] = []
    launches: list[Launch] = []
    real_chain = single_launch.chain

    def remember(given, results):
        launches[:] = given
        return real_chain(given, results)

    def build(made, given, dtypes, memory):
        tables.append(Table(made, list(launches)))
        return tables[-1]

    def fused(config, weights, plan, tiles=None):
        made = fused_weights(config, weights)
        assert not isinstance(made, str), made
        graph = FusedGraph(config, made, plan, Platform(H200, "emulator"))
        graph.single = single_launch.SingleLaunch(graph)
        return graph

    monkeypatch.setattr(single_launch, "chain", remember)
    monkeypatch.setattr(single_launch, "_build", build)
    monkeypatch.setattr(frozen, "choose_graph", fused)
    for module in (device, embed, loading):
        monkeypatch.setattr(module, "activation_dtype", lambda stored: stored)
    monkeypatch.setattr("husky_mlx.freeze.TURNS", Turns())
    return tables


def halves(weights, dtype):
    return {
        name: value if value.dtype == mx.uint32 else value.astype(dtype)
        for name, value in weights.items()
    }


def in_float32(weights):
    return {
        name: value if value.dtype == mx.uint32 else value.astype(mx.float32)
        for name, value in weights.items()
    }


@pytest.mark.parametrize(
    ("config", "bits", "dtype"),
    [
        pytest.param(FIX_A, 4, mx.float16, id="4 bit"),
        pytest.param(FIX_A, 8, mx.bfloat16, id="8 bit"),
        pytest.param(FIX_A, 16, mx.float16, id="16 bit"),
        pytest.param(QWEN3, 4, mx.float16, id="norms of heads"),
        pytest.param({**FIX_A, "tie_word_embeddings": True}, 4, mx.float16, id="tied"),
    ],
)
def test_a_table_gives_the_reference_tokens_across_a_growth(single, config, bits, dtype):
    weights = halves(weights_of(config, bits), dtype)
    model = build_model(config, dict(weights))
    prompt = PROMPT + PROMPT[:20]
    tokens, cache = decode(model, prompt, 8)
    assert tokens == expected(config, in_float32(weights), prompt, 8)
    assert cache[0].capacity() > 64 and cache[0].offset == 68
    layers = config["num_hidden_layers"]
    (launches,) = {len(table.launches) for table in single}
    assert launches == layers * (6 if config is QWEN3 else 5) + 3
    # The ninth step is the one ahead.
    assert len(single) == 9 and model.plan.counts["frozen"] == 9
    # Each kernel is there once: a layer more is rows of the table, not text.
    (kinds,) = {len(table.made.phases) for table in single}
    assert kinds == launches // layers + 2


def test_arrays_between_launches_do_not_overlap(single):
    model = build_model(FIX_A, halves(weights_of(FIX_A), mx.float16))
    decode(model, PROMPT, 1)
    table = single[0]
    sizes: dict[int, int] = {}
    for record, launch in zip(table.made.records, table.launches, strict=True):
        signature = table.made.phases[record[0]].signature
        names = [p.name for p in signature.buffers if p.role in ("input", "output")]
        for name, place in zip(names, record[POINTERS:], strict=False):
            array = {**launch.inputs, **launch.outputs}[name]
            if place < 0:
                assert sizes.setdefault(~place * REGION, array.nbytes) == array.nbytes
    ends = 0
    for start in sorted(sizes):
        assert start >= ends and start % REGION == 0
        ends = start + sizes[start]
    assert ends <= table.made.scratch


def test_operations_between_launches_are_refused():
    def launched(inputs, output):
        template = {"T": mx.float16}
        return Launch("swiglu", "outline", inputs, output, template, (32, 1, 1), (32, 1, 1))

    a, b, c, d = (mx.zeros((64,), mx.float16) for _ in range(4))
    first = launched({"x": a}, {"y": b})
    with pytest.raises(ChainError, match="swiglu takes nothing that a launch before it has made"):
        chain.chain([first, launched({"x": c}, {"y": d})], [d])


def test_what_is_read_early_may_not_be_of_the_launch_before():
    def launched(inputs, output):
        return Launch("down_add", "outline", inputs, {"y": output}, {}, (32, 1, 1), (32, 1, 1))

    a, b, c, d = (mx.zeros((64,), mx.float16) for _ in range(4))
    first = launched({"activated": a, "residual": b}, c)
    with pytest.raises(ChainError, match="down_add reads too early"):
        chain.chain([first, launched({"activated": a, "residual": c}, d)], [d])


def test_more_arrays_than_a_kernel_takes_are_refused(single, monkeypatch):
    monkeypatch.setattr(chain, "MOST_POINTERS", 5)
    model = build_model(FIX_A, halves(weights_of(FIX_A), mx.float16))
    with pytest.warns(UserWarning, match="off: 20 arrays are more than a kernel takes"):
        decode(model, PROMPT, 1)


def test_a_thread_whose_turn_it_is_not_takes_several_launches(single, monkeypatch):
    monkeypatch.setattr(Turns, "take", lambda self: None)
    weights = halves(weights_of(FIX_A), mx.float16)
    model = build_model(FIX_A, dict(weights))
    assert decode(model, PROMPT, 4)[0] == expected(FIX_A, in_float32(weights), PROMPT, 4)
    assert not single


def test_a_cache_longer_than_was_measured_takes_several_launches(single, monkeypatch):
    monkeypatch.setattr("husky_mlx.freeze.CHAIN_LONGEST", 64)
    weights = halves(weights_of(FIX_A), mx.float16)
    model = build_model(FIX_A, dict(weights))
    prompt = PROMPT + PROMPT[:20]
    tokens, cache = decode(model, prompt, 8)
    assert tokens == expected(FIX_A, in_float32(weights), prompt, 8)
    # 60 rows of the prompt, then a step for each token.
    assert cache[0].capacity() > 64 and 0 < len(single) < 8


@pytest.mark.parametrize("error", [ChainError("no compiler"), OSError("a full disk")])
def test_what_cannot_be_chained_is_several_launches_with_one_warning(single, monkeypatch, error):
    def build(made, given, dtypes, memory):
        raise error

    monkeypatch.setattr(single_launch, "_build", build)
    weights = halves(weights_of(FIX_A), mx.float16)
    model = build_model(FIX_A, dict(weights))
    with pytest.warns(UserWarning, match=f"steps of one launch are off: {error}") as warned:
        tokens, _ = decode(model, PROMPT, 4)
    assert tokens == expected(FIX_A, in_float32(weights), PROMPT, 4)
    assert len(warned) == 1 and str(error) in str(model.plan)


def test_each_launch_waits_for_the_one_before(single, monkeypatch):
    left = []
    real = Turns.leave
    monkeypatch.setattr(Turns, "leave", lambda self, after: (left.append(after), real(self, after)))
    decode(build_model(FIX_A, halves(weights_of(FIX_A), mx.float16)), PROMPT, 3)
    assert [int(after[0].item()) for after in left] == [1, 2, 3, 4]
    assert all(after.shape == (SIZE,) for after in left)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("bits", [4, 16])
def test_the_text_compiles(single, bits, tmp_path, monkeypatch):
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path))
    model = build_model(FIX_A, halves(weights_of(FIX_A, bits), mx.bfloat16))
    decode(model, PROMPT, 1)
    made = single[0].made
    arrays = [*made.inputs, *[mx.zeros((SIZE,), mx.uint32)] * 3]
    outputs = [*made.outputs, *[mx.zeros((SIZE,), mx.uint32)] * 3]
    signature = single_launch.signature_of(made, arrays, [array.dtype for array in outputs])
    text = own_text(
        cuda_chain.translate_chain(made, signature, chain_memory(H200)).source, signature, 512
    )
    (tmp_path / "chain.cu").write_text(text)
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-o", tmp_path / "chain.cubin"]
    done = subprocess.run([*command, tmp_path / "chain.cu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
