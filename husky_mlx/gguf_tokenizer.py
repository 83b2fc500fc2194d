"""Builds the tokenizer that a GGUF file's metadata describes, as llama.cpp would read it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm import tokenizer_utils
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.gguf_config import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    open_gguf,
    stop_token_ids,
    token_id,
    token_list,
    token_types,
)
from husky_mlx.gguf_file import GGUFFile

SPACE = "▁"  # how SentencePiece writes a space

# The rules that cut text into words before merging, as published with each model family.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the published rule; None stands for single digits and GPT-2's rule.
WORD_RULES = {
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "llama-v3": LLAMA3_WORDS,
    "tekken": TEKKEN_WORDS,
    "qwen2": QWEN2_WORDS,
    "smollm": None,
}
# Who looks a whole word up before merging, and begins a text with BOS.
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")


def load_tokenizer(path: Path, tokenizer_config: dict[str, Any] | None = None) -> TokenizerWrapper:
    """The file's tokenizer in mlx-lm's wrapper, with its chat template, BOS rule and stop tokens.

    ``tokenizer_config`` overrides what the file says (``chat_template``, ``eos_token``, ...); an
    ``eos_token`` given there stops a reply in addition to the file's own. UnsupportedModel for a
    tokenizer of another kind, by name; CheckpointError for metadata that contradict themselves.
    """
    file = open_gguf(path)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, begins = _byte_level(file)
        detokenizer: Any = BPEStreamingDetokenizer
    elif kind == "llama":
        tokenizer, begins = _sentencepiece(file), True
        detokenizer = partial(SPMStreamingDetokenizer, trim_space=_prefixes_space(file))
    else:
        raise UnsupportedModel(
            str(path), [f"tokenizer.ggml.model is {kind!r}; supported: 'gpt2', 'llama'"]
        )
    _add_marked_tokens(file, tokenizer)
    settings = {
        **_special_tokens(file),
        "chat_template": file.metadata.get("tokenizer.chat_template"),
        "add_bos_token": file.metadata.get("tokenizer.ggml.add_bos_token", begins),
        "add_eos_token": file.metadata.get("tokenizer.ggml.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
        **(tokenizer_config or {}),
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    try:
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
        return TokenizerWrapper(
            fast, detokenizer, eos_token_ids=stop_token_ids(file), **_tool_parser(fast)
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: no tokenizer can be built from it: {error}") from error


def _byte_level(file: GGUFFile) -> tuple[Tokenizer, bool]:
    """GPT-2 style BPE over bytes, and whether the family starts a text with BOS."""
    rule = file.metadata.get("tokenizer.ggml.pre", "default")
    if rule not in WORD_RULES:
        raise UnsupportedModel(
            str(file.path),
            [f"tokenizer.ggml.pre is {rule!r}; supported: {', '.join(sorted(WORD_RULES))}"],
        )
    merges = [tuple(merge.split(" ")) for merge in file.metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = _vocabulary(file)
    for merge in merges:
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.merges has {' '.join(merge)!r}, "
                "which does not join two tokens into a third"
            )
    words = WORD_RULES[rule]
    whole_words_first = rule in _WHOLE_WORDS_FIRST
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=whole_words_first))
    split = (
        pre_tokenizers.Digits(individual_digits=True)
        if words is None
        else pre_tokenizers.Split(Regex(words), "isolated")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if words is QWEN2_WORDS:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, whole_words_first


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """SentencePiece BPE with byte fallback: merges come back from the scores of the pieces."""
    vocabulary = _vocabulary(file)
    scores = file.metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(vocabulary):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for "
            f"{len(vocabulary)} tokens"
        )
    types = token_types(file)
    pieces = {token: i for token, i in vocabulary.items() if types[i] == NORMAL}
    unknown = token_id(file, "unknown_token_id")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(types) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            _merges(pieces, scores),
            unk_token=None if unknown is None else token_list(file)[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = _prefixes_space(file)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(pieces: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, the highest-scored result first."""
    ranked = sorted(pieces, key=lambda piece: -scores[pieces[piece]])
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _prefixes_space(file: GGUFFile) -> bool:
    return bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))


def _add_marked_tokens(file: GGUFFile, tokenizer: Tokenizer) -> None:
    """Control and user-defined tokens are found in the text before it is cut into words."""
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(token_list(file), token_types(file), strict=True)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )


def _special_tokens(file: GGUFFile) -> dict[str, str]:
    tokens = token_list(file)
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    found = {name: token_id(file, key) for name, key in names.items()}
    return {name: tokens[index] for name, index in found.items() if index is not None}


def _tool_parser(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What mlx-lm's own loader passes to its wrapper for a template that calls tools."""
    kind = tokenizer_utils._infer_tool_parser(tokenizer)
    if kind is None:
        return {}
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{kind}")
    return {
        "tool_parser": parser.parse_tool_call,
        "tool_call_start": parser.tool_call_start,
        "tool_call_end": parser.tool_call_end,
    }


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    tokens = token_list(file)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens has {twice!r} twice")
    if not tokens:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens is missing or empty")
    return vocabulary
