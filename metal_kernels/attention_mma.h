// Query vectors against the live rows of a KV cache on CUDA's matrix units, T in 16 bit.
//
// Scores: the query vectors are the left operand and 8 cache rows the right one, as they lie in
// memory; which element of a head a place stands for is free as long as both agree. The scores then
// lie as the right operand of the second multiply wants its weights, whose left operand is 16
// elements of 16 rows of values, after one instruction a word to bring two rows together. Scores,
// sums and weighted values are float32. A weight enters as two values of T: what T keeps of it, and
// the rest. Up to 4 vectors have each 2 of 8 columns for that; more of them take two multiplies.
//
// With line = lane / 4 and team = lane % 4, a lane has the scores of vector `line` against rows
// 2 team and 2 team + 1 of every 8, and of vectors 2 team and 2 team + 1 the weighted values for
// its line's share of a row.
#include "attention.h"
#include "mma.h"

template <int D>
struct MmaSoftmax {
  float maximum;
  float sum;
  float weighted[D / 16][4];
};

// Vectors that a simdgroup's result in threadgroup memory has room for.
template <int QUERIES>
inline constexpr int mma_room() {
  return QUERIES <= 4 ? 4 : 8;
}

inline uint one_word(uint words, int) {
  return words;
}
template <int N>
inline uint one_word(vec<uint, N> words, int i) {
  return words[i];
}

// Word i of a share.
template <typename T, int D, int LANES>
inline uint share_word(const thread RowShare<T, D, LANES>& share, int i) {
  constexpr int WORDS = RowShare<T, D, LANES>::ELEMENTS / 2;
  return one_word(share.words[i / WORDS], i % WORDS);
}

// A share from where its first element is, past the first cache where its loads are wide enough.
template <typename T, int D, int LANES>
inline void load_share_once(const device T* first, thread RowShare<T, D, LANES>& share) {
  typedef RowShare<T, D, LANES> Share;
#pragma unroll
  for (int c = 0; c < Share::CHUNKS; c++) {
    const device T* chunk = first + c * LANES * Share::ELEMENTS;
    if constexpr (Share::ELEMENTS == 8) {
      share.words[c] = load_streamed(reinterpret_cast<const device uint*>(chunk));
    } else {
      share.words[c] = *reinterpret_cast<const device typename Share::Words*>(chunk);
    }
  }
}

// Row `line` of each 8, from the lane's place in row 0.
template <typename T, int D, int TILES>
inline void load_keys(
    const device T* keys, int first, int end, thread RowShare<T, D, 4>* rows) {
#pragma unroll
  for (int i = 0; i < TILES * 2; i++) {
    const int row = min(first + i * 8, end - 1);
    load_share_once<T, D, 4>(keys + size_t(row) * D, rows[i]);
  }
}

// Rows 2 team and 2 team + 1 of each 8.
template <typename T, int D, int TILES>
inline void load_values(
    const device T* values, int first, int end, thread RowShare<T, D, 8>* rows) {
#pragma unroll
  for (int i = 0; i < TILES * 4; i++) {
    const int row = min(first + i / 2 * 8 + i % 2, end - 1);
    load_share_once<T, D, 8>(values + size_t(row) * D, rows[i]);
  }
}

// state.weighted += the values of 16 rows, by this lane's four weights for them.
template <typename T, int D, bool TWICE>
inline void add_values(
    const thread RowShare<T, D, 8>* rows,
    const thread float* weights,
    uint line,
    thread MmaSoftmax<D>& state) {
  uint parts[2][2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint rounded = pack_pair<T>(weights[2 * i], weights[2 * i + 1]);
    float kept[2];
    widen_word<T>(rounded, kept);
    const uint rest = pack_pair<T>(weights[2 * i] - kept[0], weights[2 * i + 1] - kept[1]);
    parts[0][i] = TWICE || line < 4 ? rounded : rest;
    parts[1][i] = rest;
  }
#pragma unroll
  for (int w = 0; w < D / 16; w++) {
    const uint a = share_word(rows[0], w);
    const uint b = share_word(rows[1], w);
    const uint c = share_word(rows[2], w);
    const uint d = share_word(rows[3], w);
#pragma unroll
    for (int part = 0; part < (TWICE ? 2 : 1); part++) {
      mma<T>(
          state.weighted[w], low_halves(a, b), high_halves(a, b), low_halves(c, d),
          high_halves(c, d), parts[part][0], parts[part][1]);
    }
  }
}

