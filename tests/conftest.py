"""Fixtures shared by the suite."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

# Most tests look at the graphs, and a native program takes seconds to compile for each new shape.
os.environ.setdefault("HUSKY_NATIVE", "0")
# Nor do they follow what husky doctor once found on this machine.
os.environ.setdefault("HUSKY_CHOICE", "0")

# MLX compiles into the temporary folder under names that depend on the code alone, in place: a
# second process can load half a library.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    own = Path(tempfile.gettempdir()) / f"husky_mlx-tests-{os.getuid()}" / worker
    own.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)

sys.path.insert(0, str(Path(__file__).parent))

from fixtures import model_of, write_tokenizer

from husky_mlx.native.cores import available_cores

MOST_WORKERS = 8


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many as compute at the same time: xdist's own count is of the machine, not of a container
    on it, and leaves out the second thread of a core."""
    return min(available_cores(), MOST_WORKERS)


@pytest.fixture(scope="module")
def stock():
    """FIX-A on mlx-lm's own class."""
    return model_of("mlx")


@pytest.fixture
def ours():
    """FIX-A on ours, a fresh one for each test: the counters start at zero."""
    return model_of()


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory):
    """The FIX-B tokenizer with no stop token, so that a reply has the length asked for."""
    from mlx_lm.tokenizer_utils import load

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = load(folder)
    tokenizer.eos_token_ids = set()
    return tokenizer
