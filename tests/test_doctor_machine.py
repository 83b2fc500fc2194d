"""``husky doctor`` on the machine: chip, memory, bandwidth, folders and hub."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from doctor_findings import one

from husky_mlx import chips, doctor_machine
from husky_mlx.doctor_report import FAIL, OK, WARN


def test_an_unwritable_cache_is_found(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = one(doctor_machine.folders, FAIL)
    assert found.name == "cache" and "set HUSKY_CACHE_DIR" in found.advice


@pytest.mark.parametrize(("limit", "state"), [(1e9, FAIL), (5e9, WARN), (1e12, OK)])
def test_too_little_memory_is_found(monkeypatch, limit, state):
    monkeypatch.setattr(doctor_machine, "memory_limit", lambda: int(limit))
    memory = SimpleNamespace(total=int(limit), available=10_000_000_000)
    monkeypatch.setattr(doctor_machine.psutil, "virtual_memory", lambda: memory)
    assert one(doctor_machine.memory).state == state


def test_an_unknown_chip_is_found(monkeypatch):
    unknown = {"device_name": "Apple M9 Ultra", "architecture": "applegpu_g21d"}
    monkeypatch.setattr(doctor_machine.device, "target", lambda: "metal")
    chip = chips.detect(unknown)
    monkeypatch.setattr(doctor_machine.chips, "detect", lambda: chip)
    found = one(doctor_machine.chip)
    assert (found.state, "policy of metal generation 17, small" in found.found) == (WARN, True)
    monkeypatch.setattr(doctor_machine.chips, "detect", lambda: chips.parse("m3max-40c")[0])
    found = one(doctor_machine.chip)
    assert (found.state, "generation 15, large" in found.found) == (OK, True)


def test_an_unreachable_hub_is_a_warning(monkeypatch):
    asked = []

    def session(problem=None):
        def head(address, timeout):
            asked.append((address, timeout))
            if isinstance(problem, OSError):
                raise problem

            def raise_for_status():
                if problem is not None:
                    raise problem

            return SimpleNamespace(raise_for_status=raise_for_status)

        client = SimpleNamespace(head=head)
        monkeypatch.setattr(doctor_machine.huggingface_hub, "get_session", lambda: client)

    constants = doctor_machine.huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    session()
    assert one(doctor_machine.hub).state == OK
    assert asked == [(constants.ENDPOINT, doctor_machine.HUB_SECONDS)]
    for problem in (ConnectionError("no route"), RuntimeError("HTTP 503")):
        session(problem)
        found = one(doctor_machine.hub)
        assert (found.state, "HF_ENDPOINT" in found.advice) == (WARN, True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in one(doctor_machine.hub).found


def test_a_slow_memory_is_found(monkeypatch):
    monkeypatch.setattr(doctor_machine.device, "target", lambda: "metal")
    monkeypatch.setattr(doctor_machine.chips, "detect", lambda: chips.parse("m3max-40c")[0])
    for speed, state in ((150.0, WARN), (350.0, OK)):
        monkeypatch.setattr(doctor_machine, "copy_bandwidth", lambda speed=speed: speed)
        found = one(doctor_machine.bandwidth)
        assert (found.state, "of 400 on the data sheet" in found.found) == (state, True)


def test_a_stand_ins_figures_are_not_called_the_data_sheets(monkeypatch):
    info = {"device_name": "NVIDIA GeForce RTX 3080", "architecture": "sm_86"}
    stand_in = chips.detect(info)
    monkeypatch.setattr(doctor_machine.device, "target", lambda: "cuda")
    monkeypatch.setattr(doctor_machine.chips, "detect", lambda: stand_in)
    monkeypatch.setattr(doctor_machine, "copy_bandwidth", lambda: 20.0)
    found = one(doctor_machine.bandwidth)
    assert (found.state, found.found) == (OK, "20 GB/s copying")
    assert "those of a small chip stand in" in one(doctor_machine.chip, WARN).found


def test_a_gpus_memory_is_not_part_of_the_hosts(monkeypatch):
    memory = SimpleNamespace(total=64_000_000_000, available=10_000_000_000)
    monkeypatch.setattr(doctor_machine.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor_machine, "memory_limit", lambda: 24_000_000_000)
    monkeypatch.setattr(doctor_machine.device, "target", lambda: "cuda")
    found = one(doctor_machine.memory).found
    assert found == "the GPU has 24,000 MB; the host 64,000 MB, 10,000 MB available now"
