"""Small facts about this machine, kept between processes: a JSON object in a file of the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from husky_mlx.paths import one_at_a_time, write_whole


def read(path: Path) -> dict[str, Any]:
    """What is kept there, by key; empty where nothing can be read."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def keep(path: Path, key: str, value: Any) -> None:
    """Add or replace one value, after whoever else is at it. Raises OSError where the file cannot
    be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(path.with_suffix(".lock")):
        write_whole(path, json.dumps({**read(path), key: value}, indent=1).encode())
