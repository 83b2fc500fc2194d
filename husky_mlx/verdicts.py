"""Verdicts of self-tests, remembered between processes."""

from __future__ import annotations

import contextlib
from pathlib import Path

from husky_mlx import records
from husky_mlx.paths import cache_dir


def path() -> Path:
    return cache_dir() / "selftest.json"


def remembered() -> dict[str, str | None]:
    """Verdicts of earlier runs: a combination's problem, or None. Empty where none can be read."""
    return records.read(path())


def remember(combination: str, problem: str | None) -> None:
    # Where it cannot be written the next load tests again.
    with contextlib.suppress(OSError):
        records.keep(path(), combination, problem)
