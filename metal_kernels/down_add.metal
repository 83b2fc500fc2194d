// inputs: activated residual constants
// outputs: y
// template: T BITS GROUP K N M ROWS SIMDGROUPS KSPLIT UNROLL QUEUE INTEGER HAS_BIAS
#include "constants.h"
#include "gemv.h"
// y (M, N) = residual (M, N) + activated (M, K) times the down projection (N, K), bias (N,) if
// HAS_BIAS; constants.h has the matrix's parts. Grid: a threadgroup a tile of rows.
constexpr Parts AT = parts<T, BITS, GROUP, N, K, HAS_BIAS>();
constexpr int TILE = ROWS * SIMDGROUPS / KSPLIT;
constexpr int STAGED = gemv_staged<T, BITS, GROUP, K, M, SIMDGROUPS, false, INTEGER>();
constexpr int QUEUED = gemv_queued<T, BITS, GROUP, K, M, ROWS, SIMDGROUPS, UNROLL, QUEUE>();
constexpr int SUMS = gemv_partial<M, ROWS, SIMDGROUPS, KSPLIT>();
threadgroup float4 staged[STAGED];
threadgroup float4 queued[QUEUED];
threadgroup float partial[SUMS];
constexpr int THREADS = 32 * SIMDGROUPS;
constexpr int SHARE = (M * TILE + THREADS - 1) / THREADS;
const uint first = threadgroup_position_in_grid.x * TILE;
// Asked for ahead of the product: behind it they would cost another trip to memory.
T before[SHARE];
#pragma unroll
for (int s = 0; s < SHARE; s++) {
  const uint i = min(thread_index_in_threadgroup + s * THREADS, uint(M * TILE - 1));
  before[s] = residual[i / TILE * N + min(first + i % TILE, uint(N - 1))];
}
gemv<T, BITS, GROUP, K, N, M, ROWS, SIMDGROUPS, KSPLIT, UNROLL, QUEUE, false, INTEGER>(
    activated, activated, 0.0f, constants, part<T>(constants, AT.scales), part<T>(constants, AT.biases), first,
    first + TILE / 2, staged, queued, partial, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
#pragma unroll
for (int s = 0; s < SHARE; s++) {
  const uint i = thread_index_in_threadgroup + s * THREADS;
  const uint row = first + i % TILE;
  if (i < M * TILE && row < N) {
    const uint m = i / TILE;
    float value = gemv_value<T, K, M, TILE, KSPLIT, false>(partial, 0.0f, m, i % TILE);
    if (HAS_BIAS) {
      value += float(part<T>(constants, AT.bias)[row]);
    }
    y[m * N + row] = T(float(before[s]) + value);
  }
}
