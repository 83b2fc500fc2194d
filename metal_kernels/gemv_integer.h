// Rows of a packed matrix against M rows of x in whole numbers, by one simdgroup on CUDA's matrix
// units.
//
// A multiply takes 16 matrix rows and 8 columns of x, unsigned bytes against signed ones. A byte of
// packed weights is one operand as it lies in memory: at 8 bits a value, at 4 bits an even value of
// its word, or an odd one 16 times, once the other four bits are masked. x is 16 bits in two bytes
// (stage_integer.h): each is a column, and so is each quantization group, zero elsewhere, so that
// the sums of a group arrive apart, exactly, and are scaled in float32. The bias takes the group's
// sum of x.
//
// A lane loads 16 bytes of a row at a time, so that four lanes cover a chunk of 512 / BITS values.
#include "mma_integer.h"
#include "mma_queue.h"
#include "stage_integer.h"

// Values that share a scale of x: a quantization group, or the part of one that is in a chunk.
template <int BITS, int GROUP>
inline constexpr int integer_group() {
  return GROUP < 512 / BITS ? GROUP : 512 / BITS;
}

// The sums of a lane's rows (two of x's columns each), high bytes and low ones together; at 4 bits
// 16 times.
template <int BITS>
inline void multiply_integer(
    vec<uint, 4> a, vec<uint, 4> b, const thread vec<uint, 4>* x, thread int* totals) {
  int sums[4];
  if constexpr (BITS == 4) {
    constexpr uint EVEN = 0x0f0f0f0fu;
    constexpr uint ODD = 0xf0f0f0f0u;
    int odd[4];
    mma_integer_first(sums, a[0] & EVEN, b[0] & EVEN, a[1] & EVEN, b[1] & EVEN, x[0][0], x[0][1]);
    mma_integer_first(odd, a[0] & ODD, b[0] & ODD, a[1] & ODD, b[1] & ODD, x[1][0], x[1][1]);
    mma_integer(sums, a[2] & EVEN, b[2] & EVEN, a[3] & EVEN, b[3] & EVEN, x[0][2], x[0][3]);
    mma_integer(odd, a[2] & ODD, b[2] & ODD, a[3] & ODD, b[3] & ODD, x[1][2], x[1][3]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sums[i] = 16 * sums[i] + odd[i];
    }
  } else {
    mma_integer_first(sums, a[0], b[0], a[1], b[1], x[0][0], x[0][1]);
    mma_integer(sums, a[2], b[2], a[3], b[3], x[0][2], x[0][3]);
  }
  totals[0] = 256 * sums[0] + sums[1];
  totals[1] = 256 * sums[2] + sums[3];
}

// Half of a word as a float; `choice` from half_choice.
template <typename T>
inline float widen_half(uint word, uint choice) {
  const uint bits = permute_bytes(word, 0u, choice);
  if constexpr (is_same_v<T, bfloat16_t>) {
    return as_type<float>(bits);
  } else {
    return float(as_type<half2>(bits).x);
  }
}
template <typename T>
inline uint half_choice(bool high) {
  if constexpr (is_same_v<T, bfloat16_t>) {
    return high ? 0x3244u : 0x1044u;
  } else {
    return high ? 0x4432u : 0x4410u;
  }
}

template <
    typename T, int BITS, int GROUP, int K, int N, int M, int ROWS, int SIMDGROUPS, int KSPLIT,
    int UNROLL, int QUEUE, bool NORM>
