"""The text that calibration and eval read: the user's, or four short domains of our own words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

DOMAINS = ("chinese", "general", "code", "mathematics")
CALIBRATION_LENGTH = 256  # tokens a sequence
_TEXTS = Path(__file__).resolve().parent / "texts"


def calibration_texts(file: str | None = None) -> dict[str, str]:
    """Domain -> text to calibrate on; a user's UTF-8 file is one domain, named as the file."""
    return _bundled("calibration") if file is None else _users(Path(file))


def held_out_texts(file: str | None = None) -> dict[str, str]:
    """Domain -> text to evaluate on, none of which is in ``calibration_texts()``."""
    return _bundled("held_out") if file is None else _users(Path(file))


def sequences(tokenizer: Any, text: str, length: int) -> np.ndarray:
    """Text -> token ids (sequences, length), each sequence with the tokenizer's BOS if it has one.

    What fills no whole sequence at the end is left out; a shorter text is one shorter sequence.
    Raises ValueError for a text of fewer than two tokens.
    """
    ids = list(tokenizer.encode(text))
    start = ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []
    body = ids[len(start) :]
    if len(body) < 2:
        raise ValueError(f"the text has {len(body)} tokens, expected 2 or more")
    piece = min(length - len(start), len(body))
    pieces = [body[i : i + piece] for i in range(0, len(body) - piece + 1, piece)]
    return np.array([start + each for each in pieces])


def calibration_sequences(
    tokenizer: Any, texts: Mapping[str, str], length: int = CALIBRATION_LENGTH
) -> np.ndarray:
    """All domains one after the other, (sequences, length); the shortest text bounds the length."""
    parts = [sequences(tokenizer, text, length) for text in texts.values()]
    shortest = min(part.shape[1] for part in parts)
    return np.concatenate([part[:, :shortest] for part in parts])


def _bundled(kind: str) -> dict[str, str]:
    return {name: (_TEXTS / kind / f"{name}.txt").read_text(encoding="utf-8") for name in DOMAINS}


def _users(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise type(error)(f"{path}: cannot be read as text: {error.strerror}") from error
    if len(text) < 2:
        raise ValueError(f"{path}: there is no text in it to read, expected 2 tokens or more")
    return {path.stem: text}
