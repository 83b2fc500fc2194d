"""The one printer of what people should know besides the result."""

from __future__ import annotations

import sys


def notice(text: str) -> None:
    """One line for people, kept off stdout."""
    print(f"husky: {text}", file=sys.stderr, flush=True)
