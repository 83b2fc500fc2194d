"""The tables of ``husky bench`` for people: on a terminal, in a file, as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from husky_mlx.bench_report import BASELINE, FIGURES, NOISY_SPREAD

MAIN_RATIO = f"husky / {BASELINE}"


def print_table(result: Mapping[str, Any], *, markdown: bool = False) -> None:
    """Print ``describe_run() | report(...)``: a table a case, with notes above and below."""
    settings, machine, versions = (result[key] for key in ("settings", "machine", "versions"))
    rounds = settings["num_trials"]
    weights = "{bits} bit, groups of {group_size}, {dtype}, ".format_map(settings)
    end = "  \n" if markdown else "\n"
    lines = [
        f"{settings['model']}: {weights if settings['config'] else ''}{_sampler(settings)}",
        f"{result['target']}: {machine['device']}, {machine['cores']} cores, {machine['os']}, "
        f"{machine['memory_mb']:,.0f} MB, {machine['available_mb']:,.0f} free, power: "
        f"{machine['power']}",
        ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]
    for name, engine in result["engines"].items():
        words = [", ".join(engine["dtypes"]), engine["plan"].replace("\n", "; ")]
        lines.append(f"{name}: {'; '.join(filter(None, words))}")
    speeds = ", ".join(f"{speed:.1f}" for speed in result["copy_gb_s"])
    rates = ", ".join(f"{rate:.0f}" for rate in result["matmul_tflops"])
    lines.append(
        f"copying before and after: {speeds} GB/s; "
        f"{f'bfloat16 products: {rates} TFLOP/s; ' if rates else ''}"
        f"others used {result['busy_share']:.0%}"
    )
    ratios = "" if rounds == 1 else "; ratios are medians over rounds"
    lines.append(spread_words(rounds) + ratios)
    print(end.join(lines))
    for number, case in enumerate(result["cases"]):
        print(f"\n{_title(case)}\n")
        rows = _case_rows(case, result["engines"], cold=number == 0)
        print_rows(*rows, markdown=markdown)
        if case["noisy"]:
            print(f"\n{noisy_words(case['noisy'])}")
    if result["interrupted"]:
        print("\ninterrupted: these are the rounds that were complete")
    if result["busy"]:
        print(
            f"\nother processes used {result['busy_share']:.0%} of all cores meanwhile: run this "
            "again on a quiet machine before you quote it"
        )


def _sampler(settings: Mapping[str, Any]) -> str:
    if not settings["temp"]:
        return "greedy"
    return f"temp {settings['temp']}, top-p {settings['top_p']}, seed {settings['seed']}"


def _title(case: Mapping[str, Any]) -> str:
    batch = f", {case['batch']} sequences" if case["batch"] > 1 else ""
    rounds = len(case["order"])
    return (
        f"prompt {case['prompt_tokens']}, reply {case['generation_tokens']}{batch}, "
        f"{rounds} {'round' if rounds == 1 else 'rounds'}"
    )


def _case_rows(
    case: Mapping[str, Any], loaded: Mapping[str, Any], *, cold: bool
) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the engines, with ours over stock right behind ours, then other ratios.

    ``cold``: the engines did nothing before this case's first trial.
    """
    engines, ratios = case["engines"], case["ratios"]
    columns = list(engines)
    if MAIN_RATIO in ratios:
        columns.insert(columns.index("husky") + 1, MAIN_RATIO)
    columns += [name for name in ratios if name != MAIN_RATIO]

    def row(label: str, of_engine: Callable[[str], str], key: str = "") -> list[str]:
        return [
            label,
            *(
                of_engine(name) if name in engines else _median(ratios[name].get(key))
                for name in columns
            ),
        ]

    def figure(key: str) -> Callable[[str], str]:
        digits = 2 if key == "token_mb" else 1
        return lambda name: _figure(engines[name]["figures"].get(key), digits)

    rows = [
        row(label, figure(key), key)
        for key, label in FIGURES.items()
        if any(key in engine["figures"] for engine in engines.values())
    ]
    label = "first token cold, ms" if cold else "first token of this length, ms"
    apart = "cold_first_token_ms"
    rows.insert(1, row(label, lambda name: f"{engines[name][apart]:.1f}"))
    rows.append(row("trials a round", lambda name: _repeats(engines[name]["trials"])))
    rows.append(row("load, s", lambda name: f"{loaded[name]['load_s']:.1f}"))
    rows.append(row("prompt tokens", lambda name: str(engines[name]["prompt_tokens"])))
    rows.append(row("generated tokens", lambda name: str(engines[name]["generation_tokens"])))
    return ["", *columns], rows


def _repeats(trials: Sequence[Mapping[str, Any]]) -> str:
    """How many trials a figure of one round is the median of."""
    least, most = (pick(trial["repeats"] for trial in trials) for pick in (min, max))
    return str(least) if least == most else f"{least} to {most}"


def _median(ratio: Mapping[str, Any] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.3f}"


def _figure(figure: Mapping[str, Any] | None, digits: int) -> str:
    return "" if figure is None else cell(figure, digits)


def spread_words(rounds: int) -> str:
    """What cells of so many rounds show, for above a table."""
    if rounds == 1:
        return "one round: the spread is unknown, -n 5 shows it"
    return f"medians (min to max); ! marks a spread over {100 * NOISY_SPREAD:.0f} %"


def noisy_words(noisy: Collection[str]) -> str:
    """What to think of the figures of this table that ``cell`` marks, for below it."""
    figures = "1 figure spreads" if len(noisy) == 1 else f"{len(noisy)} figures spread"
    return f"{figures} over {100 * NOISY_SPREAD:.0f} %, marked by !: is the machine busy?"


def cell(figure: Mapping[str, Any], digits: int = 1) -> str:
    """A summary as text: the median, with its range and a mark for noise where they are known."""
    median, low, high = (f"{figure[key]:.{digits}f}" for key in ("median", "min", "max"))
    if figure["spread"] is None or low == high:
        return median
    mark = " !" if figure["noisy"] else ""
    return f"{median} ({low} to {high}){mark}"


def print_rows(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False
) -> None:
    """Print a table: as Markdown, with lines on a terminal, plain in a file."""
    if markdown:
        for row in (header, ["---"] * len(header), *rows):
            print(f"| {' | '.join(text.replace('|', '/') for text in row)} |")
        return
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
