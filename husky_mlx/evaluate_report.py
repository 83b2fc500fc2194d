"""What ``husky eval`` prints and writes: a table for people, its figures, a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from husky_mlx.divergence import Divergence
from husky_mlx.errors import HuskyError
from husky_mlx.evaluate_models import Row

MEANING = (
    "KL is the mean divergence of the next token's distribution from the unquantized model's, in "
    "nats; a model agrees where both rank the same token first. Both measure divergence, not how "
    "well a model does tasks: husky evaluate runs those (lm-evaluation-harness)."
)


def figures(rows: Sequence[Row], tokens: Mapping[str, int]) -> dict[str, Any]:
    """All figures as one JSON-able dict."""
    return {
        "tokens": dict(tokens),
        "models": [
            {
                "name": row.name,
                "rounding": row.rounding,
                "bytes": row.nbytes,
                "bits_per_weight": row.bits_per_weight,
                "decode_tps": row.decode_tps,
                "all": _measures(row.total),
                "domains": {name: _measures(each) for name, each in row.domains.items()},
            }
            for row in rows
        ],
    }


def _measures(found: Divergence) -> dict[str, float]:
    return {"perplexity": found.perplexity, "kl": found.kl, "agreement": found.agreement}


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """One row a model, KL and agreement over all domains and KL for each of them."""
    domains = list(rows[0].domains)
    console = console or Console()
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("model")
    for header in ("MB", "bits/weight", "perplexity", "KL", "agrees", "1 token in N differs"):
        table.add_column(header, justify="right")
    for name in domains if len(domains) > 1 else []:
        table.add_column(f"KL {name}", justify="right")
    timed = any(row.decode_tps is not None for row in rows)
    if timed:
        table.add_column("decode tok/s", justify="right")
    for row in rows:
        total = row.total
        cells = [
            f"{row.name} {row.rounding}".strip(),
            f"{row.nbytes / 1e6:,.1f}",
            f"{row.bits_per_weight:.2f}",
            f"{total.perplexity:.2f}",
            f"{total.kl:.4f}",
            f"{total.agreement:.1%}",
            differs(total),
        ]
        if len(domains) > 1:
            cells += [f"{row.domains[name].kl:.4f}" for name in domains]
        if timed:
            cells.append("" if row.decode_tps is None else f"{row.decode_tps:.1f}")
        table.add_row(*cells)
    console.print(table)
    console.print(MEANING)


def differs(found: Divergence) -> str:
    """One token in how many the two models choose differently."""
    different = found.tokens - found.agreeing
    return f"{found.tokens / different:.1f}" if different else f"none of {found.tokens}"


def figure_class() -> Any:
    """matplotlib's Figure; HuskyError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HuskyError("--plot needs matplotlib: pip install matplotlib") from error
    return Figure


def plot(rows: Sequence[Row], path: Path) -> None:
    """KL against size as a picture."""
    figure = figure_class()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    shown = [row for row in rows if row.total.kl > 0]
    for method in dict.fromkeys(row.rounding for row in shown):
        points = [row for row in shown if row.rounding == method]
        sizes, divergences = [r.nbytes / 1e6 for r in points], [r.total.kl for r in points]
        axes.plot(sizes, divergences, "o", label=method or "floats")
    for row in shown:
        place = row.nbytes / 1e6, row.total.kl
        axes.annotate(row.name, place, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="MB", ylabel="KL, nats a token", yscale="log")
    axes.legend()
    figure.savefig(path)
