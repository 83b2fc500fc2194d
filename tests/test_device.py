"""What the device allows: memory checked before it is taken, and a machine that cannot compile."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import psutil
import pytest
from fixtures import FIX_A, FIX_B, PROMPT, mlx_weights, quantize_weights, write_folder
from gguf_files import Types, fix_a_tensors, write
from mlx.utils import tree_flatten
from test_gguf_tokenizer import byte_level_file

import husky_mlx
from husky_mlx import checkpoint, device, memory
from husky_mlx.cache import KVCache
from husky_mlx.errors import MemoryLimitError
from husky_mlx.loading import build_model, load

ROW_BYTES = 2 * 2 * 16 * 4  # keys and values, 2 heads of 16, float32: one token in one layer
EIGHT_LAYERS = {
    **FIX_B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
}


def limit_to(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    """Pretend that the device always has ``spare`` more bytes than MLX holds."""
    monkeypatch.setattr(memory, "memory_limit", lambda: mx.get_active_memory() + spare)


def test_memory_limit_of_the_cpu_build_is_the_machine_s():
    if device.target() != "cpu":
        pytest.skip("another target has its own recommendation")
    assert memory.memory_limit() == pytest.approx(psutil.virtual_memory().total, rel=0.01)


@pytest.mark.parametrize(
    "left, needed, fits", [(1000, 1000, True), (1000, 1001, False), (0, 1, False)]
)
def test_require_memory_counts_what_is_held_already(monkeypatch, left, needed, fits):
    monkeypatch.setattr(memory, "memory_limit", lambda: 4096 + left)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 4096)
    if fits:
        memory.require_memory(needed, "This", "Less would fit.")
        return
    with pytest.raises(MemoryLimitError) as error:
        memory.require_memory(needed, "This", "Less would fit.")
    assert f"This needs {needed:,} bytes, but {left:,} bytes of" in str(error.value)
    assert str(error.value).endswith("are left. Less would fit.")


@pytest.mark.parametrize("packed", [False, True])
def test_model_that_does_not_fit_is_refused_before_allocation(tmp_path, monkeypatch, packed):
    weights = mlx_weights(FIX_B)
    if packed:
        weights = quantize_weights(weights)
    folder = write_folder(tmp_path / "m", FIX_B, weights, tokenizer=True)
    total = sum(value.nbytes for value in weights.values())
    parameters = sum(value.size for value in weights.values())
    del weights
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    limit_to(monkeypatch, total - 1)
    with pytest.raises(MemoryLimitError) as error:
        load(str(folder))
    assert mx.get_peak_memory() - before < total // 20
    message = str(error.value)
    assert f"Loading {folder} needs {total:,} bytes, but {total - 1:,} bytes of" in message
    if packed:
        assert message.endswith("A smaller model or fewer bits would fit.")
    else:
        assert message.endswith(f"At 4 bit it would take about {parameters * 9 // 16:,} bytes.")
    limit_to(monkeypatch, total)
    load(str(folder))


@pytest.mark.parametrize("kind, bits", [(Types.Q4_1, 4), (Types.Q8_0, 8)])
def test_gguf_that_does_not_fit_is_refused_before_its_first_tensor(
    tmp_path, monkeypatch, kind, bits
):
    path = write(tmp_path / "a.gguf", fix_a_tensors({"": kind, "norm": Types.F32}))
    # Two tables of 96 x 64 and two layers of q, o (64 x 64), k, v (32 x 64) and 3 x (128 x 64);
    # a scale and a bias for every 32, in float32 on the CPU; five norms of 64.
    values = 2 * 96 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    scale_bytes = 4 if device.target() == "cpu" else 2
    total = values * bits // 8 + values // 32 * 2 * scale_bytes + 5 * 64 * 4
    gc.collect()
    mx.clear_cache()  # a freed buffer that is taken again counts with the size that it had
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    limit_to(monkeypatch, total - 1)
    with pytest.raises(MemoryLimitError) as error:
        checkpoint.read(path)
    assert mx.get_peak_memory() <= before
    assert f"Loading {path} needs {total:,} bytes" in str(error.value)
    limit_to(monkeypatch, total)
    found = checkpoint.read(path)
    read = sum(value.nbytes for value in found.weights.values())
    assert mx.get_active_memory() - before == pytest.approx(read, rel=0.01)
    model = build_model(found.config, found.weights)
    assert sum(value.nbytes for _, value in tree_flatten(model.parameters())) <= total


def test_gguf_is_counted_once(tmp_path, monkeypatch):
    path = byte_level_file(tmp_path / "a.gguf", "llama-bpe")
    total = sum(value.nbytes for value in checkpoint.read(path).weights.values())
    gc.collect()
    limit = mx.get_active_memory() + total + total // 10
    monkeypatch.setattr(memory, "memory_limit", lambda: limit)
    model, _ = load(str(path))
    assert mx.get_active_memory() <= limit
    del model


def test_lazy_load_is_not_limited(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "m", FIX_B, tokenizer=True)
    limit_to(monkeypatch, 0)
    load(str(folder), lazy=True)


def from_files(folder: Path):
    """The other way to a model: without a tokenizer, as the benchmark takes it."""
    found = checkpoint.read(folder)
    return build_model(found.config, found.weights)


def peak_of_loading(folder: Path, build) -> tuple[int, int, int]:
    """(bytes above the start at the peak, bytes of the weights, bytes of the largest layer)."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = build(folder)
    peak = mx.get_peak_memory() - before

    def size(module) -> int:
        return sum(value.nbytes for _, value in tree_flatten(module.parameters()))

    return peak, size(model), max(map(size, model.layers))


