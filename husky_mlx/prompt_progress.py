"""How far a long prompt is, for people who wait for it."""

from __future__ import annotations

from collections.abc import Callable

from tqdm import tqdm

PATIENCE = 2.0  # seconds without a word


def prompt_progress() -> Callable[[int, int], None]:
    """A ``prompt_progress_callback`` for one prompt: a bar with the time left on a terminal's
    stderr, once the prompt has taken ``PATIENCE``; nothing elsewhere, and nothing is left behind.
    """
    bar: tqdm | None = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(
                total=total,
                desc="reading the prompt",
                unit=" tokens",
                delay=PATIENCE,
                leave=False,
                disable=None,  # where stderr is no terminal
            )
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report
