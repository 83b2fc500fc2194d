"""An engine of ``husky bench``: its model, its trials, its answers; llama.cpp's."""

import gc
import json
import math
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from bench_fakes import SETTINGS, TINY, numpy_values
from mlx.utils import tree_flatten
from test_gguf_tokenizer import byte_level_file

from husky_mlx import (
    bench_engine,
    bench_llama_cpp,
    bench_report,
    bench_trial,
    gguf,
    loading,
    shapes,
)
from husky_mlx.errors import HuskyError

# What a process is told besides the settings, by its engine.
AS_STORED = {"unquantized": ""}


class Clock:
    """A clock that only the loop below moves."""

    now = 100.0

    def perf_counter(self):
        return self.now


class Response:
    prompt_tokens = 3


def test_figures_of_a_trial_by_a_known_clock_C126(monkeypatch):
    clock = Clock()
    held = []

    def loop(model, tokenizer, prompt, max_tokens):
        clock.now += 2.0
        held.append(mx.ones((1000, 1000)))
        mx.eval(held)
        yield Response()
        for _ in range(max_tokens - 1):
            clock.now += 0.25
            yield Response()
        held.clear()
        clock.now += 1.0

    monkeypatch.setattr(bench_trial, "time", clock)
    monkeypatch.setattr(bench_trial, "stream_generate", loop)
    earlier = mx.ones((5000, 5000))
    mx.eval(earlier)
    del earlier
    # What earlier tests left in cycles would be freed by the trial itself.
    gc.collect()
    before = mx.get_active_memory() / 1e6
    figures = bench_trial.run_trial(
        nn.Linear(1, 1),
        None,
        {"prompts": [[1, 2, 3]], "generation_tokens": 5},
        SETTINGS | {"loop": "husky"},
    )
    assert figures["first_token_ms"] == 2000.0
    assert figures["prefill_tps"] == 1.5
    assert figures["decode_tps"] == 4.0
    assert figures["total_s"] == 4.0
    assert figures["prompt_tokens"] == 3
    assert figures["generation_tokens"] == 5
    assert 4.0 <= figures["peak_mb"] - before < 20.0


def serve(lines, **changes):
    """The replies of an engine in this process to a specification and further lines."""
    replies = []
    feed = iter([json.dumps(SETTINGS | AS_STORED | changes), *map(json.dumps, lines)])

    class Requests:
        def readline(self):
            return next(feed)

        def __iter__(self):
            return feed

    return bench_engine.serve(Requests(), replies.append), replies


REQUEST = {"prompts": [[3, 1, 4, 1, 5]], "generation_tokens": 6}


ROOFS = ("token_mb", "percent_of_copy", "percent_of_matmul")
MEASURED = [key for key in bench_report.FIGURES if key not in ROOFS]


@pytest.mark.parametrize("bits", [4, 16])
def test_engine_serves_trials_of_the_asked_model_and_length(bits):
    for backend, loop, package in (
        ("husky", "husky", "husky_mlx."),
        ("mlx", "mlx-lm", "mlx_lm.models.llama."),
        ("husky", "mlx-lm", "husky_mlx."),
    ):
        code, (loaded, *trials) = serve([REQUEST] * 2, backend=backend, loop=loop, bits=bits)
        assert code == 0
        assert loaded["model_class"].startswith(package)
        assert loaded["vocab_size"] == 160
        assert len(trials) == 2
        for done in trials:
            assert (done["prompt_tokens"], done["generation_tokens"]) == (5, 6)
            assert all(math.isfinite(done[key]) and done[key] > 0 for key in MEASURED)
    if loaded["target"] == "cpu":
        _, (stock,) = serve([], backend="mlx", loop="mlx-lm", bits=bits)
        assert stock["dtypes"] == ["float32"]


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_16_bit_engine_holds_the_same_values_without_the_quantized_ones(name):
    weights = shapes.random_weights(TINY, 4, 32, mx.bfloat16, 0)
    config = TINY | {"quantization": {"group_size": 32, "bits": 4}}
    model = loading.build_model(config, dict(weights), backend="mlx")
    bench_engine.unquantize(model, getattr(mx, name))
    held = dict(tree_flatten(model.parameters()))
    assert set(held) == set(shapes.parameter_shapes(TINY))
    assert {value.dtype for value in held.values()} == {getattr(mx, name)}
    for stem in ("model.embed_tokens", "model.layers.2.mlp.down_proj"):
        found = np.array(held[f"{stem}.weight"].astype(mx.float32))
        # bfloat16 keeps 8 bits: half a unit in the last place, here of the largest value.
        np.testing.assert_allclose(found, numpy_values(weights, stem, 4), atol=np.ptp(found) / 256)


