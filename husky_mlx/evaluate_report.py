"""What ``husky eval`` prints and writes: a table for people, its figures, a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from husky_mlx.divergence import Divergence
from husky_mlx.errors import HuskyError
from husky_mlx.evaluate_models import Row
from husky_mlx.paths import write_figure

MEANING = (
    "bits: of a weight, with its share of scales. KL: the mean divergence of the next token's "
    "distribution from the unquantized model's, in nats. agrees: how often both rank the same "
    "token first. All this measures divergence, not how well a model does tasks: husky evaluate "
    "runs those (lm-evaluation-harness)."
)

_BY_DOMAIN: dict[str, Callable[[Divergence], str]] = {
    "KL": lambda found: f"{found.kl:.4f}",
    "agrees": lambda found: f"{found.agreement:.1%}",
    "perplexity": lambda found: f"{found.perplexity:.2f}",
}


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


def print_table(rows: Sequence[Row]) -> None:
    """A table over all text, then one a measure with a column for each domain."""
    console = Console()
    timed = any(row.decode_tps is not None for row in rows)
    headers = ["MB", "bits", "perplexity", "KL", "agrees", "differs"]
    table = _table(headers + ["tok/s"] * timed)
    for row in rows:
        total = row.total
        cells = [
            f"{row.nbytes / 1e6:,.1f}",
            f"{row.bits_per_weight:.2f}",
            f"{total.perplexity:.2f}",
            f"{total.kl:.4f}",
            f"{total.agreement:.1%}",
            differs(total),
        ]
        if timed:
            cells.append("" if row.decode_tps is None else f"{row.decode_tps:.1f}")
        table.add_row(_label(row), *cells)
    console.print(table)
    domains = list(rows[0].domains)
    for title, measure in _BY_DOMAIN.items() if len(domains) > 1 else ():
        table = _table(domains, title)
        for row in rows:
            table.add_row(_label(row), *(measure(row.domains[name]) for name in domains))
        console.print(table)
    console.print(MEANING)


def _table(headers: Sequence[str], title: str | None = None) -> Table:
    # The names of the default recipes stay on one line at 80 columns.
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("model", overflow="fold")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _label(row: Row) -> str:
    return f"{row.name} {row.rounding}".strip()


def differs(found: Divergence) -> str:
    """How often the two models rank another token first: "1 token in N"."""
    different = found.tokens - found.agreeing
    return f"1 token in {found.tokens / different:.1f}" if different else "none"


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
    write_figure(figure, path)
