// Rows of a matrix against M rows of x, by one simdgroup on CUDA's matrix units.
//
// A multiply takes 16 matrix rows and 8 columns of x. One token fills one column, so the others
// separate what must not be summed: a column is one row of x within one quantization group, zero
// elsewhere. The sums of a group then arrive apart, in float32, and are scaled there. A packed value
// q enters as 16 + q, which is its bits behind a constant exponent: two integer instructions make a
// pair, exactly, in float16 and bfloat16 alike. The 16 is taken off with the group's bias, which
// needs the group's sum of x: the same multiply with a matrix of ones.
//
// A lane loads 16 bytes of a row at a time, so that four lanes cover a chunk of 512 / BITS values.
// Which k a place of the multiply stands for is free as long as both operands agree; packed values
// half a word apart form a pair.
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

// Two nibbles of a word, `nibble` and the one 16 bits on, as 16 + q in T; 256 + 16 q if `high`.
template <typename T>
inline uint packed_pair(uint word, int nibble, bool high) {
  constexpr bool IS_HALF = is_same_v<T, float16_t>;
  constexpr int PLACE = IS_HALF ? 6 : 3;
  const uint exponent =
      IS_HALF ? (high ? 0x5c005c00u : 0x4c004c00u) : (high ? 0x43804380u : 0x41804180u);
  const int shift = PLACE - 4 * nibble;
  return masked_or(
      shift >= 0 ? word << shift : word >> -shift, 0x000f000fu << PLACE, exponent);
}

// The x that four pairs of packed values meet: 16 bytes of x are 8 consecutive values.
template <int BITS>
inline void pair_up(vec<uint, 4> x, thread uint* pairs) {
  if (BITS == 16) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      pairs[i] = x[i];
    }
  } else {
    const int other = BITS == 4 ? 2 : 1;
    const int next = BITS == 4 ? 1 : 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint a = x[i * next];
      const uint b = x[i * next + other];
      pairs[2 * i] = low_halves(a, b);
      pairs[2 * i + 1] = high_halves(a, b);
    }
  }
}

// d += the rows that the lanes hold in `a` (row g) and `b` (row g + 8) times x.
template <typename T, int BITS>
inline void multiply(
    thread float* d, vec<uint, 4> a, vec<uint, 4> b, const thread uint* pairs) {
#pragma unroll
  for (int w = 0; w < 4; w++) {
    if (BITS == 16) {
      if (w % 2 == 0) {
        mma<T>(d, a[w], b[w], a[w + 1], b[w + 1], pairs[w], pairs[w + 1]);
      }
    } else {
      // At 4 bits the second multiply has the word's other four values; at 8 the high nibbles of
      // the same four.
#pragma unroll
      for (int s = 0; s < 2; s++) {
        const bool high = BITS == 8 && s == 1;
        const int one = BITS == 4 ? 2 * s : s;
        const int two = BITS == 4 ? 2 * s + 1 : s + 2;
        const int pair = BITS == 4 ? 4 * w + 2 * s : 2 * w;
        mma<T>(
            d, packed_pair<T>(a[w], one, high), packed_pair<T>(b[w], one, high),
            packed_pair<T>(a[w], two, high), packed_pair<T>(b[w], two, high), pairs[pair],
            pairs[pair + 1]);
      }
    }
  }
}

// d += the sums of x, in every row.
template <typename T, int PAIRS>
inline void multiply_ones(thread float* d, const thread uint* pairs) {
  constexpr uint ONES = is_same_v<T, float16_t> ? 0x3c003c00u : 0x3f803f80u;
#pragma unroll
  for (int i = 0; i < PAIRS; i += 2) {
    mma<T>(d, ONES, ONES, ONES, ONES, pairs[i], pairs[i + 1]);
  }
}

