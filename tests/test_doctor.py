"""``husky doctor``: ten planted faults, each found with what to do about it, and the choice."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import bench_fakes
import emulated_kernels
import mlx.core as mx
import mlx_lm
import pytest
from fixtures import FIX_A, write_folder

from husky_mlx import (
    chips,
    choices,
    cli,
    demo_model,
    doctor,
    doctor_compute,
    doctor_machine,
    doctor_model,
    doctor_report,
    doctor_software,
    integrity,
    loading,
    paths,
    records,
)
from husky_mlx.config import LlamaConfig
from husky_mlx.doctor_report import FAIL, OK, WARN, findings
from husky_mlx.dropin import DropIn
from husky_mlx.footprint import footprint
from husky_mlx.native import NativeError, compiler
from husky_mlx.roofline import needed

fake_engines = pytest.fixture(bench_fakes.fake_engines)
fast_emulator = pytest.fixture(emulated_kernels.fast_emulator)
kernels_of = pytest.fixture(emulated_kernels.kernels_of)
plant = pytest.fixture(emulated_kernels.plant)


def one(check, state=None):
    """The only finding of a check, or the only one in a state."""
    (found,) = [finding for finding in check() if state in (None, finding.state)]
    assert bool(found.advice) == (found.state != OK)
    return found


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


# 1: wrong MLX build
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


# 2: missing compiler
@pytest.mark.parametrize(("target", "state"), [("cpu", FAIL), ("metal", WARN)])
def test_a_missing_compiler_is_found(monkeypatch, target, state):
    def nothing():
        raise NativeError(["no C++ compiler: install g++ 9 or clang++ 12 or newer"])

    monkeypatch.setattr(compiler, "find", nothing)
    monkeypatch.setattr(doctor_software.device, "target", lambda: target)
    monkeypatch.setattr(doctor_software.device, "compile_problem", lambda: None)
    found = one(doctor_software.cpp_compiler)
    assert (found.state, "install g++" in found.found) == (state, True)


# 3: unwritable cache
def test_an_unwritable_cache_is_found(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = one(doctor_machine.folders, FAIL)
    assert found.name == "cache" and "set HUSKY_CACHE_DIR" in found.advice


# 4: corrupted artifact
def test_a_truncated_file_and_another_shape_are_found(tmp_path):
    whole = write_folder(tmp_path / "a model")
    assert integrity.problems(whole) == []
    weights = whole / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    found = one(lambda: doctor_model.model_checks(str(whole)), FAIL)
    assert "truncated or not a safetensors file" in found.found
    other = write_folder(tmp_path / "other", hidden_size=128)
    assert "do not fit the config" in integrity.problems(other)[0]


def test_a_flipped_byte_in_the_hubs_cache_is_found(tmp_path):
    """There a file is a link to one that is named by its hash."""
    folder = write_folder(tmp_path / "snapshot")
    file = folder / "model.safetensors"
    blob = tmp_path / integrity.sha256(file)
    file.rename(blob)
    file.symlink_to(blob)
    assert integrity.problems(folder) == []
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    (found,) = integrity.problems(folder)
    assert f"expected {blob.name}" in found


def test_a_flipped_byte_in_the_model_of_the_demo_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path))
    content = b"a model"
    sha256 = "0" * 64
    model = replace(demo_model.SMOLLM2, size=len(content), sha256=sha256)
    model.cache_path.write_bytes(content)
    monkeypatch.setattr(integrity.sources, "ALIASES", {"smollm2": model})
    monkeypatch.setattr(integrity.gguf, "read_config", lambda path: {})
    found = one(doctor_model.cached_models)
    assert (found.state, f"expected {sha256}" in found.found) == (FAIL, True)


def test_a_model_that_is_not_there_or_not_ours_is_a_finding(tmp_path):
    found = one(lambda: doctor_model.model_checks("./none"))
    assert (found.state, "no such file" in found.found) == (FAIL, True)
    other = write_folder(tmp_path, model_type="qwen2")
    found = one(lambda: doctor_model.model_checks(str(other)))
    assert (found.state, "model_type is 'qwen2'" in found.found) == (FAIL, True)


# 5 and 6: a kernel that does not compile, a kernel with a wrong result
@pytest.fixture
def emulated(fast_emulator, kernels_of, plant, monkeypatch):
    """``emulated(op, old, new)``: only this kernel is checked, planted, in the emulator."""

    def choose(op, old, new):
        kernels_of()
        plant(op, old, new)
        monkeypatch.setattr(doctor_compute, "OPS", [op])
        monkeypatch.setattr(doctor_compute, "FORMATS", ((4, 64, "float32"),))
        monkeypatch.setattr(doctor_compute, "_steps", lambda model, platform: ())

    return choose


SCALED = "T(float(code) * scale + bias)"


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ("T(float(code) * nonsense + bias)", "4 bit, float32: compile: "),
        ("T(float(code) * scale * 1.5f + bias)", "the kernel's result differs from MLX's by"),
    ],
)
def test_a_broken_kernel_is_found(emulated, planted, says):
    emulated("embed", SCALED, planted)
    found = one(doctor_compute.kernel_checks, FAIL)
    assert found.name == "kernel embed" and says in found.found
    assert "HUSKY_KERNELS=0" in found.advice


def test_a_right_kernel_is_right(emulated):
    emulated("embed", SCALED, SCALED)
    assert next(iter(doctor_compute.kernel_checks())).state == OK


@pytest.mark.slow
def test_whole_steps_and_prompts_are_right_and_every_kernel_runs(
    fast_emulator, kernels_of, monkeypatch
):
    """In the emulator, where prompts on MLX's CPU build are float32."""
    kernels_of()
    monkeypatch.setattr(doctor_compute, "FORMATS", ((4, 64, "float32"),))
    found = {finding.name: finding for finding in doctor_compute.kernel_checks()}
    assert {"decode step", "prompts", "kernel down_add", "kernels"} <= set(found)
    assert [finding for finding in found.values() if finding.state != OK] == []


