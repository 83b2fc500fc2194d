// The weights and scales of some chunks of K on their way from memory; gemv_mma.h says which lane
// takes what.
#include "mma.h"
#include "words.h"

template <typename T, int BITS, int GROUP, int K, int M, int UNROLL>
struct MmaShape {
  static constant constexpr int VALUES = 128 / BITS;
  static constant constexpr int CHUNK = 4 * VALUES;
  static constant constexpr int BATCH = UNROLL * CHUNK;
  static constant constexpr bool WHOLE = K % BATCH == 0;
  static constant constexpr int GROUPS = BITS < 16 && CHUNK > GROUP ? CHUNK / GROUP : 1;
  static constant constexpr int BLOCKS = (M * GROUPS + 7) / 8;
  // Entries of scales that a lane reads in one batch. With four groups in a chunk a lane's columns
  // belong to two of them.
  static constant constexpr int RUN =
      GROUPS == 4 ? 2 : (BATCH > GROUP && BITS < 16 ? BATCH / GROUP : 1);
  static constant constexpr int RUNS = GROUPS == 4 ? UNROLL : 1;
  static constant constexpr int RUN_WORDS = (RUN + 1) / 2;
  // What a packed value stands above itself: see packed_pair.
  static constant constexpr float OFFSET = BITS == 4 ? 16.0f : 272.0f;
};

// COUNT entries from `first` on of the row of ENTRIES scales that begins at `row`, two in a word;
// past the row its last one again.
template <typename T, int COUNT, bool ALIGNED, int ENTRIES>
inline void load_entries(const device T* scales, uint row, uint first, thread uint* words) {
  if constexpr (ALIGNED && COUNT == 2) {
    words[0] = *reinterpret_cast<const device uint*>(scales + (row + first));
  } else if constexpr (ALIGNED && COUNT > 2) {
    const vec<uint, COUNT / 2> loaded =
        *reinterpret_cast<const device vec<uint, COUNT / 2>*>(scales + (row + first));
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
      words[i] = loaded[i];
    }
  } else {
    const device ushort* entries = reinterpret_cast<const device ushort*>(scales);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const uint entry = entries[row + min(first + i, uint(ENTRIES - 1))];
      words[i / 2] = i % 2 == 0 ? entry : words[i / 2] | (entry << 16);
    }
  }
}

template <typename T>
inline float entry(const thread uint* words, int i) {
  float pair[2];
  widen_word<T>(words[i / 2], pair);
  return pair[i % 2];
}

// The weights and scales of UNROLL chunks, TILES times 16 rows.
template <typename Shape, int UNROLL, int TILES>
struct MmaBatch {
  vec<uint, 4> weights[UNROLL][TILES][2];
  uint scales[TILES][2][Shape::RUNS][Shape::RUN_WORDS];
  uint biases[TILES][2][Shape::RUNS][Shape::RUN_WORDS];
};

// Where a lane reads its part of each of its rows: words of weights and entries of scales, counted
// from the matrix's first in 32 bits. An address is then one multiplication.
template <typename T, int TILES>
struct MmaRows {
  const device uint* weight;
  const device T* scales;
  const device T* biases;
  uint words[TILES][2];
  uint entries[TILES][2];
};

// Row g of a multiply is of the tile's first run, row g + 8 of its second. Rows past the matrix
// read its last one, and nobody keeps the result.
template <typename T, int BITS, int GROUP, int K, int N, int TILES>
inline void find_rows(
    const device uint* weight,
    const device T* scales,
    const device T* biases,
    uint first,
    uint second,
    uint lane,
    thread MmaRows<T, TILES>& rows) {
  rows.weight = weight;
  rows.scales = scales;
  rows.biases = biases;
#pragma unroll
  for (int i = 0; i < TILES * 2; i++) {
    const uint start = i % 2 == 0 ? first : second;
    const uint row = min(start + i / 2 * 8 + lane / 4, uint(N - 1));
    rows.words[i / 2][i % 2] = row * (K * BITS / 32) + lane % 4 * 4;
    rows.entries[i / 2][i % 2] = row * (K / GROUP);
  }
}

// `entry_word`: which two of a chunk's four entries of scales a lane takes, where there are four.
template <typename T, int BITS, int GROUP, int K, int M, int UNROLL, int TILES>
inline void load_batch(
    const thread MmaRows<T, TILES>& rows,
    int batch,
    int team,
    int entry_word,
    thread MmaBatch<MmaShape<T, BITS, GROUP, K, M, UNROLL>, UNROLL, TILES>& out) {
  typedef MmaShape<T, BITS, GROUP, K, M, UNROLL> Shape;
#pragma unroll
  for (int i = 0; i < TILES * 2; i++) {
    const device uint* words =
        rows.weight + (rows.words[i / 2][i % 2] + uint(batch) * (UNROLL * 16));
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int k = batch * Shape::BATCH + u * Shape::CHUNK + team * Shape::VALUES;
      if (Shape::WHOLE || k < K) {
        out.weights[u][i / 2][i % 2] = load_once(words + u * 16);
      } else {
        out.weights[u][i / 2][i % 2] = vec<uint, 4>(0u);
      }
    }
  }
  if constexpr (BITS < 16) {
    constexpr int ENTRIES = K / GROUP;
    constexpr bool ALIGNED = Shape::WHOLE && ENTRIES % Shape::RUN == 0 && Shape::RUN <= 8;
#pragma unroll
    for (int i = 0; i < TILES * 2; i++) {
#pragma unroll
      for (int r = 0; r < Shape::RUNS; r++) {
        const uint first = uint(batch * Shape::BATCH + r * Shape::CHUNK) / GROUP +
                           (Shape::GROUPS == 4 ? entry_word * 2 : 0);
        const uint row = rows.entries[i / 2][i % 2];
        load_entries<T, Shape::RUN, ALIGNED, ENTRIES>(
            rows.scales, row, first, out.scales[i / 2][i % 2][r]);
        load_entries<T, Shape::RUN, ALIGNED, ENTRIES>(
            rows.biases, row, first, out.biases[i / 2][i % 2][r]);
      }
    }
  }
}
