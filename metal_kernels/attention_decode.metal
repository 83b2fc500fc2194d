// inputs: queries keys values place
// outputs: attended
// template: T M HEADS KV_HEADS D BATCHED SPLIT SIMDGROUPS QUERIES LANES UNROLL
// cuda inputs: tickets
// cuda outputs: partials
#include "attention.h"
#ifdef MSL_CUDA
#include "attention_mma.h"
#include "attention_splits.h"
#endif
// queries (M, HEADS, D); keys, values (BATCHED ? M : 1, KV_HEADS, capacity, D), all T.
// place int32 (16,): in 1 the live rows that row 0 sees; row m of one sequence sees m more, rows of a
// batch as many, from their left padding on, which place has from 8 on.
// attended (M, HEADS, D) in T. With SPLIT on Metal it is float32, for attention_combine: weighted
// values (M, HEADS, splits, D), then maxima and then sums (M, HEADS, splits). On CUDA these are in
// partials, each maximum with its sum (M, HEADS, splits, 2), and the threadgroup that comes last for
// its slice of vectors and sequence merges them. tickets, uint32, one for each slice and sequence,
// are zero before and after. Without SPLIT neither is touched.
// A block is UNROLL rows for each 32 / LANES lanes (attention.h), or UNROLL tiles of 16 rows where
// matrix units take T (attention_mma.h).
// Grid: KV heads with their slices of QUERIES vectors, then splits of the rows, then sequences. The
// number of splits is no template value: a cache that grows must not compile anew.
const uint lane = thread_index_in_simdgroup;
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int splits = SPLIT ? int(threadgroups_per_grid.y) : 1;
const int split = SPLIT ? int(threadgroup_position_in_grid.y) : 0;
const int batch = int(threadgroup_position_in_grid.z);
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int SLICES = (BATCHED ? GROUP : M * GROUP) / QUERIES;
#ifdef MSL_CUDA
// Longer heads do not fit a lane's registers.
constexpr bool MATRIX = sizeof(T) == 2 && D <= 128 && QUERIES <= 8;
#else
constexpr bool MATRIX = false;
#endif
constexpr int BLOCK = MATRIX ? 16 * UNROLL : 32 / LANES * UNROLL;
const int kv_head = int(threadgroup_position_in_grid.x) / SLICES;
const int first_vector = int(threadgroup_position_in_grid.x) % SLICES * QUERIES;

// Query vectors that the partial results have room for.
constexpr int ROOM = !MATRIX ? QUERIES : QUERIES <= 4 ? 4 : 8;
threadgroup float maxima[SIMDGROUPS * ROOM];
threadgroup float sums[SIMDGROUPS * ROOM];
threadgroup float weighted[SIMDGROUPS * ROOM * D];
#ifdef MSL_CUDA
threadgroup uint arrived[1];
device float* states = partials + size_t(M * HEADS * splits) * D;
#endif

const int start = BATCHED ? place[8 + batch] : 0;
const int live = place[1];
const int last = BATCHED ? live : live + (first_vector + QUERIES - 1) / GROUP;
const int begin = start + (split * SIMDGROUPS + simdgroup) * BLOCK;
const int stride = splits * SIMDGROUPS * BLOCK;
const size_t head_rows = size_t(batch * KV_HEADS + kv_head) * keys_shape[2] * D;
const float scale = LOG2_E * metal::precise::rsqrt(float(D));
#ifdef MSL_CUDA
if constexpr (MATRIX) {
  const int j = first_vector + min(int(lane) / 4 % ROOM, QUERIES - 1);
  const int row = BATCHED ? batch : j / GROUP;
  const int vector = row * HEADS + kv_head * GROUP + j % GROUP;
  MmaSoftmax<D> state;
  state.maximum = EMPTY_MAXIMUM;
  state.sum = 0.0f;
#pragma unroll
  for (int i = 0; i < D / 4; i++) {
    state.weighted[i / 4][i % 4] = 0.0f;
  }
  attend_mma<T, D, ROOM == 8, UNROLL>(
      keys + head_rows, values + head_rows, begin, last, stride, BATCHED ? live : live + row,
      place[0], queries + size_t(vector) * D, scale, lane, state);
  store_mma<D, QUERIES>(
      state, scale, lane, maxima + simdgroup * ROOM, sums + simdgroup * ROOM,
      weighted + simdgroup * ROOM * D);
} else
#endif
{
#ifdef MSL_CUDA
  MSL_INPUTS_READY();
#endif
  int limits[QUERIES];
  QueryShare<QUERIES, D / LANES> vectors;
  OnlineSoftmax<QUERIES, D / LANES> state;
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
  attend<T, D, LANES, QUERIES, UNROLL>(
      keys + head_rows, values + head_rows, begin, last, stride, limits, vectors, lane, state);
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
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int at = int(thread_index_in_threadgroup); at < ROOM * D; at += SIMDGROUPS * 32) {
  int j = at / D;
  int element = at % D;
#ifdef MSL_CUDA
  if constexpr (MATRIX) {
    const MmaPlace mma_at = mma_place<T, D, QUERIES>(at);
    j = mma_at.query;
    element = mma_at.element;
  }
#endif
  const int row = BATCHED ? batch : (first_vector + j) / GROUP;
  const int vector = row * HEADS + kv_head * GROUP + (first_vector + j) % GROUP;
  const Merged merged = merge_simdgroups<SIMDGROUPS, ROOM, D>(maxima, sums, weighted, j, at);
  if (j < QUERIES) {
    if (!SPLIT) {
      put(attended, size_t(vector) * D + element, merged.weighted / merged.sum);
    } else {
      const size_t part = size_t(vector) * splits + split;
#ifdef MSL_CUDA
      partials[part * D + element] = merged.weighted;
      if (element == 0) {
        states[part * 2] = merged.maximum;
        states[part * 2 + 1] = merged.sum;
      }
#else
      put(attended, part * D + element, merged.weighted);
      if (element == 0) {
        put(attended, size_t(M * HEADS * splits) * D + part, merged.maximum);
        put(attended, size_t(M * HEADS * splits) * (D + 1) + part, merged.sum);
      }
#endif
    }
  }
}
#ifdef MSL_CUDA
if constexpr (SPLIT) {
  device atomic_uint* ticket =
      reinterpret_cast<device atomic_uint*>(mutable_input(tickets)) +
      threadgroups_per_grid.x * threadgroup_position_in_grid.z + threadgroup_position_in_grid.x;
  if (comes_last(ticket, splits, thread_index_in_threadgroup, arrived)) {
    constexpr int TOGETHER = merged_together<QUERIES * D, SIMDGROUPS * 32>();
    for (int at = int(thread_index_in_threadgroup) * TOGETHER; at < QUERIES * D;
         at += SIMDGROUPS * 32 * TOGETHER) {
      const int j = first_vector + at / D;
      const int vector = (BATCHED ? batch : j / GROUP) * HEADS + kv_head * GROUP + j % GROUP;
      const size_t part = size_t(vector) * splits;
      float merged[TOGETHER];
      merge_splits<D, TOGETHER>(
          partials + part * D + at % D, reinterpret_cast<const device float2*>(states) + part,
          splits, merged);
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        attended[size_t(vector) * D + at % D + i] = T(merged[i]);
      }
    }
  }
}
#endif
