"""A command line of husky in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def husky(*words: str, **options) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HUSKY_")}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "husky_mlx", *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        **options,
    )
