// inputs: best_values best_indices
// outputs: tokens
// template: COUNT SIMDGROUPS
#include "argmax.h"
// tokens uint32 (M,): where the largest of COUNT values stands, for each row of best_values float32
// and best_indices uint32 (M, COUNT). Grid: a threadgroup a row.
threadgroup float values[SIMDGROUPS];
threadgroup uint indices[SIMDGROUPS];
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const size_t row = size_t(threadgroup_position_in_grid.x) * COUNT;
Best best;
best.value = -INFINITY;
best.index = 0xffffffffu;
for (uint i = thread_index_in_threadgroup; i < COUNT; i += 32 * SIMDGROUPS) {
  Best candidate;
  candidate.value = best_values[row + i];
  candidate.index = best_indices[row + i];
  best = better(best, candidate);
}
best = simd_best(best);
if (lane == 0) {
  values[simdgroup] = best.value;
  indices[simdgroup] = best.index;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup == 0) {
  const uint source = min(lane, uint(SIMDGROUPS - 1));
  best.value = values[source];
  best.index = indices[source];
  best = simd_best(best);
  if (lane == 0) {
    tokens[threadgroup_position_in_grid.x] = best.index;
  }
}
