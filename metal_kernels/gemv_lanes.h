// Rows of a matrix against M rows of x, by one simdgroup with K spread over its lanes. Float32
// throughout, for any platform.
#include "dequantize.h"

template <int M, int ROWS>
struct RowSums {
  float rows[M][ROWS];
  float squares[M];
};

// The r-th of a simdgroup's ROWS rows: half of them from `first` on, half from `second` on. Rows
// past the matrix read its last one, and nobody keeps the result.
template <int N, int ROWS>
inline uint row_of(uint first, uint second, int r) {
  return min(r < ROWS / 2 ? first + r : second + r - ROWS / 2, uint(N - 1));
}

template <typename T, int VALUES>
inline void load_values(const device T* x, thread float* out) {
#pragma unroll
  for (int i = 0; i < VALUES; i += 4) {
    widen<T>(*reinterpret_cast<const device vec<uint, int(sizeof(T))>*>(x + i), out + i);
  }
}

// Part `part` of KSPLIT parts of K, summed over the lanes. With NORM x is multiplied by the norm's
// weight, and the sum of its squares is returned beside the products: the row's scale is a factor
// of the finished sums, so nothing waits for it.
template <
    typename T, int BITS, int GROUP, int K, int N, int M, int ROWS, int KSPLIT, int UNROLL,
    bool NORM>
inline void gemv_lanes(
    const device T* x,
    const device T* norm,
    const device ushort* weight,
    const device T* scales,
    const device T* biases,
    uint first,
    uint second,
    uint part,
    uint lane,
    thread RowSums<M, ROWS>& sums) {
  typedef typename Packed<T, BITS>::Words Words;
  constexpr int VALUES = Packed<T, BITS>::VALUES;
  constexpr int STEP = 32 * VALUES;
  constexpr bool WHOLE = K % (STEP * UNROLL) == 0;
  constexpr int ROW_WORDS = K / VALUES;

  for (int start = int(part) * STEP * UNROLL; start < K; start += KSPLIT * STEP * UNROLL) {
    Words words[UNROLL][ROWS];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int k = start + u * STEP + int(lane) * VALUES;
      if (WHOLE || k < K) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const uint row = row_of<N, ROWS>(first, second, r);
          words[u][r] =
              reinterpret_cast<const device Words*>(weight)[size_t(row) * ROW_WORDS + k / VALUES];
        }
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int k = start + u * STEP + int(lane) * VALUES;
      if (WHOLE || k < K) {
        Prepared<VALUES> prepared[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
          load_values<T, VALUES>(x + m * K + k, prepared[m].x);
          if (NORM) {
            float factors[VALUES];
            load_values<T, VALUES>(norm + k, factors);
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
              sums.squares[m] += prepared[m].x[i] * prepared[m].x[i];
              prepared[m].x[i] *= factors[i];
            }
          }
          prepare<BITS, VALUES>(prepared[m]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          float scale = 1.0f;
          float bias = 0.0f;
          if (BITS < 16) {
            const size_t group =
                size_t(row_of<N, ROWS>(first, second, r)) * (K / GROUP) + k / GROUP;
            scale = float(scales[group]);
            bias = float(biases[group]);
          }
#pragma unroll
          for (int m = 0; m < M; m++) {
            sums.rows[m][r] +=
                scale * dot_words<T, BITS>(words[u][r], prepared[m]) + bias * prepared[m].sum;
          }
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < M; m++) {
    sums.squares[m] = NORM ? simd_sum(sums.squares[m]) : 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      sums.rows[m][r] = simd_sum(sums.rows[m][r]);
    }
  }
}
