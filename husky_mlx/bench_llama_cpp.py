"""llama.cpp as an engine of ``husky bench``: the same GGUF file through the package xllamacpp.

Its figures are from its own timings: the prompt's evaluation, then the tokens after the first over
the time after that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from husky_mlx import device, gguf, sources
from husky_mlx.errors import HuskyError
from husky_mlx.native.cores import available_cores

INSTALL = "pip install 'husky-mlx[bench]' brings the version that the figures here are made with"


def open_engine(specification: dict) -> tuple[dict, Callable[[dict], dict]]:
    """What there is to say about the loaded model, and the function that runs one trial.

    Raises HuskyError for a model that is no GGUF file, sampling, or without xllamacpp.
    """
    try:
        import xllamacpp
    except ImportError as error:
        raise HuskyError(f"the engine llama.cpp needs xllamacpp: {INSTALL}") from error
    if device.target() != "cpu":
        raise HuskyError("the engine llama.cpp runs on the CPU: compare it with MLX's CPU build")
    if specification["config"] is not None or specification["temp"] > 0:
        raise HuskyError("the engine llama.cpp takes a .gguf --model and no sampling")
    path = sources.resolve(specification["model"], notify=print)
    if path.suffix != ".gguf":
        raise HuskyError(f"the engine llama.cpp reads .gguf files, found {path}")
    config = gguf.read_config(path)
    threads = available_cores()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = min(config["max_position_embeddings"], 8192)
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0
    parameters.verbosity = -1  # nothing of its log
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)

    def trial(request: dict) -> dict:
        if len(request["prompts"]) != 1:
            raise HuskyError("the engine llama.cpp takes one sequence at a time: -b 1")
        started = time.perf_counter()
        timings = _complete(server, request)
        return {
            "first_token_ms": timings["prompt_ms"],
            "prefill_tps": timings["prompt_per_second"],
            "decode_tps": (timings["predicted_n"] - 1) / timings["predicted_ms"] * 1e3,
            "total_s": time.perf_counter() - started,
            "peak_mb": None,
            "prompt_operations": None,
            "prompt_tokens": timings["prompt_n"],
            "generation_tokens": timings["predicted_n"],
            "calls": {},
        }

    described = {
        "model_class": "llama.cpp",
        "plan": f"xllamacpp {version('xllamacpp')}, {threads} threads",
        "dtypes": [],
        "quantized": True,
        "gguf": True,
        "values": None,
        "read_bytes": None,
        "cache_bytes": None,
        "active_mb": path.stat().st_size / 1e6,
        "vocab_size": config["vocab_size"],
    }
    return described, trial


def _complete(server: Any, request: dict) -> dict:
    """llama.cpp's timings of one completion of exactly so many tokens."""
    reply = server.handle_completions(
        {
            "prompt": request["prompts"][0],
            "n_predict": request["generation_tokens"],
            "cache_prompt": False,
            "ignore_eos": True,
            "temperature": 0.0,
        }
    )
    if isinstance(reply, list | tuple):
        reply = reply[0]
    if isinstance(reply, str | bytes):
        reply = json.loads(reply)
    if "timings" not in reply:
        raise HuskyError(f"llama.cpp replied {str(reply)[:200]}")
    return reply["timings"]
