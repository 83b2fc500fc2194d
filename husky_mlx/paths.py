"""Where files of ours live on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """$HUSKY_CACHE_DIR, or the platform's cache folder for husky_mlx."""
    chosen = os.environ.get("HUSKY_CACHE_DIR")
    return Path(os.path.expanduser(chosen or platformdirs.user_cache_dir("husky_mlx")))
