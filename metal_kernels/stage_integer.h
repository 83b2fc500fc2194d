// x as 16-bit integers in two signed bytes, in threadgroup memory, for products with packed weights
// in whole numbers.
//
// GROUP values share a scale: x = scale * (256 * high + low) within half of scale, and the largest
// has 32512 steps, more than 256 times as many as bfloat16 tells apart near it.
#include "mma_integer.h"
#include "words.h"

// Float elements of 16 bytes that x (M, K), its groups' scales and sums and the simdgroups' sums of
// squares need.
template <int K, int M, int GROUP, int SIMDGROUPS>
inline constexpr int integer_staged() {
  return M * (K / 8 + (K / GROUP * 2 + 3) / 4) + (M * SIMDGROUPS + 3) / 4;
}

// A scale, and the sum of the values, of each of a row's groups.
template <int K, int GROUP>
inline constexpr int integer_facts() {
  return (K / GROUP * 2 + 3) / 4 * 2;
}

// Byte BYTE of each of four words.
template <int BYTE>
inline uint bytes_of(uint a, uint b, uint c, uint d) {
  constexpr uint CHOICE = BYTE | (BYTE + 4) << 4;
  return permute_bytes(permute_bytes(a, b, CHOICE), permute_bytes(c, d, CHOICE), 0x5410u);
}

// Four words of bytes of 16 values, as a lane's packed weights meet them: at 8 bits in order, at 4
// bits the even values of either 8 and then the odd ones.
template <int BITS, int BYTE>
inline vec<uint, 4> bytes_in_order(const thread uint* v) {
  constexpr int STEP = BITS == 4 ? 2 : 1;
  constexpr int NEXT = BITS == 4 ? 8 : 4;
  constexpr int THIRD = BITS == 4 ? 1 : 8;
  constexpr int FOURTH = BITS == 4 ? 9 : 12;
  return vec<uint, 4>(
      bytes_of<BYTE>(v[0], v[STEP], v[2 * STEP], v[3 * STEP]),
      bytes_of<BYTE>(v[NEXT], v[NEXT + STEP], v[NEXT + 2 * STEP], v[NEXT + 3 * STEP]),
      bytes_of<BYTE>(v[THIRD], v[THIRD + STEP], v[THIRD + 2 * STEP], v[THIRD + 3 * STEP]),
      bytes_of<BYTE>(v[FOURTH], v[FOURTH + STEP], v[FOURTH + 2 * STEP], v[FOURTH + 3 * STEP]));
}

// Values 16 * unit and the next 15, or zeros.
template <typename T>
inline void load_sixteen(const device uint* words, int unit, bool live, thread float* values) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const vec<uint, 4> loaded =
        live ? load_shared_words(words + (unit * 2 + i) * 4) : vec<uint, 4>(0u);
    widen<T>(loaded, values + i * 8);
  }
}

// 16 values as bytes at their place, and the scale and sum of their group from its first lane.
template <int BITS, int GROUP>
inline void stage_sixteen(
    thread float* values, int unit, bool live, threadgroup uint* bytes, threadgroup float2* facts) {
  float largest = 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    largest = max(largest, metal::abs(values[i]));
    sum += values[i];
  }
#pragma unroll
  for (int distance = 1; distance < GROUP / 16; distance *= 2) {
    largest = max(largest, simd_shuffle_xor(largest, ushort(distance)));
    sum += simd_shuffle_xor(sum, ushort(distance));
  }
  // Smaller groups are zero beside anything that a 16-bit type tells from zero.
  largest = max(largest, 1e-30f);
  const float steps = 32512.0f / largest;
  uint whole[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    // Added to 1.5 * 2^23 a float's last bits are the number itself.
    whole[i] = as_type<uint>(metal::fma(values[i], steps, 12582912.0f));
  }
  const vec<uint, 4> low = bytes_in_order<BITS, 0>(whole);
#pragma unroll
  for (int i = 0; i < 16; i++) {
    whole[i] += 128u;  // low is signed
  }
  const vec<uint, 4> high = bytes_in_order<BITS, 1>(whole);
  if (live) {
    if constexpr (BITS == 4) {
      // A lane has 32 values: each half of them brings half of the even and of the odd ones.
      threadgroup vec<uint, 2>* out =
          reinterpret_cast<threadgroup vec<uint, 2>*>(bytes) + unit / 2 * 8 + unit % 2;
      out[0] = vec<uint, 2>(high[0], high[1]);
      out[2] = vec<uint, 2>(high[2], high[3]);
      out[4] = vec<uint, 2>(low[0], low[1]);
      out[6] = vec<uint, 2>(low[2], low[3]);
    } else {
      threadgroup vec<uint, 4>* out =
          reinterpret_cast<threadgroup vec<uint, 4>*>(bytes) + unit * 2;
      out[0] = high;
      out[1] = low;
    }
    if (unit % (GROUP / 16) == 0) {
      // At 4 bits a product of whole numbers is 16 times too large: see multiply_integer.
      facts[unit / (GROUP / 16)] = float2(largest / (BITS == 4 ? 520192.0f : 32512.0f), sum);
    }
  }
}

// The sums of squares of x (M, K) by simdgroup, in threadgroup memory.
template <int K, int M, int GROUP>
inline threadgroup float* staged_squares(threadgroup uint* staged) {
  return reinterpret_cast<threadgroup float*>(staged) + M * (K / 2 + 2 * integer_facts<K, GROUP>());
}

// x (M, K), times the norm's weights if NORM. `staged`: for each row of x its bytes, for 16 values
// (at 4 bits 32) the high ones and then the low ones; then for each row its groups' scales and sums;
// then sums of squares. What RMS norm divides by is left to the products, which need not wait for it.
template <typename T, int BITS, int GROUP, int K, int M, int SIMDGROUPS, bool NORM>
inline void stage_integer(
    const device T* x,
    const device T* norm,
    threadgroup uint* staged,
    uint simdgroup,
    uint lane) {
  constexpr int THREADS = 32 * SIMDGROUPS;
  constexpr int UNITS = K / 16;
  constexpr int SHARE = (UNITS + THREADS - 1) / THREADS;
  const device uint* x_words = reinterpret_cast<const device uint*>(x);
  const device uint* norm_words = reinterpret_cast<const device uint*>(norm);
  threadgroup float2* facts = reinterpret_cast<threadgroup float2*>(staged + M * (K / 2));
  float squares[M];
#pragma unroll
  for (int m = 0; m < M; m++) {
    squares[m] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    const int first = int(simdgroup) * 32 + i * THREADS;
    // Of a small K most simdgroups have none.
    if (first < UNITS) {
      const int unit = first + int(lane);
      const bool live = unit < UNITS;
      float weights[16];
      if constexpr (NORM) {
        load_sixteen<T>(norm_words, unit, live, weights);
      }
#pragma unroll
      for (int m = 0; m < M; m++) {
        float values[16];
        load_sixteen<T>(x_words + m * (K / 2), unit, live, values);
        if constexpr (NORM) {
#pragma unroll
          for (int j = 0; j < 16; j++) {
            squares[m] += values[j] * values[j];
            values[j] *= weights[j];
          }
        }
        stage_sixteen<BITS, GROUP>(
            values, unit, live, staged + m * (K / 2), facts + m * integer_facts<K, GROUP>());
      }
    }
  }
  if constexpr (NORM) {
    threadgroup float* sums = staged_squares<K, M, GROUP>(staged);
#pragma unroll
    for (int m = 0; m < M; m++) {
      const float sum = simd_sum(squares[m]);
      if (lane == 0) {
        sums[m * SIMDGROUPS + simdgroup] = sum;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
