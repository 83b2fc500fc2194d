"""The bar of a long prompt."""

from __future__ import annotations

import io
import sys

import pytest
from tqdm import std

from husky_mlx import prompt_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that tqdm reads; ``clock[0] += 1`` lets one pass."""
    now = [100.0]
    monkeypatch.setattr(std, "time", lambda: now[0])
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    return now


def read(clock, monkeypatch, stream, seconds):
    monkeypatch.setattr(sys, "stderr", stream)
    report = prompt_progress.prompt_progress()
    report(0, 8000)
    for done in (2000, 4000, 6000):
        clock[0] += seconds
        report(done, 8000)
    shown = stream.getvalue()
    report(8000, 8000)
    return shown, stream.getvalue()


def test_a_long_prompt_shows_tokens_and_the_time_left(clock, monkeypatch):
    shown, ended = read(clock, monkeypatch, Terminal(), 4.0)
    last = shown.split("\r")[-1]
    assert "6000/8000" in last
    # 500 tokens a second: 4 seconds for the rest.
    assert "00:12<00:04" in last
    assert ended.split("\r")[-1].strip() == ""


def test_a_short_prompt_shows_nothing(clock, monkeypatch):
    assert read(clock, monkeypatch, Terminal(), 0.5) == ("", "")


def test_a_pipe_shows_nothing(clock, monkeypatch):
    assert read(clock, monkeypatch, io.StringIO(), 4.0) == ("", "")
