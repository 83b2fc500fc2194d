"""The environment variables that say what runs: the name, the values and the default of each.

Nothing else reads them. A value that a switch does not take is an error, not its default: who
misspells one would measure, or ship, something else than what was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from husky_mlx.errors import SwitchError

Value = TypeVar("Value")

BACKENDS = ("husky", "mlx")
_NO, _YES = ("0", "false", "no", "off"), ("1", "true", "yes", "on")
_TRUTH = {**dict.fromkeys(_NO, False), **dict.fromkeys(_YES, True)}


@dataclass(frozen=True)
class Switch(Generic[Value]):
    """One variable: what it takes, in any case, and what each word stands for."""

    name: str
    values: Mapping[str, Value]
    default: Value

    def read(self) -> Value:
        """What is set; the default where nothing or the empty string is. Raises SwitchError."""
        text = os.environ.get(self.name, "")
        word = text.strip().lower()
        if not word:
            return self.default
        if word not in self.values:
            allowed = ", ".join(self.values)
            raise SwitchError(f"{self.name} must be one of {allowed}, found {text!r}")
        return self.values[word]


EAGER = Switch("HUSKY_EAGER", _TRUTH, False)
KERNELS = Switch("HUSKY_KERNELS", _TRUTH, True)
SINGLE_LAUNCH = Switch("HUSKY_SINGLE_LAUNCH", _TRUTH, False)
NATIVE = Switch(
    "HUSKY_NATIVE",
    {**dict.fromkeys(_NO, "off"), **dict.fromkeys(_YES, "on"), "exact": "exact"},
    "on",
)
CHOICE = Switch("HUSKY_CHOICE", _TRUTH, True)
# None: nobody asked.
BACKEND = Switch[str | None]("HUSKY_BACKEND", {name: name for name in BACKENDS}, None)
ALL: tuple[Switch, ...] = (EAGER, KERNELS, SINGLE_LAUNCH, NATIVE, BACKEND, CHOICE)


def problems() -> list[SwitchError]:
    """An error for each switch that is set to what it does not take."""
    found = []
    for switch in ALL:
        try:
            switch.read()
        except SwitchError as error:
            found.append(error)
    return found


def check() -> None:
    """Raise SwitchError for the first of them: before anything is read or computed."""
    for error in problems():
        raise error


def changed() -> list[str]:
    """The switches, as in ``HUSKY_KERNELS=0``, that make ours run another way than by default."""
    return [
        f"{switch.name}={os.environ[switch.name]}"
        for switch in (EAGER, KERNELS, SINGLE_LAUNCH, NATIVE)
        if switch.read() != switch.default
    ]
