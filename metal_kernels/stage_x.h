// What the mma scheme multiplies with, in threadgroup memory: x in 16 bit, after its norm if there
// is one, in the order in which packed values meet it, and its sum over each quantization group.
#include "mma_operands.h"
#include "words.h"

// Bytes of x up to which a threadgroup keeps a copy that it would not need for a norm.
constant constexpr int STAGED_BYTES = 32768;

// The float4 elements of a staged x: the values, zeros for lanes without a column, then the sums.
template <typename T, int BITS, int GROUP, int K, int M, bool NORM>
struct StagedX {
  static constant constexpr bool STAGED = NORM || M * K * int(sizeof(T)) <= STAGED_BYTES;
  static constant constexpr int ZEROS = M * K / 8;
  static constant constexpr int SUMS = ZEROS + 4;
  static constant constexpr int ENTRIES = BITS == 16 ? 0 : K / GROUP;
  static constant constexpr int SIZE = STAGED ? SUMS + (M * ENTRIES + 3) / 4 : 1;
};

// Stages x (M, K); norm (K,) if NORM, rounded to T as the norm by itself would be.
template <typename T, int BITS, int GROUP, int K, int M, int SIMDGROUPS, bool NORM>
inline void stage_x(
    const device T* x,
    const device T* norm,
    float eps,
    threadgroup uint* staged,
    threadgroup float* partial,
    uint simdgroup,
    uint lane) {
  typedef StagedX<T, BITS, GROUP, K, M, NORM> Place;
  constexpr int THREADS = 32 * SIMDGROUPS;
  constexpr int VECTORS = K / 8;
  constexpr int SHARE = (VECTORS + THREADS - 1) / THREADS;
  const int thread_index = int(simdgroup * 32 + lane);
  const device uint* x_words = reinterpret_cast<const device uint*>(x);
  const device uint* norm_words = reinterpret_cast<const device uint*>(norm);
  threadgroup vec<uint, 4>* out = reinterpret_cast<threadgroup vec<uint, 4>*>(staged);
  threadgroup float* sums = reinterpret_cast<threadgroup float*>(out + Place::SUMS);
  if (thread_index < 4) {
    out[Place::ZEROS + thread_index] = vec<uint, 4>(0u);
  }
  // Loaded with x: after the barrier they would cost a second trip to memory.
  vec<uint, 4> factors[NORM ? SHARE : 1];
  float scales[M];
#pragma unroll
  for (int m = 0; m < M; m++) {
    scales[m] = 0.0f;
    if constexpr (NORM) {
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
            scales[m] += values[j] * values[j];
          }
        }
      }
      scales[m] = simd_sum(scales[m]);
      if (lane == 0) {
        partial[m * SIMDGROUPS + simdgroup] = scales[m];
      }
    }
  }
  if constexpr (NORM) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma unroll
  for (int m = 0; m < M; m++) {
    if constexpr (NORM) {
      float total = 0.0f;
#pragma unroll
      for (int s = 0; s < SIMDGROUPS; s++) {
        total += partial[m * SIMDGROUPS + s];
      }
      scales[m] = metal::precise::rsqrt(total / float(K) + eps);
    }
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      const int at = thread_index + i * THREADS;
      float sum = 0.0f;
      if (at < VECTORS) {
        vec<uint, 4> words;
        if constexpr (NORM) {
          float values[8];
          float weights[8];
          widen<T>(out[m * VECTORS + at], values);
          widen<T>(factors[i], weights);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            words[j] = pair_word<T>(
                values[2 * j] * scales[m] * weights[2 * j],
                values[2 * j + 1] * scales[m] * weights[2 * j + 1]);
          }
        } else {
          words = load_shared_words(x_words + m * (K / 2) + at * 4);
        }
        uint pairs[4];
        pair_up<BITS>(words, pairs);
        out[m * VECTORS + at] = vec<uint, 4>(pairs[0], pairs[1], pairs[2], pairs[3]);
        if (BITS < 16) {
          float values[8];
          widen<T>(words, values);
#pragma unroll
          for (int j = 0; j < 8; j++) {
            sum += values[j];
          }
        }
      }
      if (BITS < 16) {
        // A group is GROUP / 8 threads in a row, and all of them have a vector or none has.
#pragma unroll
        for (int distance = 1; distance < GROUP / 8; distance *= 2) {
          sum += simd_shuffle_xor(sum, ushort(distance));
        }
        if (at < VECTORS && at % (GROUP / 8) == 0) {
          sums[m * Place::ENTRIES + at / (GROUP / 8)] = sum;
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
