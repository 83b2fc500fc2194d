// inputs: constants
// outputs: weight
// template: T BITS GROUP N K
#include "constants.h"
#include "words.h"
// weight (N, K) in T: the matrix of constants.h, of 4 or 8 bit, written out for a product of many
// rows. A thread takes eight values. T has 16 bits, or is float.
constexpr Parts AT = parts<T, BITS, GROUP, N, K, false>();
const size_t at = thread_position_in_grid.x;
if (at < size_t(N) * K / 8) {
  const float scale = float(part<T>(constants, AT.scales)[at * 8 / GROUP]);
  const float bias = float(part<T>(constants, AT.biases)[at * 8 / GROUP]);
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint word = constants[at * (BITS / 4) + i * BITS / 32];
    const uint code = (word >> (i * BITS % 32)) & ((1u << BITS) - 1u);
    values[i] = float(code) * scale + bias;
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
