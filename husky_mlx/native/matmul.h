// Weight rows times many tokens: prefill. LANES rows are unpacked once, row by lane, and then meet
// the tokens several at a time.
#pragma once

#include "matvec.h"
#include "tiles.h"

namespace husky {

// Tokens that share one load of the weights: as many accumulators as registers allow.
constexpr int TOKENS_AT_ONCE = LANES == 16 ? 12 : 4;
// Fewer tokens are cheaper one by one than unpacking is.
constexpr int FEWEST_FOR_TILES = 4;
constexpr int FLOAT_DEPTH = 128;

// Room for the unpacked rows of any matrix of this width.
constexpr int64_t unpacked_bytes(int columns) {
  const int64_t integers = (int64_t)columns * LANES + 2 * (columns / GROUP) * LANES * 4;
  const int64_t floats = (int64_t)FLOAT_DEPTH * TILE_COLUMNS * 4;
  return integers > floats ? integers : floats;
}

namespace detail {

template <typename M>
struct Unpacked {
  static constexpr int QUADS = M::COLUMNS / 4;  // four codes of each row in one vector
  Words* codes;
  Floats* scales;
  Floats* biases;

  explicit Unpacked(char* memory) {
    codes = reinterpret_cast<Words*>(memory);
    scales = reinterpret_cast<Floats*>(codes + QUADS);
    biases = scales + M::GROUPS;
  }

  void fill(const Tensor& tensor, int first, int rows) const {
    for (int word = 0; word < M::WORDS; word += LANES) {
      const int count = M::WORDS - word < LANES ? M::WORDS - word : LANES;
      Words block[LANES] = {};
      for (int i = 0; i < rows; ++i) {
        const uint32_t* from = M::words(tensor, first + i) + word;
        block[i] = count == LANES ? load<Words>(from) : load_some<Words>(from, count * 4);
      }
      transpose(block);
      for (int i = 0; i < count; ++i) {
        if constexpr (M::BITS == 8) {
          codes[word + i] = block[i];
        } else {
          // A group's even elements take four vectors, its odd ones the next four.
          const int at = (word + i) / 4 * 8 + (word + i) % 4;
          codes[at] = block[i] & 0x0f0f0f0fu;
          codes[at + 4] = block[i] >> 4 & 0x0f0f0f0fu;
        }
      }
    }
    fill_floats(M::scales(tensor, first), rows, scales);
    fill_floats(M::biases(tensor, first), rows, biases);
  }