// COUNT entries of a row of `groups` scales, two in a word; past the row its last one again.
template <typename T, int COUNT, bool ALIGNED>
inline void load_entries(const device T* row, int first, int groups, thread uint* words) {
  if constexpr (ALIGNED && COUNT == 2) {
    words[0] = *reinterpret_cast<const device uint*>(row + first);
  } else if constexpr (ALIGNED && COUNT > 2) {
    const vec<uint, COUNT / 2> loaded =
        *reinterpret_cast<const device vec<uint, COUNT / 2>*>(row + first);
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
      words[i] = loaded[i];
    }
  } else {
    const device ushort* entries = reinterpret_cast<const device ushort*>(row);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const uint entry = entries[min(first + i, groups - 1)];
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

// Where a lane reads its part of each of its rows.
template <typename T, int TILES>
struct MmaRows {
  const device uint* weights[TILES][2];
  const device T* scales[TILES][2];
  const device T* biases[TILES][2];
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
#pragma unroll
  for (int i = 0; i < TILES * 2; i++) {
    const uint start = i % 2 == 0 ? first : second;
    const size_t row = min(start + i / 2 * 8 + lane / 4, uint(N - 1));
    rows.weights[i / 2][i % 2] = weight + row * (K * BITS / 32) + lane % 4 * 4;
    if (BITS < 16) {
      rows.scales[i / 2][i % 2] = scales + row * (K / GROUP);
      rows.biases[i / 2][i % 2] = biases + row * (K / GROUP);
    }
  }
}

template <typename T, int BITS, int GROUP, int K, int M, int UNROLL, int TILES>
inline void load_batch(
    const thread MmaRows<T, TILES>& rows,
    int batch,
    int team,
    thread MmaBatch<MmaShape<T, BITS, GROUP, K, M, UNROLL>, UNROLL, TILES>& out) {
  typedef MmaShape<T, BITS, GROUP, K, M, UNROLL> Shape;
#pragma unroll
  for (int i = 0; i < TILES * 2; i++) {
    const device uint* words = rows.weights[i / 2][i % 2] + batch * (UNROLL * 16);
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
        const int first = (batch * Shape::BATCH + r * Shape::CHUNK) / GROUP +
                          (Shape::GROUPS == 4 ? team % 2 * 2 : 0);
        load_entries<T, Shape::RUN, ALIGNED>(
            rows.scales[i / 2][i % 2], first, ENTRIES, out.scales[i / 2][i % 2][r]);
        load_entries<T, Shape::RUN, ALIGNED>(
            rows.biases[i / 2][i % 2], first, ENTRIES, out.biases[i / 2][i % 2][r]);
      }
    }
  }
}

// Where x comes from: the threadgroup's normed copy, or the input.
template <bool NORM>
inline vec<uint, 4> load_x(const device uint* x, const threadgroup uint* staged, uint word) {
  if constexpr (NORM) {
    return *reinterpret_cast<const threadgroup vec<uint, 4>*>(staged + word);
  } else {
    return load_shared_words(x + word);
  }
}

// x after RMS norm, rounded to T as the norm by itself would be, in threadgroup memory.
template <typename T, int K, int M, int SIMDGROUPS>
inline void stage_normed(
    const device T* x,
    const device T* norm,
    float eps,
    threadgroup uint* staged,
    threadgroup float* partial,
    uint simdgroup,
    uint lane) {
  constexpr int THREADS = 32 * SIMDGROUPS;
  constexpr int VECTORS = K / 8;
  constexpr int SHARE = (VECTORS + THREADS - 1) / THREADS;
  const int thread_index = int(simdgroup * 32 + lane);
  const device uint* x_words = reinterpret_cast<const device uint*>(x);
  const device uint* norm_words = reinterpret_cast<const device uint*>(norm);
  threadgroup vec<uint, 4>* out = reinterpret_cast<threadgroup vec<uint, 4>*>(staged);
  // Loaded with x: after the barrier they would cost a second trip to memory.
  vec<uint, 4> factors[SHARE];
  float squares[M];
#pragma unroll
  for (int m = 0; m < M; m++) {
    squares[m] = 0.0f;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      const int at = thread_index + i * THREADS;
      if (at < VECTORS) {
        if (m == 0) {
          factors[i] = load_shared_words(norm_words + at * 4);
        }
        const vec<uint, 4> words = load_shared_words(x_words + m * (K / 2) + at * 4);
        out[m * VECTORS + at] = words;
        float values[8];
        widen<T>(words, values);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          squares[m] += values[j] * values[j];
        }
      }
    }
    squares[m] = simd_sum(squares[m]);
    if (lane == 0) {
      partial[m * SIMDGROUPS + simdgroup] = squares[m];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int m = 0; m < M; m++) {
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < SIMDGROUPS; s++) {
      total += partial[m * SIMDGROUPS + s];
    }
    const float scale = metal::precise::rsqrt(total / float(K) + eps);
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      const int at = thread_index + i * THREADS;
      if (at < VECTORS) {
        float values[8];
        float weights[8];
        widen<T>(out[m * VECTORS + at], values);
        widen<T>(factors[i], weights);
        vec<uint, 4> words;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const ushort low = as_type<ushort>(T(values[2 * j] * scale * weights[2 * j]));
          const ushort high = as_type<ushort>(T(values[2 * j + 1] * scale * weights[2 * j + 1]));
          words[j] = uint(low) | (uint(high) << 16);
        }
        out[m * VECTORS + at] = words;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <
    typename T, int BITS, int GROUP, int K, int N, int M, int ROWS, int SIMDGROUPS, int KSPLIT,
    int UNROLL, bool NORM>
