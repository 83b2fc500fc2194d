// Packed weights and x as the operands of a multiply; gemv_mma.h says how they meet.
#include "mma.h"
#include "words.h"

// Two nibbles of a word, `nibble` and the one 16 bits on, as 16 + q in T; 256 + 16 q if `high`.
template <typename T>
inline uint packed_pair(uint word, int nibble, bool high) {
  constexpr bool IS_HALF = is_same_v<T, float16_t>;
  constexpr int PLACE = IS_HALF ? 6 : 3;
  const uint exponent =
      IS_HALF ? (high ? 0x5c005c00u : 0x4c004c00u) : (high ? 0x43804380u : 0x41804180u);
  const int shift = PLACE - 4 * nibble;
  return masked_or(
      shift >= 0 ? word << shift : word >> -shift, 0x000f000fu << PLACE, exponent);
}

// The x that four pairs of packed values meet: 16 bytes of x are 8 consecutive values.
template <int BITS>
inline void pair_up(vec<uint, 4> x, thread uint* pairs) {
  if (BITS == 16) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      pairs[i] = x[i];
    }
  } else {
    const int other = BITS == 4 ? 2 : 1;
    const int next = BITS == 4 ? 1 : 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint a = x[i * next];
      const uint b = x[i * next + other];
      pairs[2 * i] = low_halves(a, b);
      pairs[2 * i + 1] = high_halves(a, b);
    }
  }
}

// d += the rows that the lanes hold in `a` (row g) and `b` (row g + 8) times x.
template <typename T, int BITS>
inline void multiply(
    thread float* d, vec<uint, 4> a, vec<uint, 4> b, const thread uint* pairs) {
#pragma unroll
  for (int w = 0; w < 4; w++) {
    if (BITS == 16) {
      if (w % 2 == 0) {
        mma<T>(d, a[w], b[w], a[w + 1], b[w + 1], pairs[w], pairs[w + 1]);
      }
    } else {
      // At 4 bits the second multiply has the word's other four values; at 8 the high nibbles of
      // the same four.
#pragma unroll
      for (int s = 0; s < 2; s++) {
        const bool high = BITS == 8 && s == 1;
        const int one = BITS == 4 ? 2 * s : s;
        const int two = BITS == 4 ? 2 * s + 1 : s + 2;
        const int pair = BITS == 4 ? 4 * w + 2 * s : 2 * w;
        mma<T>(
            d, packed_pair<T>(a[w], one, high), packed_pair<T>(b[w], one, high),
            packed_pair<T>(a[w], two, high), packed_pair<T>(b[w], two, high), pairs[pair],
            pairs[pair + 1]);
      }
    }
  }
}

// d += the sums of x, in every row.
template <typename T, int PAIRS>
inline void multiply_ones(thread float* d, const thread uint* pairs) {
  constexpr uint ONES = is_same_v<T, float16_t> ? 0x3c003c00u : 0x3f803f80u;
#pragma unroll
  for (int i = 0; i < PAIRS; i += 2) {
    mma<T>(d, ONES, ONES, ONES, ONES, pairs[i], pairs[i + 1]);
  }
}
