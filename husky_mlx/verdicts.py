"""Verdicts of self-tests, remembered between processes."""

from __future__ import annotations

import json
from pathlib import Path

from husky_mlx.paths import cache_dir, write_whole


def path() -> Path:
    return cache_dir() / "selftest.json"


def remembered() -> dict[str, str | None]:
    """Verdicts of earlier runs: a combination's problem, or None. Empty where none can be read."""
    try:
        verdicts = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return verdicts if isinstance(verdicts, dict) else {}


def remember(combination: str, problem: str | None) -> None:
    try:
        text = json.dumps({**remembered(), combination: problem}, indent=1)
        write_whole(path(), text.encode())
    except OSError:
        return  # the next load tests again
