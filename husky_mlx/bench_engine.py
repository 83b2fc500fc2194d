"""One engine of ``husky bench``: a process that loads a model once and times trials on request.

It speaks JSON lines. In: the specification, then ``{"prompt": ids, "generation_tokens": n}`` a
trial; the end of the input ends the process. Out: one line about the loaded model, then one line
of figures a trial, or ``{"error": ...}`` as the last line. All other output goes to stderr.

Stock mlx-lm runs in its fastest dtype: on a GPU the checkpoint's own, on the CPU build float32.
Measured there (SmolLM2's dimensions, 2 x86 cores, mlx 0.32.4, decode tok/s): at 4 bit float32 9.8,
bfloat16 0.75, float16 0.24; at 8 bit 9.6, 1.2, 0.16; at 16 bit 8.5, 6.6, 3.9. Only the prefill of
unquantised bfloat16 is faster than float32 (23 against 14 tok/s). The 16-bit engines run in the
dtype of their name everywhere: they stand for the checkpoint before it was quantised.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import dequantize_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import husky_mlx
from husky_mlx import device, shapes, sources
from husky_mlx.bench_report import LLAMA_CPP
from husky_mlx.errors import HuskyError
from husky_mlx.generation import stream_generate
from husky_mlx.loading import build_model, load

MEGABYTE = 1e6


def serve(requests: IO[str], reply: Callable[[dict], None]) -> int:
    """Load the model of the first line, answer each further line with one trial; the exit code.

    Any failure is replied as ``{"error": message}`` and ends the engine with code 1.
    """
    specification = json.loads(requests.readline())
    try:
        started = time.perf_counter()
        described, trial = _open(specification)
        load_seconds = time.perf_counter() - started
        reply(describe_machine() | described | {"load_s": load_seconds})
        for line in requests:
            reply(trial(json.loads(line)) | {"rss_mb": peak_resident_bytes() / MEGABYTE})
    except Exception as error:
        if specification["debug"]:
            traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _open(specification: dict) -> tuple[dict, Callable[[dict], dict]]:
    """What there is to say about the loaded model, and the function that runs a trial."""
    if specification["backend"] == LLAMA_CPP:
        # Only here: its package is no requirement.
        from husky_mlx.bench_llama_cpp import open_engine

        return open_engine(specification)
    model, tokenizer, vocabulary = load_model(specification)
    tokenizer.eos_token_ids = set()
    described = describe_model(model) | {"vocab_size": vocabulary}
    return described, lambda trial: run_trial(model, tokenizer, trial, specification)


def load_model(specification: dict) -> tuple[nn.Module, Any, int]:
    """The model, its tokenizer and its vocabulary size."""
    backend = specification["backend"]
    if specification["config"] is not None:
        loaded = _build_shape(specification)
    else:
        source = sources.resolve(specification["model"], notify=print)
        stock_reads_it = backend == "mlx" and source.suffix != ".gguf"
        loaded = (
            mlx_lm.load(str(source), return_config=True)
            if stock_reads_it
            else load(str(source), return_config=True, backend=backend)
        )
    model, tokenizer, config = loaded
    if (backend == "mlx") == type(model).__module__.startswith("husky_mlx"):
        raise HuskyError(
            f"expected a model of backend {backend}, found {type(model).__module__}.Model"
        )
    if specification["unquantized"]:
        unquantize(model, getattr(mx, specification["unquantized"]))
    elif backend == "mlx" and device.target() == "cpu":
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer, config.get("vocab_size") or config["text_config"]["vocab_size"]


def unquantize(model: nn.Module, dtype: mx.Dtype) -> None:
    """Replace every quantized weight by its values in ``dtype``, one matrix after the other.

    The peak is the result and whatever of the quantized weights is not replaced yet.
    """
    dequantize_model(model).set_dtype(dtype)
    for weight in dict(tree_flatten(model.parameters())).values():
        mx.eval(weight)
    mx.clear_cache()


def _build_shape(specification: dict) -> tuple[nn.Module, Any, dict]:
    config, bits, group_size = (specification[key] for key in ("config", "bits", "group_size"))
    if bits < 16:
        config["quantization"] = {"group_size": group_size, "bits": bits}
    dtype = getattr(mx, specification["dtype"])
    weights = shapes.random_weights(config, bits, group_size, dtype, specification["seed"])
    model = build_model(config, weights, backend=specification["backend"])
    return model, shape_tokenizer(config["vocab_size"]), config


class _SilentDetokenizer(StreamingDetokenizer):
    """Costs next to nothing and yields no text: random weights have none."""

    def __init__(self, tokenizer):
        self.reset()

    def reset(self):
        self.offset = 0
        self.text = ""
        self.tokens = []

    def add_token(self, token):
        self.tokens.append(token)

    def finalize(self):
        pass


def shape_tokenizer(vocab_size: int) -> TokenizerWrapper:
    """A tokenizer of ``vocab_size`` meaningless words without an end token."""
    words = WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0")
    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)), _SilentDetokenizer
    )


def run_trial(model: nn.Module, tokenizer: Any, trial: dict, specification: dict) -> dict:
    """One reply timed from outside the loop: ms, tokens a second, seconds and megabytes (1e6).

    The first response ends the prefill; decode counts the tokens after the first over the time
    after the first. ``peak_mb`` is what MLX held at most during the trial, weights included.
    """
    loop = {"husky": stream_generate, "mlx-lm": mlx_lm.stream_generate}[specification["loop"]]
    prompt, options = trial["prompt"], dict[str, Any]()
    if specification["temp"] > 0:
        options["sampler"] = make_sampler(specification["temp"], specification["top_p"])
    mx.random.seed(specification["seed"])
    before = dict(getattr(getattr(model, "plan", None), "counts", {}))
    gc.collect()
    mx.reset_peak_memory()

    started = time.perf_counter()
    arrivals, read = [], 0
    for response in loop(
        model, tokenizer, prompt, max_tokens=trial["generation_tokens"], **options
    ):
        arrivals.append(time.perf_counter())
        read = int(response.prompt_tokens)
    total = time.perf_counter() - started

    peak = max(mx.get_peak_memory(), mx.get_active_memory())
    # mlx-lm runs one step past the last token: it must not run into the next engine's trial.
    mx.synchronize(generation_stream)
    mx.synchronize()
    first, after_first = arrivals[0] - started, arrivals[-1] - arrivals[0]
    return {
        "first_token_ms": first * 1e3,
        "prefill_tps": len(prompt) / first,
        "decode_tps": (len(arrivals) - 1) / after_first if after_first else 0.0,
        "total_s": total,
        "peak_mb": peak / MEGABYTE,
        "prompt_tokens": read,
        "generation_tokens": len(arrivals),
        "calls": {
            kind: count - before.get(kind, 0)
            for kind, count in getattr(getattr(model, "plan", None), "counts", {}).items()
        },
    }


def peak_resident_bytes() -> int:
    """The most memory that this process ever had resident, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # A new program inherits its parent's ru_maxrss on Linux; VmHWM (KiB) is its own.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def describe_model(model: nn.Module) -> dict:
    """Class, plan, floating-point dtypes, bytes held."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    dtypes = {array.dtype for array in parameters.values()}
    return {
        "model_class": f"{type(model).__module__}.{type(model).__name__}",
        "plan": model.plan.summary if hasattr(model, "plan") else "stock mlx-lm",
        "dtypes": sorted(
            str(dtype).removeprefix("mlx.core.")
            for dtype in dtypes
            if mx.issubdtype(dtype, mx.floating)
        ),
        "active_mb": mx.get_active_memory() / MEGABYTE,
    }


def describe_machine() -> dict:
    """Target (cpu, metal, cuda), device, processor, system and versions."""
    return {
        "target": device.target(),
        "machine": {
            "device": device.chip(),
            "chip": _processor(),
            "cores": os.cpu_count(),
            "os": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {
            "husky_mlx": husky_mlx.__version__,
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
        },
    }


def _processor() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> int:
    # Libraries print where they like; only replies may reach the pipe.
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def reply(message: dict) -> None:
        print(json.dumps(message), file=pipe)

    return serve(sys.stdin, reply)


if __name__ == "__main__":
    sys.exit(main())
