"""The figures of ``husky bench`` as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from husky_mlx.bench_report import FIGURES
from husky_mlx.errors import HuskyError, UsageError
from husky_mlx.paths import require_writable, write_figure

DRAWN = ("first_token_ms", "prefill_tps", "decode_tps", "peak_mb")


def require(path: Path) -> None:
    """Raise HuskyError where nothing could be drawn to ``path``, before anything is timed."""
    if not path.resolve().parent.is_dir():
        raise HuskyError(f"--plot {path}: there is no folder {path.parent}")
    if path.suffix != ".png":
        raise UsageError(f"--plot {path}: expected a name that ends in .png")
    require_writable(path, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise HuskyError("--plot needs matplotlib: pip install 'husky-mlx[bench]'") from error


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write bars of the medians with their ranges: a row of panels for each case.

    Raises OSError where the file cannot be written.
    """
    from matplotlib.figure import Figure

    cases = result["cases"]
    figure = Figure(figsize=(3.2 * len(DRAWN), 2.6 * len(cases) + 0.8), layout="constrained")
    panels = figure.subplots(len(cases), len(DRAWN), squeeze=False)
    for case, row in zip(cases, panels, strict=True):
        for key, panel in zip(DRAWN, row, strict=True):
            figures = {
                name: engine["figures"][key]
                for name, engine in case["engines"].items()
                if key in engine["figures"]
            }
            medians = [each["median"] for each in figures.values()]
            below = [each["median"] - each["min"] for each in figures.values()]
            above = [each["max"] - each["median"] for each in figures.values()]
            panel.bar(list(figures), medians, yerr=(below, above), capsize=3)
            panel.set_title(FIGURES[key], fontsize=9)
            panel.tick_params(axis="x", labelrotation=30, labelsize=7)
        row[0].set_ylabel(
            f"-p {case['prompt_tokens']} -g {case['generation_tokens']} -b {case['batch']}",
            fontsize=8,
        )
    busy = ", on a busy machine" if result["busy"] else ""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    figure.suptitle(
        f"{result['settings']['model']} on {result['machine']['device']}{busy}\n{versions}",
        fontsize=9,
    )
    write_figure(figure, path)
