"""``husky doctor``: whether this machine runs everything as it should, and what to do if not."""

from __future__ import annotations

import argparse
import functools
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from husky_mlx import __version__
from husky_mlx.doctor_report import (
    FAIL,
    OK,
    WARN,
    Check,
    Finding,
    fail,
    findings,
    installed,
    print_finding,
)

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``husky doctor``."""
    parser.add_argument(
        "--model",
        help="also check this model's files, time stock, reference and fused decode on it, and "
        "keep the winner as this machine's choice",
    )
    parser.add_argument("--json", action="store_true", help="only JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Print a line for each finding; 0, or 1 where one is a fail."""
    found = []
    for finding in findings(checks(args.model)):
        found.append(finding)
        if not args.json:
            print_finding(finding)
    counts = {state: sum(finding.state == state for finding in found) for state in (OK, WARN, FAIL)}
    if args.json:
        record = {
            "schema": SCHEMA,
            "command": "doctor",
            "versions": {name: installed(name) for name in ("mlx", "mlx-lm")}
            | {"husky_mlx": __version__, "python": platform.python_version()},
            "counts": counts,
            "findings": [asdict(finding) for finding in found],
        }
        print(json.dumps(record, indent=2))
    else:
        print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 1 if counts[FAIL] else 0


def checks(model: str | None = None) -> Sequence[tuple[str, Check]]:
    """All checks in order, by the name that a check which breaks is reported under."""
    try:
        import mlx.core  # noqa: F401
        import mlx_lm  # noqa: F401
    except ImportError as error:
        return [("mlx", functools.partial(_not_importable, str(error)))]
    # Only now: all of these import it.
    from husky_mlx import doctor_compute as compute
    from husky_mlx import doctor_machine as machine
    from husky_mlx import doctor_model as models
    from husky_mlx import doctor_software as software

    listed: list[tuple[str, Check]] = [
        ("python", software.python),
        ("system", software.system),
        ("versions", software.versions),
        ("mlx build", software.mlx_build),
        ("environment", software.variables),
        ("chip", machine.chip),
        ("memory", machine.memory),
        ("bandwidth", machine.bandwidth),
        ("compiler", software.cpp_compiler),
        ("folders", machine.folders),
        ("hub", machine.hub),
        ("kernels", compute.kernel_checks),
        ("parity", compute.parity),
        ("model files", models.cached_models),
    ]
    if model is not None:
        listed.append(("model", functools.partial(models.model_checks, model)))
    return listed


def _not_importable(error: str) -> Iterator[Finding]:
    yield fail(
        "mlx",
        f"MLX or mlx-lm cannot be imported: {error}",
        "install husky_mlx with one of [cpu], [cuda12] and [cuda13] on Linux, without any on a Mac",
    )
