// The batches of weights that a simdgroup has asked for and not yet used. With QUEUE 0 that is one,
// in registers. Otherwise QUEUE of them lie in threadgroup memory: a chain of kernels, whose
// simdgroups have few registers each, so has much of a product on its way while it waits for the
// kernel before (prelude/chain.h).
#include "copies.h"
#include "mma_batch.h"

// A batch in threadgroup memory, in vectors of 16 bytes: what each of a lane's loads takes, a vector a
// lane; then for each row its entries of scales; then of biases. Loads of odd chunks have neighbouring
// rows the other way round: what a simdgroup copies at once then lies in different banks.
template <typename T, int BITS, int GROUP, int K, int M, int UNROLL, int TILES>
struct MmaSlot {
  typedef MmaShape<T, BITS, GROUP, K, M, UNROLL> Shape;
  static constant constexpr int ENTRIES =
      BITS == 16 ? 0 : (Shape::BATCH > GROUP ? Shape::BATCH / GROUP : 1);
  static constant constexpr int ROW_WORDS = (ENTRIES + 1) / 2;
  static constant constexpr int WEIGHTS = UNROLL * TILES * 2 * 32;
  static constant constexpr int VECTORS = WEIGHTS + TILES * 8 * ROW_WORDS;
  // Whether a row's entries are one copy.
  static constant constexpr bool WHOLE =
      Shape::WHOLE && (ENTRIES == 2 || ENTRIES == 4 || ENTRIES == 8) &&
      K / GROUP % (ENTRIES == 0 ? 1 : ENTRIES) == 0;
};

inline uint queue_place(uint lane, int chunk) {
  return lane ^ uint(chunk % 2 * 4);
}

// What a simdgroup asks for: of the rows of its two runs, as find_rows has them. `slots`: its own.
template <typename T>
struct MmaQueue {
  threadgroup vec<uint, 4>* slots;
  const device uint* weight;
  const device T* scales;
  const device T* biases;
  uint first;
  uint second;
  Copies copies;
};

// The queue of a simdgroup; `queued` has QUEUE slots of SLOT vectors for each. The rest as find_rows.
template <typename T, int SLOT, int QUEUE>
inline MmaQueue<T> queue_of(
    threadgroup float4* queued,
    const device uint* weight,
    const device T* scales,
    const device T* biases,
    uint first,
    uint second,
    uint simdgroup) {
  MmaQueue<T> queue;
  queue.slots = reinterpret_cast<threadgroup vec<uint, 4>*>(queued) + simdgroup * (QUEUE * SLOT);
  queue.weight = weight;
  queue.scales = scales;
  queue.biases = biases;
  queue.first = first;
  queue.second = second;
  return queue;
}

// Row `line` of the eight of load i. Rows past the matrix read its last one.
template <typename T, int N>
inline uint queue_row(const thread MmaQueue<T>& queue, int i, uint line) {
  return min((i % 2 == 0 ? queue.first : queue.second) + i / 2 * 8 + line, uint(N - 1));
}

