// Query vectors against the live rows of a KV cache, by online softmax in float32.
//
// A simdgroup is cut into teams of LANES lanes. A team holds one row of the cache at a time, each
// lane D / LANES elements of it, so that one load of the simdgroup covers 32 / LANES whole rows.
// Each team keeps its own running maximum, sum and weighted values; they are merged at the end.
#include "words.h"
#ifdef MSL_CUDA
#include "mma_pairs.h"
#else
inline float exp2_flushed(float x) {
  return metal::fast::exp2(x);
}
#endif

// exp2(MASKED_SCORE - EMPTY_MAXIMUM) is 0 and neither is infinite: no NaN where nothing was seen.
constant constexpr float MASKED_SCORE = -3.0e38f;
constant constexpr float EMPTY_MAXIMUM = -1.0e30f;
constant constexpr float LOG2_E = 1.4426950408889634f;

template <int QUERIES, int SHARE>
struct QueryShare {
  float x[QUERIES][SHARE];
};

template <int QUERIES, int SHARE>
struct OnlineSoftmax {
  float maximum[QUERIES];
  float sum[QUERIES];
  float weighted[QUERIES][SHARE];
};

// A lane's share of one row: CHUNKS loads, LANES loads apart so that a team reads consecutively.
template <typename T, int D, int LANES>
struct RowShare {
  static constant constexpr int ELEMENTS = load_elements<T, D / LANES>();
  static constant constexpr int CHUNKS = D / (LANES * ELEMENTS);
  typedef typename WordVector<ELEMENTS * int(sizeof(T)) / 4>::type Words;
  Words words[CHUNKS];
};

template <typename T, int D, int LANES>
inline void load_share(const device T* row, uint member, thread RowShare<T, D, LANES>& share) {
  typedef RowShare<T, D, LANES> Share;
#pragma unroll
  for (int c = 0; c < Share::CHUNKS; c++) {
    const uint element = (c * LANES + member) * Share::ELEMENTS;
    share.words[c] = *reinterpret_cast<const device typename Share::Words*>(row + element);
  }
}

template <typename T, int D, int LANES>
inline void widen_share(const thread RowShare<T, D, LANES>& share, thread float* out) {
#pragma unroll
  for (int c = 0; c < RowShare<T, D, LANES>::CHUNKS; c++) {
    widen<T>(share.words[c], out + c * RowShare<T, D, LANES>::ELEMENTS);
  }
}

// Which element of a row is number i of a lane's share.
template <typename T, int D, int LANES>
inline int share_element(int i, int member) {
  constexpr int ELEMENTS = RowShare<T, D, LANES>::ELEMENTS;
  return (i / ELEMENTS * LANES + member) * ELEMENTS + i % ELEMENTS;
}

template <typename T, int D, int LANES>
inline void store_share(const thread float* share, uint member, threadgroup float* row) {
#pragma unroll
  for (int i = 0; i < D / LANES; i++) {
    row[share_element<T, D, LANES>(i, int(member))] = share[i];
  }
}

// The rows [begin, end) of one head, UNROLL rows a team at a time and then `stride` rows on. Query
// j sees the rows below limits[j]. Rows past the end are never read: dead ones may hold anything.
template <typename T, int D, int LANES, int QUERIES, int UNROLL>
inline void attend(
    const device T* keys,
    const device T* values,
    int begin,
    int end,
    int stride,
    const thread int* limits,
    const thread QueryShare<QUERIES, D / LANES>& queries,
    uint lane,
    thread OnlineSoftmax<QUERIES, D / LANES>& state) {
  constexpr int SHARE = D / LANES;
  constexpr int TEAMS = 32 / LANES;
  const uint member = lane % LANES;
  const int team = int(lane / LANES);
  for (int first = begin; first < end; first += stride) {
    RowShare<T, D, LANES> key_rows[UNROLL];
    RowShare<T, D, LANES> value_rows[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const size_t row = size_t(min(first + u * TEAMS + team, end - 1)) * D;
      load_share<T, D, LANES>(keys + row, member, key_rows[u]);
      load_share<T, D, LANES>(values + row, member, value_rows[u]);
    }
    float scores[QUERIES][UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      float key[SHARE];
      widen_share<T, D, LANES>(key_rows[u], key);
#pragma unroll
      for (int j = 0; j < QUERIES; j++) {
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
          score += queries.x[j][i] * key[i];
        }
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2) {
          score += simd_shuffle_xor(score, ushort(mask));
        }
        scores[j][u] = first + u * TEAMS + team < limits[j] ? score : MASKED_SCORE;
      }
    }
#pragma unroll
    for (int j = 0; j < QUERIES; j++) {
      float maximum = state.maximum[j];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        maximum = max(maximum, scores[j][u]);
      }
      const float rescale = exp2_flushed(state.maximum[j] - maximum);
      state.maximum[j] = maximum;
      float sum = state.sum[j] * rescale;
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        scores[j][u] = exp2_flushed(scores[j][u] - maximum);
        sum += scores[j][u];
      }
      state.sum[j] = sum;
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        state.weighted[j][i] *= rescale;
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      float value[SHARE];
      widen_share<T, D, LANES>(value_rows[u], value);
#pragma unroll
      for (int j = 0; j < QUERIES; j++) {
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
          state.weighted[j][i] += scores[j][u] * value[i];
        }
      }
    }
  }
}

// Merges the teams of a simdgroup: every lane then holds the whole group's state for its share.
template <int LANES, int QUERIES, int SHARE>
inline void merge_teams(thread OnlineSoftmax<QUERIES, SHARE>& state) {
#pragma unroll
  for (int j = 0; j < QUERIES; j++) {
    float maximum = state.maximum[j];
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) {
      maximum = max(maximum, simd_shuffle_xor(maximum, ushort(mask)));
    }
    const float rescale = exp2_flushed(state.maximum[j] - maximum);
    state.maximum[j] = maximum;
    state.sum[j] *= rescale;
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) {
      state.sum[j] += simd_shuffle_xor(state.sum[j], ushort(mask));
    }
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      state.weighted[j][i] *= rescale;
#pragma unroll
      for (int mask = LANES; mask < 32; mask *= 2) {
        state.weighted[j][i] += simd_shuffle_xor(state.weighted[j][i], ushort(mask));
      }
    }
  }
}

// A query's maximum, sum and one weighted element over a threadgroup's PARTS simdgroups.
struct Merged {
  float maximum;
  float sum;
  float weighted;
};

// ROOM: query vectors that `weighted` of each part has room for; `at`: the element's place in it.
template <int PARTS, int ROOM, int D>
inline Merged merge_simdgroups(
    const threadgroup float* maxima,
    const threadgroup float* sums,
    const threadgroup float* weighted,
    int query,
    int at) {
  Merged merged;
  merged.maximum = EMPTY_MAXIMUM;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    merged.maximum = max(merged.maximum, maxima[p * ROOM + query]);
  }
  merged.sum = 0.0f;
  merged.weighted = 0.0f;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const float rescale = exp2_flushed(maxima[p * ROOM + query] - merged.maximum);
    merged.sum += sums[p * ROOM + query] * rescale;
    merged.weighted += weighted[p * ROOM * D + at] * rescale;
  }
  return merged;
}

// attended is T or float32, whatever the launch asked for.
template <typename Out>
inline void put(device Out* out, size_t at, float x) {
  out[at] = Out(x);
}
