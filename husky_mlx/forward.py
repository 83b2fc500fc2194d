"""mlx-lm's commands as ``husky CMD``: their own ``main``, our options taken out first.

Only the standard library is imported here at the top, so that ``husky --help`` answers at once.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import math
import socket
import sys
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from husky_mlx.errors import HuskyError, UsageError
from husky_mlx.notices import notice
from husky_mlx.switches import BACKENDS

if TYPE_CHECKING:
    from husky_mlx.dropin import DropIn

# Where mlx-lm's commands keep the names of models, once parsed.
_MODEL_ARGUMENTS = ("model", "hf_path", "draft_model", "quantized_model")
# Modules that mlx-lm does not install itself and imports late or at once.
_EXTRA_MODULES = {"evaluate": "lm_eval", "perplexity": "datasets", "dwq": "datasets"}
_SCANS_CACHE = ("manage", "server")


def debug_option(prog: str) -> argparse.ArgumentParser:
    """The parser of the one option that every command has."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def own_options(prog: str) -> argparse.ArgumentParser:
    """The parser of the options that husky adds to the commands that load a model."""
    parser = debug_option(prog)
    group = parser.add_argument_group("options of husky")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help="the model class and loop that run: ours, or mlx-lm's (default: $HUSKY_BACKEND, "
        "else husky)",
    )
    group.add_argument(
        "--max-context",
        type=_positive,
        metavar="N",
        help="the most tokens of prompt and reply together",
    )
    group.add_argument(
        "--max-kv-size",
        type=_positive,
        metavar="N",
        help="at most N tokens in the key-value cache, a rotating window",
    )
    return parser


def take_own(
    argv: Sequence[str], theirs: argparse.ArgumentParser | None = None
) -> tuple[list[str], list[str]]:
    """Split a command line into ``(our options with their values, the rest)``, in order.

    The value of an option of ``theirs`` is not mistaken for an option of ours: in
    ``--prompt --debug`` the prompt is "--debug". An option that ``theirs`` also has stays there.
    Without ``theirs``, everything from the first word that is not ours is the rest.
    """
    ours = own_options("husky")._option_string_actions
    known = theirs._option_string_actions if theirs is not None else {}
    own: list[str] = []
    rest: list[str] = []
    words = list(argv)
    while words and words[0] != "--":
        word = words.pop(0)
        name = word.partition("=")[0]
        if name in ours and name not in known:
            own.append(word)
            if ours[name].nargs is None and word == name:
                own += words[:1]
                del words[:1]
        elif theirs is None:
            words.insert(0, word)
            break
        elif word in known and known[word].nargs is None and _starts_with(ours, words):
            rest.append(f"{word}={words.pop(0)}")
        else:
            rest.append(word)
    return own, rest + words


def _starts_with(options: Container[str], words: Sequence[str]) -> bool:
    return bool(words) and words[0].partition("=")[0] in options


def commands() -> dict[str, str]:
    """mlx-lm's subcommands with the modules that hold them, from its own ``cli.py``.

    The file is read, not imported: importing mlx_lm takes a second or more. Empty where mlx-lm is
    missing or keeps its list elsewhere.
    """
    spec = importlib.util.find_spec("mlx_lm")
    path = Path(spec.origin).with_name("cli.py") if spec and spec.origin else None
    if path is None or not path.exists():
        return {}
    literals: dict[str, Any] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                literals[node.targets[0].id] = ast.literal_eval(node.value)
    packages = literals.get("subpackages", {})
    return {
        name: ".".join(filter(None, ("mlx_lm", packages.get(name), name)))
        for name in literals.get("subcommands", ())
    }


def forward(
    command: str,
    module: str,
    before: Sequence[str],
    arguments: Sequence[str],
    settings: argparse.Namespace,
    program: str,
) -> int:
    """Run ``module.main()`` under the drop-in as ``PROGRAM ARGUMENTS``; returns 0.

    ``program`` is what its usage line names. ``before`` holds our options that stood before the
    command; all of ours end up in ``settings``. Whatever the command raises passes through.
    """
    from husky_mlx.dropin import DropIn
    from husky_mlx.serving import guarded

    typed = sys.argv
    sys.argv = [program, *arguments]
    if command in _SCANS_CACHE:
        _make_hub_cache()
    try:
        with DropIn() as dropin, contextlib.ExitStack() as stack:
            command_main = importlib.import_module(module).main
            if command == "server":
                stack.enter_context(guarded())
            with _parser_hook(command, before, settings, dropin):
                command_main()
    except EOFError:
        if command != "chat":  # where it is the way to leave
            raise
        print()
    except ModuleNotFoundError as error:
        raise HuskyError(_missing(command, error.name)) from error
    finally:
        sys.argv = typed
    return 0


def _missing(command: str, module: str | None) -> str:
    if module not in _EXTRA_MODULES.values():
        return f"husky {command} needs the package {module!r}, which is not installed"
    package = str(module).replace("_", "-")
    return (
        f"husky {command} needs the package {package!r}, which is not installed: "
        f"pip install {package}"
    )


