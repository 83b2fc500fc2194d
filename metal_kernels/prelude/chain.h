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
constexpr int RECORD = 24;   // int32 a phase: function, grid, pointers, shapes of inputs
constexpr int POINTERS = 4;  // where they begin in it
constexpr int SHAPES = 16;
constexpr int SHAPE_SIZE = 4;
// Longer than any phase takes, a debugger's slow ones included: what waits so long waits for ever.
constexpr unsigned long long PATIENCE = 20000000000ull;  // ns

// What the barrier of the grid needs in shared memory; a thread touches its own entries only, so that
// threads need not wait for each other to use them.
struct State {
  unsigned long long* counter;
  unsigned long long target[THREADS];
  bool waits[THREADS];  // for the phase before
};

HUSKY_FUNC State& state() {
  __shared__ State shared;
  return shared;
}

template <int COUNT> HUSKY_FUNC constexpr int parts_of() {
  return THREADS / COUNT < MOST_PARTS ? THREADS / COUNT : MOST_PARTS;
}

// threadIdx.x, read anew: what a phase computes of it does not stay in registers over the others.
HUSKY_FUNC uint thread_of_block() {
  uint thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
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

HUSKY_FUNC unsigned long long arrived_at(const unsigned long long* counter) {
  unsigned long long arrived;
  asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(arrived) : "l"(counter) : "memory");
  return arrived;
}

HUSKY_FUNC void wait_for(const unsigned long long* counter, unsigned long long target) {
  unsigned long long started = 0;
  for (unsigned tries = 1; arrived_at(counter) < target; tries++) {
    if (tries % 4096 == 0) {
      const unsigned long long now = nanoseconds();
      started = started == 0 ? now : started;
      if (now - started > PATIENCE) {
        __trap();
      }
    }
  }
}

// All threads of a part: waits for the end of the phase before, once; true for the call that did.
template <int COUNT> HUSKY_FUNC bool ready() {
  const uint thread = thread_of_block();
  if (!state().waits[thread]) {
    return false;
  }
  if (thread % COUNT == 0) {
    wait_for(state().counter, state().target[thread]);
  }
  part_barrier<COUNT>();
  state().waits[thread] = false;
  return true;
}

// All threads, before the first phase. The counter only ever grows, by one for each block and
// barrier, so that it stands at a multiple of the grid between two launches, and a block that has not
// arrived yet reads less than a grid beyond that.
HUSKY_FUNC void begin(unsigned long long* counter) {
  if (threadIdx.x == 0) {
    state().counter = counter;
  }
  state().target[threadIdx.x] = arrived_at(counter) / gridDim.x * gridDim.x;
  state().waits[threadIdx.x] = false;
}

// All threads of a block: it has done its share of a phase.
HUSKY_FUNC void arrive() {
  __syncthreads();
  const uint thread = thread_of_block();
  if (thread == 0) {
    asm volatile("red.release.gpu.global.add.u64 [%0], 1;" : : "l"(state().counter) : "memory");
  }
  state().target[thread] += gridDim.x;
  state().waits[thread] = true;
  // What the next phase asks for would stand before the arrival in the way to memory.
  __syncthreads();
}

// Where a phase's arrays are: `pointers` from outside, or `scratch` in units of 256 bytes.
struct Arrays {
  const int* record;
  const void* const* pointers;
  char* scratch;
  char* arena;

  template <class T> HUSKY_FUNC T* at(int index) const {
    const int found = record[POINTERS + index];
    T* pointer = found >= 0 ? reinterpret_cast<T*>(const_cast<void*>(pointers[found]))
                            : reinterpret_cast<T*>(scratch + size_t(~found) * 256);
    __builtin_assume(__isGlobal(pointer));
    return pointer;
  }
  HUSKY_FUNC const int* shape(int index) const {
    return record + SHAPES + index * SHAPE_SIZE;
  }
};

}  // namespace chain
}  // namespace metal