@pytest.mark.parametrize("build", [lambda folder: load(str(folder))[0], from_files])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "4 bit", "mixed"])
def test_peak_while_loading_is_the_weights_and_two_layers(tmp_path, storage, build):
    weights = mlx_weights(EIGHT_LAYERS)
    if storage == "bfloat16":
        weights = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    if storage == "4 bit":
        weights = quantize_weights(weights)
    if storage == "mixed":
        eight = {name: value for name, value in weights.items() if "v_proj" in name}
        rest = {name: value for name, value in weights.items() if "v_proj" not in name}
        weights = quantize_weights(eight, bits=8) | quantize_weights(rest, bits=4)
    folder = write_folder(tmp_path / "m", EIGHT_LAYERS, weights, tokenizer=True)
    del weights
    peak, total, layer = peak_of_loading(folder, build)
    assert 8 * layer > total // 2, "the layers dominate"
    assert total <= peak <= total + 2 * layer + 100_000


def check_reply_cut_short(monkeypatch, tokenizer, sampler) -> None:
    """600 tokens are asked for; from the 100th on the device has no byte to spare."""
    model = build_model({**FIX_A, "max_position_embeddings": 4096}, mlx_weights(FIX_A))
    options = {"max_tokens": 600, "sampler": sampler}
    whole = list(husky_mlx.stream_generate(model, tokenizer, PROMPT, **options))
    assert len(whole) == 600 and whole[-1].finish_reason == "length"
    cache = model.make_cache()
    short, capacity = [], 0
    for response in husky_mlx.stream_generate(
        model, tokenizer, PROMPT, prompt_cache=cache, **options
    ):
        short.append(response)
        if len(short) == 100:
            capacity = cache[0].capacity()
            limit_to(monkeypatch, 0)
    assert capacity <= len(PROMPT) + len(short) <= capacity + 1, "all room that there was is used"
    assert cache[0].capacity() == capacity
    assert [r.token for r in short] == [r.token for r in whole[: len(short)]]
    assert [r.text for r in short[:-1]] == [r.text for r in whole[: len(short) - 1]]
    assert [r.finish_reason for r in short] == [None] * (len(short) - 1) + ["length"]
    assert [r.generation_tokens for r in short] == list(range(1, len(short) + 1))


def test_greedy_reply_that_meets_the_memory_limit_ends_with_length(monkeypatch, plain_tokenizer):
    check_reply_cut_short(monkeypatch, plain_tokenizer, None)


def test_sampled_reply_that_meets_the_memory_limit_ends_with_length(monkeypatch, plain_tokenizer):
    check_reply_cut_short(monkeypatch, plain_tokenizer, lambda x: mx.argmax(x, axis=-1))


@pytest.mark.parametrize("sampler", [None, lambda x: mx.argmax(x, axis=-1)])
@pytest.mark.parametrize("spare", [-2, -1, 0])
def test_memory_taken_right_before_a_growth_ends_the_reply(
    monkeypatch, plain_tokenizer, sampler, spare
):
    model = build_model(FIX_A, mlx_weights(FIX_A))
    cache = model.make_cache()
    responses = []
    for response in husky_mlx.stream_generate(
        model, plain_tokenizer, PROMPT, max_tokens=600, sampler=sampler, prompt_cache=cache
    ):
        responses.append(response)
        if len(PROMPT) + len(responses) == cache[0].capacity() + spare:
            limit_to(monkeypatch, 0)
    assert [r.finish_reason for r in responses] == [None] * (len(responses) - 1) + ["length"]
    assert len(responses) < 600


