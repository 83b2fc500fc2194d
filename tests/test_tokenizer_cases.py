"""Public reports about tokenizers of model folders, each under its id.

Folders go through mlx-lm's own tokenizer loading; what is tested is that our ``load`` and our loop
use it rightly. The replies are scripted: fixed token ids take the place of the model's.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from fixtures import FIX_B, write_folder
from mlx_lm.sample_utils import make_logits_processors
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from husky_mlx import generation
from husky_mlx.loading import load

BOS, EOS, EOT, PADDING = 260, 261, 262, 263
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "fix-b", FIX_B, tokenizer=True)


def change_settings(folder: Path, **settings: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def add_bos_to_every_text(folder: Path) -> None:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    single = [
        {"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [BOS], "tokens": ["<|bos|>"]}},
    }
    file.write_text(json.dumps(tokenizer))


@pytest.fixture
def scripted(monkeypatch):
    """Replies of given token ids through our greedy loop; returns the text of each response."""

    def run(model, tokenizer, ids: list[int]) -> list[str]:
        def greedy_tokens(*_, **__):
            return ((token, mx.zeros((1, 1, FIX_B["vocab_size"]))) for token in ids)

        monkeypatch.setattr(generation, "greedy_tokens", greedy_tokens)
        responses = list(generation.stream_generate(model, tokenizer, [5], len(ids)))
        assert [response.token for response in responses] == ids
        return [response.text for response in responses]

    return run


def prompt_of(monkeypatch, model, tokenizer, text: str) -> list[int]:
    """The token ids that our loop makes of a text."""
    prompts = []

    def greedy_tokens(model, prompt, *_, **__):
        prompts.append(prompt.tolist())
        yield EOS, mx.zeros((1, 1, FIX_B["vocab_size"]))

    monkeypatch.setattr(generation, "greedy_tokens", greedy_tokens)
    list(generation.stream_generate(model, tokenizer, text, 1))
    return prompts[0]


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS], ids=["with BOS", "without BOS"])
def test_exactly_one_bos_C097(template, folder, monkeypatch):
    change_settings(folder, chat_template=template)
    add_bos_to_every_text(folder)
    model, tokenizer = load(str(folder))
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello world"}], tokenize=False
    )
    assert rendered.count("<|bos|>") == (template is WITH_BOS)
    prompt = prompt_of(monkeypatch, model, tokenizer, rendered)
    assert prompt == [BOS, *b"hello world"]
    assert len(prompt) == 12
    (response,) = generation.stream_generate(model, tokenizer, rendered, 1)
    assert response.prompt_tokens == 12


def test_a_base_model_without_a_template_C098(folder, monkeypatch):
    model, tokenizer = load(str(folder))
    assert not tokenizer.has_chat_template
    text = "in the hat"
    assert prompt_of(monkeypatch, model, tokenizer, text) == tokenizer.encode(text)
    assert isinstance(generation.generate(model, tokenizer, text, max_tokens=4), str)


def test_a_template_in_a_file_of_its_own_is_found_C098(folder):
    (folder / "chat_template.jinja").write_text(WITH_BOS)
    _, tokenizer = load(str(folder))
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|bos|>hi"


CHARACTERS = {
    "emoji": "\N{GRINNING FACE}",
    "family": "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}",
    "flag": "\N{WAVING WHITE FLAG}\N{VARIATION SELECTOR-16}\N{ZERO WIDTH JOINER}\N{RAINBOW}",
    "accent": "a\N{COMBINING ACUTE ACCENT}",
    "japanese": "\u79c1\u306f\u732b\u3067\u3059",
}


@pytest.mark.parametrize("text", CHARACTERS.values(), ids=CHARACTERS.keys())
def test_characters_over_several_tokens_C099(text, folder, scripted):
    model, tokenizer = load(str(folder))
    ids = list(f"x{text}y".encode())
    pieces = scripted(model, tokenizer, ids)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids) == f"x{text}y"
    assert len(pieces) == len(ids), "a token that completes nothing gives an empty text"


@pytest.fixture
def byte_fallback_folder(tmp_path) -> Path:
    """A SentencePiece-style tokenizer: <0xXX> for bytes 0..255, then words, then specials."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {"\u2581ab": 256, "a": 257, "b": 258, "\u2581": 259}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|bos|>", "<|eos|>", "<|eot|>")]
    )
    folder = write_folder(tmp_path / "spm", FIX_B, tokenizer=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_byte_fallback_gives_the_character_C101(byte_fallback_folder, scripted):
    model, tokenizer = load(str(byte_fallback_folder))
    ids = [256, 0xE7, 0xA7, 0x81, 256]
    pieces = scripted(model, tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "ab\u79c1 ab"
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_truncated_character_is_one_mark_at_the_end_C101(byte_fallback_folder, scripted):
    model, tokenizer = load(str(byte_fallback_folder))
    pieces = scripted(model, tokenizer, [256, 0xE7, 0xA7])
    assert "".join(pieces).rstrip(REPLACEMENT) == "ab"
    assert REPLACEMENT in pieces[-1] and not any(REPLACEMENT in piece for piece in pieces[:-1])


@pytest.mark.parametrize("ids", [[0xF0, 0x9F, 256], [0xFF, 0x20, 0x80, 0x41], [0xF0, 0x9F]])
@pytest.mark.parametrize("stopped", [True, False])
def test_a_cut_sequence_of_bytes_C102(ids, stopped, folder, scripted):
    model, tokenizer = load(str(folder))
    pieces = scripted(model, tokenizer, [*ids, EOS] if stopped else ids)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_an_id_past_the_tokenizer_is_what_mlx_lm_makes_of_it_C104(folder):
    """FIX-B has 263 tokens and a vocabulary of 264. Nothing of ours pads it further."""
    model, tokenizer = load(str(folder))
    stock, stock_tokenizer = mlx_lm.load(str(folder))
    bias = make_logits_processors({PADDING: 100.0})
    found = list(generation.stream_generate(model, tokenizer, "the", 3, logits_processors=bias))
    expected = list(
        mlx_lm.stream_generate(stock, stock_tokenizer, "the", 3, logits_processors=bias)
    )
    assert [r.token for r in found] == [r.token for r in expected] == [PADDING] * 3
    assert [r.text for r in found] == [r.text for r in expected]
    assert model(mx.array([[5]])).shape[-1] == model.lm_head.weight.shape[0] == 264


def test_an_id_past_the_tokenizer_in_the_greedy_loop_C104(folder, scripted):
    model, tokenizer = load(str(folder))
    detokenizer = mlx_lm.load(str(folder))[1].detokenizer
    for token in (0x41, PADDING, 0x42):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert "".join(scripted(model, tokenizer, [0x41, PADDING, 0x42])) == detokenizer.text


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "TokenizersBackend"},
        {"extra_special_tokens": ["<|eot|>"]},
        {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|eot|>"]},
        {"tokenizer_class": "NoSuchTokenizer"},
    ],
    ids=str,
)
def test_settings_of_transformers_5_C105(settings, folder):
    plain = load(str(folder))[1].encode("the inn")
    change_settings(folder, **settings)
    _, tokenizer = load(str(folder))
    assert tokenizer.encode("the inn") == plain
    assert tokenizer.decode([EOT, 0x41], skip_special_tokens=True) == "A"
    assert set(tokenizer.eos_token_ids) == {EOS}


def test_tokenizer_config_of_load_overrides_the_folder(folder):
    _, tokenizer = load(str(folder), tokenizer_config={"eos_token": "<|eot|>"})
    _, expected = mlx_lm.load(str(folder), tokenizer_config={"eos_token": "<|eot|>"})
    assert tokenizer.eos_token == expected.eos_token == "<|eot|>"
    assert set(tokenizer.eos_token_ids) == set(expected.eos_token_ids)


def test_a_plain_tokenizer_is_wrapped(folder):
    """mlx-lm's loop takes a transformers tokenizer that nobody wrapped, and so does ours."""
    from transformers import PreTrainedTokenizerFast

    model, wrapped = load(str(folder))
    plain = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    plain.eos_token = "<|eos|>"
    expected = mlx_lm.generate(model, wrapped, "the inn", max_tokens=6)
    assert generation.generate(model, plain, "the inn", max_tokens=6) == expected
