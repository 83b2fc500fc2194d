// Kernels chained in one persistent launch: each is a phase, and a barrier of the whole grid stands
// between two. CUDA only: on Metal nobody promises that all threadgroups of a grid make progress.
//
// A block has THREADS threads. A phase whose kernel takes fewer has several threadgroups side by
// side in a block, its *parts*, each with a barrier of its own. The barrier of the grid is split:
// a block arrives at the end of a phase, and in the next one a part waits only when it needs what
// the others left, after it has asked for its first weights.
#pragma once

namespace metal {
namespace chain {

constexpr int THREADS = 512;
constexpr int MOST_PARTS = 8;
constexpr int RECORD = 28;   // int32 a phase: function, grid, pointers, one input's shape, pieces
constexpr int POINTERS = 4;  // where they begin in it
constexpr int SHAPE = 12;
constexpr int AHEAD = 16;
constexpr int SEGMENTS = 4;
// Longer than any phase takes, a debugger's slow ones included: what waits so long waits for ever.
constexpr unsigned long long PATIENCE = 20000000000ull;  // ns

struct State {
  unsigned long long target;
  int pending[MOST_PARTS];
};

HUSKY_FUNC State& state() {
  __shared__ State shared;
  return shared;
}

template <int COUNT> HUSKY_FUNC constexpr int parts_of() {
  return THREADS / COUNT < MOST_PARTS ? THREADS / COUNT : MOST_PARTS;
}

// The barrier of the COUNT threads of a part.
template <int COUNT> HUSKY_FUNC void part_barrier() {
  if constexpr (COUNT == THREADS) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, %1;" : : "r"(1 + threadIdx.x / COUNT), "n"(COUNT) : "memory");
  }
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

HUSKY_FUNC unsigned long long* grid_counter(unsigned long long* set = nullptr) {
  __shared__ unsigned long long* counter;
  if (set != nullptr) {
    counter = set;
  }
  return counter;
}

// All threads of a part: waits for the end of the phase before, once; true for the call that did.
template <int COUNT> HUSKY_FUNC bool ready() {
  const int part = threadIdx.x / COUNT;
  if (state().pending[part] == 0) {
    return false;
  }
  const bool leads = threadIdx.x % COUNT == 0;
  if (leads) {
    wait_for(grid_counter(), state().target);
  }
  part_barrier<COUNT>();
  if (leads) {
    state().pending[part] = 0;
  }
  return true;
}

// All threads of a block: it has done its share of a phase. The counter only ever grows, by one
// for each block and barrier, so that it stands at a multiple of the grid between two launches.
HUSKY_FUNC void arrive(bool first) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned long long* counter = grid_counter();
    if (first) {
      __threadfence();
      const unsigned long long before = atomicAdd(counter, 1ull);
      state().target = (before / gridDim.x + 1) * gridDim.x;
    } else {
      asm volatile("red.release.gpu.global.add.u64 [%0], 1;" : : "l"(counter) : "memory");
      state().target += gridDim.x;
    }
  }
  if (threadIdx.x < MOST_PARTS) {
    state().pending[threadIdx.x] = 1;
  }
  __syncthreads();
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
    for (int at = blockIdx.x + threadIdx.x * gridDim.x; at < count; at += THREADS * gridDim.x) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                   : : "l"(start + size_t(at) * PIECE), "n"(PIECE) : "memory");
    }
  }
#endif
}

}  // namespace chain
}  // namespace metal
