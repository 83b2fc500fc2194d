"""One engine of ``husky bench``: a process that loads a model once and times trials on request.

It speaks JSON lines. In: the specification, then one line a request: ``{"prompts": [ids, ...],
"generation_tokens": n}`` for a trial, ``{"tokenize": text}`` for its ids; the end of the input ends
the process. Out: one line about the loaded model, then one line a request, or ``{"error": ...}`` as
the last line. All other output goes to stderr.

Stock mlx-lm runs in its fastest dtype: on a GPU the checkpoint's own, on the CPU build float32.
Measured there (SmolLM2's dimensions, 2 x86 cores, mlx 0.32.4, decode tok/s): at 4 bit float32 9.8,
bfloat16 0.75, float16 0.24; at 8 bit 9.6, 1.2, 0.16; at 16 bit 8.5, 6.6, 3.9. Only the prefill of
unquantised bfloat16 is faster than float32 (23 against 14 tok/s). The 16-bit engines run in the
dtype of their name everywhere: they stand for the checkpoint before it was quantised.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import dequantize_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from husky_mlx import device, shapes, sources
from husky_mlx.bench_machine import MEGABYTE, describe_machine
from husky_mlx.bench_report import LLAMA_CPP
from husky_mlx.bench_trial import peak_resident_bytes, run_trial
from husky_mlx.config import LlamaConfig
from husky_mlx.errors import HuskyError
from husky_mlx.footprint import Footprint
from husky_mlx.loading import build_model, load
from husky_mlx.memory import memory_limit
from husky_mlx.model import Model
from husky_mlx.notices import warnings_as_notices
from husky_mlx.structure import expected_shapes


def serve(requests: IO[str], reply: Callable[[dict], None]) -> int:
    """Load the model of the first line, answer each further line with one trial; the exit code.

    Any failure is replied as ``{"error": message}`` and ends the engine with code 1.
    """
    specification = json.loads(requests.readline())
    try:
        started = time.perf_counter()
        described, trial, tokenizer = _open(specification)
        load_seconds = time.perf_counter() - started
        memory = {"memory_limit_mb": memory_limit() / MEGABYTE}
        reply(describe_machine() | described | memory | {"load_s": load_seconds})
        for line in requests:
            request = json.loads(line)
            if "tokenize" in request:
                reply({"tokens": tokens_of(request["tokenize"], tokenizer)})
            else:
                reply(trial(request) | {"rss_mb": peak_resident_bytes() / MEGABYTE})
    except Exception as error:
        if specification["debug"]:
            traceback.print_exc()
        ours = isinstance(error, HuskyError)
        reply({"error": str(error) if ours else f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _open(specification: dict) -> tuple[dict, Callable[[dict], dict], Any]:
    """What there is to say about the loaded model, the function that runs a trial, and the model's
    tokenizer, None where it has none for texts."""
    if specification["backend"] == LLAMA_CPP:
        # Only here: its package is no requirement.
        from husky_mlx.bench_llama_cpp import open_engine

        return *open_engine(specification), None
    model, tokenizer, config = load_model(specification)
    tokenizer.eos_token_ids = set()
    described = describe_model(model, config) | {"gguf": is_gguf(specification)}
    texts = tokenizer if specification["config"] is None else None
    operations = prompt_operations(config)

    def trial(request: dict) -> dict:
        done = run_trial(model, tokenizer, request, specification)
        return done | {"prompt_operations": operations(map(len, request["prompts"]))}

    return described, trial, texts


def prompt_operations(config: dict) -> Callable[[Iterable[int]], int | None]:
    """A function of prompts' lengths: what they multiply and add, or None for a model that only
    mlx-lm knows."""
    try:
        footprint = Footprint(LlamaConfig.from_dict(config), {}, 0, "")
    except HuskyError:
        return lambda lengths: None
    return lambda lengths: sum(map(footprint.prompt_operations, lengths))


def is_gguf(specification: dict) -> bool:
    """Whether the weights are those of a GGUF file."""
    return specification["config"] is None and (
        sources.resolve(specification["model"], config_only=True).suffix == ".gguf"
    )


def tokens_of(text: str, tokenizer: Any) -> list[int]:
    """The token ids of a text as it is, without a chat template."""
    if tokenizer is None:
        raise HuskyError("--prompt-file needs an engine with a tokenizer for texts: a --model")
    return [int(token) for token in tokenizer.encode(text)]


def load_model(specification: dict) -> tuple[nn.Module, Any, dict]:
    """The model, its tokenizer and its config.json."""
    backend = specification["backend"]
    if specification["config"] is not None:
        loaded = _build_shape(specification)
    else:
        source = sources.resolve(specification["model"], notify=print)
        stock_reads_it = backend == "mlx" and source.suffix != ".gguf"
        loaded = (
            mlx_lm.load(str(source), return_config=True)
            if stock_reads_it
            # Ours would run prompts while it loads, and mlx-lm's first token is a cold one.
            else load(str(source), return_config=True, backend=backend, warm=False)
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
    return model, tokenizer, config


def unquantize(model: nn.Module, dtype: mx.Dtype) -> None:
    """Replace every quantized weight by its values in ``dtype``, one matrix after the other.

    The peak is the result and whatever of the quantized weights is not replaced yet.
    """
    dequantize_model(model).set_dtype(dtype)
    for weight in dict(tree_flatten(model.parameters())).values():
        mx.eval(weight)
    mx.clear_cache()


def _build_shape(specification: dict) -> tuple[nn.Module, Any, dict]:
    bits, group_size = specification["bits"], specification["group_size"]
    config = shapes.quantized(specification["config"], bits, group_size)
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


def describe_model(model: nn.Module, config: dict) -> dict:
    """Class, plan, floating-point dtypes, number of weights, bytes held, and what a decode step
    reads: of the weights, and of the cache for each token in it."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    dtypes = {array.dtype for array in parameters.values()}
    described = {
        "model_class": f"{type(model).__module__}.{type(model).__name__}",
        "plan": model.plan.summary if hasattr(model, "plan") else "stock mlx-lm",
        "dtypes": sorted(
            str(dtype).removeprefix("mlx.core.")
            for dtype in dtypes
            if mx.issubdtype(dtype, mx.floating)
        ),
        "quantized": any(name.endswith(".scales") for name in parameters),
        "active_mb": mx.get_active_memory() / MEGABYTE,
        "vocab_size": config.get("vocab_size") or config["text_config"]["vocab_size"],
        "values": None,
        "read_bytes": None,
        "cache_bytes": None,
    }
    try:
        checked = LlamaConfig.from_dict(config)
    except HuskyError:
        return described  # a model of mlx-lm's alone: nothing is known of what it reads
    sizes = Counter[str]()
    for name, array in parameters.items():
        sizes[name.rsplit(".", 1)[0]] += array.nbytes
    size = Footprint(checked, dict(sizes), activation_itemsize(model, parameters), "as loaded")
    return described | {
        "values": sum(map(math.prod, expected_shapes(checked).values())),
        "read_bytes": size.read_bytes(),
        "cache_bytes": size.cache_bytes(1),
    }


def activation_itemsize(model: nn.Module, parameters: Mapping[str, mx.array]) -> int:
    """Bytes of a number of the KV cache: of what the embedding's values are computed in."""
    if isinstance(model, Model):
        return model.model.activation_dtype().size
    table = "model.embed_tokens."
    stored = parameters.get(f"{table}scales", parameters[f"{table}weight"]).dtype
    return 2 if stored == mx.uint8 else stored.size  # the mx formats come out in bfloat16


def main() -> int:
    # Libraries print where they like; only replies may reach the pipe.
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def reply(message: dict) -> None:
        print(json.dumps(message), file=pipe)

    with warnings_as_notices():
        return serve(sys.stdin, reply)


if __name__ == "__main__":
    sys.exit(main())
