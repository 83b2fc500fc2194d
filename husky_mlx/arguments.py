"""Types of command line arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(smallest: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from ``smallest`` up."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"expected a number from {smallest} up, found {text}")
        return int(text)

    return parse


def numbers_from(smallest: int) -> Callable[[str], list[int]]:
    """The type of an argument that is a comma-separated list of different such numbers."""

    def parse(text: str) -> list[int]:
        numbers = [at_least(smallest)(part) for part in text.split(",")]
        return list(dict.fromkeys(numbers))

    return parse