// Asks for a batch, or for nothing past the last: zeros that nobody waits for might come late. The lanes
// copy a row's bytes side by side.
template <typename T, int BITS, int GROUP, int K, int N, int M, int UNROLL, int TILES>
inline void ask_batch(thread MmaQueue<T>& queue, int slot, int batch, uint lane) {
  typedef MmaSlot<T, BITS, GROUP, K, M, UNROLL, TILES> Slot;
  typedef typename Slot::Shape Shape;
  constexpr int BATCHES = (K + Shape::BATCH - 1) / Shape::BATCH;
  constexpr int ROW_VECTORS = UNROLL * 4;
  constexpr int AT_ONCE = 32 / ROW_VECTORS;
  static_assert(32 % ROW_VECTORS == 0, "UNROLL must be 1, 2, 4 or 8");
  threadgroup uint* out =
      reinterpret_cast<threadgroup uint*>(queue.slots + slot * Slot::VECTORS);
  if (batch < BATCHES) {
    const int vector = int(lane) % ROW_VECTORS;
    const int chunk = vector / 4;
    const bool inside = Shape::WHOLE || batch * Shape::BATCH + vector * Shape::VALUES < K;
#pragma unroll
    for (int j = 0; j < TILES * 16 / AT_ONCE; j++) {
      const int i = j * AT_ONCE / 8;
      const uint line = j * AT_ONCE % 8 + lane / ROW_VECTORS;
      const uint row = queue_row<T, N>(queue, i, line);
      const uint place = queue_place(line * 4 + vector % 4, chunk);
      copy_ahead<16>(
          queue.copies, out + ((chunk * TILES * 2 + i) * 32 + int(place)) * 4,
          queue.weight + (row * (K * BITS / 32) + uint(batch * ROW_VECTORS + vector) * 4),
          inside);
    }
    if constexpr (BITS < 16) {
      const uint entry = uint(batch * Shape::BATCH) / GROUP;
      // The upper half of the lanes copies the biases.
      const device T* entries = lane < 16 ? queue.scales : queue.biases;
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const uint first =
            queue_row<T, N>(queue, i * 2 + int(lane) / 8 % 2, lane % 8) * (K / GROUP);
        threadgroup uint* out_row =
            out + Slot::WEIGHTS * 4 +
            ((int(lane) / 16 * TILES + i) * 16 + int(lane) % 16) * Slot::ROW_WORDS;
        if constexpr (Slot::WHOLE) {
          copy_ahead<Slot::ENTRIES * 2>(queue.copies, out_row, entries + (first + entry), true);
        } else {
          const device ushort* halves = reinterpret_cast<const device ushort*>(entries) + first;
#pragma unroll
          for (int w = 0; w < Slot::ROW_WORDS; w++) {
            const uint low = halves[min(entry + 2 * w, uint(K / GROUP - 1))];
            const uint high = halves[min(entry + 2 * w + 1, uint(K / GROUP - 1))];
            out_row[w] = low | high << 16;
          }
        }
      }
    }
  }
  end_copies(queue.copies);
}

// Bytes that a simdgroup asks for before it waits and stages x. More would stand before the loads of x,
// and of what it waits for, in the way to memory; so would any of the first simdgroup's, which waits
// for all.
constant constexpr int EARLY_BYTES = 4608;

// Asks for QUEUE batches, of which this simdgroup's are every KSPLIT-th: for the early ones, or LATE
// for the rest.
template <
    typename T, int BITS, int GROUP, int K, int N, int M, int UNROLL, int TILES, int KSPLIT,
    int QUEUE, bool LATE>
inline void ask_ahead(thread MmaQueue<T>& queue, uint simdgroup, uint lane) {
  constexpr int BYTES = 16 * MmaSlot<T, BITS, GROUP, K, M, UNROLL, TILES>::VECTORS;
#pragma unroll
  for (int i = 0; i < QUEUE; i++) {
    const bool early = (i == 0 || (i + 1) * BYTES <= EARLY_BYTES) && simdgroup != 0;
    if (early != LATE) {
      ask_batch<T, BITS, GROUP, K, N, M, UNROLL, TILES>(
          queue, i, i * KSPLIT + int(simdgroup) % KSPLIT, lane);
    }
  }
}

// A batch that was asked for, which then makes room for another.
template <typename T, int BITS, int GROUP, int K, int M, int UNROLL, int TILES, int QUEUE>
inline void take_batch(
    thread MmaQueue<T>& queue,
    int slot,
    int entry_word,
    uint lane,
    thread MmaBatch<MmaShape<T, BITS, GROUP, K, M, UNROLL>, UNROLL, TILES>& out) {
  typedef MmaSlot<T, BITS, GROUP, K, M, UNROLL, TILES> Slot;
  typedef typename Slot::Shape Shape;
  wait_for_copies<QUEUE - 1>(queue.copies);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const threadgroup vec<uint, 4>* from = queue.slots + slot * Slot::VECTORS;
#pragma unroll
  for (int i = 0; i < TILES * 2; i++) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      out.weights[u][i / 2][i % 2] =
          from[(u * TILES * 2 + i) * 32 + int(queue_place(lane, u))];
    }
  }
  if constexpr (BITS < 16) {
    const threadgroup uint* words =
        reinterpret_cast<const threadgroup uint*>(from + Slot::WEIGHTS) +
        int(lane) / 4 * Slot::ROW_WORDS + (Shape::GROUPS == 4 ? entry_word : 0);
#pragma unroll
    for (int i = 0; i < TILES * 2; i++) {
#pragma unroll
      for (int r = 0; r < Shape::RUNS; r++) {
#pragma unroll
        for (int w = 0; w < Shape::RUN_WORDS; w++) {
          const int at = i * 8 * Slot::ROW_WORDS + r * 2 + w;
          out.scales[i / 2][i % 2][r][w] = words[at];
          out.biases[i / 2][i % 2][r][w] = words[at + TILES * 16 * Slot::ROW_WORDS];
        }
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
