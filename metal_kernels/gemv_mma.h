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
#include "mma_operands.h"
#include "mma_queue.h"
#include "stage_normed.h"

// Where x comes from: the threadgroup's normed copy, or the input.
template <bool NORM>
inline vec<uint, 4> load_x(const device uint* x, const threadgroup uint* staged, uint word) {
  if constexpr (NORM) {
    return *reinterpret_cast<const threadgroup vec<uint, 4>*>(staged + word);
  } else {
    return load_shared_words(x + word);
  }
}

template <
    typename T, int BITS, int GROUP, int K, int N, int M, int ROWS, int SIMDGROUPS, int KSPLIT,
    int UNROLL, int QUEUE, bool NORM>
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
    threadgroup float4* queued,
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
  constexpr int SLOT = MmaSlot<T, BITS, GROUP, K, M, UNROLL, TILES>::VECTORS;
  MmaQueue<T> queue =
      queue_of<T, SLOT, QUEUE>(queued, weight, scales, biases, first, second, simdgroup);
  if constexpr (QUEUE > 0) {
    ask_ahead<T, BITS, GROUP, K, N, M, UNROLL, TILES, KSPLIT, QUEUE, false>(
        queue, simdgroup, lane);
  } else if (BATCHES >= KSPLIT || part < BATCHES) {
    load_batch<T, BITS, GROUP, K, M, UNROLL, TILES>(rows, part, team, team % 2, current);
  }
  const bool fresh = MSL_INPUTS_READY();
  if constexpr (NORM) {
    if (fresh) {
      stage_normed<T, K, M, SIMDGROUPS>(x, norm, eps, staged, partial, simdgroup, lane);
    }
  }
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
      take_batch<T, BITS, GROUP, K, M, UNROLL, TILES, QUEUE>(queue, slot, team % 2, lane, current);
      ask_batch<T, BITS, GROUP, K, N, M, UNROLL, TILES>(
          queue, slot, batch + QUEUE * KSPLIT, lane);
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
    if (QUEUE == 0 && step + 1 < STEPS && (BATCHES % KSPLIT == 0 || batch + KSPLIT < BATCHES)) {
      load_batch<T, BITS, GROUP, K, M, UNROLL, TILES>(
          rows, batch + KSPLIT, team, team % 2, current);
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