inline void gemv_mma(
    const device T* x,
    const device T* norm,
    float eps,
    const device uint* weight,
    const device T* scales,
    const device T* biases,
    uint first,
    uint second,
    threadgroup uint* staged,
    threadgroup float* partial,
    threadgroup float* sums_out,
    uint simdgroup,
    uint lane) {
  typedef MmaShape<T, BITS, GROUP, K, M, UNROLL> Shape;
  constexpr int TILES = ROWS / 16;
  constexpr int TILE = ROWS * SIMDGROUPS / KSPLIT;
  constexpr int BATCHES = (K + Shape::BATCH - 1) / Shape::BATCH;
  constexpr int STEPS = (BATCHES + KSPLIT - 1) / KSPLIT;
  constexpr int PAIRS = Shape::VALUES / 2;
  static_assert(ROWS % 16 == 0, "ROWS must be a multiple of 16");
  const int line = int(lane) / 4;
  const int team = int(lane) % 4;
  const int part = int(simdgroup) % KSPLIT;

  MmaRows<T, TILES> rows;
  find_rows<T, BITS, GROUP, K, N, TILES>(weight, scales, biases, first, second, lane, rows);
  float sums[TILES][Shape::BLOCKS][4];
#pragma unroll
  for (int i = 0; i < TILES * Shape::BLOCKS * 4; i++) {
    sums[i / 4 / Shape::BLOCKS][i / 4 % Shape::BLOCKS][i % 4] = 0.0f;
  }

  // Asked for before the norm, which takes as long as the trip to memory.
  MmaBatch<Shape, UNROLL, TILES> current;
  if (BATCHES >= KSPLIT || part < BATCHES) {
    load_batch<T, BITS, GROUP, K, M, UNROLL, TILES>(rows, part, team, current);
  }
  if constexpr (NORM) {
    stage_normed<T, K, M, SIMDGROUPS>(x, norm, eps, staged, partial, simdgroup, lane);
  }
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    const int batch = step * KSPLIT + part;
    if (BATCHES % KSPLIT != 0 && batch >= BATCHES) {
      break;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int k = batch * Shape::BATCH + u * Shape::CHUNK + team * Shape::VALUES;
#pragma unroll
      for (int block = 0; block < Shape::BLOCKS; block++) {
        const int column = block * 8 + line;
        const int m = column / Shape::GROUPS;
        const bool mine = m < M && column % Shape::GROUPS == team * Shape::GROUPS / 4;
        uint pairs[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; i += 4) {
          vec<uint, 4> words = vec<uint, 4>(0u);
          if (mine && (Shape::WHOLE || k < K)) {
            words = load_x<NORM>(
                reinterpret_cast<const device uint*>(x), staged, (m * K + k) / 2 + i);
          }
          pair_up<BITS>(words, pairs + i);
        }
        float group_sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (BITS < 16) {
          multiply_ones<T, PAIRS>(group_sums, pairs);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          if constexpr (BITS == 16) {
            multiply<T, BITS>(
                sums[tile][block], current.weights[u][tile][0], current.weights[u][tile][1], pairs);
          } else {
            float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            multiply<T, BITS>(
                products, current.weights[u][tile][0], current.weights[u][tile][1], pairs);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int run = Shape::GROUPS == 4 ? u : 0;
              const int at = Shape::GROUPS == 4
                                 ? i % 2
                                 : u * Shape::CHUNK / GROUP + (Shape::GROUPS == 2 ? i % 2 : 0);
              const float scale = entry<T>(current.scales[tile][i / 2][run], at);
              const float bias = entry<T>(current.biases[tile][i / 2][run], at);
              sums[tile][block][i] += scale * products[i];
              sums[tile][block][i] += (bias - Shape::OFFSET * scale) * group_sums[i % 2];
            }
          }
        }
      }
    }
    if (step + 1 < STEPS && (BATCHES % KSPLIT == 0 || batch + KSPLIT < BATCHES)) {
      load_batch<T, BITS, GROUP, K, M, UNROLL, TILES>(rows, batch + KSPLIT, team, current);
    }
  }

#pragma unroll
  for (int i = 0; i < TILES * 2 * Shape::BLOCKS; i++) {
    const int tile = i / 2 / Shape::BLOCKS;
    const int block = i / 2 % Shape::BLOCKS;
    const int run = i % 2;
    const float left = sums[tile][block][run * 2];
    const float right = sums[tile][block][run * 2 + 1];
    threadgroup float* out = sums_out + run * (TILE / 2) + tile * 8 + line;
    if constexpr (Shape::GROUPS == 1) {
      const int m = block * 8 + team * 2;
      if (m < M) {
        out[m * TILE] = left;
      }
      if (m + 1 < M) {
        out[(m + 1) * TILE] = right;
      }
    } else if constexpr (Shape::GROUPS == 2) {
      const int m = block * 4 + team;
      if (m < M) {
        out[m * TILE] = left + right;
      }
    } else {
      const float sum = left + right;
      const float total = sum + simd_shuffle_xor(sum, ushort(1));
      const int m = block * 2 + team / 2;
      if (team % 2 == 0 && m < M) {
        out[m * TILE] = total;
      }
    }
  }
}
