// The norm of the mma scheme, whose operands are 16 bits wide: all of it before the product.
#include "mma.h"
#include "words.h"

// x (M, K) after RMS norm, rounded to T as the norm by itself would be, in threadgroup memory.
template <typename T, int K, int M, int SIMDGROUPS>
inline void stage_normed(
    const device T* x,
    const device T* norm,
    float eps,
    threadgroup uint* staged,
    threadgroup float* partial,
    uint simdgroup,
    uint lane) {
  constexpr int THREADS = 32 * SIMDGROUPS;
  constexpr int VECTORS = K / 8;
  constexpr int SHARE = (VECTORS + THREADS - 1) / THREADS;
  const int thread_index = int(simdgroup * 32 + lane);
  const device uint* x_words = reinterpret_cast<const device uint*>(x);
  const device uint* norm_words = reinterpret_cast<const device uint*>(norm);
  threadgroup vec<uint, 4>* out = reinterpret_cast<threadgroup vec<uint, 4>*>(staged);
  // Loaded with x: after the barrier they would cost a second trip to memory.
  vec<uint, 4> factors[SHARE];
  float squares[M];
#pragma unroll
  for (int m = 0; m < M; m++) {
    squares[m] = 0.0f;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      const int at = thread_index + i * THREADS;
      if (at < VECTORS) {
        if (m == 0) {
          factors[i] = load_shared_words(norm_words + at * 4);
        }
        const vec<uint, 4> words = load_shared_words(x_words + m * (K / 2) + at * 4);
        out[m * VECTORS + at] = words;
        float values[8];
        widen<T>(words, values);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          squares[m] += values[j] * values[j];
        }
      }
    }
    squares[m] = simd_sum(squares[m]);
    if (lane == 0) {
      partial[m * SIMDGROUPS + simdgroup] = squares[m];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int m = 0; m < M; m++) {
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < SIMDGROUPS; s++) {
      total += partial[m * SIMDGROUPS + s];
    }
    const float scale = metal::precise::rsqrt(total / float(K) + eps);
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      const int at = thread_index + i * THREADS;
      if (at < VECTORS) {
        float values[8];
        float weights[8];
        widen<T>(out[m * VECTORS + at], values);
        widen<T>(factors[i], weights);
        vec<uint, 4> words;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          words[j] = pair_word<T>(
              values[2 * j] * scale * weights[2 * j],
              values[2 * j + 1] * scale * weights[2 * j + 1]);
        }
        out[m * VECTORS + at] = words;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