@pytest.mark.parametrize("sampler", [None, lambda x: mx.argmax(x, axis=-1)])
def test_prompt_that_does_not_fit_is_an_error_with_its_figures(
    monkeypatch, plain_tokenizer, sampler
):
    model = build_model(FIX_A, mlx_weights(FIX_A))
    limit_to(monkeypatch, 10 * 2 * ROW_BYTES)
    with pytest.raises(MemoryLimitError) as error:
        next(husky_mlx.stream_generate(model, plain_tokenizer, PROMPT, 8, sampler=sampler))
    rows = 2 * device.growth_step()  # for 40 tokens
    needed = f"A KV cache of {rows} tokens needs {rows * 2 * ROW_BYTES:,} bytes"
    assert f"{needed}, but 5,120 bytes of" in str(error.value)
    assert str(error.value).endswith("About 10 tokens would fit.")


def test_growth_in_the_middle_of_decode_is_refused_before_allocation(monkeypatch):
    model = build_model(FIX_A, mlx_weights(FIX_A))
    cache = model.make_cache()
    model(mx.array([PROMPT * 6]), cache=cache)
    for _ in range(16):
        mx.eval(model(mx.array([[7]]), cache=cache))
    assert cache[0].offset == cache[0].capacity() == 256
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    # One layer's old buffer lives beside its new one: of 300 rows to spare, 44 are for new tokens.
    limit_to(monkeypatch, 300 * ROW_BYTES)
    with pytest.raises(MemoryLimitError) as error:
        model(mx.array([[7]]), cache=cache)
    assert mx.get_peak_memory() - before < 32 * ROW_BYTES
    step = device.growth_step()
    needed = (2 * step + 256) * ROW_BYTES
    assert f"A KV cache of {256 + step} tokens needs {needed:,} bytes" in str(error.value)
    assert f"but {300 * ROW_BYTES:,} bytes of" in str(error.value)
    assert str(error.value).endswith(f"About {256 + 44 // 2} tokens would fit.")
    assert isinstance(cache[0], KVCache) and cache[0].offset == 256, "the cache is as it was"
    limit_to(monkeypatch, needed)
    assert model(mx.array([[7]]), cache=cache).shape == (1, 1, 96)


REPLY = """
import sys
from husky_mlx import generate, load
from mlx_lm.sample_utils import make_sampler
model, tokenizer = load(sys.argv[1])
print(ascii(generate(model, tokenizer, "the", max_tokens=4)))
if "sampled" in sys.argv:
    sampler = make_sampler(temp=0.7, top_p=0.9, min_p=0.1, top_k=8)
    generate(model, tokenizer, "the", max_tokens=4, sampler=sampler)
print(model.plan)
print(model.plan.counts["frozen"])
"""


def reply_process(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    root = str(Path(husky_mlx.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", REPLY, str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root, **environment},
    )


def finish(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    return out.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("device") / "m", FIX_B, tokenizer=True)


@pytest.fixture(scope="module")
def expected(folder) -> str:
    model, tokenizer = load(str(folder))
    return ascii(husky_mlx.generate(model, tokenizer, "the", max_tokens=4))


@pytest.mark.skipif(device.target() != "cpu", reason="only MLX's CPU build compiles with g++")
def test_without_a_compiler_everything_runs_eagerly_C125(folder, expected, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    machines = {
        "g++, which is not installed": {"PATH": str(tmp_path / "empty"), "TMPDIR": str(tmp_path)},
        "could not compile here": {"TMPDIR": str(tmp_path / "file" / "x")},
    }
    processes = [reply_process(folder, "sampled", **machine) for machine in machines.values()]
    for process, reason in zip(processes, machines, strict=True):
        reply, *plan, frozen = finish(process)
        assert reply == expected
        assert frozen == "0"
        assert "decode: eager (MLX" in plan[1] and reason in plan[1]


@pytest.mark.slow
@pytest.mark.skipif(device.target() != "cpu", reason="only MLX's CPU build compiles with g++")
def test_two_first_runs_share_an_empty_compile_folder_C125(folder, expected, tmp_path):
    for process in [reply_process(folder, TMPDIR=str(tmp_path)) for _ in range(2)]:
        reply, *_, frozen = finish(process)
        assert reply == expected
        assert int(frozen) >= 3, "the steps after the first token"
