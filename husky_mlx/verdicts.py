"""Verdicts of self-tests, remembered between processes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from husky_mlx.paths import cache_dir


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
    target = path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: another process reads the old verdicts or the new ones.
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=".selftest-", delete=False
        ) as file:
            json.dump({**remembered(), combination: problem}, file, indent=1)
        os.replace(file.name, target)
    except OSError:
        return  # the next load tests again
