"""Rotary position embedding: what a config asks for, and the frequencies that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """A rotary embedding over the whole head.

    ``theta`` is the base; ``factor`` divides positions for ``linear`` and frequencies for
    ``llama3`` and ``yarn``, whose other constants are those of Llama 3.1 and of YaRN's authors
    unless the config says more. ``magnitude`` multiplies what is rotated.
    ``traditional`` rotates neighbours (2i, 2i+1) instead of halves (i, i + dims/2).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0
    original_max_position_embeddings: int = 8192
    traditional: bool = False

    @property
    def position_scale(self) -> float:
        """What a position is multiplied by before the rotation."""
        return 1.0 / self.factor if self.kind == "linear" else 1.0

    def frequencies(self, dims: int) -> np.ndarray:
        """Radians a position, float32 of shape (dims/2,)."""
        table = self.wavelength_table(dims)
        if table is None:
            table = self._plain_table(dims)
        return (self.position_scale / table).astype(np.float32)

    def wavelength_table(self, dims: int) -> np.ndarray | None:
        """``theta ** (2i/dims)`` with the correction of llama3 or yarn, float32 (dims/2,).

        The convention is that of ``mx.fast.rope(freqs=)``: an angle is position / table. None
        where theta alone says everything. Both corrections slow long waves by ``factor``, keep
        short ones, and interpolate the inverse linearly between the two: llama3's, published with
        Llama 3.1 (``apply_scaling`` in meta-llama/llama-models), by the turns of a wave in the
        original context, yarn's (Peng et al. 2023, arXiv:2309.00071) by its number.
        """
        if self.kind == "yarn":
            return self._yarn_table(dims)
        if self.kind != "llama3":
            return None
        table = self._plain_table(dims)
        turns = self.original_max_position_embeddings / (2 * np.pi * table)
        span = self.high_freq_factor - self.low_freq_factor
        smooth = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return (table / (smooth + (1 - smooth) / self.factor)).astype(np.float32)

    def _plain_table(self, dims: int) -> np.ndarray:
        return self.theta ** (np.arange(0, dims, 2, dtype=np.float64) / dims)

    def _yarn_table(self, dims: int) -> np.ndarray:
        def number(turns: float) -> float:
            """Of the wave that turns so often in the original context."""
            wavelength = self.original_max_position_embeddings / (2 * math.pi * turns)
            return dims * math.log(wavelength) / (2 * math.log(self.theta))

        first = max(math.floor(number(self.beta_fast)), 0)
        last = min(math.ceil(number(self.beta_slow)), dims - 1)
        slowed = np.clip((np.arange(dims // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
        table = self._plain_table(dims)
        return (table / (1 - slowed + slowed / self.factor)).astype(np.float32)


def is_positive(value: Any) -> bool:
    """Whether a value of a config is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def parse_rope(
    config: Mapping[str, Any], theta: float = 10000.0
) -> tuple[Rope | None, list[str], list[str]]:
    """Read the rotary embedding of a config.json; ``theta`` is the base where it has none.

    Returns ``(rope, malformed, unsupported)``: rope is None where one of the lists of sentences is
    not empty. ``rope_parameters`` (transformers 5) wins over ``rope_scaling`` where both stand.
    """
    field = "rope_scaling" if config.get("rope_parameters") in (None, {}) else "rope_parameters"
    scaling = config.get(field)
    scaling = {} if scaling is None else scaling
    if not isinstance(scaling, Mapping):
        return None, [f"{field} must be an object, found {scaling!r}"], []

    given = (scaling.get("rope_theta"), config.get("rope_theta"))
    base = next((value for value in given if value is not None), theta)
    if not is_positive(base):
        return None, [f"rope_theta must be a number above 0, found {base!r}"], []
    rotated = scaling.get("partial_rotary_factor")
    if rotated not in (None, 1):
        found = f"{field}.partial_rotary_factor is {rotated!r}, supported is 1"
        return None, [], [found]
    traditional = bool(config.get("rope_traditional") or False)
    kind = scaling.get("type") if scaling.get("rope_type") is None else scaling["rope_type"]
    numbers = {k: v for k, v in scaling.items() if k not in ("rope_type", "type", "rope_theta")}
    if kind is None:
        meaningful = {k: v for k, v in numbers.items() if v is not None}
        if meaningful:
            return None, [f"{field} has {sorted(meaningful)} but no rope_type"], []
        kind = "default"
    if kind not in SUPPORTED_ROPE_TYPES:
        return None, [], [f"{field}.rope_type is {kind!r}, supported are {SUPPORTED_ROPE_TYPES}"]
    if kind == "default":
        return Rope(theta=float(base), traditional=traditional), [], []

    constants: dict[str, Any] = {}
    malformed = []
    wanted = ["factor"]
    needed = ["factor"]
    if kind == "llama3":
        wanted += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    if kind == "yarn":
        needed += ["original_max_position_embeddings"]
        wanted += ["original_max_position_embeddings", "beta_fast", "beta_slow"]
        unsupported = [
            f"{field}.{name} is {scaling[name]!r}, supported is {plain!r}"
            for name, plain in (("attention_factor", None), ("truncate", True))
            if scaling.get(name, plain) != plain
        ]
        if unsupported:
            return None, [], unsupported
    for name in wanted:
        value = scaling.get(name)
        if value is None and name in needed:
            malformed.append(f"{field}.{name} is missing (rope_type {kind!r} needs it)")
        elif value is not None and not is_positive(value):
            malformed.append(f"{field}.{name} must be a number above 0, found {value!r}")
        elif value is not None:
            constants[name] = value
    if kind == "yarn" and not malformed:
        constants["magnitude"], problem = _yarn_magnitude(scaling)
        malformed += [f"{field}.{problem}"] if problem else []
    rope = Rope(kind=kind, theta=float(base), traditional=traditional, **constants)
    if not malformed and rope.high_freq_factor <= rope.low_freq_factor:
        malformed.append(
            f"{field}.high_freq_factor must be above low_freq_factor, "
            f"found {rope.high_freq_factor} and {rope.low_freq_factor}"
        )
    return (None if malformed else rope), malformed, []


def _yarn_magnitude(scaling: Mapping[str, Any]) -> tuple[float, str | None]:
    """What YaRN multiplies queries and keys by, and what is wrong with its numbers, if anything.

    As mlx-lm has it: the ratio of two magnitudes, of which the second is 1 unless the config says
    ``mscale_all_dim``.
    """
    magnitudes = []
    for name, default in (("mscale", 1), ("mscale_all_dim", 0)):
        value = scaling.get(name)
        value = default if value is None else value
        if value != 0 and not is_positive(value):
            return 1.0, f"{name} must be a number from 0 up, found {value!r}"
        magnitudes.append(0.1 * value * math.log(max(scaling["factor"], 1.0)) + 1.0)
    return magnitudes[0] / magnitudes[1], None
