"""``husky bench``: engines compared on the same weights and the same token ids.

Each engine lives in a process of its own (``bench_engine``) and is told to run one trial at a
time, so that trials interleave and whatever else the machine does meets all engines alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from husky_mlx.bench_report import BASELINE, LLAMA_CPP, describe_run, print_table, report
from husky_mlx.errors import HuskyError
from husky_mlx.notices import notice
from husky_mlx.shapes import SHAPES, shape_config

SEED = 0
DEFAULT_LENGTHS = {"cpu": (128, 32), "metal": (1024, 512), "cuda": (1024, 512)}
PACKAGE = Path(__file__).resolve().parent


class Engine(NamedTuple):
    """A model class, the loop that drives it, what its environment adds, and the dtype that its
    weights are dequantised to, or "" for weights as they are."""

    backend: str
    loop: str
    environment: dict[str, str]
    unquantized: str = ""


ENGINES = {
    "husky": Engine("husky", "husky", {}),
    BASELINE: Engine("mlx", "mlx-lm", {}),
    "mlx-lm-bf16": Engine("mlx", "mlx-lm", {}, "bfloat16"),
    "mlx-lm-fp16": Engine("mlx", "mlx-lm", {}, "float16"),
    "husky-eager": Engine("husky", "husky", {"HUSKY_EAGER": "1"}),
    "mlx-lm-loop": Engine("husky", "mlx-lm", {}),
    LLAMA_CPP: Engine(LLAMA_CPP, LLAMA_CPP, {}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``husky bench``, named as mlx-lm's benchmark names them."""
    parser.epilog = "husky bench ops times kernel by kernel; it has options of its own"
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="smollm2", help="folder, .gguf, alias or repo")
    model.add_argument("--shape", choices=SHAPES, help="random weights of these dimensions instead")
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), help="with --shape (default 4)")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), help="(default 64)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="(default bfloat16)"
    )
    lengths = "(default 128 and 32 on the CPU, 1024 and 512 elsewhere)"
    parser.add_argument("-p", "--prompt-tokens", type=at_least(1), help=f"prompt length {lengths}")
    parser.add_argument("-g", "--generation-tokens", type=at_least(2), help="tokens to generate")
    parser.add_argument("-n", "--num-trials", type=at_least(1), default=5, help="rounds timed")
    parser.add_argument(
        "--engines",
        type=_engine_names,
        default=["husky", BASELINE],
        help=f"comma-separated, of {', '.join(ENGINES)} (default husky,{BASELINE})",
    )
    parser.add_argument("--temp", type=float, default=0.0, help="sampling temperature (default 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus, with --temp (default 1)")
    parser.add_argument("--json", action="store_true", help="only JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its table or JSON; 0, or HuskyError naming what failed."""
    for name in ("backend", "max_context", "max_kv_size"):
        if getattr(args, name, None) is not None:
            raise HuskyError(f"--{name.replace('_', '-')} does not apply here: use --engines")
    if not 0 <= args.temp < math.inf:
        raise HuskyError(f"--temp must be a number from 0 up, found {args.temp}")
    defaults = {"bits": 4, "group_size": 64, "dtype": "bfloat16"}
    weights = {name: getattr(args, name) for name in defaults}
    if args.shape:
        weights = {name: weights[name] or default for name, default in defaults.items()}
    for name, value in weights.items():
        if value is not None and not args.shape:
            raise HuskyError(f"--{name.replace('_', '-')} needs --shape: a model keeps its own")
    settings = {
        "model": args.shape or args.model,
        "config": shape_config(args.shape) if args.shape else None,
        **weights,
        "prompt_tokens": args.prompt_tokens,
        "generation_tokens": args.generation_tokens,
        "num_trials": args.num_trials,
        "temp": args.temp,
        "top_p": args.top_p,
        "seed": SEED,
        "debug": getattr(args, "debug", False),
    }
    result = describe_run() | compare(args.engines, settings)
    if args.json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        print_table(result)
    return 0


def compare(names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Load every engine, warm each up once, then time ``num_trials`` interleaved rounds.

    Progress goes to stderr. An engine that fails, or that did other work than asked, ends the run
    with a HuskyError.
    """
    with contextlib.ExitStack() as running:
        engines, loaded = {}, {}
        for name in names:
            engines[name] = running.enter_context(EngineProcess(name, settings))
            loaded[name] = engines[name].reply()
            notice(f"{name}: loaded in {loaded[name]['load_s']:.1f} s: {loaded[name]['plan']}")
        target = loaded[names[0]]["target"]
        prompt_tokens, generation_tokens = (
            settings[key] or default
            for key, default in zip(
                ("prompt_tokens", "generation_tokens"), DEFAULT_LENGTHS[target], strict=True
            )
        )
        notice(f"{target}: -p {prompt_tokens} -g {generation_tokens} -n {settings['num_trials']}")
        vocabulary = min(reply["vocab_size"] for reply in loaded.values())
        prompt = np.random.default_rng(settings["seed"]).integers(vocabulary, size=prompt_tokens)
        request = {"prompt": prompt.tolist(), "generation_tokens": generation_tokens}

        cold = {name: engines[name].trial(request) for name in names}
        trials: dict[str, list[dict]] = {name: [] for name in names}
        order = interleave(names, settings["num_trials"])
        for number, turn in enumerate(order, 1):
            for name in turn:
                trials[name].append(engines[name].trial(request))
            speeds = ", ".join(f"{name} {trials[name][-1]['decode_tps']:.1f}" for name in names)
            notice(f"round {number} of {len(order)}: decode tok/s {speeds}")
    done = {**settings, "prompt_tokens": prompt_tokens, "generation_tokens": generation_tokens}
    return report(done, loaded, cold, trials) | {"order": order}


def engine_command(name: str) -> list[str]:
    """The command line of the process that runs the named engine."""
    return [sys.executable, "-m", "husky_mlx.bench_engine"]


class EngineProcess:
    """A running engine, spoken to in JSON lines; leaving the context kills it."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        engine = ENGINES[name]
        python_path = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.name = name
        self.process = subprocess.Popen(
            engine_command(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is the parent's alone to handle: it ends the engines.
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(python_path)} | engine.environment,
        )
        self._send(
            {
                **settings,
                "backend": engine.backend,
                "loop": engine.loop,
                "unquantized": engine.unquantized,
            }
        )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()

    def _send(self, message: dict) -> None:
        assert self.process.stdin is not None
        # A dead engine is reported, with its last words, where its reply is read.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def reply(self) -> dict[str, Any]:
        """The next message; HuskyError with the engine's name where it failed or died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise HuskyError(f"engine {self.name} died with exit code {self.process.wait()}")
        message = json.loads(line)
        if "error" in message:
            raise HuskyError(f"engine {self.name} failed: {message['error']}")
        return message

    def trial(self, request: dict) -> dict[str, Any]:
        """One trial; HuskyError unless exactly the requested tokens were read and generated."""
        self._send(request)
        trial = self.reply()
        asked = (len(request["prompt"]), request["generation_tokens"])
        counted = (trial["prompt_tokens"], trial["generation_tokens"])
        if counted != asked:
            raise HuskyError(
                f"engine {self.name} read {counted[0]} and generated {counted[1]} tokens, asked "
                f"were {asked[0]} and {asked[1]}: its figures cannot be compared"
            )
        return trial


def interleave(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The engines of each round: A B, then B A, then A B ..."""
    return [list(names if number % 2 == 0 else reversed(names)) for number in range(rounds)]


def at_least(smallest: int) -> Callable[[str], int]:
    """The type of a command line argument that is a whole number from ``smallest`` up."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"expected a number from {smallest} up, found {text}")
        return int(text)

    return parse


def _engine_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in ENGINES]
    if unknown or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"expected different names out of {', '.join(ENGINES)}, found {text}"
        )
    return names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m husky_mlx.bench", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the engines' tracebacks")
    try:
        return run(parser.parse_args())
    except HuskyError as error:
        notice(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