def test_parity_sees_another_token():
    """A model with two rows of its head exchanged answers with the wrong one of both."""
    settings = (16, 64, "float32")
    stock, ours = (doctor_compute.tiny_model(*settings, name) for name in ("mlx", "husky"))
    assert doctor_compute.different_token(stock, ours) is None
    tokens = mx.array([[(7919 * i + 1) % 512 for i in range(doctor_compute.PARITY_PROMPT)]])
    best = mx.argmax(stock(tokens)[0, -1]).item()
    rows = mx.arange(512)
    rows[best], rows[0] = 0, best
    ours.lm_head.weight = ours.lm_head.weight[rows]
    assert doctor_compute.different_token(stock, ours) == f"token 1 is 0, mlx-lm's is {best}"


# 7: too little memory
@pytest.mark.parametrize(("limit", "state"), [(1e9, FAIL), (5e9, WARN), (1e12, OK)])
def test_too_little_memory_is_found(monkeypatch, limit, state):
    monkeypatch.setattr(doctor_machine, "memory_limit", lambda: int(limit))
    memory = SimpleNamespace(total=int(limit), available=10_000_000_000)
    monkeypatch.setattr(doctor_machine.psutil, "virtual_memory", lambda: memory)
    assert one(doctor_machine.memory).state == state


def test_a_model_that_does_not_fit_is_found(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "model")
    monkeypatch.setattr(doctor_model, "memory_limit", lambda: 1000)
    assert "husky plan" in one(lambda: doctor_model.model_checks(str(folder)), FAIL).advice
    # The weights alone would fit, what a reply needs beside them does not.
    raw = doctor_model.checkpoint.read_config(folder)
    size = footprint(LlamaConfig.from_dict(raw), raw)
    monkeypatch.setattr(doctor_model, "memory_limit", lambda: needed(size, 300))
    found = doctor_model._fits("model", folder)
    assert (found.state, "tokens fit" in found.found) == (WARN, True)
    monkeypatch.setattr(doctor_model, "memory_limit", lambda: needed(size, 512))
    assert doctor_model._fits("model", folder).state == OK


# 8: unknown chip
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


# 9: old MLX
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


# 10: hub unreachable
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


