"""Finding a compiler, and the cache of what it made."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from fixtures import FIX_A, mlx_weights

from husky_mlx.config import LlamaConfig
from husky_mlx.loading import build_model
from husky_mlx.native import NativeError, Program, compiler
from husky_mlx.native import library as library_module
from husky_mlx.native.cores import available_cores
from husky_mlx.native.emit import block_tokens, emit
from husky_mlx.native.library import library
from husky_mlx.native.storage import model_format
from husky_mlx.shapes import shape_config

# Compiles in a moment, and shows which of the headers' constants it saw.
SOURCE = """
#include "lanes.h"
extern "C" __attribute__((visibility("default"))) int lanes() { return husky::LANES; }
"""


@pytest.fixture
def found():
    compiler.find.cache_clear()
    try:
        return compiler.find()
    except NativeError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(library_module, "_temporary", [])
    return tmp_path / "native"


@pytest.fixture
def builds(monkeypatch):
    """The sources compiled during a test."""
    done = []
    real = compiler.Compiler.build

    def counted(self, source, library):
        done.append(source)
        real(self, source, library)

    monkeypatch.setattr(compiler.Compiler, "build", counted)
    return done


def loads(path: Path) -> bool:
    return ctypes.CDLL(str(path)).lanes() in (8, 16)


def test_a_source_is_compiled_once(found, folder, builds):
    first, second = library(SOURCE, found), library(SOURCE, found)
    assert first == second and first.parent == folder
    assert loads(first)
    assert len(builds) == 1
    assert not list(folder.glob(".build-*"))


def test_another_source_compiler_or_cpu_is_another_library(found, folder, builds, monkeypatch):
    paths = {library(SOURCE, found), library(SOURCE + "\n", found)}
    paths.add(library(SOURCE, dataclasses.replace(found, identity="another CPU")))
    changed = {**compiler.headers(), "lanes.h": b"// another text"}
    monkeypatch.setattr(library_module, "headers", lambda: changed)
    paths.add(library(SOURCE, found))
    assert len(paths) == len(builds) == 4


def test_the_identity_tells_cpus_apart(found, tmp_path, monkeypatch):
    """One command with one set of flags, that resolves "native" to a lesser CPU the second time."""
    lesser = {"x86_64": "-march=x86-64", "aarch64": "-mcpu=generic"}.get(os.uname().machine)
    if lesser is None or "ziglang" in found.command:
        pytest.skip("no lesser CPU known to this compiler")
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\nexec {found.command[0]} "$@" $LESSER\n')
    script.chmod(0o755)
    identities = []
    for flag in ("", "", lesser):
        monkeypatch.setenv("LESSER", flag)
        probed = compiler._probe((str(script),))
        assert isinstance(probed, compiler.Compiler)
        identities.append(probed.identity)
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: path.with_suffix(".json").write_text("{"),
        lambda path: path.with_suffix(".json").write_text(json.dumps({"size": 1})),
    ],
    ids=["cut", "longer", "zeros", "no library", "no record", "cut record", "other record"],
)
def test_a_damaged_entry_is_built_again(damage, found, folder, builds):
    path = library(SOURCE, found)
    # A new file, as another process would have left it: this one's may be mapped.
    contents = path.read_bytes()
    path.unlink()
    path.write_bytes(contents)
    damage(path)
    assert library(SOURCE, found) == path
    assert len(builds) == 2
    assert path.stat().st_size == len(contents)
    assert loads(path)


def test_two_processes_at_once_build_one_sound_entry(found, folder):
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]!r}
from test_native_library import *
real, count = compiler.Compiler.build, []
def counted(self, source, library):
    count.append(1)
    real(self, source, library)
compiler.Compiler.build = counted
sys.stdin.readline()
path = library(SOURCE, compiler.find())
print(len(count), loads(path))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HUSKY_CACHE_DIR": str(folder.parent)},
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [loaded for _, loaded in outputs] == ["True"] * 3
    assert sum(int(count) for count, _ in outputs) == 1
    assert len(list(folder.glob("*.so"))) == 1


def test_a_folder_that_cannot_be_written_is_one_warning(found, tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(blocked))
    monkeypatch.setattr(library_module, "_temporary", [])
    paths = {library(SOURCE, found) for _ in range(2)}
    paths.add(library(SOURCE + "\n", found))
    assert all(map(loads, paths)) and len(paths) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(blocked) in line and "cannot be written" in line


def test_a_source_that_does_not_compile_says_why(found, folder):
    with pytest.raises(NativeError, match=r"failed: .*error.*nonsense"):
        library("int f() { return nonsense; }", found)
    assert not list(folder.glob("*.so")) and not list(folder.glob(".build-*"))


def test_no_compiler_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    compiler.find.cache_clear()
    with pytest.raises(NativeError, match=r"no C\+\+ compiler: install g\+\+.*pip install ziglang"):
        compiler.find()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("/no/such/compiler", "no such program"),
        (f"{sys.executable} -c pass", "older than"),
        (f"{sys.executable} -c 1/0", "ZeroDivisionError|Traceback"),
    ],
)
def test_a_chosen_compiler_that_does_not_work_is_not_passed_over(chosen, message, monkeypatch):
    monkeypatch.setenv("CXX", chosen)
    compiler.find.cache_clear()
    with pytest.raises(NativeError, match=message):
        compiler.find()


def test_the_compiler_that_pip_brings(folder, monkeypatch):
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    compiler.find.cache_clear()
    found = compiler.find()
    assert "ziglang" in found.name
    assert loads(library(SOURCE, found))


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(NativeError(["one", "two"])))
    assert (str(error), error.reasons) == ("no native program: one; two", ["one", "two"])


def test_the_source_is_that_of_the_model():
    """Sizes, formats and switches of a model with two kinds of layers, as C++ constants."""
    changes = {"attention_bias": True, "rope_traditional": True, "head_dim": 32}
    config = {**FIX_A, **changes}
    weights = mlx_weights(config)
    model = build_model(config, weights)
    other = model.layers[1].mlp.down_proj
    other.weight = other.weight.astype(mx.bfloat16)
    text = emit(model.args, model_format(model), mx.float16, exact=True)
    for line in (
        "using Query = Dense<128, 64, float, float>;",
        "using Down = Dense<64, 128, BFloat>;",
        "HEADS = 4, KV_HEADS = 2, HEAD_DIM = 32;",
        "TRADITIONAL = true, EXACT = true;",
        "using KV = Half;",
        "FORMAT[] = {0, 1};",
        # 1e-5, 32 ** -0.5 and 1 in float32
        "EPS = 0x1.4f8b580000000p-17f, SCALE = 0x1.6a09e60000000p-3f",
        "MAGNITUDE = 0x1.0000000000000p+0f;",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("name", "block"), [("smollm2-135m", 192), ("llama-3.2-1b", 96), ("llama-3.1-8b", 12)]
)
def test_blocks_are_shorter_for_larger_models(name, block):
    assert block_tokens(LlamaConfig.from_dict(shape_config(name))) == block


def test_models_of_one_shape_share_a_library(found, folder, builds):
    models = [build_model(FIX_A, mlx_weights(FIX_A, seed)) for seed in (0, 1)]
    programs = [Program.of(model, threads=1) for model in models]
    assert programs[0].path == programs[1].path
    assert len(builds) == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "what\n"}, 8),
    ],
)
def test_threads_are_what_affinity_and_container_allow(files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == cores
