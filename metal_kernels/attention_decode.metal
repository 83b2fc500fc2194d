// inputs: queries keys values place left_padding
// outputs: attended
// template: T M HEADS KV_HEADS D BATCHED SPLIT SIMDGROUPS QUERIES LANES UNROLL
#include "attention.h"
// queries (M, HEADS, D); keys, values (BATCHED ? M : 1, KV_HEADS, capacity, D), all T.
// place int32 (2,): the slot that was written last and the live rows that row 0 sees with it; row m
// of one sequence sees m more, rows of a batch see as many from their left_padding int32 (M,) on.
// attended (M, HEADS, D) in T; with SPLIT float32, for attention_combine: weighted values
// (M, HEADS, splits, D), then maxima and then sums (M, HEADS, splits).
// Grid: KV heads with their slices of QUERIES vectors, then splits of the rows, then sequences. The
// number of splits is no template value: a cache that grows must not compile anew.
const uint lane = thread_index_in_simdgroup;
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int splits = SPLIT ? int(threadgroups_per_grid.y) : 1;
const int split = SPLIT ? int(threadgroup_position_in_grid.y) : 0;
const int batch = int(threadgroup_position_in_grid.z);
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int SLICES = (BATCHED ? GROUP : M * GROUP) / QUERIES;
constexpr int BLOCK = 32 / LANES * UNROLL;
const int kv_head = int(threadgroup_position_in_grid.x) / SLICES;
const int first_vector = int(threadgroup_position_in_grid.x) % SLICES * QUERIES;

threadgroup float maxima[SIMDGROUPS * QUERIES];
threadgroup float sums[SIMDGROUPS * QUERIES];
threadgroup float weighted[SIMDGROUPS * QUERIES * D];

const int start = BATCHED ? left_padding[batch] : 0;
const int live = place[1];
int limits[QUERIES];
QueryShare<QUERIES, D / LANES> vectors;
OnlineSoftmax<QUERIES, D / LANES> state;
const float scale = LOG2_E * metal::precise::rsqrt(float(D));
#pragma unroll
for (int j = 0; j < QUERIES; j++) {
  const int row = BATCHED ? batch : (first_vector + j) / GROUP;
  const int head = kv_head * GROUP + (first_vector + j) % GROUP;
  limits[j] = BATCHED ? live : live + row;
  RowShare<T, D, LANES> share;
  load_share<T, D, LANES>(queries + size_t(row * HEADS + head) * D, lane % LANES, share);
  widen_share<T, D, LANES>(share, vectors.x[j]);
  state.maximum[j] = EMPTY_MAXIMUM;
  state.sum[j] = 0.0f;
#pragma unroll
  for (int i = 0; i < D / LANES; i++) {
    vectors.x[j][i] *= scale;
    state.weighted[j][i] = 0.0f;
  }
}

const int last = limits[QUERIES - 1];
const int blocks = (last - start + splits * BLOCK - 1) / (splits * BLOCK);
const int begin = start + split * blocks * BLOCK;
const int end = min(begin + blocks * BLOCK, last);
const size_t head_rows = size_t(batch * KV_HEADS + kv_head) * keys_shape[2] * D;
attend<T, D, LANES, QUERIES, UNROLL>(
    keys + head_rows, values + head_rows, begin + simdgroup * BLOCK, end, SIMDGROUPS * BLOCK,
    limits, vectors, lane, state);
merge_teams<LANES, QUERIES, D / LANES>(state);

#pragma unroll
for (int j = 0; j < QUERIES; j++) {
  if (j % (32 / LANES) == int(lane) / LANES) {
    if (lane % LANES == 0) {
      maxima[simdgroup * QUERIES + j] = state.maximum[j];
      sums[simdgroup * QUERIES + j] = state.sum[j];
    }
    store_share<T, D, LANES>(
        state.weighted[j], lane % LANES, weighted + (simdgroup * QUERIES + j) * D);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int at = int(thread_index_in_threadgroup); at < QUERIES * D; at += SIMDGROUPS * 32) {
  const int j = at / D;
  const int row = BATCHED ? batch : (first_vector + j) / GROUP;
  const int vector = row * HEADS + kv_head * GROUP + (first_vector + j) % GROUP;
  const Merged merged =
      merge_simdgroups<SIMDGROUPS, QUERIES, D>(maxima, sums, weighted, j, at % D);
  if (!SPLIT) {
    put(attended, size_t(vector) * D + at % D, merged.weighted / merged.sum);
  } else {
    const size_t part = size_t(vector) * splits + split;
    put(attended, part * D + at % D, merged.weighted);
    if (at % D == 0) {
      put(attended, size_t(M * HEADS * splits) * D + part, merged.maximum);
      put(attended, size_t(M * HEADS * splits) * (D + 1) + part, merged.sum);
    }
  }
}
