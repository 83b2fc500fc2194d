"""The C++ source of one model's program: its sizes and formats as constants. A pure function."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from husky_mlx.config import LlamaConfig
from husky_mlx.native.storage import LayerFormat, MatrixFormat, ModelFormat

_TYPES = {mx.float32: "float", mx.float16: "Half", mx.bfloat16: "BFloat"}
_NORM_NAMES = ("InputNorm", "PostNorm", "QueryNorm", "KeyNorm")
_NAMES = ("Query", "Key", "Value", "Output", "Gate", "Up", "Down")

# The longest native call, during which Python sees no Ctrl-C, in multiplications: about a second
# on two cores. Blocks are multiples of the tokens that the kernels take at once.
_MULTIPLICATIONS_A_CALL = 10**11
_BLOCKS = (192, 96, 48, 24, 12)

_SOURCE = """\
#include "engine.h"

namespace {{

using namespace husky;

{layers}
struct Shape {{
  static constexpr int HIDDEN = {hidden}, INTERMEDIATE = {intermediate}, LAYERS = {layer_count};
  static constexpr int HEADS = {heads}, KV_HEADS = {kv_heads}, HEAD_DIM = {head_dim};
  static constexpr int BLOCK = {block};
  static constexpr float EPS = {eps}, SCALE = {scale}, MAGNITUDE = {magnitude};
  static constexpr bool TRADITIONAL = {traditional}, EXACT = {exact};
  static constexpr float FREQUENCIES[] = {{{frequencies}}};
  using KV = {kv};
  using Embedding = {embedding};
  using Head = {head};
  using FinalNorm = {final_norm};

  template <typename F>
  static void with_layer(int layer, F f) {{
    static constexpr unsigned short FORMAT[] = {{{format_of_layer}}};
    switch (FORMAT[layer]) {{
{cases}
    }}
  }}
}};

Engine<Shape> engine;

}}  // namespace

extern "C" __attribute__((visibility("default")))
int husky_forward(const Call* call, int threads) {{
  return engine.run(*call, threads);
}}
"""


def block_tokens(config: LlamaConfig) -> int:
    """The most tokens that one call of the program takes."""
    per_layer = config.hidden_size * (
        2 * config.query_size + 2 * config.key_value_size + 3 * config.intermediate_size
    )
    fitting = _MULTIPLICATIONS_A_CALL // (per_layer * config.num_hidden_layers)
    return next((block for block in _BLOCKS if block <= fitting), _BLOCKS[-1])


def emit(config: LlamaConfig, formats: ModelFormat, kv_dtype: mx.Dtype, exact: bool = False) -> str:
    """The translation unit for a model whose KV buffers hold ``kv_dtype``.

    ``exact``: activations stay floats; otherwise they are quantised to 16 bit where they meet
    quantised weights.
    """
    kinds = list(dict.fromkeys(formats.layers))
    hidden, vocabulary = config.hidden_size, config.vocab_size
    frequencies = config.rope.frequencies(config.head_dim)
    return _SOURCE.format(
        layers="\n".join(_layer(i, kind, config) for i, kind in enumerate(kinds)),
        hidden=hidden,
        intermediate=config.intermediate_size,
        layer_count=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        block=block_tokens(config),
        eps=_literal(config.rms_norm_eps),
        scale=_literal(config.attention_scale),
        magnitude=_literal(config.rope.magnitude),
        traditional=_boolean(config.rope.traditional),
        exact=_boolean(exact),
        frequencies=", ".join(map(_literal, frequencies)),
        kv=_TYPES[kv_dtype],
        embedding=_matrix(vocabulary, hidden, formats.embedding),
        head=_matrix(vocabulary, hidden, formats.head),
        final_norm=_TYPES[formats.final_norm],
        format_of_layer=", ".join(str(kinds.index(layer)) for layer in formats.layers),
        cases="\n".join(f"      case {i}: return f(Layer{i}{{}});" for i in range(len(kinds))),
    )


def _layer(number: int, layer: LayerFormat, config: LlamaConfig) -> str:
    hidden, wide = config.hidden_size, config.intermediate_size
    query, key_value = config.query_size, config.key_value_size
    shapes = (
        (query, hidden),
        (key_value, hidden),
        (key_value, hidden),
        (hidden, query),
        (wide, hidden),
        (wide, hidden),
        (hidden, wide),
    )
    lines = [
        f"  using {name} = {_matrix(*shape, found)};"
        for name, shape, found in zip(_NAMES, shapes, layer.projections, strict=True)
    ]
    lines += [
        f"  using {name} = {'None' if dtype is None else _TYPES[dtype]};"
        for name, dtype in zip(_NORM_NAMES, layer.norms, strict=True)
    ]
    return "\n".join([f"struct Layer{number} {{", *lines, "};", ""])


def _matrix(rows: int, columns: int, found: MatrixFormat) -> str:
    bias = "" if found.bias is None else f", {_TYPES[found.bias]}"
    if found.bits is None:
        return f"Dense<{rows}, {columns}, {_TYPES[found.dtype]}{bias}>"
    layout = f"{found.bits}, {found.group_size}, {_TYPES[found.dtype]}"
    return f"Affine<{rows}, {columns}, {layout}{bias}>"


def _literal(value: float) -> str:
    """A float32 in C++, without rounding it again."""
    return f"{float(np.float32(value)).hex()}f"


def _boolean(value: bool) -> str:
    return "true" if value else "false"
