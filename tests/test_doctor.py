"""``husky doctor``: the report, its exit code, and all of it here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from husky_mlx import cli, doctor, doctor_machine, doctor_software
from husky_mlx.doctor_report import FAIL, OK, WARN, findings


def test_an_mlx_that_cannot_be_imported_is_found(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    assert cli.main(["doctor"]) == 1
    assert "cannot be imported" in capsys.readouterr().out


def test_a_check_that_breaks_is_a_finding_and_the_others_run():
    def broken():
        raise KeyError("no such thing")

    first, second = findings([("broken", broken), ("python", doctor_software.python)])
    assert (first.name, first.state, "KeyError" in first.found) == ("broken", FAIL, True)
    assert second.state == OK


@pytest.mark.parametrize("state", [OK, WARN, FAIL])
def test_only_a_fail_is_an_exit_code_of_1(monkeypatch, capsys, state):
    finding = doctor.fail("a name", "a thing", "do this")
    check = [("a name", lambda: [replace(finding, state=state)])]
    monkeypatch.setattr(doctor, "checks", lambda model: check)
    assert cli.main(["doctor"]) == (state == FAIL)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [state, "a", "name", "a", "thing"]
    assert lines[1].split() == ["->", "do", "this"]
    assert cli.main(["doctor", "--json"]) == (state == FAIL)
    record = json.loads(capsys.readouterr().out)
    assert record["findings"] == [
        {"name": "a name", "state": state, "found": "a thing", "advice": "do this"}
    ]
    assert record["counts"][state] == 1 and record["schema"] == 1


def test_the_whole_of_it_runs_here(monkeypatch, capsys, tmp_path):
    """All checks but the copy and the native build, on the machine of the test."""
    monkeypatch.setattr(doctor_machine, "copy_bandwidth", lambda: 10.0)
    monkeypatch.setattr(doctor_machine.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path))
    cli.main(["doctor", "--json"])
    record = json.loads(capsys.readouterr().out)
    names = {finding["name"] for finding in record["findings"]}
    assert {"python", "system", "mlx", "mlx build", "chip", "memory", "bandwidth"} <= names
    assert {"compiler", "cache", "hub", "kernels", "parity"} <= names
    parity = next(each for each in record["findings"] if each["name"] == "parity")
    assert parity["state"] == OK
