// inputs: partials
// outputs: attended
// template: T VECTORS D SIMDGROUPS
// partials: float32 (VECTORS * splits * (D + 2),), what attention_decode leaves with SPLIT; VECTORS
// is M * HEADS.
// attended (VECTORS, D) in T. A threadgroup takes one vector, its simdgroups in turn the splits.
const int splits = partials_shape[0] / (VECTORS * (D + 2));
const int vector = int(threadgroup_position_in_grid.x);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
constexpr int PER_LANE = (D + 31) / 32;
threadgroup float weighted[SIMDGROUPS * D];

const device float* values = partials + size_t(vector) * splits * D;
const device float* maxima = partials + size_t(VECTORS * splits) * D + vector * splits;
const device float* sums = maxima + VECTORS * splits;
float maximum = maxima[0];
for (int s = lane; s < splits; s += 32) {
  maximum = max(maximum, maxima[s]);
}
maximum = simd_max(maximum);
float sum = 0.0f;
for (int s = lane; s < splits; s += 32) {
  sum += sums[s] * metal::fast::exp2(maxima[s] - maximum);
}
sum = simd_sum(sum);

float share[PER_LANE];
#pragma unroll
for (int i = 0; i < PER_LANE; i++) {
  share[i] = 0.0f;
}
#pragma unroll 4
for (int s = simdgroup; s < splits; s += SIMDGROUPS) {
  const float weight = metal::fast::exp2(maxima[s] - maximum);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int d = i * 32 + lane;
    share[i] += d < D ? weight * values[s * D + d] : 0.0f;
  }
}
#pragma unroll
for (int i = 0; i < PER_LANE; i++) {
  if (i * 32 + lane < D) {
    weighted[simdgroup * D + i * 32 + lane] = share[i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int d = int(thread_index_in_threadgroup); d < D; d += SIMDGROUPS * 32) {
  float total = 0.0f;
  for (int s = 0; s < SIMDGROUPS; s++) {
    total += weighted[s * D + d];
  }
  attended[size_t(vector) * D + d] = T(total / sum);
}
