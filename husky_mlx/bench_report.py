"""What ``husky bench`` reports: the statistics, the record of the run, the table for people."""

from __future__ import annotations

import datetime
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

SCHEMA = 1
BASELINE = "mlx-lm"
LLAMA_CPP = "llama.cpp"
NOISY_SPREAD = 0.10
RECORDED_VARIABLES = ("HUSKY_", "MLX_", "OMP_", "OPENBLAS_")
FIGURES = {
    "first_token_ms": "first token, ms",
    "prefill_tps": "prefill, tok/s",
    "decode_tps": "decode, tok/s",
    "total_s": "total, s",
    "peak_mb": "peak MLX memory, MB",
    "rss_mb": "peak resident, MB",
}


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


def report(
    settings: Mapping[str, Any],
    loaded: Mapping[str, dict],
    cold: Mapping[str, dict],
    trials: Mapping[str, list[dict]],
) -> dict[str, Any]:
    """All figures of a run as one JSON-able dict."""
    engines = {
        name: {
            **{key: loaded[name][key] for key in ("model_class", "plan", "dtypes", "active_mb")},
            "load_s": loaded[name]["load_s"],
            "cold_first_token_ms": cold[name]["first_token_ms"],
            "prompt_tokens": cold[name]["prompt_tokens"],
            "generation_tokens": cold[name]["generation_tokens"],
            "figures": {
                key: summarise([trial[key] for trial in done])
                for key in FIGURES
                if done[0][key] is not None
            },
            "trials": done,
        }
        for name, done in trials.items()
    }
    first = next(iter(loaded.values()))
    return {
        **{key: first[key] for key in ("target", "machine", "versions")},
        "settings": dict(settings),
        "engines": engines,
        "ratios": {
            f"{name} / {other}": pair_ratios(trials[name], trials[other])
            for name, other in [(name, BASELINE) for name in trials] + [("husky", LLAMA_CPP)]
            if name != other and name in trials and other in trials
        },
        "noisy": [
            f"{name} {key}"
            for name, engine in engines.items()
            for key, figure in engine["figures"].items()
            if figure["noisy"]
        ],
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


def print_table(result: Mapping[str, Any]) -> None:
    """Print ``describe_run() | report(...)`` for people: a table with notes above and below."""
    settings, engines, ratios = (result[key] for key in ("settings", "engines", "ratios"))
    header = ["", *engines, *ratios]
    rows = [
        [
            label,
            *(_figure(engine["figures"].get(key)) for engine in engines.values()),
            *(f"{ratio[key]['median']:.3f}" if key in ratio else "" for ratio in ratios.values()),
        ]
        for key, label in FIGURES.items()
    ]
    for label, key, form in (
        ("first token cold, ms", "cold_first_token_ms", "{:.1f}"),
        ("load, s", "load_s", "{:.1f}"),
        ("prompt tokens", "prompt_tokens", "{}"),
        ("generated tokens", "generation_tokens", "{}"),
    ):
        cells = [form.format(engine[key]) for engine in engines.values()]
        rows.append([label, *cells, *[""] * len(ratios)])

    rounds = settings["num_trials"]
    machine, versions = result["machine"], result["versions"]
    weights = "{bits} bit, groups of {group_size}, {dtype}, ".format_map(settings)
    print(
        f"{settings['model']}: {weights if settings['config'] else ''}"
        f"{rounds} {'round' if rounds == 1 else 'rounds'}, temp {settings['temp']}"
    )
    print(f"{result['target']}: {machine['device']}, {machine['cores']} cores, {machine['os']}")
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    for name, engine in engines.items():
        words = [", ".join(engine["dtypes"]), engine["plan"].replace("\n", "; ")]
        print(f"{name}: {'; '.join(filter(None, words))}")
    if rounds == 1:
        print("one round: the spread is unknown, -n 5 shows it\n")
    else:
        print("median (min to max); ! marks a spread over 10 %; ratios are medians over rounds\n")
    print_rows(header, rows)
    if result["noisy"]:
        print(f"\nspread over 10 %: {', '.join(result['noisy'])}. Is the machine busy?")


def _figure(figure: Mapping[str, Any] | None) -> str:
    return "" if figure is None else cell(figure)


def cell(figure: Mapping[str, Any], digits: int = 1) -> str:
    """A summary as text: the median, with its range and a mark for noise where they are known."""
    median, low, high = (f"{figure[key]:.{digits}f}" for key in ("median", "min", "max"))
    if figure["spread"] is None:
        return median
    mark = " !" if figure["noisy"] else ""
    return f"{median} ({low} to {high}){mark}"


def print_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with lines on a terminal and plain in a file."""
    if sys.stdout.isatty():
        table = Table(*header, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