@pytest.mark.parametrize("bits", [4, 16])
def test_a_16_bit_engine_runs_in_16_bits_on_the_cpu_too(bits):
    told = {"backend": "mlx", "loop": "mlx-lm", "unquantized": "bfloat16", "bits": bits}
    code, (loaded, done) = serve([REQUEST], **told)
    assert code == 0
    assert loaded["model_class"].startswith("mlx_lm.models.llama.")
    assert loaded["dtypes"] == ["bfloat16"]
    assert (done["prompt_tokens"], done["generation_tokens"]) == (5, 6)


def test_engine_samples_when_asked():
    code, (_, done) = serve([REQUEST], backend="mlx", loop="mlx-lm", temp=0.7, top_p=0.9)
    assert code == 0
    assert done["generation_tokens"] == 6


@pytest.fixture
def folder(tmp_path):
    """A tiny 4-bit checkpoint with a tokenizer, as on disk."""
    weights = shapes.random_weights(TINY, 4, 32, mx.float16, 0)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "mlx"})
    config = TINY | {
        "quantization": {"group_size": 32, "bits": 4},
        "eos_token_id": list(range(160)),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    bench_engine.shape_tokenizer(160)._tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_engines_take_a_folder_and_do_not_stop_at_its_end_token(folder):
    request = {"prompts": [[5, 9, 2]], "generation_tokens": 40}
    for backend, package in (("husky", "husky_mlx."), ("mlx", "mlx_lm.models.llama.")):
        code, (loaded, done) = serve(
            [request],
            backend=backend,
            loop=backend.replace("mlx", "mlx-lm"),
            config=None,
            model=folder,
        )
        assert code == 0
        assert loaded["model_class"].startswith(package)
        assert done["generation_tokens"] == 40


def test_a_cold_first_token_is_one(folder, monkeypatch):
    """A load that ran prompts would hide what mlx-lm's first token has to wait for."""
    asked = []

    def load(name, **options):
        asked.append(options["warm"])
        return loading.load(name, **options)

    monkeypatch.setattr(bench_engine, "load", load)
    serve([], backend="husky", loop="husky", config=None, model=folder)
    assert asked == [False]


def test_our_model_is_never_timed_as_mlx_lms(folder, monkeypatch):
    ours = loading.load(folder, backend="husky", return_config=True)
    monkeypatch.setattr(bench_engine.mlx_lm, "load", lambda *names, **options: ours)
    code, replies = serve([], backend="mlx", loop="mlx-lm", config=None, model=folder)
    assert code == 1
    assert "expected a model of backend mlx, found husky_mlx" in replies[-1]["error"]


def test_engine_reports_its_failure():
    code, replies = serve([], backend="husky", loop="husky", config=None, model="/no/such/folder")
    assert code == 1
    assert "/no/such/folder" in replies[-1]["error"]


class FakeServer:
    """What xllamacpp has, as far as the engine uses it."""

    def __init__(self, parameters):
        self.parameters = parameters

    def handle_completions(self, request):
        assert request["cache_prompt"] is False and request["ignore_eos"] is True
        assert request["temperature"] == 0.0
        made = request["n_predict"]
        timings = {"prompt_n": len(request["prompt"]), "prompt_ms": 50.0, "prompt_per_second": 60.0}
        return [{"timings": timings | {"predicted_n": made, "predicted_ms": 80.0}}]


@pytest.fixture
def fake_llama_cpp(monkeypatch):
    def parameters():
        return SimpleNamespace(
            model=SimpleNamespace(),
            cpuparams=SimpleNamespace(),
            cpuparams_batch=SimpleNamespace(),
        )

    module = SimpleNamespace(CommonParams=parameters, Server=FakeServer)
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    monkeypatch.setattr(bench_llama_cpp, "version", lambda name: "1.2")


def llama_cpp_settings(model, **changes):
    return {"model": str(model), "config": None, "temp": 0.0, **changes}


def test_llama_cpp_reads_the_same_file_and_counts_its_own_tokens(fake_llama_cpp, tmp_path):
    path = byte_level_file(tmp_path / "a.gguf", "llama-bpe")
    described, run = bench_llama_cpp.open_engine(llama_cpp_settings(path))
    assert described["vocab_size"] == gguf.read_config(path)["vocab_size"]
    assert described["plan"].startswith("xllamacpp 1.2, ")
    done = run({"prompts": [[1, 2, 3]], "generation_tokens": 5})
    assert (done["prompt_tokens"], done["generation_tokens"]) == (3, 5)
    assert (done["first_token_ms"], done["prefill_tps"], done["decode_tps"]) == (50.0, 60.0, 50.0)
    assert done["peak_mb"] is None


def test_what_llama_cpp_cannot_run_is_refused(fake_llama_cpp, folder, monkeypatch):
    for changes in ({"config": {}}, {"temp": 0.5}):
        with pytest.raises(HuskyError, match=r"takes a \.gguf --model and no sampling"):
            bench_llama_cpp.open_engine(llama_cpp_settings(folder, **changes))
    with pytest.raises(HuskyError, match=r"reads \.gguf files"):
        bench_llama_cpp.open_engine(llama_cpp_settings(folder))
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(HuskyError, match=r"needs xllamacpp: pip install 'husky-mlx\[bench\]'"):
        bench_llama_cpp.open_engine(llama_cpp_settings(folder))


@pytest.mark.parametrize("backend", ["husky", "mlx"])
def test_several_sequences_at_once(backend):
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2], [1, 6, 1, 8, 0]]
    request = {"prompts": prompts, "generation_tokens": 6}
    code, (_, done) = serve([request], backend=backend, loop="mlx-lm")
    assert code == 0, done
    assert (done["prompt_tokens"], done["generation_tokens"]) == (15, 18)
    assert all(math.isfinite(done[key]) and done[key] > 0 for key in MEASURED)


def test_an_engine_says_what_a_step_reads():
    _, (ours,) = serve([], backend="husky", loop="husky")
    _, (stock,) = serve([], backend="mlx", loop="mlx-lm")
    matrices = 160 * 64 + 3 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96)
    # 4 bits, and a scale and a bias for 32 values: 32 bits each on the CPU, whose norms are too.
    itemsize = 4 if ours["target"] == "cpu" else 2
    expected = matrices // 2 + matrices // 32 * 2 * itemsize + 7 * 64 * itemsize
    assert stock["read_bytes"] == expected
    # Keys and values of 3 layers with 2 heads of 16.
    assert ours["cache_bytes"] == stock["cache_bytes"] == 3 * 2 * 32 * itemsize
    assert ours["values"] == matrices + 7 * 64 and ours["quantized"]


def test_a_text_becomes_the_ids_of_the_models_tokenizer(folder):
    request = {"tokenize": "t3"}
    _, replies = serve([request], backend="husky", loop="husky", config=None, model=folder)
    assert replies[-1]["tokens"] == [3]
    code, replies = serve([request], backend="husky", loop="husky")
    assert (code, "needs an engine with a tokenizer" in replies[-1]["error"]) == (1, True)
