"""FIX-B of the public cases: a tiny float32 Llama with a real byte-level BPE tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n")]
SPECIAL_TOKENS = {"<|bos|>": 260, "<|eos|>": 261, "<|eot|>": 262}
VOCAB_SIZE = 264
CHAT_TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] }}: {{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 261,
    "bos_token_id": 260,
}


def write_fix_b(folder: Path, **changes: object) -> Path:
    """Write the model folder; ``changes`` replace fields of its config.json. Returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(_weights(), folder / "model.safetensors")
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0..255 are the bytes, 256..259 the merges, then the special tokens."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    vocabulary |= {a + b: 256 + i for i, (a, b) in enumerate(MERGES)}
    bpe = Tokenizer(models.BPE(vocabulary, MERGES))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|bos|>", eos_token="<|eos|>", clean_up=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    assert wrapped.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(SPECIAL_TOKENS.values())
    return wrapped


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte.

    Bytes that print as themselves in Latin-1 keep their letter, the others get the letters from
    256 on, in order.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def _weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def normal(rows: int, columns: int, scale: float = 0.08) -> np.ndarray:
        return (random.normal(size=(rows, columns)) * scale).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, 64, 1.0),
        "lm_head.weight": normal(VOCAB_SIZE, 64),
        "model.norm.weight": np.ones(64, np.float32),
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": normal(64, 64),
            f"{layer}.self_attn.k_proj.weight": normal(32, 64),
            f"{layer}.self_attn.v_proj.weight": normal(32, 64),
            f"{layer}.self_attn.o_proj.weight": normal(64, 64),
            f"{layer}.mlp.gate_proj.weight": normal(128, 64),
            f"{layer}.mlp.up_proj.weight": normal(128, 64),
            f"{layer}.mlp.down_proj.weight": normal(64, 128),
            f"{layer}.input_layernorm.weight": np.ones(64, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(64, np.float32),
        }
    return weights
