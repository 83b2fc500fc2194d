"""What a check of ``husky doctor`` found."""

from __future__ import annotations

from husky_mlx.doctor_report import OK


def one(check, state=None):
    """The only finding of a check, or the only one in a state."""
    (found,) = [finding for finding in check() if state in (None, finding.state)]
    assert bool(found.advice) == (found.state != OK)
    return found
