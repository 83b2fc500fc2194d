// gemv_mma for a tile of 16 rows a simdgroup, whose weights travel through threadgroup memory.
//
// Loads into registers keep a simdgroup's weights in flight only as long as it has registers for
// them, and the code for several chunks at once is long: in a chain of kernels each phase runs it
// cold. Here a lane copies its own 16 bytes of a row into its own place of a ring, some chunks
// ahead, and reads them back: nothing is shared between lanes, and the loop is one chunk long.
#include "mma.h"
#include "mma_batch.h"
#include "mma_operands.h"
#include "stage_x.h"

// Of the ring: chunks on their way, and bytes of one for a simdgroup: two rows of 16 bytes a lane,
// and of each row a word of scales and one of biases.
constant constexpr int PIPE_STAGES = 4;
constant constexpr int PIPE_STAGE_BYTES = 32 * 2 * (16 + 8);

// Whether rows are whole chunks, their scales whole words, and x fits threadgroup memory.
template <typename T, int BITS, int GROUP, int K, int M, int ROWS, bool NORM>
inline constexpr bool pipe_fits() {
  return StagedX<T, BITS, GROUP, K, M, NORM>::STAGED && ROWS == 16 && K % (512 / BITS) == 0 && (BITS == 16 || K / GROUP % 2 == 0);
}

template <int BYTES>
inline void copy_ahead(threadgroup char* to, const device void* from) {
  const uint at = shared_address(to);
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" : : "r"(at), "l"(from));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(at), "l"(from));
  }
}

template <
    typename T, int BITS, int GROUP, int K, int N, int M, int SIMDGROUPS, int KSPLIT, bool NORM>
inline void gemv_pipe(
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
    threadgroup char* ring,
    uint simdgroup,
    uint lane) {
  typedef MmaShape<T, BITS, GROUP, K, M, 1> Shape;
  typedef StagedX<T, BITS, GROUP, K, M, NORM> Place;
  constexpr int TILE = 16 * SIMDGROUPS / KSPLIT;
  constexpr int CHUNKS = K / Shape::CHUNK;
  constexpr int PAIRS = Shape::VALUES / 2;
  const int line = int(lane) / 4;
  const int team = int(lane) % 4;
  const int part = int(simdgroup) % KSPLIT;
  const int begin = part * CHUNKS / KSPLIT;
  const int end = (part + 1) * CHUNKS / KSPLIT;

  MmaRows<T, 1> rows;
  find_rows<T, BITS, GROUP, K, N, 1>(weight, scales, biases, first, second, lane, rows);
  threadgroup char* slots = ring + lane * 16;
  threadgroup char* entries = ring + 1024 + lane * 4;
  // The word of scales that has a chunk's entry, or its two.
  const int pair = Shape::GROUPS == 4 ? team % 2 * 2 : 0;

  auto ask = [&](int chunk) {
    if (chunk < end) {
      const int at = chunk % PIPE_STAGES * PIPE_STAGE_BYTES;
      const int entry = (chunk * Shape::CHUNK / GROUP + pair) & ~1;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        copy_ahead<16>(slots + at + r * 512, rows.weights[0][r] + chunk * 16);
        if constexpr (BITS < 16) {
          copy_ahead<4>(entries + at + r * 256, rows.scales[0][r] + entry);
          copy_ahead<4>(entries + at + r * 256 + 128, rows.biases[0][r] + entry);
        }
      }
    }
    asm volatile("cp.async.commit_group;" : : : "memory");
  };
#pragma unroll 1
  for (int chunk = begin; chunk < begin + PIPE_STAGES; chunk++) {
    ask(chunk);
  }
  if (MSL_INPUTS_READY()) {
    stage_x<T, BITS, GROUP, K, M, SIMDGROUPS, NORM>(
        x, norm, eps, staged, partial, simdgroup, lane);
  }

  const threadgroup vec<uint, 4>* staged_words =
      reinterpret_cast<const threadgroup vec<uint, 4>*>(staged);
  const threadgroup float* staged_sums =
      reinterpret_cast<const threadgroup float*>(staged_words + Place::SUMS);
  float sums[Shape::BLOCKS][4];
#pragma unroll
  for (int i = 0; i < Shape::BLOCKS * 4; i++) {
    sums[i / 4][i % 4] = 0.0f;
  }
#pragma unroll 1
  for (int chunk = begin; chunk < end; chunk++) {
    asm volatile("cp.async.wait_group %0;" : : "n"(PIPE_STAGES - 1) : "memory");
    const int at = chunk % PIPE_STAGES * PIPE_STAGE_BYTES;
    vec<uint, 4> weights[2];
    float row_scales[2][2];
    float row_biases[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      weights[r] = *reinterpret_cast<const threadgroup vec<uint, 4>*>(slots + at + r * 512);
      if constexpr (BITS < 16) {
        const threadgroup uint* words =
            reinterpret_cast<const threadgroup uint*>(entries + at + r * 256);
        widen_word<T>(words[0], row_scales[r]);
        widen_word<T>(words[32], row_biases[r]);
        if (Shape::GROUPS == 1 && (chunk * Shape::CHUNK / GROUP) % 2 == 1) {
          row_scales[r][0] = row_scales[r][1];
          row_biases[r][0] = row_biases[r][1];
        }
      }
    }
#pragma unroll
    for (int block = 0; block < Shape::BLOCKS; block++) {
      const int column = block * 8 + line;
      const int m = column / Shape::GROUPS;
      const bool mine = m < M && column % Shape::GROUPS == team * Shape::GROUPS / 4;
      const threadgroup vec<uint, 4>* from =
          staged_words +
          (mine ? (m * K + chunk * Shape::CHUNK + team * Shape::VALUES) / 8 : Place::ZEROS);
      uint pairs[PAIRS];
#pragma unroll
      for (int i = 0; i < PAIRS; i += 4) {
        const vec<uint, 4> words = from[i / 4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          pairs[i + j] = words[j];
        }
      }
      if constexpr (BITS == 16) {
        multiply<T, BITS>(sums[block], weights[0], weights[1], pairs);
      } else {
        float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply<T, BITS>(products, weights[0], weights[1], pairs);
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const int own = min(block * 8 + team * 2 + c, M * Shape::GROUPS - 1);
          const float group_sum =
              staged_sums[own / Shape::GROUPS * Place::ENTRIES +
                          chunk * Shape::CHUNK / GROUP + own % Shape::GROUPS];
          const int of = Shape::GROUPS == 1 ? 0 : c;
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const float scale = row_scales[r][of];
            sums[block][r * 2 + c] += scale * products[r * 2 + c];
            sums[block][r * 2 + c] += (row_biases[r][of] - Shape::OFFSET * scale) * group_sum;
          }
        }
      }
    }
    ask(chunk + PIPE_STAGES);
  }
  asm volatile("cp.async.wait_all;" : : : "memory");

#pragma unroll
  for (int block = 0; block < Shape::BLOCKS; block++) {
    store_sums<Shape, M, TILE>(sums[block], block, line, team, sums_out);
  }
}
