"""An edit of a body that test_emulator.py proves right, and the error that it must be.

``caught`` proves the body here again, unedited, so that a broken tool chain, which fails on
anything, cannot pass for a bug caught.
"""

from __future__ import annotations

import re

import mlx.core as mx
import pytest
from kernel_bodies import BODIES, Case, assert_right

from husky_mlx import emulator


def run(case: Case, **options):
    return emulator.metal_kernel(**case.parts)(**case.call, **options)


def caught(body: str, old: str, new: str, dtype: mx.Dtype = mx.float16, **call):
    """The error for a body with one edit, after the body itself has passed."""
    case = BODIES[body](dtype)
    assert_right(case, run(case))
    edited = case.edited(old, new, **call)
    with pytest.raises(emulator.EmulatorError) as error:
        run(edited)
    return error.value, edited


def assert_reported(error, kind: str, message: str, *lines: int):
    """The kind and the whole message, in which {} stands for a line of the body."""
    expected = re.escape(message).replace(r"\.\.\.", ".*")
    for line in lines:
        expected = expected.replace(r"\{\}", f"body line {line}", 1)
    assert error.kind == kind, error
    assert re.fullmatch(expected, error.message, re.DOTALL), error
