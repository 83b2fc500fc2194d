"""``husky doctor`` on software: planted faults of versions and builds, each found with advice."""

from __future__ import annotations

import pytest
from doctor_findings import one

from husky_mlx import doctor_report, doctor_software
from husky_mlx.doctor_report import FAIL, OK, WARN
from husky_mlx.native import NativeError, compiler


@pytest.fixture
def versions(monkeypatch):
    """``versions(mlx="0.31.0")``: what is installed, for the checks; None for not at all."""

    def install(**named):
        found = {name.replace("_", "-"): number for name, number in named.items()}
        real = doctor_report.installed
        monkeypatch.setattr(
            doctor_software,
            "installed",
            lambda package: found[package] if package in found else real(package),
        )

    return install


def test_two_builds_of_mlx_are_found(versions):
    versions(mlx="0.32.4", mlx_cpu="0.32.4", mlx_cuda_13="0.32.4")
    found = one(doctor_software.mlx_build)
    assert (found.state, "exclude each other" in found.found) == (FAIL, True)
    assert "pip uninstall -y mlx mlx-cpu mlx-cuda-13" in found.advice


def test_parts_of_two_releases_are_found(versions):
    versions(mlx="0.32.4", mlx_cpu="0.32.2")
    found = one(doctor_software.mlx_build)
    assert (found.state, "parts of two releases" in found.found) == (FAIL, True)
    assert "mlx-cpu==0.32.4" in found.advice


def test_the_cpu_build_beside_a_gpu_is_found(versions, monkeypatch):
    versions(mlx="0.32.4", mlx_cpu="0.32.4", mlx_cuda_13=None)
    monkeypatch.setattr(doctor_software.device, "target", lambda: "cpu")
    assert one(doctor_software.mlx_build).state == OK
    monkeypatch.setattr(doctor_software, "_nvidia_gpu", lambda: "NVIDIA H200")
    found = one(doctor_software.mlx_build)
    assert (found.state, "there is an NVIDIA H200" in found.found) == (FAIL, True)


def test_a_mac_without_metal_is_found(versions, monkeypatch):
    versions(mlx="0.32.4", mlx_cpu=None, mlx_metal="0.32.4")
    monkeypatch.setattr(doctor_software.sys, "platform", "darwin")
    monkeypatch.setattr(doctor_software.mx.metal, "is_available", lambda: False)
    assert "MLX finds no Metal device" in one(doctor_software.mlx_build, FAIL).found


@pytest.mark.parametrize(("target", "state"), [("cpu", FAIL), ("metal", WARN)])
def test_a_missing_compiler_is_found(monkeypatch, target, state):
    def nothing():
        raise NativeError(["no C++ compiler: install g++ 9 or clang++ 12 or newer"])

    monkeypatch.setattr(compiler, "find", nothing)
    monkeypatch.setattr(doctor_software.device, "target", lambda: target)
    monkeypatch.setattr(doctor_software.device, "compile_problem", lambda: None)
    found = one(doctor_software.cpp_compiler)
    assert (found.state, "install g++" in found.found) == (state, True)


def test_an_old_mlx_is_found(versions):
    versions(mlx="0.31.9")
    found = one(doctor_software.versions, FAIL)
    assert found.found == "0.31.9 is older than 0.32.2"
    assert "mlx>=0.32.2" in found.advice
    versions(mlx="0.100.0")
    assert all(finding.state == OK for finding in doctor_software.versions())


def test_a_version_known_to_be_bad_is_found(versions, monkeypatch):
    monkeypatch.setattr(doctor_software.device, "target", lambda: "cuda")
    versions(mlx="0.32.2")
    assert "CUDA graphs" in one(doctor_software.versions, WARN).found


def test_an_mlx_lm_that_we_do_not_fit_is_found(monkeypatch):
    monkeypatch.setattr(doctor_software.contract, "violations", lambda: ["a function is gone"])
    assert "a function is gone" in one(doctor_software.versions, FAIL).found


def test_rosetta_and_an_old_system_are_found(monkeypatch):
    monkeypatch.setattr(doctor_software, "sysctl", {"sysctl.proc_translated": "1"}.get)
    assert "arm64 Python" in one(doctor_software.python, FAIL).advice
    monkeypatch.setattr(doctor_software.platform, "mac_ver", lambda: ("13.6.1", (), ""))
    assert "14.0 or newer" in one(doctor_software.system, FAIL).advice
    monkeypatch.setattr(doctor_software.platform, "mac_ver", lambda: ("26.1", (), ""))
    assert one(doctor_software.system).state == OK
    monkeypatch.setattr(doctor_software.platform, "mac_ver", lambda: ("", (), ""))
    monkeypatch.setattr(doctor_software.platform, "libc_ver", lambda: ("glibc", "2.31"))
    assert "2.35 or newer" in one(doctor_software.system, FAIL).advice
