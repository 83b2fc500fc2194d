"""The environment variables that say what runs: what each takes, and what becomes of nonsense."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fixtures import write_folder

from husky_mlx import bench_run, cli, doctor_machine, doctor_report, switches
from husky_mlx.errors import HuskyError, SwitchError
from husky_mlx.loading import load

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NAMES = (
    "HUSKY_EAGER",
    "HUSKY_KERNELS",
    "HUSKY_SINGLE_LAUNCH",
    "HUSKY_NATIVE",
    "HUSKY_BACKEND",
    "HUSKY_CHOICE",
)
ON, OFF = ("1", "true", "YES", "On", " 1 "), ("0", "False", "no", "off")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "switch", [switches.EAGER, switches.KERNELS, switches.SINGLE_LAUNCH, switches.CHOICE]
)
def test_yes_and_no_in_the_usual_words(switch, monkeypatch):
    for words, meant in ((ON, True), (OFF, False)):
        for word in words:
            monkeypatch.setenv(switch.name, word)
            assert switch.read() is meant, word


@pytest.mark.parametrize(
    "value, meant",
    [*((word, "on") for word in ON), *((word, "off") for word in OFF), ("Exact", "exact")],
)
def test_native_is_also_exact(value, meant, monkeypatch):
    monkeypatch.setenv("HUSKY_NATIVE", value)
    assert switches.NATIVE.read() == meant


@pytest.mark.parametrize("value", [None, "", "  "])
def test_nothing_is_the_default(value, monkeypatch):
    for name in NAMES if value is not None else ():
        monkeypatch.setenv(name, value)
    found = {switch.name: switch.read() for switch in switches.ALL}
    assert found == dict(zip(NAMES, (False, True, False, "on", None, True), strict=True))
    assert switches.problems() == switches.changed() == []


def test_what_is_the_default_changes_nothing(monkeypatch):
    for name, value in (("HUSKY_EAGER", "0"), ("HUSKY_KERNELS", "1"), ("HUSKY_NATIVE", "yes")):
        monkeypatch.setenv(name, value)
    assert switches.changed() == []
    monkeypatch.setenv("HUSKY_NATIVE", "exact")
    assert switches.changed() == ["HUSKY_NATIVE=exact"]


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("HUSKY_EAGER", "ture", "0, false, no, off, 1, true, yes, on"),
        ("HUSKY_KERNELS", "2", "0, false, no, off, 1, true, yes, on"),
        ("HUSKY_NATIVE", "exactt", "0, false, no, off, 1, true, yes, on, exact"),
        ("HUSKY_BACKEND", "torch", "husky, mlx"),
        ("HUSKY_CHOICE", "none", "0, false, no, off, 1, true, yes, on"),
    ],
)
class TestNonsense:
    def test_load_raises_before_it_looks_for_a_model(self, name, value, allowed, monkeypatch):
        monkeypatch.setenv(name, value)
        message = re.escape(f"{name} must be one of {allowed}, found '{value}'")
        for backend in (None, "husky", "mlx"):
            with pytest.raises(SwitchError, match=message) as raised:
                load("/no/such/model", backend=backend)
        assert isinstance(raised.value, HuskyError) and isinstance(raised.value, ValueError)

    @pytest.mark.parametrize("command", ["generate", "bench"])
    def test_a_command_is_one_line(
        self, name, value, allowed, command, monkeypatch, tmp_path, capsys
    ):
        monkeypatch.setattr(bench_run, "EngineProcess", None)  # none is started
        monkeypatch.setenv(name, value)
        folder = str(write_folder(tmp_path / "m", tokenizer=True))
        assert cli.main([command, "--model", folder]) == 1
        (line,) = [each for each in capsys.readouterr().err.splitlines() if "husky" in each]
        assert line == f"husky: error: {name} must be one of {allowed}, found '{value}'"

    def test_doctor_names_it_and_checks_the_rest(
        self, name, value, allowed, monkeypatch, tmp_path, capsys
    ):
        monkeypatch.setattr(doctor_machine, "copy_bandwidth", lambda: 10.0)
        monkeypatch.setattr(doctor_machine.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv(name, value)
        assert cli.main(["doctor", "--json"]) == 1
        record = json.loads(capsys.readouterr().out)
        found = {each["name"]: each for each in record["findings"]}
        assert found["environment"] == {
            "name": "environment",
            "state": "fail",
            "found": f"{name} must be one of {allowed}, found '{value}'",
            "advice": "correct or unset it: until then no model loads",
        }
        assert found["cache"]["state"] == "ok"
        assert "report it" not in "".join(each["advice"] for each in record["findings"])


def test_a_check_that_reads_a_wrong_switch_says_that_it_was_not_made():
    def parity():
        raise SwitchError("HUSKY_EAGER must be ...")
        yield

    (found,) = doctor_report.findings([("parity", parity)])
    assert (found.name, found.state) == ("parity", "warn")
    assert found.found.startswith("not checked")


def test_convert_reads_the_backend_too(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HUSKY_BACKEND", "torch")
    folder = write_folder(tmp_path / "m", tokenizer=True)
    target = tmp_path / "out"
    assert cli.main(["convert", "--model", str(folder), "--mlx-path", str(target)]) == 1
    assert "HUSKY_BACKEND must be one of husky, mlx" in capsys.readouterr().err
    assert not target.exists()
    assert cli.main(["convert", "--help"]) == 0


def test_readme_lists_them_all():
    rows = re.findall(r"(?m)^\| `(HUSKY_\w+)=", README)
    assert sorted(rows) == sorted(NAMES) == sorted(switch.name for switch in switches.ALL)
