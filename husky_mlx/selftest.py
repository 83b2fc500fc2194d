"""Proves the fused step on the machine in front of it, against its twin in plain ``mx`` code.

In-place writes are no promise of MLX's, and a kernel that is right on one chip may not compile on
another. So before the kernels serve a reply on a new combination of chip, system, versions, kernel
sources and model shapes, a few steps run both ways, and the verdict is remembered.
"""

from __future__ import annotations

import functools
import platform as machine
import warnings
from collections.abc import Callable, Iterable, Sequence

from husky_mlx import verdicts
from husky_mlx.combination import combination
from husky_mlx.config import LlamaConfig
from husky_mlx.differences import Differences
from husky_mlx.errors import brief
from husky_mlx.freeze import StepGraph
from husky_mlx.fused import FusedWeights
from husky_mlx.ops.gemv import Platform

# Steps of one launch have to win by this much, in the best of so many runs of each: what else a
# host does slows several launches more, so that they are at their best here.
MARGIN, PACES = 0.98, 4


class SelfTest:
    """The tests of one model's fused step: one for each number of rows, batched or not."""

    def __init__(
        self, config: LlamaConfig, weights: FusedWeights, twin: StepGraph, platform: Platform
    ):
        self.twin = twin
        self._differences = Differences(config, weights, twin, platform)
        self._combination = functools.partial(combination, platform, weights, config.rms_norm_eps)
        self._passed: set[tuple[int, bool]] = set()

    def passes(self, rows: int, batched: bool) -> bool:
        """Whether steps of ``rows`` rows may run on the kernels; else the twin's plan says why.

        ``rows``: consecutive tokens of one sequence or, ``batched``, a token of each sequence.
        Tests what neither this process nor an earlier one has: a failure there is one warning.
        """
        if (rows, batched) in self._passed:
            return True
        of = f"{rows} rows{' batched' if batched else ''}"
        problem = self._verdict(
            of,
            "the fused kernels are off, replies are slower",
            functools.partial(self.problem, rows, batched),
        )
        if problem is not None:
            self.twin.plan.kernels = f"plain MLX operations (self-test: {problem})"
            self.twin.plan.launches, self.twin.plan.prefill = [], "plain MLX operations"
            return False
        self._passed.add((rows, batched))
        return True

    def prompts_pass(self) -> bool:
        """Whether prompts may take the kernels."""
        off = "the kernels for prompts are off, first tokens are slower"
        return self._verdict("prompts", off, self.prompt_problem) is None

    def short_prompts_pass(self, lengths: Sequence[int]) -> bool:
        """Whether steps of ``lengths`` rows may take short prompts."""
        off = "the kernels for short prompts are off, their first tokens are slower"
        of = f"prompts of up to {max(lengths)}"
        return self._verdict(of, off, functools.partial(self.short_prompt_problem, lengths)) is None

    def single_launch_wins(self) -> bool:
        """Whether one-token steps of one launch are right and, here, faster than of several.

        What this machine's host needs for a launch decides: it is measured once, and remembered.
        """
        off = "steps of one launch are off"
        find = self._differences.of_single_launch
        if self._verdict("single launch", off, lambda: _first(find())) is not None:
            return False
        found_on = self._combination(f"the pace of a single launch on {machine.node()}")
        known = verdicts.remembered()
        if found_on not in known:
            known = {found_on: self._slower_in_one_launch()}
            verdicts.remember(found_on, known[found_on])
        return known[found_on] is None

    def _slower_in_one_launch(self) -> str | None:
        """What steps of one launch take, in words; None where that is less by MARGIN."""
        steps = self._differences.single_and_several()
        single, several = (
            min(paces)
            for paces in zip(
                *([self._differences.pace(step) for step in steps] for _ in range(PACES)),
                strict=True,
            )
        )
        if single < MARGIN * several:
            return None
        return f"{single:.0f} us a step in one launch, {several:.0f} in several"

    def problem(self, rows: int, batched: bool) -> str | None:
        """What is wrong with such steps here and now; None where they are right."""
        return _first(self._differences.of_steps(rows, batched))

    def prompt_problem(self) -> str | None:
        """What is wrong with prompts here and now; None where they are right."""
        return _first(self._differences.of_prompts())

    def short_prompt_problem(self, lengths: Sequence[int]) -> str | None:
        """What is wrong with short prompts here and now; None where they are right."""
        return _first(self._differences.of_short_prompts(lengths))

    def _verdict(self, of: str, off: str, test: Callable[[], str | None]) -> str | None:
        """The remembered problem of this combination, or what ``test`` finds: one warning."""
        found_on = self._combination(of)
        known = verdicts.remembered()
        if found_on in known:
            return known[found_on]
        problem = test()
        verdicts.remember(found_on, problem)
        if problem is not None:
            warnings.warn(
                f"{off}: {problem} (self-test of {of}; {verdicts.path()} keeps the verdict)",
                stacklevel=3,
            )
        return problem


def _first(problems: Iterable[str | None]) -> str | None:
    """The first problem; whatever a compiler, a driver or a check of ours raises is one."""
    try:
        return next((found for found in problems if found is not None), None)
    except Exception as error:
        return brief(error)
