"""``husky CMD``: our commands, and every command of mlx-lm with all its own options on our model.

Heavy imports stay inside the functions, so that ``husky --help`` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import os
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence

# Not `from husky_mlx import ...`: the package looks a name up in mlx_lm before its own modules.
import husky_mlx.forward as forward
from husky_mlx.errors import HuskyError, exit_code
from husky_mlx.interrupts import interrupted_by_termination
from husky_mlx.notices import warnings_as_notices

_OURS = {
    "demo": ("husky_mlx.demo", "one answer from a small real model, fetched once: try this first"),
    "models": ("husky_mlx.support", "what is supported; with a model: how it would run"),
    "plan": ("husky_mlx.fit", "whether a model fits a machine, before a download"),
    "doctor": ("husky_mlx.doctor", "whether everything works here, and what to do if not"),
    "convert": ("husky_mlx.conversion", "a checkpoint as a checked folder that mlx-lm reads too"),
    "compile": ("husky_mlx.compilation_command", "quantize, pack and store a model for one chip"),
    "cache": ("husky_mlx.build_cache", "what husky keeps on this disk, and clearing it"),
    "bench": ("husky_mlx.bench", "husky against mlx-lm on the same weights and tokens"),
    "eval": ("husky_mlx.evaluate", "what recipes and quantized models lose, on held-out text"),
    "bench ops": ("husky_mlx.bench_ops", "each kernel against the MLX operations it replaces"),
}
# mlx-lm lists its commands without a word about them.
_DESCRIPTIONS = {
    "generate": "answer one prompt",
    "chat": "talk with a model in the terminal",
    "server": "an OpenAI-style HTTP server",
    "cache_prompt": "run a long prompt once and keep its cache in a file",
    "lora": "fine-tune adapters",
    "fuse": "merge adapters into a model",
    "evaluate": "run lm-evaluation-harness tasks",
    "perplexity": "perplexity on a data set",
    "benchmark": "mlx-lm's own speed test",
    "manage": "list or delete cached models",
    "upload": "publish an MLX folder on the Hugging Face hub",
    "share": "copy a model to other machines",
    "awq": "quantize with activation-aware scales",
    "dwq": "quantize with distilled weights",
    "dynamic_quant": "quantize with bits chosen by sensitivity",
    "gptq": "quantize with error compensation",
}


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Run one command line (``sys.argv`` by default); ``program`` is its name in messages.

    Returns 0, 1 where something failed, 2 for a wrong command line, 130 when interrupted. An error
    is one line on stderr, and with ``--debug`` its traceback before that line.
    """
    settings = argparse.Namespace(debug=False)
    _no_bars_off_terminal()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer does not end at what LANG cannot show
    try:
        with warnings_as_notices():
            code = _run(list(sys.argv[1:] if argv is None else argv), settings, program)
        sys.stdout.flush()
        return code
    except SystemExit as stop:
        return _exit_code(stop)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader is gone; without this Python complains again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if settings.debug:
            traceback.print_exc()
        text = " ".join(str(error).split())
        if not text or not isinstance(error, HuskyError | OSError | ValueError):
            text = f"{type(error).__name__}: {text}"
        print(f"{program or 'husky'}: error: {text}", file=sys.stderr)
        return exit_code(error)


def main_convert() -> int:
    """``husky-convert`` is ``husky convert``."""
    return main(["convert", *sys.argv[1:]], "husky-convert")


def main_compile() -> int:
    """``husky-compile`` is ``husky compile``."""
    return main(["compile", *sys.argv[1:]], "husky-compile")


def _run(argv: list[str], settings: argparse.Namespace, program: str | None) -> int:
    for word in argv:
        # Python stands a surrogate for each such byte; no tokenizer and no MLX call takes those.
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            print(f"husky: error: an argument is not UTF-8 text: {word!r}", file=sys.stderr)
            return 2
    before, rest = forward.take_own(argv)
    forward.own_options("husky").parse_args(before, namespace=settings)
    theirs = forward.commands()
    if not rest or rest[0] in ("-h", "--help"):
        print(_overview(theirs))
        return 0
    if rest[0] == "--version":
        print(_versions())
        return 0
    command, arguments = rest[0].replace("-", "_"), rest[1:]
    if [command, *arguments[:1]] == ["bench", "ops"]:
        command, arguments = "bench ops", arguments[1:]
    if command in _OURS:
        program = program or f"husky {command}"
        return _run_ours(command, [*before, *arguments], settings, program)
    if command in theirs:
        program = program or f"husky {command}"
        return forward.forward(command, theirs[command], before, arguments, settings, program)
    print(f"husky: error: {_unknown(rest[0], [*_OURS, *theirs])}", file=sys.stderr)
    return 2


def _run_ours(command: str, argv: Sequence[str], settings: argparse.Namespace, program: str) -> int:
    name, description = _OURS[command]
    module = importlib.import_module(name)
    options = forward.own_options if command == "demo" else forward.debug_option
    parser = argparse.ArgumentParser(
        prog=program,
        description=getattr(module, "DESCRIPTION", description),
        parents=[options(program)],
    )
    module.add_arguments(parser)
    with interrupted_by_termination():
        return module.run(parser.parse_args(argv, namespace=settings))


def _overview(theirs: Mapping[str, str]) -> str:
    def listed(descriptions: Mapping[str, str]) -> str:
        return "\n".join(f"  {name:<15}{text}" for name, text in descriptions.items())

    known = sorted(set(theirs) - set(_OURS), key=[*_DESCRIPTIONS, *theirs].index)
    mlx_lm = {name: _DESCRIPTIONS.get(name, f"mlx-lm's {name}") for name in known}
    parser = argparse.ArgumentParser(
        prog="husky",
        usage="husky [options of husky] COMMAND [options of the command]",
        description="Llama-family models on MLX through a frozen decode graph.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[forward.own_options("husky")],
        epilog=textwrap.dedent("""\
            commands of husky:
            {ours}

            commands of mlx-lm, with all their own options, on husky's model:
            {theirs}

            husky COMMAND --help says more about one of them.""").format(
            ours=listed({name: text for name, (_, text) in _OURS.items()}),
            theirs=listed(mlx_lm) if mlx_lm else "  none found: is mlx-lm installed?",
        ),
    )
    parser.add_argument("--version", action="store_true", help="husky_mlx, mlx and mlx-lm versions")
    return parser.format_help().rstrip()


def _versions() -> str:
    from husky_mlx import __version__

    lines = [f"husky_mlx {__version__}"]
    for package in ("mlx", "mlx-lm"):
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return "\n".join(lines)


def _unknown(word: str, commands: Sequence[str]) -> str:
    kind = "option" if word.startswith("-") else "command"
    near = difflib.get_close_matches(word.replace("-", "_"), commands, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near and kind == "command" else ""
    return f"unknown {kind} {word!r}{hint} (husky --help lists the commands)"


def _exit_code(stop: SystemExit) -> int:
    if isinstance(stop.code, str):
        print(stop.code, file=sys.stderr)
        return 1
    return stop.code or 0


def _no_bars_off_terminal() -> None:
    """Must run before huggingface_hub and tqdm are imported: they read these once."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
