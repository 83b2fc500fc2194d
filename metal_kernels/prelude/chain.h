// Kernels chained in one persistent launch: each is a phase, and a barrier of the whole grid stands
// between two. CUDA only: on Metal nobody promises that all threadgroups of a grid make progress.
//
// A block has THREADS threads that compute. A phase whose kernel takes fewer has several
// threadgroups side by side in a block, its *parts*, each with a barrier of its own. One more warp
// stands for the block at the barrier of the grid, so that the others never wait for memory to
// agree that they are done: they go on to the next phase, ask for its first weights, and wait only
// when they need what other blocks have left.
#pragma once

namespace metal {
namespace chain {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int ALL_THREADS = THREADS + 32;
constexpr int MOST_PARTS = 8;
constexpr int RECORD = 28;   // int32 a phase: function, grid, pointers, one input's shape, pieces
constexpr int POINTERS = 4;  // where they begin in it
constexpr int SHAPE = 12;
constexpr int AHEAD = 16;
constexpr int SEGMENTS = 4;
// Longer than any phase takes, a debugger's slow ones included: what waits so long waits for ever.
constexpr unsigned long long PATIENCE = 20000000000ull;  // ns

// The shared memory of a launch begins with a ring for each warp's weights on their way.
constexpr int RING_BYTES = WARPS * 4 * 1536;

HUSKY_FUNC uint4* shared_memory() {
  extern __shared__ uint4 husky_shared[];
  return husky_shared;
}

template <int BYTES> HUSKY_FUNC char* ring() {
  static_assert(BYTES * WARPS <= RING_BYTES, "a warp's ring is larger than its share");
  return reinterpret_cast<char*>(shared_memory()) + threadIdx.x / 32 * BYTES;
}

// Barriers of a block besides those of its parts, which are 1 to MOST_PARTS.
enum Barrier { WHOLE = MOST_PARTS + 1, DONE, READY };

template <int COUNT> HUSKY_FUNC constexpr int parts_of() {
  return THREADS / COUNT < MOST_PARTS ? THREADS / COUNT : MOST_PARTS;
}

HUSKY_FUNC void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}
HUSKY_FUNC void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// The barrier of the COUNT threads of a part.
template <int COUNT> HUSKY_FUNC void part_barrier() {
  barrier_sync(COUNT == THREADS ? int(WHOLE) : 1 + int(threadIdx.x) / COUNT, COUNT);
}

// Whether a warp still has to wait for the phase before.
HUSKY_FUNC bool& pending() {
  __shared__ bool of_warp[WARPS];
  return of_warp[threadIdx.x / 32];
}

HUSKY_FUNC void set_pending(bool value) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    pending() = value;
  }
  __syncwarp();
}

// All warps of a part alike: waits for the phase before, once; true for the call that did.
HUSKY_FUNC bool ready() {
  if (!pending()) {
    return false;
  }
  barrier_sync(READY, ALL_THREADS);
  set_pending(false);
  return true;
}

HUSKY_FUNC unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

HUSKY_FUNC void wait_for(const unsigned long long* counter, unsigned long long target) {
  unsigned long long arrived, started = 0;
  for (unsigned tries = 1;; tries++) {
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(arrived) : "l"(counter) : "memory");
    if (arrived >= target) {
      return;
    }
    if (tries % 4096 == 0) {
      const unsigned long long now = nanoseconds();
      started = started == 0 ? now : started;
      if (now - started > PATIENCE) {
        __trap();
      }
    }
  }
}

// Where a phase's arrays are: `pointers` from outside, or `scratch` in units of 256 bytes.
struct Arrays {
  const int* record;
  const void* const* pointers;
  char* scratch;
  char* arena;

  template <class T> HUSKY_FUNC T* at(int index) const {
    return array<T>(record[POINTERS + index]);
  }
  template <class T> HUSKY_FUNC T* array(int found) const {
    return found >= 0 ? reinterpret_cast<T*>(const_cast<void*>(pointers[found]))
                      : reinterpret_cast<T*>(scratch + size_t(~found) * 256);
  }
};

// Asks for what later phases will read, so that memory never waits while the grid does. A segment
// is an array, where to begin and how much, both in pieces of PIECE bytes.
constexpr int PIECE = 4096;

HUSKY_FUNC void fetch_ahead(const Arrays& arrays) {
#if __CUDA_ARCH__ >= 900
#pragma unroll 1
  for (int i = 0; i < SEGMENTS; i++) {
    const int* segment = arrays.record + AHEAD + 3 * i;
    const int count = segment[2];
    if (count == 0) {
      return;
    }
    const char* start = arrays.array<const char>(segment[0]) + size_t(segment[1]) * PIECE;
    const int first = blockIdx.x + threadIdx.x % 32 * gridDim.x;
    for (int at = first; at < count; at += 32 * gridDim.x) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                   : : "l"(start + size_t(at) * PIECE), "n"(PIECE) : "memory");
    }
  }
#endif
}

// The warp that stands for a block. The counter only ever grows, by one for each block and barrier,
// so that it stands at a multiple of the grid between two launches.
template <int PHASES>
HUSKY_FUNC void keep_barriers(Arrays arrays, unsigned long long* counter) {
  const bool leads = threadIdx.x % 32 == 0;
  unsigned long long target = 0;
#pragma unroll 1
  for (int number = 0; number + 1 < PHASES; number++) {
    fetch_ahead(arrays);
    arrays.record += RECORD;
    barrier_sync(DONE, ALL_THREADS);
    if (leads) {
      if (number == 0) {
        __threadfence();
        const unsigned long long before = atomicAdd(counter, 1ull);
        target = (before / gridDim.x + 1) * gridDim.x;
      } else {
        asm volatile("red.release.gpu.global.add.u64 [%0], 1;" : : "l"(counter) : "memory");
        target += gridDim.x;
      }
      wait_for(counter, target);
    }
    __syncwarp();
    barrier_arrive(READY, ALL_THREADS);
  }
}

}  // namespace chain
}  // namespace metal