// The rows [begin, end) of one head, TILES times 16 of them and then `stride` rows on; this lane's
// vector `query_row` sees the rows below `limit`. Rows past the end are never read. The next keys and
// values are asked for as soon as their registers are free; rows below `settled` were there before
// this step, and need not wait for it.
template <typename T, int D, bool TWICE, int TILES>
inline void attend_mma(
    const device T* keys,
    const device T* values,
    int begin,
    int end,
    int stride,
    int limit,
    int settled,
    const device T* query_row,
    float scale,
    uint lane,
    thread MmaSoftmax<D>& state) {
  const int line = int(lane) / 4;
  const int pair = int(lane) % 4 * 2;
  const device T* lane_keys = keys + lane % 4 * RowShare<T, D, 4>::ELEMENTS;
  const device T* lane_values = values + lane / 4 * RowShare<T, D, 8>::ELEMENTS;
  RowShare<T, D, 4> key_rows[TILES * 2];
  RowShare<T, D, 8> value_rows[TILES * 4];
  const bool early = begin + 16 * TILES <= settled;
  if (!early) {
    MSL_INPUTS_READY();
  }
  if (begin < end) {
    load_keys<T, D, TILES>(lane_keys, begin + line, end, key_rows);
    load_values<T, D, TILES>(lane_values, begin + pair, end, value_rows);
  }
  if (early) {
    MSL_INPUTS_READY();
  }
  RowShare<T, D, 4> query;
  load_share<T, D, 4>(query_row, lane % 4, query);
#pragma unroll 1
  for (int first = begin; first < end; first += stride) {
    const int next = first + stride;
    float scores[TILES * 4];
    float raised = state.maximum;
#pragma unroll
    for (int i = 0; i < TILES * 2; i++) {
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < D / 8; w += 2) {
        mma<T>(
            sums, share_word(query, w), 0u, share_word(query, w + 1), 0u,
            share_word(key_rows[i], w), share_word(key_rows[i], w + 1));
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        scores[i * 2 + c] = first + i * 8 + pair + c < limit ? sums[c] : MASKED_SCORE;
        raised = max(raised, scores[i * 2 + c]);
      }
    }
    if (next < end) {
      load_keys<T, D, TILES>(lane_keys, next + line, end, key_rows);
    }
    raised = max(raised, simd_shuffle_xor(raised, ushort(1)));
    raised = max(raised, simd_shuffle_xor(raised, ushort(2)));
    const float offset = -raised * scale;
    const float rescale = exp2_flushed(state.maximum * scale + offset);
    state.maximum = raised;
    state.sum *= rescale;
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
      scores[i] = exp2_flushed(scores[i] * scale + offset);
      state.sum += scores[i];
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float factor = simd_shuffle(rescale, ushort((pair + c) * 4));
#pragma unroll
      for (int w = 0; w < D / 16; w++) {
        state.weighted[w][c] *= factor;
        state.weighted[w][2 + c] *= factor;
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      add_values<T, D, TWICE>(value_rows + i * 4, scores + i * 4, lane / 4, state);
    }
    if (next < end) {
      load_values<T, D, TILES>(lane_values, next + pair, end, value_rows);
    }
  }
}

// A simdgroup's result in threadgroup memory: `mma_place` says where, so that lanes do not collide.
template <int D, int QUERIES>
inline void store_mma(
    thread MmaSoftmax<D>& state,
    float scale,
    uint lane,
    threadgroup float* maxima,
    threadgroup float* sums,
    threadgroup float* weighted) {
  constexpr int ROOM = mma_room<QUERIES>();
  const bool lower = lane % 4 < 2;
  state.sum += simd_shuffle_xor(state.sum, ushort(1));
  state.sum += simd_shuffle_xor(state.sum, ushort(2));
  if (lane % 4 == 0 && lane / 4 < ROOM) {
    maxima[lane / 4] = state.maximum * scale;
    sums[lane / 4] = state.sum;
  }
#pragma unroll
  for (int w = 0; w < D / 16; w++) {
    if (ROOM == 8) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        weighted[(w * 4 + i) * 32 + int(lane)] = state.weighted[w][i];
      }
    } else {
      // Two lanes have a part each of the same two vectors and elements, and take one element each.
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float first = state.weighted[w][c];
        const float second = state.weighted[w][2 + c];
        const float other = simd_shuffle_xor(lower ? second : first, ushort(2));
        weighted[(w * 2 + c) * 32 + int(lane)] = (lower ? first : second) + other;
      }
    }
  }
}

// The vector and the element that `store_mma` leaves at a place.
struct MmaPlace {
  int query;
  int element;
};

template <typename T, int D, int QUERIES>
inline MmaPlace mma_place(int at) {
  const int team = at % 4;
  const int i = at / 32;
  MmaPlace place;
  int share;
  if (mma_room<QUERIES>() == 8) {
    place.query = team * 2 + i % 2;
    share = i / 2;
  } else {
    place.query = team % 2 * 2 + i % 2;
    share = i / 2 * 2 + team / 2;
  }
  place.element = share_element<T, D, 8>(share, at % 32 / 4);
  return place;
}
