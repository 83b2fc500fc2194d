"""When steps of one token are one launch: asked for, right, and faster on this machine."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import mlx.core as mx
import pytest

from husky_mlx import chips, graphs, policy, selftest, verdicts
from husky_mlx.plan import Plan

CONFIG = SimpleNamespace(rms_norm_eps=1e-5)
GPU = {"architecture": "sm_90", "total_memory": 141 << 30}
H200 = chips.detect(GPU | {"device_name": "NVIDIA H200"})


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(problem, single, several)``: a self-test where steps of one launch have that
    problem, and those microseconds a step in each of the runs."""
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path))
    asked = []

    def find(problem, single, several):
        paces = {"single": iter(single), "several": iter(several)}
        differences = SimpleNamespace(
            of_single_launch=lambda: asked.append("right") or iter([problem]),
            single_and_several=lambda: ("single", "several"),
            pace=lambda step: asked.append(step) or next(paces[step]),
        )
        monkeypatch.setattr(selftest, "Differences", lambda *given: differences)
        monkeypatch.setattr(selftest, "combination", lambda *given: f"here, {given[-1]}")
        return selftest.SelfTest(CONFIG, None, None, None)

    return find, asked


def test_the_best_of_a_few_runs_decides_and_is_remembered(machine):
    find, asked = machine
    # By 12 %, in the best run of each.
    assert find(None, [700, 440, 900, 800], [500, 510, 505, 700]).single_launch_wins()
    assert asked.count("single") == asked.count("several") == selftest.PACES
    asked.clear()
    assert find(None, [], []).single_launch_wins()
    assert not asked


def test_a_lead_within_the_noise_is_none(machine):
    find, _ = machine
    assert not find(None, [495] * 4, [500] * 4).single_launch_wins()
    verdict = verdicts.remembered()[f"here, the pace of a single launch on {platform.node()}"]
    assert verdict == "495 us a step in one launch, 500 in several"


def test_what_is_wrong_is_off_with_one_warning_and_not_timed(machine):
    find, asked = machine
    with pytest.warns(UserWarning, match="steps of one launch are off: the logits differ"):
        assert not find("the logits differ", [], []).single_launch_wins()
    assert asked == ["right"]
    assert not find(None, [1] * 4, [9] * 4).single_launch_wins()


@pytest.mark.parametrize(
    ("chip", "itemsize", "found"),
    [
        (H200, 2, True),
        (H200, 4, False),
        (chips.parse("m4max")[0], 2, False),
        # How many multiprocessors it has is not known: threadgroups that do not fit would wait for
        # others that never begin.
        (chips.detect(GPU | {"device_name": "NVIDIA H200 MIG 1g.18gb"}), 2, False),
    ],
)
def test_where_there_are_steps_of_one_launch(chip, itemsize, found):
    assert policy.chains_steps(chip, itemsize) is found


@pytest.mark.parametrize("asked", [None, "0", "1"])
@pytest.mark.parametrize("wins", [False, True])
def test_the_plan_says_what_was_asked_for(asked, wins, monkeypatch):
    if asked is not None:
        monkeypatch.setenv("HUSKY_SINGLE_LAUNCH", asked)
    monkeypatch.setattr(graphs, "SingleLaunch", lambda graph: "one launch")
    graph = SimpleNamespace(platform=SimpleNamespace(chip=H200), dtype=mx.bfloat16, single=None)
    plan = Plan("cuda", "a GPU", "a model", 4, kernels="fused kernels")
    graphs._add_single_launch(graph, plan, SimpleNamespace(single_launch_wins=lambda: wins))
    taken = asked == "1" and wins
    assert graph.single == ("one launch" if taken else None)
    assert ("those of one token in one launch" in plan.kernels) is taken
    assert ("several launches a token" in plan.kernels) is (asked == "1" and not wins)
