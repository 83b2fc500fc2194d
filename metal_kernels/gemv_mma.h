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
#include "mma_batch.h"
#include "mma_operands.h"
#include "stage_x.h"

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
  typedef StagedX<T, BITS, GROUP, K, M, NORM> Place;
  const threadgroup vec<uint, 4>* staged_words =
      reinterpret_cast<const threadgroup vec<uint, 4>*>(staged);
  const threadgroup float* staged_sums =
      reinterpret_cast<const threadgroup float*>(staged_words + Place::SUMS);
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
  const bool fresh = MSL_INPUTS_READY();
  if constexpr (Place::STAGED) {
    if (fresh) {
      stage_x<T, BITS, GROUP, K, M, SIMDGROUPS, NORM>(
          x, norm, eps, staged, partial, simdgroup, lane);
    }
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
        const bool reads = mine && (Shape::WHOLE || k < K);
        uint pairs[PAIRS];
        float group_sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (Place::STAGED) {
          // Lanes without a column read zeros: cheaper than to make them.
          const threadgroup vec<uint, 4>* from =
              staged_words + (reads ? (m * K + k) / 8 : Place::ZEROS);
#pragma unroll
          for (int i = 0; i < PAIRS; i += 4) {
            const vec<uint, 4> words = from[i / 4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
              pairs[i + j] = words[j];
            }
          }
#pragma unroll
          for (int c = 0; c < 2 && BITS < 16; c++) {
            const int own = min(block * 8 + team * 2 + c, M * Shape::GROUPS - 1);
            const int entry = (k - team * Shape::VALUES) / GROUP + own % Shape::GROUPS;
            group_sums[c] =
                staged_sums[own / Shape::GROUPS * Place::ENTRIES + min(entry, Place::ENTRIES - 1)];
          }
        } else {
#pragma unroll
          for (int i = 0; i < PAIRS; i += 4) {
            vec<uint, 4> words = vec<uint, 4>(0u);
            if (reads) {
              words = load_shared_words(
                  reinterpret_cast<const device uint*>(x) + (m * K + k) / 2 + i);
            }
            pair_up<BITS>(words, pairs + i);
          }
          if (BITS < 16) {
            multiply_ones<T, PAIRS>(group_sums, pairs);
          }
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
  for (int i = 0; i < TILES * Shape::BLOCKS; i++) {
    const int tile = i / Shape::BLOCKS;
    const int block = i % Shape::BLOCKS;
    store_sums<Shape, M, TILE>(sums[tile][block], block, tile * 8 + line, team, sums_out);
  }
}
