"""The shapes of the native tests once more, compiled with AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHECKS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# A write behind an array, to know that the build would end the process.
OVERFLOW = """
#include <stdlib.h>
#include <string.h>
extern "C" void overflow(int at) { char* p = (char*)malloc(16); memset(p, 1, at); free(p); }
extern "C" int shift(int by) { return 1 << by; }
"""
# The checks make optimising the longer part of a run.
RUN = """
import sys, pytest
from husky_mlx.native import compiler
compiler._FLAGS = tuple("-Og" if flag == "-O3" else flag for flag in compiler._FLAGS)
sys.exit(pytest.main(["-q", "-x", "-s", "-n", "0", "-p", "no:cacheprovider", "-k", *sys.argv[1:]]))
"""
SHOW = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]); getattr(f, sys.argv[2])(int(sys.argv[3]))"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The variables under which a process may load a library that g++ built with its checks."""
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("the checked builds are made by g++ on Linux")
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("g++ has no AddressSanitizer here")
    return {
        **os.environ,
        "CXX": " ".join((compiler, *CHECKS)),
        "LD_PRELOAD": runtime,
        # Python itself does not free all that it allocates.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=0",
    }


@pytest.mark.parametrize(
    ("function", "sound", "wrong", "message"),
    [
        ("overflow", "16", "17", "AddressSanitizer: heap-buffer-overflow"),
        ("shift", "3", "40", "runtime error: shift exponent 40"),
    ],
)
def test_the_checks_are_on(function, sound, wrong, message, environment, tmp_path):
    source, library = tmp_path / "wrong.cpp", tmp_path / "wrong.so"
    source.write_text(OVERFLOW)
    command = [*environment["CXX"].split(), "-O0", "-shared", "-fPIC", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    for argument, expected in ((sound, ""), (wrong, message)):
        done = subprocess.run(
            [sys.executable, "-c", SHOW, str(library), function, argument],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) == (expected == "")
        assert expected in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "chosen"),
    [
        ("test_native.py", "not ctrl_c"),
        # -k sees the name of the file too, which holds "native".
        ("test_native_kernels.py", "not VNNI"),
    ],
)
def test_native_tests_pass_in_a_checked_build(suite, chosen, environment):
    done = subprocess.run(
        [sys.executable, "-c", RUN, chosen, suite],
        cwd=HERE,
        env={**environment, "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 50