def test_an_mlx_that_cannot_be_imported_is_found(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    assert cli.main(["doctor"]) == 1
    assert "cannot be imported" in capsys.readouterr().out


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


class TestChoice:
    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path / "cache"))
        for name in ("HUSKY_CHOICE", "HUSKY_EAGER", "HUSKY_KERNELS", "HUSKY_NATIVE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("HUSKY_BACKEND", raising=False)
        self.folder = str(write_folder(tmp_path / "model", tokenizer=True))

    @pytest.mark.parametrize(
        ("speeds", "way"),
        [
            ((100.0, 50.0, 60.0), "husky"),
            # Within the noise of a machine.
            ((100.0, 50.0, 104.0), "husky"),
            ((100.0, 50.0, 106.0), "mlx-lm"),
            ((100.0, 120.0, 110.0), "reference"),
        ],
    )
    def test_the_fastest_by_more_than_noise_wins(self, monkeypatch, speeds, way):
        timed = dict(zip(("husky", "reference", "mlx-lm"), speeds, strict=True))
        monkeypatch.setattr(doctor_model, "decode_speeds", lambda name: timed)
        *_, found = doctor_model.model_checks(self.folder)
        assert (found.name, found.state, found.found.startswith(way)) == ("fastest", OK, True)
        assert choices.remembered(FIX_A) == (way, timed)
        for other in ({"hidden_size": 128}, {"torch_dtype": "float16"}, {"dtype": "bfloat16"}):
            assert choices.remembered({**FIX_A, **other}) is None

    @pytest.mark.parametrize(
        "name, value", [("HUSKY_KERNELS", "0"), ("HUSKY_EAGER", "1"), ("HUSKY_NATIVE", "exact")]
    )
    def test_what_was_timed_under_a_variable_is_not_kept(self, monkeypatch, name, value):
        timed = {"husky": 1.0, "reference": 1.0, "mlx-lm": 2.0}
        monkeypatch.setattr(doctor_model, "decode_speeds", lambda name: timed)
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            *_, found = doctor_model.model_checks(self.folder)
        assert f"not kept, because {name}={value} changes what runs" in found.found
        assert choices.remembered(FIX_A) is None
        self.remember("mlx-lm")
        monkeypatch.setenv(name, value)
        assert choices.remembered(FIX_A) is None

    def remember(self, way):
        choices.remember(FIX_A, choices.Choice(way, {"husky": 1.0, "reference": 2.0}))

    def test_load_follows_it_and_the_plan_says_so(self):
        self.remember("husky")
        model, _ = loading.load(self.folder)
        assert "chosen: husky, by husky doctor" in model.plan.summary
        assert model.plan.eager_reason is None
        self.remember("reference")
        model, _ = loading.load(self.folder)
        assert "husky doctor timed it as the fastest here" in model.plan.summary
        cache = model.make_cache()
        mx.eval(model(mx.array([[5, 6]]), cache=cache), model(mx.array([[7]]), cache=cache))
        assert {name for name, count in model.plan.counts.items() if count} == {"reference"}

    def test_mlx_lms_class_is_said_on_stderr(self, capsys):
        self.remember("mlx-lm")
        model, _ = loading.load(self.folder)
        assert type(model).__module__ == "mlx_lm.models.llama"
        said = "runs on mlx-lm's model class: chosen: mlx-lm, by husky doctor"
        assert said in capsys.readouterr().err
        loading.load(self.folder, verbose=True)
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1

    @pytest.mark.parametrize("limit", ["max_context", "max_kv_size"])
    def test_limits_that_ours_alone_has_come_first_and_the_plan_says_nothing_else(self, limit):
        self.remember("mlx-lm")
        model, _ = loading.load(self.folder, **{limit: 64})
        assert type(model).__module__.startswith("husky_mlx")
        assert model.plan.choice is None and "chosen" not in model.plan.summary

    def test_the_commands_of_mlx_lm_follow_it_too(self):
        self.remember("reference")
        for backend, follows in ((None, True), ("husky", False)):
            with DropIn(backend):
                model, _ = mlx_lm.load(self.folder)
            assert (model.plan.choice is not None) == follows

    @pytest.mark.parametrize("how", ["argument", "HUSKY_BACKEND", "HUSKY_CHOICE"])
    def test_who_asks_for_something_gets_it(self, monkeypatch, how):
        self.remember("mlx-lm")
        if how == "argument":
            model, _ = loading.load(self.folder, backend="husky")
        else:
            monkeypatch.setenv(how, "husky" if how == "HUSKY_BACKEND" else "0")
            model, _ = loading.load(self.folder)
        assert model.plan.choice is None

    def test_two_that_keep_at_the_same_time_lose_nothing(self, tmp_path, monkeypatch):
        read = records.read

        def slow(path):
            kept = read(path)
            time.sleep(0.05)
            return kept

        monkeypatch.setattr(records, "read", slow)
        path = tmp_path / "new folder" / "facts.json"
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda key: records.keep(path, key, True), "abcd"))
        assert read(path) == dict.fromkeys("abcd", True)

    @pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', "{"])
    def test_a_damaged_file_is_no_choice(self, content):
        paths.write_whole(choices.path(), content.encode())
        assert choices.remembered(FIX_A) is None
        records.keep(choices.path(), choices._key(FIX_A), {"way": 3})
        assert choices.remembered(FIX_A) is None

    def test_what_is_timed_is_what_the_ways_are(self, fake_engines):
        log = fake_engines()
        found = doctor_model.decode_speeds("x")
        # The fake's trial n makes 10 n tokens a second; the first is the cold one, two are timed.
        assert found == dict.fromkeys(("husky", "reference", "mlx-lm"), 25.0)
        entries = log()
        ran = {
            entry["name"]: entry["specification"] for entry in entries if "specification" in entry
        }
        assert set(ran) == {"husky", "husky-eager", "mlx-lm"}
        assert {told["model"] for told in ran.values()} == {"x"}
        asked = [entry["request"] for entry in entries if "request" in entry]
        assert {each["generation_tokens"] for each in asked} == {64}
