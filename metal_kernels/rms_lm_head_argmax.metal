// inputs: x constants
// outputs: logits best_values best_indices
// template: T OUT BITS GROUP K N M ROWS SIMDGROUPS KSPLIT UNROLL QUEUE NORM INTEGER EPS_BITS
#include "argmax.h"
#include "constants.h"
#include "gemv.h"
// rms_lm_head, and of each tile of rows the largest logit as it was stored: best_values float32
// and best_indices uint32, both (M, threadgroups), for argmax_combine.
constexpr Parts AT = parts<T, BITS, GROUP, N, K, false>();
constexpr int TILE = ROWS * SIMDGROUPS / KSPLIT;
constexpr int STAGED = gemv_staged<T, BITS, GROUP, K, M, SIMDGROUPS, NORM, INTEGER>();
constexpr int QUEUED = gemv_queued<T, BITS, GROUP, K, M, ROWS, SIMDGROUPS, UNROLL, QUEUE>();
constexpr int SUMS = gemv_partial<M, ROWS, SIMDGROUPS, KSPLIT>();
threadgroup float4 staged[STAGED];
threadgroup float4 queued[QUEUED];
threadgroup float partial[SUMS];
const float eps = as_type<float>(EPS_BITS);
const uint tile = threadgroup_position_in_grid.x;
const uint first = tile * TILE;
const uint lane = thread_index_in_simdgroup;
gemv<T, BITS, GROUP, K, N, M, ROWS, SIMDGROUPS, KSPLIT, UNROLL, QUEUE, NORM, INTEGER>(
    x, part<T>(constants, AT.rest), eps, constants, part<T>(constants, AT.scales),
    part<T>(constants, AT.biases), first, first + TILE / 2, staged, queued, partial,
    simdgroup_index_in_threadgroup, lane);
for (uint m = simdgroup_index_in_threadgroup; m < M; m += SIMDGROUPS) {
  Best best;
  best.value = -INFINITY;
  best.index = first;
  for (uint t = lane; t < TILE; t += 32) {
    const uint row = first + t;
    if (row < N) {
      const OUT logit = OUT(gemv_value<T, K, M, TILE, KSPLIT, NORM>(partial, eps, m, t));
      logits[m * N + row] = logit;
      Best candidate;
      candidate.value = float(logit);
      candidate.index = row;
      best = better(best, candidate);
    }
  }
  best = simd_best(best);
  if (lane == 0) {
    best_values[m * threadgroups_per_grid.x + tile] = best.value;
    best_indices[m * threadgroups_per_grid.x + tile] = best.index;
  }
}
