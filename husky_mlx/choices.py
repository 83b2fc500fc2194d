"""Which of three ways a kind of model runs fastest on this machine, as ``husky doctor`` timed them.

``load`` takes the choice where its caller leaves it open: no ``backend``, no HUSKY_BACKEND, and
HUSKY_CHOICE is not 0. Switches that change what runs are no part of a choice: while one does, none
is kept and none is followed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from husky_mlx import __version__, device, records, switches
from husky_mlx.paths import cache_dir

# Ours as it runs by default, whichever path that is here: the plan says.
HUSKY, REFERENCE, STOCK = "husky", "reference", "mlx-lm"
# The fields of a config.json that decide how fast a model is.
_FIELDS = (
    *("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "dtype", "torch_dtype"),
    *("quantization", "quantization_config"),
)


class Choice(NamedTuple):
    """The way that won, and tokens a second of decode for each of the ways."""

    way: str
    decode_tps: dict[str, float]

    def __str__(self) -> str:
        speeds = ", ".join(f"{way} {speed:.1f}" for way, speed in self.decode_tps.items())
        return f"{self.way}, by husky doctor on this machine (decode tok/s: {speeds})"


def path() -> Path:
    return cache_dir() / "choices.json"


def remembered(config: Mapping[str, Any]) -> Choice | None:
    """The choice for models of this config (a config.json); None where none was made, or where the
    environment says what runs."""
    if not switches.CHOICE.read() or switches.changed():
        return None
    kept: Any = records.read(path()).get(_key(config))
    try:
        way, speeds = kept["way"], kept["decode_tps"]
        return Choice(way, {str(name): float(speed) for name, speed in speeds.items()})
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def remember(config: Mapping[str, Any], choice: Choice) -> None:
    """Keep a choice. Raises OSError where the cache folder cannot be written."""
    records.keep(path(), _key(config), choice._asdict())


def _key(config: Mapping[str, Any]) -> str:
    facts = json.dumps({name: config.get(name) for name in _FIELDS}, sort_keys=True, default=str)
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return (
        f"{device.target()} on {device.chip()}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, "
        f"husky_mlx {__version__}, model {digest}"
    )
