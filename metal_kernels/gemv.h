// A tile of a matrix-vector product by one threadgroup: the unit of work of every projection.
//
// A tile is two runs of TILE / 2 rows each, one from row `first` on and one from row `second` on, so
// that rows which belong together (the two halves of a rotary pair, gate and up) meet in one tile;
// a plain projection takes second = first + TILE / 2. Tile row t is a row of the first run below
// TILE / 2 and of the second from there on. Each simdgroup takes ROWS rows, half from each run.
// KSPLIT simdgroups share their rows and split K; TILE = ROWS * SIMDGROUPS / KSPLIT.
//
// x (M, K) and norm (K,) are T; the matrix has N rows in the format of dequantize.h (GROUP values
// share an entry of scales and biases (N, K / GROUP), in T). K is a multiple of 32.
// INTEGER: in whole numbers, on CUDA's matrix units. NORM: the product is of x after RMS norm. A
// product is read with `gemv_value`.
#include "gemv_lanes.h"
#ifdef MSL_CUDA
#include "gemv_integer.h"
#include "gemv_mma.h"
#endif

// Whether the platform multiplies T on matrix units.
template <typename T>
inline constexpr bool has_mma() {
#ifdef MSL_CUDA
  return sizeof(T) == 2;
#else
  return false;
#endif
}

// Threadgroup memory that a tile needs: float4 elements for the staged x, floats for the sums.
template <
    typename T, int BITS, int GROUP, int K, int M, int SIMDGROUPS, bool NORM, bool INTEGER>
inline constexpr int gemv_staged() {
#ifdef MSL_CUDA
  if (has_mma<T>() && INTEGER) {
    return integer_staged<K, M, integer_group<BITS, GROUP>(), SIMDGROUPS>();
  }
#endif
  return has_mma<T>() && NORM ? M * K / 8 : 1;
}
// And float4 elements for the weights that are asked for ahead: see mma_queue.h.
template <
    typename T, int BITS, int GROUP, int K, int M, int ROWS, int SIMDGROUPS, int UNROLL, int QUEUE>
inline constexpr int gemv_queued() {
#ifdef MSL_CUDA
  if (has_mma<T>() && QUEUE > 0) {
    return SIMDGROUPS * QUEUE * MmaSlot<T, BITS, GROUP, K, M, UNROLL, ROWS / 16>::VECTORS;
  }
#endif
  return 1;
}
template <int M, int ROWS, int SIMDGROUPS, int KSPLIT>
inline constexpr int gemv_partial() {
  return M * (ROWS * SIMDGROUPS + KSPLIT);
}

template <
    typename T, int BITS, int GROUP, int K, int N, int M, int ROWS, int SIMDGROUPS, int KSPLIT,
    int UNROLL, int QUEUE, bool NORM, bool INTEGER, typename Weight>
inline void gemv(
    const device T* x,
    const device T* norm,
    float eps,
    const device Weight* weight,
    const device T* scales,
    const device T* biases,
    uint first,
    uint second,
    threadgroup float4* staged,
    threadgroup float4* queued,
    threadgroup float* partial,
    uint simdgroup,
    uint lane) {
  constexpr int TILE = ROWS * SIMDGROUPS / KSPLIT;
  const uint part = simdgroup % KSPLIT;
  const uint offset = simdgroup / KSPLIT * (ROWS / 2);
  threadgroup float* sums_out = partial + part * M * TILE + offset;
#ifdef MSL_CUDA
  if constexpr (has_mma<T>() && INTEGER) {
    gemv_integer<T, BITS, GROUP, K, N, M, ROWS, SIMDGROUPS, KSPLIT, UNROLL, QUEUE, NORM>(
        x, norm, eps, reinterpret_cast<const device uint*>(weight), scales, biases, first + offset,
        second + offset, reinterpret_cast<threadgroup uint*>(staged), queued, sums_out, simdgroup,
        lane);
  } else if constexpr (has_mma<T>()) {
    gemv_mma<T, BITS, GROUP, K, N, M, ROWS, SIMDGROUPS, KSPLIT, UNROLL, QUEUE, NORM>(
        x, norm, eps, reinterpret_cast<const device uint*>(weight), scales, biases, first + offset,
        second + offset, reinterpret_cast<threadgroup uint*>(staged), queued, partial, sums_out,
        simdgroup, lane);
  } else
#endif
  {
    RowSums<M, ROWS> sums = {};
    gemv_lanes<T, BITS, GROUP, K, N, M, ROWS, KSPLIT, UNROLL, NORM>(
        x, norm, reinterpret_cast<const device ushort*>(weight), scales, biases, first + offset,
        second + offset, part, lane, sums);
    if (lane == 0) {
#pragma unroll
      for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          sums_out[m * TILE + (r < ROWS / 2 ? r : TILE / 2 + r - ROWS / 2)] = sums.rows[m][r];
        }
        if (simdgroup < KSPLIT) {
          partial[KSPLIT * M * TILE + part * M + m] = sums.squares[m];
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The product of row m of x and row t of the tile, after `gemv` with the same parameters.
template <typename T, int K, int M, int TILE, int KSPLIT, bool NORM>
inline float gemv_value(const threadgroup float* partial, float eps, uint m, uint t) {
  float value = 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int part = 0; part < KSPLIT; part++) {
    value += partial[(part * M + m) * TILE + t];
    if (NORM && !has_mma<T>()) {
      squares += partial[KSPLIT * M * TILE + part * M + m];
    }
  }
  if (NORM && !has_mma<T>()) {
    value *= metal::precise::rsqrt(squares / float(K) + eps);
  }
  return value;
}
