// What a compiled kernel and the runtime say to each other. Plain C, no library headers: a kernel
// must see no name that the Metal Shading Language does not have.
#pragma once

extern "C" {

// The values of Metal's thread attributes for one thread.
struct EmulatorThread {
  unsigned thread_position_in_grid[3];
  unsigned thread_position_in_threadgroup[3];
  unsigned threadgroup_position_in_grid[3];
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
  unsigned threads_per_threadgroup[3];
  unsigned thread_index_in_threadgroup;
  unsigned simdgroup_index_in_threadgroup;
  unsigned thread_index_in_simdgroup;
  unsigned simdgroups_per_threadgroup;
};

// A place in the kernel's text: file is "body" or "header".
struct EmulatorPlace {
  const char* file;
  unsigned line;
};

// One thread's run through the body; defined by the generated text.
void emulator_thread(void* const* buffers, const EmulatorThread* thread);

// Hands in `size` bytes (64 at most) and returns the values of all 32 lanes, `size` bytes apart,
// valid until this lane's next exchange. Waits until every lane has come to the same operation.
const void* emulator_exchange(const char* operation, const void* value, unsigned size,
                              EmulatorPlace place);
unsigned emulator_lane();

// `memory`: bit 0 device memory, bit 1 threadgroup memory: what the barrier orders.
void emulator_simdgroup_barrier(unsigned memory, EmulatorPlace place);
void emulator_threadgroup_barrier(unsigned memory, EmulatorPlace place);
// Orders device memory between threadgroups, with atomic updates of one word: runtime/state.h.
void emulator_device_fence();

void* emulator_threadgroup_array(unsigned index, const char* name, unsigned size,
                                 unsigned element_size);
void emulator_make_mutable(const void* pointer);

// An atomic access to 4 bytes is recorded first, then done through the two functions below, which
// are not recorded.
enum EmulatorAccess { EMULATOR_READ, EMULATOR_WRITE, EMULATOR_UPDATE };
void emulator_atomic(const volatile void* pointer, EmulatorAccess access);
unsigned emulator_load_word(const volatile void* pointer);
void emulator_store_word(volatile void* pointer, unsigned value);
}
