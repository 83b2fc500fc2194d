// A threadgroup's share of a matrix as plain values, for a product of many rows.
//
// weight (N, K) in T: the matrix of constants.h, of 4 or 8 bit. A thread takes UNROLL times eight
// values, a threadgroup's width apart: so many loads are in flight and every one of them is of whole
// lines. T has 16 bits, or is float.
#include "constants.h"
#include "words.h"

template <typename T, int BITS, int GROUP, int N, int K, int UNROLL>
inline void dequantize_share(
    const device uint* constants, device T* weight, uint tile, uint thread_index, uint threads) {
  constexpr Parts AT = parts<T, BITS, GROUP, N, K, false>();
  constexpr int WORDS = BITS / 4;
  const size_t first = size_t(tile) * threads * UNROLL + thread_index;
  uint codes[UNROLL][WORDS];
  float scales[UNROLL];
  float biases[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const size_t at = first + u * threads;
    if (at < size_t(N) * K / 8) {
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        codes[u][i] = constants[at * WORDS + i];
      }
      scales[u] = float(part<T>(constants, AT.scales)[at * 8 / GROUP]);
      biases[u] = float(part<T>(constants, AT.biases)[at * 8 / GROUP]);
    }
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const size_t at = first + u * threads;
    if (at < size_t(N) * K / 8) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const uint code = (codes[u][i * BITS / 32] >> (i * BITS % 32)) & ((1u << BITS) - 1u);
        values[i] = float(code) * scales[u] + biases[u];
      }
      if constexpr (sizeof(T) == 2) {
        vec<uint, 4> words;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          words[i] = pair_word<T>(values[2 * i], values[2 * i + 1]);
        }
        reinterpret_cast<device vec<uint, 4>*>(weight)[at] = words;
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
          weight[at * 8 + i] = T(values[i]);
        }
      }
    }
  }
}