  template <typename T>
  static void fill_floats(const T* from, int rows, Floats* to) {
    for (int group = 0; group < M::GROUPS; group += LANES) {
      const int count = M::GROUPS - group < LANES ? M::GROUPS - group : LANES;
      Words block[LANES] = {};
      for (int i = 0; i < rows; ++i)
        block[i] = bits_as<Words>(load_floats(from + i * M::GROUPS + group, count));
      transpose(block);
      for (int i = 0; i < count; ++i) to[group + i] = bits_as<Floats>(block[i]);
    }
  }
};

// Where the activations of a quad are within a token's bytes, from those of its group.
template <typename M>
constexpr int quad_offset(int quad) {
  return M::BITS == 8 ? 4 * quad : quad % 4 * 4 + quad / 4 * (SPLIT_BLOCK / 2);
}
template <typename M>
inline int group_offset(int group) {
  if constexpr (M::BITS == 8) return group * GROUP;
  constexpr int IN_BLOCK = SPLIT_BLOCK / GROUP;
  return group / IN_BLOCK * SPLIT_BLOCK + group % IN_BLOCK * (GROUP / 2);
}

// The dot products of one group's codes with one of the bytes of its activations.
template <int TOKENS, typename M, typename X>
inline void add_dots(const Words* codes, const int8_t* from, Ints* dots) {
#pragma GCC unroll 8
  for (int quad = 0; quad < GROUP / 4; ++quad) {
    const Words weights = codes[quad];
#pragma GCC unroll 12
    for (int t = 0; t < TOKENS; ++t) {
      const uint32_t four = load<uint32_t>(from + t * X::STRIDE + quad_offset<M>(quad));
      dots[t] = dot4<M::BITS>(dots[t], weights, splat(four));
    }
  }
}

template <int TOKENS, typename M, typename X>
inline void integer_tile(const Unpacked<M>& tile, const X& x, int token, float* out, int stride) {
  const int8_t* bytes = (M::BITS == 4 ? x.split : x.natural) + (int64_t)token * X::STRIDE;
  const float* x_scale = x.scale + (int64_t)token * X::GROUP_STRIDE;
  const float* x_sum = x.sum + (int64_t)token * X::GROUP_STRIDE;
  Floats total[TOKENS] = {};
  for (int group = 0; group < X::GROUPS; ++group) {
    const int8_t* from = bytes + group_offset<M>(group);
    const Words* codes = tile.codes + group * (GROUP / 4);
    Ints dots[TOKENS] = {};
    add_dots<TOKENS, M, X>(codes, from, dots);
#pragma GCC unroll 12
    for (int t = 0; t < TOKENS; ++t) dots[t] <<= 8;
    add_dots<TOKENS, M, X>(codes, from + x.low, dots);
    const Floats scale = tile.scales[group * GROUP / M::GROUP];
    const Floats bias = tile.biases[group * GROUP / M::GROUP];
#pragma GCC unroll 12
    for (int t = 0; t < TOKENS; ++t) {
      total[t] += convert<Floats>(dots[t]) * (scale * x_scale[t * X::GROUP_STRIDE + group]);
      total[t] += bias * x_sum[t * X::GROUP_STRIDE + group];
    }
  }
  for (int t = 0; t < TOKENS; ++t) store_floats(out + (int64_t)t * stride, total[t]);
}

template <typename M, typename X>
void multiply_integers(const Tensor& tensor, int first, int rows, const X& x, int token, int tokens,
                       char* memory, float* out, int stride) {
  const Unpacked<M> tile(memory);
  tile.fill(tensor, first, rows);
  int t = 0;
  for (; t + TOKENS_AT_ONCE <= tokens; t += TOKENS_AT_ONCE)
    integer_tile<TOKENS_AT_ONCE>(tile, x, token + t, out + (int64_t)t * stride, stride);
  if constexpr (TOKENS_AT_ONCE > 4)
    for (; t + 4 <= tokens; t += 4)
      integer_tile<4>(tile, x, token + t, out + (int64_t)t * stride, stride);
  for (; t < tokens; ++t) integer_tile<1>(tile, x, token + t, out + (int64_t)t * stride, stride);
}

template <typename M, typename X>
void multiply_floats(const Tensor& tensor, int first, int rows, const X& x, int token, int tokens,
                     char* memory, float* out, int stride) {
  float* unpacked = reinterpret_cast<float*>(memory);  // (FLOAT_DEPTH, TILE_COLUMNS)
  const int vectors = round_up(rows, LANES) / LANES;
  for (int t = 0; t < tokens; ++t)
    for (int i = 0; i < vectors; ++i) store_floats(out + (int64_t)t * stride + i * LANES, Floats{});
  for (int column = 0; column < M::COLUMNS; column += FLOAT_DEPTH) {
    const int depth = M::COLUMNS - column < FLOAT_DEPTH ? M::COLUMNS - column : FLOAT_DEPTH;
    for (int base = 0; base < rows; base += LANES)
      in_vectors(depth, [&](int i, int count) {
        Words block[LANES] = {};
        for (int row = 0; row < LANES && base + row < rows; ++row)
          block[row] = bits_as<Words>(M::values(tensor, first + base + row, column + i, count));
        transpose(block);
        for (int j = 0; j < count; ++j) store(unpacked + (i + j) * TILE_COLUMNS + base, block[j]);
      });
    add_product(x.row(token) + column, X::STRIDE, unpacked, TILE_COLUMNS, depth, out, stride,
                tokens, vectors);
  }
}

}  // namespace detail

// As multiply_rows, for any number of tokens. `memory` is the thread's own, unpacked_bytes large.
template <typename M, bool INTEGER, typename X>
void multiply(const Tensor& tensor, int first, int rows, const X& x, int token, int tokens,
              char* memory, float* out, int stride) {
  if (tokens < FEWEST_FOR_TILES) {
    multiply_rows<M, INTEGER>(tensor, first, rows, x, token, tokens, out, stride);
    return;
  }
  constexpr int STEP = INTEGER ? LANES : TILE_COLUMNS;
  for (int base = 0; base < rows; base += STEP) {
    const int count = rows - base < STEP ? rows - base : STEP;
    if constexpr (INTEGER)
      detail::multiply_integers<M>(tensor, first + base, count, x, token, tokens, memory,
                                   out + base, stride);
    else
      detail::multiply_floats<M>(tensor, first + base, count, x, token, tokens, memory, out + base,
                                 stride);
  }
}

}  // namespace husky