def _make_hub_cache() -> None:
    """An empty Hugging Face cache where there is none: mlx-lm stumbles over a missing one."""
    from huggingface_hub import constants

    with contextlib.suppress(OSError):  # the command itself says what is wrong with it
        Path(constants.HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _parser_hook(
    command: str, before: Sequence[str], settings: argparse.Namespace, dropin: DropIn
) -> Iterator[None]:
    """Take our options out of the first command line that is parsed, and act on them.

    mlx-lm builds its parsers inside ``main``, and only they know which words are options and
    which are the values of options.
    """
    stock = argparse.ArgumentParser.parse_args
    early = io.StringIO()
    holding = contextlib.ExitStack()

    def parse_args(parser, args=None, namespace=None):
        argparse.ArgumentParser.parse_args = stock  # type: ignore[method-assign]
        holding.close()
        parser.prog = sys.argv[0]
        own, theirs = take_own(sys.argv[1:] if args is None else args, parser)
        own_options(parser.prog).parse_args([*before, *own], namespace=settings)
        has_window = "--max-kv-size" in parser._option_string_actions
        if has_window and settings.max_kv_size is not None:
            parser.set_defaults(max_kv_size=settings.max_kv_size)
        has_model = "--model" in parser._option_string_actions
        note = _note(has_window) if has_model else "It also takes --debug (tracebacks)."
        parser.epilog = " ".join(filter(None, (parser.epilog, note)))
        parsed = stock(parser, theirs, namespace)
        sys.stdout.write(early.getvalue())
        if has_window:
            settings.max_kv_size = parsed.max_kv_size
        _configure(dropin, command, settings, parser, parsed, theirs)
        return parsed

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]
    try:
        # What a command says before it knows its command line is no part of its --help.
        holding.enter_context(contextlib.redirect_stdout(early))
        yield
    finally:
        holding.close()
        argparse.ArgumentParser.parse_args = stock  # type: ignore[method-assign]


def _configure(
    dropin: DropIn,
    command: str,
    settings: argparse.Namespace,
    parser: argparse.ArgumentParser,
    parsed: argparse.Namespace,
    words: Sequence[str],
) -> None:
    """Hand our options to the drop-in, and check early what mlx-lm would report late."""
    from husky_mlx import sources

    has_window = "--max-kv-size" in parser._option_string_actions
    dropin.backend = settings.backend
    dropin.max_context = settings.max_context
    dropin.max_kv_size = settings.max_kv_size
    if settings.max_kv_size is not None and getattr(parsed, "draft_model", None):
        # Speculation takes tokens back, which a rotating cache cannot; mlx-lm drops the value too.
        dropin.max_kv_size = None
        notice("--max-kv-size has no effect together with --draft-model")
    elif dropin.chosen_backend == "mlx" and settings.max_kv_size and not has_window:
        notice("--max-kv-size has no effect on mlx-lm's model class in this command")
    if dropin.chosen_backend == "mlx" and settings.max_context is not None:
        notice("--max-context has no effect on mlx-lm's model class")
    model = parser._option_string_actions.get("--model")
    if model is not None:
        given = any(word.partition("=")[0] in model.option_strings for word in words)
        dropin.announce = not given and command != "server"
    # mlx-lm's save and prompt caches look up the name that they were given as a path.
    for name in _MODEL_ARGUMENTS:
        if sources.alias(str(getattr(parsed, name, None))):
            setattr(parsed, name, str(sources.resolve(getattr(parsed, name), notify=notice)))
    if not 0 <= getattr(parsed, "temp", 0) < math.inf:
        parser.error(f"--temp must be a number from 0 up, found {parsed.temp}")
    extra = _EXTRA_MODULES.get(command)
    if extra is not None and importlib.util.find_spec(extra) is None:
        raise HuskyError(_missing(command, extra))
    if command == "server":
        _check_server(parsed)


def _check_server(parsed: argparse.Namespace) -> None:
    """Fail before the server's threads start: one that is busy or loading outlives the failure."""
    from husky_mlx import sources

    if parsed.model is None:
        notice("no --model given: mlx-lm's server has no default, each request must name its model")
    else:
        sources.resolve(parsed.model, config_only=True)
    if not 0 <= parsed.port < 65536:
        raise UsageError(f"--port must be from 0 to 65535, found {parsed.port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            parsed.host, parsed.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise HuskyError(f"cannot serve on host {parsed.host!r}: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise HuskyError(
                f"cannot serve on {parsed.host}:{parsed.port}: {error.strerror}; "
                "choose another with --port"
            ) from error


def _note(has_window: bool) -> str:
    window = (
        "" if has_window else "--max-kv-size N (at most N tokens in the cache, a rotating window), "
    )
    return (
        "With husky this command runs on husky_mlx's model class. It also takes --backend "
        "{husky,mlx} (mlx: mlx-lm's class), --max-context N (the most tokens of prompt and reply "
        f"together), {window}--debug (tracebacks), here or before the command. --model also takes "
        "a .gguf file or the alias smollm2."
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, found {text!r}")
    return int(text)