inline void gemv_integer(
    const device T* x,
    const device T* norm,
    float eps,
    const device uint* weight,
    const device T* scales,
    const device T* biases,
    uint first,
    uint second,
    threadgroup uint* staged,
    threadgroup float4* queued,
    threadgroup float* sums_out,
    uint simdgroup,
    uint lane) {
  typedef MmaShape<T, BITS, GROUP, K, M, UNROLL> Shape;
  constexpr int TILES = ROWS / 16;
  constexpr int TILE = ROWS * SIMDGROUPS / KSPLIT;
  constexpr int BATCHES = (K + Shape::BATCH - 1) / Shape::BATCH;
  constexpr int STEPS = (BATCHES + KSPLIT - 1) / KSPLIT;
  constexpr int GROUPS = Shape::GROUPS;
  constexpr int BLOCKS = (M * GROUPS + 3) / 4;
  constexpr int VECTORS = Shape::VALUES / 16;
  constexpr int XGROUP = integer_group<BITS, GROUP>();
  constexpr int FACTS = integer_facts<K, XGROUP>();
  static_assert(ROWS % 16 == 0, "ROWS must be a multiple of 16");
  static_assert(BITS < 16, "INTEGER is for packed weights");
  const int line = int(lane) / 4;
  const int team = int(lane) % 4;
  const int part = int(simdgroup) % KSPLIT;
  const int entry_word = GROUPS == 4 ? team / 2 : 0;
  const uint choice = half_choice<T>(team % 2 == 1);

  MmaRows<T, TILES> rows;
  find_rows<T, BITS, GROUP, K, N, TILES>(weight, scales, biases, first, second, lane, rows);
  float sums[TILES][BLOCKS][2];
#pragma unroll
  for (int i = 0; i < TILES * BLOCKS * 2; i++) {
    sums[i / 2 / BLOCKS][i / 2 % BLOCKS][i % 2] = 0.0f;
  }

  // Asked for before x is staged, which takes as long as the trip to memory.
  MmaBatch<Shape, UNROLL, TILES> current;
  constexpr int SLOT = MmaSlot<T, BITS, GROUP, K, M, UNROLL, TILES>::VECTORS;
  MmaQueue<T> queue =
      queue_of<T, SLOT, QUEUE>(queued, weight, scales, biases, first, second, simdgroup);
  if constexpr (QUEUE > 0) {
    ask_ahead<T, BITS, GROUP, K, N, M, UNROLL, TILES, KSPLIT, QUEUE, false>(
        queue, simdgroup, lane);
  } else if (BATCHES >= KSPLIT || part < BATCHES) {
    load_batch<T, BITS, GROUP, K, M, UNROLL, TILES>(rows, part, team, entry_word, current);
  }
  if (MSL_INPUTS_READY()) {
    stage_integer<T, BITS, XGROUP, K, M, SIMDGROUPS, NORM>(x, norm, staged, simdgroup, lane);
  }
  const threadgroup vec<uint, 4>* bytes =
      reinterpret_cast<const threadgroup vec<uint, 4>*>(staged);
  const threadgroup float2* facts =
      reinterpret_cast<const threadgroup float2*>(staged + M * (K / 2));
  if constexpr (QUEUE > 0) {
    ask_ahead<T, BITS, GROUP, K, N, M, UNROLL, TILES, KSPLIT, QUEUE, true>(queue, simdgroup, lane);
  }
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    const int batch = step * KSPLIT + part;
    if (BATCHES % KSPLIT != 0 && batch >= BATCHES) {
      break;
    }
    if constexpr (QUEUE > 0) {
      const int slot = step % QUEUE;
      take_batch<T, BITS, GROUP, K, M, UNROLL, TILES, QUEUE>(queue, slot, entry_word, lane, current);
      ask_batch<T, BITS, GROUP, K, N, M, UNROLL, TILES>(
          queue, slot, batch + QUEUE * KSPLIT, lane);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int start = batch * Shape::BATCH + u * Shape::CHUNK;
      const int k = start + team * Shape::VALUES;
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
        // The column that a lane brings, and the two, of one group, whose sums it gets.
        const int column = block * 4 + line / 2;
        const int m = column / GROUPS;
        const bool mine = m < M && column % GROUPS == team * GROUPS / 4;
        vec<uint, 4> words[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
          words[i] = vec<uint, 4>(0u);
          if (mine && (Shape::WHOLE || k < K)) {
            words[i] = bytes[(m * K + k) / 8 + line % 2 * VECTORS + i];
          }
        }
        const int own = block * 4 + team;
        const int group = start / XGROUP + own % GROUPS;
        float2 fact = float2(0.0f);
        if (Shape::WHOLE || group < K / XGROUP) {
          fact = facts[min(own / GROUPS, M - 1) * FACTS + group];
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          int totals[2];
          multiply_integer<BITS>(
              current.weights[u][tile][0], current.weights[u][tile][1], words, totals);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float scale;
            float bias;
            if constexpr (GROUPS == 1) {
              scale = entry<T>(current.scales[tile][i][0], u * Shape::CHUNK / GROUP);
              bias = entry<T>(current.biases[tile][i][0], u * Shape::CHUNK / GROUP);
            } else {
              const int run = GROUPS == 4 ? u : 0;
              const int word = GROUPS == 4 ? 0 : u;
              scale = widen_half<T>(current.scales[tile][i][run][word], choice);
              bias = widen_half<T>(current.biases[tile][i][run][word], choice);
            }
            sums[tile][block][i] += scale * fact.x * float(totals[i]);
            sums[tile][block][i] += bias * fact.y;
          }
        }
      }
    }
    if (QUEUE == 0 && step + 1 < STEPS && (BATCHES % KSPLIT == 0 || batch + KSPLIT < BATCHES)) {
      load_batch<T, BITS, GROUP, K, M, UNROLL, TILES>(
          rows, batch + KSPLIT, team, entry_word, current);
    }
  }

  const threadgroup float* squares = staged_squares<K, M, XGROUP>(staged);
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    const int m = (block * 4 + team) / GROUPS;
    float scale = 1.0f;
    if constexpr (NORM) {
      float total = 0.0f;
#pragma unroll
      for (int s = 0; s < SIMDGROUPS; s++) {
        total += squares[min(m, M - 1) * SIMDGROUPS + s];
      }
      scale = metal::precise::rsqrt(total / float(K) + eps);
    }
#pragma unroll
    for (int i = 0; i < TILES * 2; i++) {
      float sum = sums[i / 2][block][i % 2];
#pragma unroll
      for (int distance = 1; distance < GROUPS; distance *= 2) {
        sum += simd_shuffle_xor(sum, ushort(distance));
      }
      if (team % GROUPS == 0 && m < M) {
        sums_out[m * TILE + i % 2 * (TILE / 2) + i / 2 * 8 + line] = sum * scale;
      }
    }
  }
}
