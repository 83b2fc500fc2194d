// inputs: partials
// outputs: attended
// template: T VECTORS D SIMDGROUPS
#include "attention.h"
// partials: float32 (VECTORS * splits * (D + 2),), what attention_decode leaves with SPLIT; VECTORS
// is M * HEADS.
// attended (VECTORS, D) in T. A threadgroup takes one vector, its simdgroups in turn the splits.
const int splits = partials_shape[0] / (VECTORS * (D + 2));
const int vector = int(threadgroup_position_in_grid.x);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
constexpr int PER_LANE = (D + 31) / 32;
// Splits that a simdgroup asks for before it looks at one.
constexpr int AT_ONCE = 4;
threadgroup float maxima[SIMDGROUPS];
threadgroup float sums[SIMDGROUPS];
threadgroup float weighted[SIMDGROUPS * D];

const device float* values = partials + size_t(vector) * splits * D;
const device float* all_maxima = partials + size_t(VECTORS * splits) * D + vector * splits;
const device float* all_sums = all_maxima + VECTORS * splits;
float maximum = EMPTY_MAXIMUM;
float sum = 0.0f;
float share[PER_LANE];
#pragma unroll
for (int i = 0; i < PER_LANE; i++) {
  share[i] = 0.0f;
}
#pragma unroll 1
for (int first = simdgroup; first < splits; first += SIMDGROUPS * AT_ONCE) {
  float found[AT_ONCE];
  float found_sums[AT_ONCE];
  float found_values[AT_ONCE][PER_LANE];
  float raised = maximum;
#pragma unroll
  for (int u = 0; u < AT_ONCE; u++) {
    const int s = first + u * SIMDGROUPS;
    found[u] = s < splits ? all_maxima[s] : MASKED_SCORE;
    found_sums[u] = s < splits ? all_sums[s] : 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int d = i * 32 + lane;
      found_values[u][i] = s < splits && d < D ? values[s * D + d] : 0.0f;
    }
  }
#pragma unroll
  for (int u = 0; u < AT_ONCE; u++) {
    raised = max(raised, found[u]);
  }
  const float rescale = exp2_flushed(maximum - raised);
  maximum = raised;
  sum *= rescale;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    share[i] *= rescale;
  }
#pragma unroll
  for (int u = 0; u < AT_ONCE; u++) {
    const float weight = exp2_flushed(found[u] - raised);
    sum += found_sums[u] * weight;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      share[i] += found_values[u][i] * weight;
    }
  }
}
if (lane == 0) {
  maxima[simdgroup] = maximum;
  sums[simdgroup] = sum;
}
#pragma unroll
for (int i = 0; i < PER_LANE; i++) {
  if (i * 32 + lane < D) {
    weighted[simdgroup * D + i * 32 + lane] = share[i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int d = int(thread_index_in_threadgroup); d < D; d += SIMDGROUPS * 32) {
  const Merged merged = merge_simdgroups<SIMDGROUPS, 1, D>(maxima, sums, weighted, 0, d);
  attended[size_t(vector) * D + d] = T(merged.weighted / merged.sum);
}
