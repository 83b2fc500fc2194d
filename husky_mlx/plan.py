"""What runs where, and why: the answer to "did the fast path run?"."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class Plan:
    """The choices made for one model and how often each path has run.

    ``counts`` has "native" (calls of the CPU's native program), "frozen" (decode steps through the
    compiled graph), "prefill" (prompts and pieces of them through the kernels), "reference" (calls
    of the general forward) and "traces" (times that the frozen step's Python ran to be traced).
    ``launches``: a line for each fused kernel of a step, empty where none runs. ``warm_up``: what
    ``load`` made ready, and how long that took.
    ``choice``: what ``husky doctor`` found fastest here, where that decided.
    ``foreign_part``: what somebody built into the model, which is why there is no frozen step.
    """

    target: str
    chip: str
    model: str
    max_rows: int
    activations: str = "not loaded yet"
    kernels: str = "built at the first decode"
    prefill: str = "plain MLX operations"
    native: str | None = None
    warm_up: str | None = None
    eager_reason: str | None = None
    choice: str | None = None
    foreign_part: str | None = None
    launches: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts: Counter[str] = Counter(native=0, frozen=0, prefill=0, reference=0, traces=0)

    @property
    def counts(self) -> dict[str, int]:
        """A copy of the counters."""
        return dict(self._counts)

    def count(self, path: str) -> None:
        """Add one to a counter."""
        self._counts[path] += 1

    def forget_counts(self) -> None:
        """Back to zero: what was counted were no calls of the user's."""
        self._counts = Counter(dict.fromkeys(self._counts, 0))

    def __deepcopy__(self, memo: dict) -> Plan:
        """A copied model counts its own calls, from zero."""
        return Plan(**{f.name: copy.copy(getattr(self, f.name)) for f in fields(self)})

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {line}" for line in self.launches)])

    @property
    def summary(self) -> str:
        """What runs where, without the launches."""
        head = f"{self.target} ({self.chip}) | {self.model} | activations: {self.activations}"
        if self.native is not None:
            step = f"prompts and decode: {self.native} | other calls: plain MLX operations"
        elif self.eager_reason is not None:
            step = f"decode: eager ({self.eager_reason}), plain MLX operations as in prefill"
        elif self.foreign_part is not None:
            step = f"decode: plain MLX operations as in prefill ({self.foreign_part})"
        else:
            step = (
                f"decode: frozen step, compiled, {self.kernels} | prefill: {self.prefill} | "
                f"batches of more than {self.max_rows} rows: plain MLX operations"
            )
        more = [f"chosen: {self.choice}"] if self.choice else []
        more += [self.warm_up] if self.warm_up else []
        return "\n".join([head, step, *more, *self.notes])

    __repr__ = __str__
