"""Runs the engines of ``husky bench``: each in a process of its own, trials interleaved.

Whatever else the machine does then meets all engines alike.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from husky_mlx import switches
from husky_mlx.bandwidth import roofs_apart
from husky_mlx.bench_machine import Bystanders
from husky_mlx.bench_report import (
    BASELINE,
    FIGURES,
    LLAMA_CPP,
    SIXTEEN_BIT,
    in_order,
    report,
    report_case,
)
from husky_mlx.errors import HuskyError, UsageError
from husky_mlx.notices import notice
from husky_mlx.paths import child_environment

SEED = 0
# Prompt and reply. On a CPU mlx-lm reads about 10 tokens a second and writes 7 (4 bit, 2 cores).
DEFAULT_LENGTHS = {"cpu": (64, 32), "metal": (1024, 512), "cuda": (1024, 512)}
DEFAULT_ROUNDS = {"cpu": 3, "metal": 5, "cuda": 5}
# A trial shorter than this is repeated, and its medians count: one hesitation of the machine would
# be much of a reply that takes a tenth of a second.
TRIAL_SECONDS = 1.0
# Of the memory that MLX may use: what all engines together may take before one is left out.
MEMORY_SHARE = 0.8


class Engine(NamedTuple):
    """A model class, the loop that drives it, what its environment adds, and the dtype that its
    weights are dequantised to, or "" for weights as they are."""

    backend: str
    loop: str
    environment: dict[str, str]
    unquantized: str = ""


ENGINES = {
    "mlx-lm-fp16": Engine("mlx", "mlx-lm", {}, "float16"),
    SIXTEEN_BIT: Engine("mlx", "mlx-lm", {}, "bfloat16"),
    BASELINE: Engine("mlx", "mlx-lm", {}),
    "husky": Engine("husky", "husky", {}),
    "husky-eager": Engine("husky", "husky", {"HUSKY_EAGER": "1"}),
    "mlx-lm-loop": Engine("husky", "mlx-lm", {}),
    LLAMA_CPP: Engine(LLAMA_CPP, LLAMA_CPP, {}),
}


class EngineProcess:
    """A running engine, spoken to in JSON lines; leaving the context kills it."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        engine = ENGINES[name]
        self.name = name
        self.process = subprocess.Popen(
            engine_command(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is the parent's alone to handle: it ends the engines.
            start_new_session=True,
            # An engine runs what its name says, whatever husky doctor once chose.
            env=child_environment() | {"HUSKY_CHOICE": "0"} | engine.environment,
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

    def ask(self, request: dict) -> dict[str, Any]:
        self._send(request)
        return self.reply()

    def trial(self, request: dict) -> dict[str, Any]:
        """One trial; HuskyError unless exactly the requested tokens were read and generated."""
        trial = self.ask(request)
        prompts = request["prompts"]
        asked = (sum(map(len, prompts)), len(prompts) * request["generation_tokens"])
        counted = (trial["prompt_tokens"], trial["generation_tokens"])
        if counted != asked:
            raise HuskyError(
                f"engine {self.name} read {counted[0]} and generated {counted[1]} tokens, asked "
                f"were {asked[0]} and {asked[1]}: its figures cannot be compared"
            )
        return trial


def compare(
    names: Sequence[str], settings: Mapping[str, Any], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Load every engine, then time each case in interleaved rounds after one warm-up.

    A case is a prompt length, a reply length and a number of sequences. Progress goes to stderr. An
    engine that fails, or that did other work than asked, ends the run with a HuskyError. Of the
    ``optional`` engines those are left out, with a notice, that would show nothing or not fit.
    KeyboardInterrupt ends it with the rounds that are complete, if there are any.
    """
    switches.check()
    file = settings["prompt_file"]
    text = None if file is None else _text_of(file)
    with contextlib.ExitStack() as running:
        engines: dict[str, EngineProcess] = {}
        loaded: dict[str, dict[str, Any]] = {}
        for name in sorted(names, key=lambda name: name in optional):
            if name in optional and (reason := _left_out(name, loaded, settings)):
                notice(f"{name}: left out, {reason}")
                continue
            engines[name] = running.enter_context(EngineProcess(name, settings))
            loaded[name] = engines[name].reply()
            plan = loaded[name]["plan"].replace("\n", "; ")
            notice(f"{name}: loaded in {loaded[name]['load_s']:.1f} s: {plan}")
        names = in_order(engines)
        done, prompts = _prepare(settings, engines, loaded, text)
        roofs = [roofs_apart()]
        bystanders = Bystanders([engine.process.pid for engine in engines.values()])
        cases: list[dict[str, Any]] = []
        for length, generated, batch in itertools.product(
            done["prompt_tokens"], done["generation_tokens"], done["batch"]
        ):
            rows = [prompts[row][:length] for row in range(batch)]
            request = {"prompts": rows, "generation_tokens": generated}
            case = _run_case(engines, names, request, done["num_trials"])
            if case is None and not cases:
                raise KeyboardInterrupt
            if case is not None:
                cases.append(case)
            interrupted = case is None or len(case["order"]) < done["num_trials"]
            if interrupted:
                notice("interrupted: the rounds that were complete are reported")
                break
        busy = bystanders.share()
        if not interrupted:
            # All rounds are complete: stopped here, only the second measurement is missing.
            with contextlib.suppress(KeyboardInterrupt):
                roofs.append(roofs_apart())
    copies = [copy for copy, _ in roofs]
    rates = [rate for _, rate in roofs if rate is not None]
    reported = [report_case(case, loaded, max(copies), max(rates, default=None)) for case in cases]
    ordered = {name: loaded[name] for name in names}
    return report(done, ordered, reported, copies, rates, busy, interrupted)


def decode_speeds(
    names: Sequence[str], model: str, prompt: int, reply: int, rounds: int
) -> dict[str, float]:
    """Engine -> tokens a second of greedy decode of a model on disk, the median of the rounds."""
    settings = {
        "model": model,
        "config": None,
        "prompt_tokens": [prompt],
        "generation_tokens": [reply],
        "batch": [1],
        "prompt_file": None,
        "num_trials": rounds,
        "temp": 0.0,
        "top_p": 1.0,
        "seed": SEED,
        "debug": False,
    }
    result = compare(names, settings)
    if result["interrupted"]:
        raise KeyboardInterrupt
    (case,) = result["cases"]
    return {name: case["engines"][name]["figures"]["decode_tps"]["median"] for name in names}


def _left_out(
    name: str, loaded: Mapping[str, dict[str, Any]], settings: Mapping[str, Any]
) -> str | None:
    """Why an engine need not run beside those that are loaded, or None."""
    others = list(loaded.values())
    if name == LLAMA_CPP:
        if importlib.util.find_spec("xllamacpp") is None:
            return "xllamacpp is not installed (pip install 'husky-mlx[bench]')"
        if others[0]["target"] != "cpu" or not others[0]["gguf"]:
            return "it compares with the CPU build on .gguf files"
        if settings["temp"] or settings["batch"] != [1]:
            return "it runs one greedy sequence"
        return None
    if not others[0]["quantized"]:
        return "the weights are not quantized"
    needed = 2e-6 * others[0]["values"] + sum(other["active_mb"] for other in others)
    limit = others[0]["memory_limit_mb"] * MEMORY_SHARE
    if needed > limit:
        return f"all engines together would take {needed:,.0f} MB, {limit:,.0f} are there for them"
    return None


def _text_of(file: str) -> str:
    """What the file of ``--prompt-file`` holds. Raises HuskyError where it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise HuskyError(f"--prompt-file {file}: not UTF-8: {error}") from error
    except OSError as error:
        raise HuskyError(f"--prompt-file {file}: cannot be read: {error.strerror}") from error


def _prepare(
    settings: Mapping[str, Any],
    engines: Mapping[str, EngineProcess],
    loaded: Mapping[str, dict[str, Any]],
    text: str | None,
) -> tuple[dict[str, Any], list[list[int]]]:
    """The settings with what was left open, and a prompt of the longest length a sequence: the
    beginning of ``text``, or random tokens for None."""
    first = next(iter(engines))
    target = loaded[first]["target"]
    prompt, generated = DEFAULT_LENGTHS[target]
    done = {
        **settings,
        "prompt_tokens": settings["prompt_tokens"] or [prompt],
        "generation_tokens": settings["generation_tokens"] or [generated],
        "num_trials": settings["num_trials"] or DEFAULT_ROUNDS[target],
    }
    sequences = max(done["batch"])
    if text is not None:
        reader = next((name for name in engines if ENGINES[name].backend != LLAMA_CPP), None)
        if reader is None:
            raise UsageError(
                f"--prompt-file needs an engine besides {LLAMA_CPP}, whose tokenizer reads it"
            )
        tokens = engines[reader].ask({"tokenize": text})["tokens"]
        if not tokens:
            raise HuskyError(f"--prompt-file {settings['prompt_file']} is empty")
        done["prompt_tokens"] = settings["prompt_tokens"] or [len(tokens)]
        if max(done["prompt_tokens"]) > len(tokens):
            raise HuskyError(
                f"--prompt-file has {len(tokens)} tokens, -p asks for {max(done['prompt_tokens'])}"
            )
        prompts = [tokens] * sequences
    else:
        vocabulary = min(reply["vocab_size"] for reply in loaded.values())
        shape = (sequences, max(done["prompt_tokens"]))
        random = np.random.default_rng(settings["seed"])
        prompts = random.integers(vocabulary, size=shape).tolist()
    words = (
        f"-{letter} {','.join(map(str, done[key]))}"
        for letter, key in (("p", "prompt_tokens"), ("g", "generation_tokens"), ("b", "batch"))
    )
    notice(f"{target}: {' '.join(words)} -n {done['num_trials']}")
    return done, prompts


def _run_case(
    engines: Mapping[str, EngineProcess], names: Sequence[str], request: dict, rounds: int
) -> dict[str, Any] | None:
    """One trial of each engine apart, then the rounds: those before an interrupt, None if there are
    none."""
    trials: dict[str, list[dict]] = {name: [] for name in names}
    order = interleave(names, rounds)
    try:
        cold = {name: engines[name].trial(request) for name in names}
        for number, turn in enumerate(order, 1):
            for name in turn:
                trials[name].append(_settled(engines[name], request))
            speeds = ", ".join(f"{name} {trials[name][-1]['decode_tps']:.1f}" for name in names)
            notice(f"round {number} of {len(order)}: decode tok/s {speeds}")
    except KeyboardInterrupt:
        order = order[: min(map(len, trials.values()))]
        if not order:
            return None
        trials = {name: done[: len(order)] for name, done in trials.items()}
    return {
        "prompt_tokens": len(request["prompts"][0]),
        "generation_tokens": request["generation_tokens"],
        "batch": len(request["prompts"]),
        "cold": cold,
        "trials": trials,
        "order": order,
    }


def _settled(engine: EngineProcess, request: dict) -> dict[str, Any]:
    """The medians of as many trials as TRIAL_SECONDS take; ``repeats`` says how many."""
    until = time.monotonic() + TRIAL_SECONDS
    done = [engine.trial(request)]
    while time.monotonic() < until:
        done.append(engine.trial(request))
    medians = {
        key: statistics.median(trial[key] for trial in done)
        for key in FIGURES
        if done[0].get(key) is not None
    }
    return done[-1] | medians | {"repeats": len(done)}


def engine_command(name: str) -> list[str]:
    """The command line of the process that runs the named engine."""
    return [sys.executable, "-m", "husky_mlx.bench_engine"]


def interleave(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The engines of each round: A B, then B A, then A B ..."""
    return [list(names if number % 2 == 0 else reversed(names)) for number in range(rounds)]
