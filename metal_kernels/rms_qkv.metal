// inputs: x constants
// outputs: qkv
// template: T BITS GROUP K N M ROWS SIMDGROUPS KSPLIT UNROLL QUEUE NORM INTEGER EPS_BITS HAS_BIAS
#include "constants.h"
#include "gemv.h"
// qkv (M, N) of x (M, K) after RMS norm by norm (K,), bias (N,) if HAS_BIAS, for norm_rope_append;
// NORM false: x is normed already. norm follows the bias in constants.h. EPS_BITS: the norm's float32
// epsilon as an integer. Grid: a threadgroup a tile of rows.
constexpr Parts AT = parts<T, BITS, GROUP, N, K, HAS_BIAS>();
constexpr int TILE = ROWS * SIMDGROUPS / KSPLIT;
constexpr int STAGED = gemv_staged<T, BITS, GROUP, K, M, SIMDGROUPS, NORM, INTEGER>();
constexpr int QUEUED = gemv_queued<T, BITS, GROUP, K, M, ROWS, SIMDGROUPS, UNROLL, QUEUE>();
constexpr int SUMS = gemv_partial<M, ROWS, SIMDGROUPS, KSPLIT>();
threadgroup float4 staged[STAGED];
threadgroup float4 queued[QUEUED];
threadgroup float partial[SUMS];
const float eps = as_type<float>(EPS_BITS);
const uint first = threadgroup_position_in_grid.x * TILE;
gemv<T, BITS, GROUP, K, N, M, ROWS, SIMDGROUPS, KSPLIT, UNROLL, QUEUE, NORM, INTEGER>(
    x, part<T>(constants, AT.rest), eps, constants, part<T>(constants, AT.scales),
    part<T>(constants, AT.biases), first, first + TILE / 2, staged, queued, partial,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
for (uint i = thread_index_in_threadgroup; i < M * TILE; i += 32 * SIMDGROUPS) {
  const uint m = i / TILE;
  const uint row = first + i % TILE;
  if (row < N) {
    float value = gemv_value<T, K, M, TILE, KSPLIT, NORM>(partial, eps, m, i % TILE);
    if (HAS_BIAS) {
      value += float(part<T>(constants, AT.bias)[row]);
    }
    qkv[m * N + row] = T(value);
  }
}
