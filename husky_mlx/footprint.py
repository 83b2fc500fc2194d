"""What a model costs to run, from its config: bytes by part, bytes a token, operations of a prompt.

Nothing here asks the machine. A bench counts with the same functions on the tensors that it loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from husky_mlx.buffers import first_capacity
from husky_mlx.cache import quantized_group_size
from husky_mlx.config import LlamaConfig
from husky_mlx.structure import expected_shapes

# Tokens that mlx-lm and we give to the model at once in a prompt (mlx_lm.generate.generate_step).
PROMPT_CHUNK = 2048
KV_GROUP_SIZE = 64  # mlx-lm's default
DEFAULT_CONTEXT = 8192
_PARTS = {
    "embed_tokens": "embedding",
    "self_attn": "attention",
    "mlp": "MLP",
    "lm_head": "head",
}
NORMS = "norms"
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# What mlx-lm takes where a config's quantization has no group_size.
_GROUP_SIZES = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}


@dataclass(frozen=True)
class Footprint:
    """Bytes of every tensor in memory (``tensors``: module path -> bytes), and the config.

    ``itemsize``: bytes of a number of the activations and the KV cache. ``words``: how the weights
    are stored, for people.
    """

    config: LlamaConfig
    tensors: Mapping[str, int]
    itemsize: int
    words: str

    def parts(self) -> dict[str, int]:
        """Bytes of the weights by part, the parts in the order of the forward."""
        sizes: Counter[str] = Counter()
        for path, size in self.tensors.items():
            sizes[part_of(path)] += size
        return {name: sizes[name] for name in (*_PARTS.values(), NORMS) if sizes[name]}

    def weight_bytes(self) -> int:
        return sum(self.tensors.values())

    def read_bytes(self) -> int:
        """Bytes of the weights that a decode step reads: all but the table of an untied model, of
        which it reads a row."""
        table = sum(size for path, size in self.tensors.items() if part_of(path) == "embedding")
        return self.weight_bytes() - (0 if self.config.tie_word_embeddings else table)

    def usual_context(self) -> int:
        """Tokens to count with where nobody says: as many as it is trained for, up to 8192."""
        return min(DEFAULT_CONTEXT, self.config.max_position_embeddings or DEFAULT_CONTEXT)

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of ``tokens`` tokens, those in windows only once."""
        return self._row_bytes() * self._rows(tokens)

    def quantized_cache_bytes(self, tokens: int, bits: int) -> int | None:
        """The same with mlx-lm's ``kv_bits``; None where it has none for these heads or windows."""
        config = self.config
        if any(map(config.window_of, range(config.num_hidden_layers))):
            return None  # mlx-lm quantizes no rotating cache
        try:
            group = quantized_group_size((config.head_dim,), KV_GROUP_SIZE, bits)
        except ValueError:
            return None
        values = 2 * config.key_value_size * self._rows(tokens)
        return values * bits // 8 + values // group * 2 * self.itemsize

    def allocated_cache_bytes(self, tokens: int) -> int:
        """The same with the spare rows that the buffers are allocated with on a GPU."""
        return self.cache_bytes(first_capacity(tokens))

    def decode_bytes(self, context: int) -> int:
        """Bytes that one decode step moves at least, with ``context`` tokens in the cache."""
        return self.read_bytes() + self.cache_bytes(context)

    def prompt_bytes(self, tokens: int) -> int:
        """Bytes that a prompt moves at least: the layers once a chunk, the head, which only the
        last token asks for, and the cache once."""
        chunks = math.ceil(tokens / PROMPT_CHUNK)
        layers = sum(size for path, size in self.tensors.items() if ".layers." in path)
        return layers * (chunks - 1) + self.read_bytes() + self.cache_bytes(tokens)

    def prompt_operations(self, tokens: int) -> int:
        """Multiplications and additions of a prompt: every matrix for each token, the head for the
        last one, and attention over the tokens before."""
        config = self.config
        shapes = expected_shapes(config)
        matrices = sum(
            math.prod(shape)
            for path, shape in shapes.items()
            if len(shape) == 2 and part_of(path) in ("attention", "MLP")
        )
        seen = sum(
            _seen(tokens, config.window_of(layer)) for layer in range(config.num_hidden_layers)
        )
        head = config.vocab_size * config.hidden_size
        return 2 * (matrices * tokens + head) + 4 * config.query_size * seen

    def workspace_bytes(self, tokens: int) -> int:
        """About what a prompt's activations take at their widest: a layer's input and its norm, its
        queries, and the MLP's three wide arrays, of one chunk."""
        config = self.config
        widest = 2 * config.hidden_size + 3 * config.intermediate_size
        return min(tokens, PROMPT_CHUNK) * (widest + config.query_size) * self.itemsize

    def _row_bytes(self) -> int:
        return 2 * self.config.key_value_size * self.itemsize

    def _rows(self, tokens: int) -> int:
        """Rows of all layers together."""
        windows = (self.config.window_of(i) for i in range(self.config.num_hidden_layers))
        return sum(min(tokens, window or tokens) for window in windows)


def footprint(
    config: LlamaConfig, raw: Mapping[str, Any], *, unquantized: bool = False
) -> Footprint:
    """What the ``quantization`` and the dtype of a config.json (``raw``) take on a GPU.

    ``unquantized``: the same model with every weight in 16 bit.
    """
    stored = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix("torch.")
    itemsize = 2 if unquantized else _DTYPE_BYTES.get(stored, 2)
    quantization = raw.get("quantization") or raw.get("quantization_config") or {}
    quantization = {} if unquantized else quantization
    tensors: Counter[str] = Counter()
    for name, shape in expected_shapes(config).items():
        path = name.rsplit(".", 1)[0]
        settings = quantization.get(path, quantization) if len(shape) == 2 else {}
        tensors[path] += _stored_bytes(math.prod(shape), settings or {}, itemsize)
    bits = 8 * sum(tensors.values()) / sum(map(math.prod, expected_shapes(config).values()))
    kind = quantization.get("bits")
    words = f"{kind} bit" if kind else ("16 bit" if itemsize == 2 else "32 bit")
    return Footprint(config, dict(tensors), itemsize, f"{words} ({bits:.2f} bits a weight)")


def part_of(path: str) -> str:
    """The part that a parameter belongs to, by its name in mlx-lm."""
    words = path.split(".")
    if words[-1].endswith("norm"):
        return NORMS
    return next((part for word, part in _PARTS.items() if word in words), NORMS)


def _stored_bytes(values: int, settings: Mapping[str, Any], itemsize: int) -> int:
    """Bytes of a matrix in the layout of ``settings``: MLX's affine one has a scale and a bias of
    the activations' dtype for each group, the others a scale of one byte."""
    if "bits" not in settings:
        return values * itemsize
    mode = settings.get("mode", "affine")
    group = settings.get("group_size") or _GROUP_SIZES[mode]
    return values * settings["bits"] // 8 + values // group * (
        2 * itemsize if mode == "affine" else 1
    )


def _seen(tokens: int, window: int | None) -> int:
    """Pairs of a token and one that it attends to, itself included."""
    full = min(tokens, window or tokens)
    return full * (full + 1) // 2 + (tokens - full) * full
