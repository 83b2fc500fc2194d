"""What ``husky bench`` reports: the statistics, and the record of the run."""

from __future__ import annotations

import datetime
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from husky_mlx.bench_machine import BUSY_SHARE

SCHEMA = 2
BASELINE = "mlx-lm"
SIXTEEN_BIT = "mlx-lm-bf16"
LLAMA_CPP = "llama.cpp"
# The columns from the left: stock in 16 bit, stock at the same bits, ours, then the rest.
COLUMNS = ("mlx-lm-fp16", SIXTEEN_BIT, BASELINE, "husky")
NOISY_SPREAD = 0.10
RECORDED_VARIABLES = ("HUSKY_", "MLX_", "OMP_", "OPENBLAS_")
FIGURES = {
    "first_token_ms": "first token, ms",
    "prefill_tps": "prefill, tok/s",
    "percent_of_matmul": "% of matmul rate",
    "decode_tps": "decode, tok/s",
    "total_s": "total, s",
    "peak_mb": "peak MLX memory, MB",
    "rss_mb": "peak resident, MB",
    "token_mb": "MB a token",
    "percent_of_copy": "% of copy bandwidth",
}


def in_order(names: Iterable[str]) -> list[str]:
    """Engines in the order of their columns."""
    names = list(names)
    return [name for name in COLUMNS if name in names] + [
        name for name in names if name not in COLUMNS
    ]


def summarise(values: Sequence[float]) -> dict[str, Any]:
    """Median, min, max, spread (max - min over the median; None of one value) and whether it is
    over 10 %."""
    median, low, high = statistics.median(values), min(values), max(values)
    spread = (high - low) / median if len(values) > 1 else None
    return {
        "median": median,
        "min": low,
        "max": high,
        "spread": spread,
        "noisy": spread is not None and spread > NOISY_SPREAD,
    }


def pair_ratios(trials: Sequence[dict], baseline: Sequence[dict]) -> dict[str, dict[str, Any]]:
    """Each figure over the baseline's of the same round, summarised over the rounds.

    A figure that one of them has not is left out.
    """
    pairs = list(zip(trials, baseline, strict=True))
    return {
        key: summarise([ours[key] / theirs[key] for ours, theirs in pairs])
        for key in FIGURES
        if None not in (trials[0][key], baseline[0][key])
    }


def prompt_figures(
    trial: Mapping[str, Any], matmul_tflops: float | None
) -> dict[str, float | None]:
    """The percent of the rate of bfloat16 products that the prompt's arithmetic until its first
    token amounts to; None on a CPU and for an unknown engine."""
    operations = trial["prompt_operations"]
    if operations is None or matmul_tflops is None:
        return {"percent_of_matmul": None}
    rate = operations / (trial["first_token_ms"] * 1e-3) / 1e12
    return {"percent_of_matmul": 100 * rate / matmul_tflops}


def roof_figures(
    trial: Mapping[str, Any],
    engine: Mapping[str, Any],
    context: float,
    batch: int,
    copy_gb_s: float,
) -> dict[str, float | None]:
    """Megabytes that a decode step moves for each token with ``context`` tokens in the cache, and
    the percent of the bandwidth of copying that this amounts to; None for an unknown engine."""
    if engine["read_bytes"] is None:
        return {"token_mb": None, "percent_of_copy": None}
    moved = engine["read_bytes"] + batch * context * engine["cache_bytes"]
    steps = trial["decode_tps"] / batch
    return {
        "token_mb": moved / batch / 1e6,
        "percent_of_copy": 100 * steps * moved / (copy_gb_s * 1e9),
    }


def report_case(
    case: Mapping[str, Any],
    loaded: Mapping[str, dict],
    copy_gb_s: float,
    matmul_tflops: float | None,
) -> dict[str, Any]:
    """The figures of one prompt length, reply length and number of sequences."""
    # The cache holds the prompt and, on average, half of the reply.
    context = case["prompt_tokens"] + case["generation_tokens"] / 2
    trials = {
        name: [
            trial
            | prompt_figures(trial, matmul_tflops)
            | roof_figures(trial, loaded[name], context, case["batch"], copy_gb_s)
            for trial in done
        ]
        for name, done in case["trials"].items()
    }
    engines = {
        name: {
            "cold_first_token_ms": case["cold"][name]["first_token_ms"],
            "prompt_tokens": case["cold"][name]["prompt_tokens"],
            "generation_tokens": case["cold"][name]["generation_tokens"],
            "figures": {
                key: summarise([trial[key] for trial in done])
                for key in FIGURES
                if done[0][key] is not None
            },
            "trials": done,
        }
        for name, done in trials.items()
    }
    # Ours over stock at the same bits first: the comparison that a reader looks for.
    pairs = [(name, BASELINE) for name in sorted(trials, key=lambda name: name != "husky")]
    pairs.append(("husky", LLAMA_CPP))
    return {
        **{key: case[key] for key in ("prompt_tokens", "generation_tokens", "batch", "order")},
        "engines": engines,
        "ratios": {
            f"{name} / {other}": pair_ratios(trials[name], trials[other])
            for name, other in pairs
            if name != other and name in trials and other in trials
        },
        "noisy": [
            f"{name} {key}"
            for name, engine in engines.items()
            for key, figure in engine["figures"].items()
            if figure["noisy"]
        ],
    }


def report(
    settings: Mapping[str, Any],
    loaded: Mapping[str, dict],
    cases: Sequence[dict[str, Any]],
    copies: Sequence[float],
    rates: Sequence[float],
    busy_share: float,
    interrupted: bool = False,
) -> dict[str, Any]:
    """All figures of a run as one JSON-able dict. ``copies`` in GB/s, ``rates`` of products in
    TFLOP/s, ``busy_share``: of all cores, what other processes took."""
    first = next(iter(loaded.values()))
    facts = ("model_class", "plan", "dtypes", "active_mb", "load_s", "read_bytes", "cache_bytes")
    return {
        **{key: first[key] for key in ("target", "machine", "versions")},
        "settings": dict(settings),
        "engines": {name: {key: engine[key] for key in facts} for name, engine in loaded.items()},
        "copy_gb_s": list(copies),
        "matmul_tflops": list(rates),
        "busy_share": busy_share,
        "busy": busy_share > BUSY_SHARE,
        "interrupted": interrupted,
        "cases": list(cases),
    }


def describe_run() -> dict[str, Any]:
    """Schema, date, exact command, commit of the checkout (None outside one), environment."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "commit": _commit(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(RECORDED_VARIABLES)
        },
        "load_average": os.getloadavg()[0],
    }


def _commit() -> str | None:
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / ".git").exists():
        return None
    try:
        asked = [
            subprocess.run(
                ["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return asked[0] + (" with local changes" if asked[1] else "")
