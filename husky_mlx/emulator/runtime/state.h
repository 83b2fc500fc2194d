// The state of one launch, shared by the scheduler and the access checks.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../include/runtime.h"

namespace emulator {

constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxBuffers = 64;
constexpr unsigned kMaxArrays = 64;

// The order of husky_mlx/emulator/launch.py's fields; both sides change together.
enum class Role : uint32_t { input, output, shape };
struct Buffer {
  const char* name;
  void* data;
  uint64_t size;
  uint32_t element_size;
  Role role;
  uint32_t written;  // out: an input that the body updated in place
};
struct Failure {
  char kind[32];
  char message[1536];  // {0} and {1} stand for the lines of the two code addresses
  int64_t code[2];     // relative to emulator_thread
};
struct Launch {
  uint32_t threadgroups[3];
  uint32_t threads[3];  // per threadgroup
  uint32_t seed;
  uint32_t fill;
  uint32_t check;
  uint32_t track_inputs;
  uint32_t threadgroup_memory;  // bytes
  uint32_t buffer_count;
  Buffer* buffers;
  Failure failure;
};

// What orders threadgroups: accesses to device memory before the barrier that begins `epoch` of one
// precede those of another after it, where `word` is the same. word null: nothing yet.
struct Handover {
  const void* word;
  uint32_t epoch;
};

struct Thread {
  void* stack_pointer;
  EmulatorThread attributes;
  const char* operation;  // what it waits at; null while it can run
  EmulatorPlace place;
  bool returned;
  bool fenced;
  uint32_t fence_epoch;  // the device memory's at the latest fence
  const void* updated;   // the word in device memory of the latest atomic update; null: none
};

struct Simdgroup {
  unsigned arrived;
  unsigned round;     // counts exchanges; its parity picks the half of `values`
  unsigned epoch[2];  // counts barriers that order device [0] or threadgroup [1] memory
  alignas(16) unsigned char values[2][kLanes * 64];
};

struct Run {
  Launch* launch;
  bool failed;
  Thread threads[kMaxThreads];
  Simdgroup simdgroups[kMaxThreads / kLanes];
  unsigned thread_count;
  unsigned runnable[kMaxThreads];
  unsigned runnable_count;
  unsigned at_barrier;
  unsigned epoch[2];
  unsigned group[3];
  unsigned group_number;  // from 1
  Thread* current;
  Handover* released;  // by group_number: what a fence and then an atomic update gave away
  Handover acquired;   // this threadgroup's: what an atomic update and then a fence took over
  char note[200];  // the first read of unwritten memory, or empty
  int64_t note_code;
  void* scheduler_stack;
  void* pointers[kMaxBuffers];  // what emulator_thread gets
};
extern Run run;

// Records the first failure of the launch, with the note about unwritten memory if there is one.
__attribute__((format(printf, 2, 3)))
void record_failure(const char* kind, const char* format, ...);
// Leaves the current thread for good; the scheduler ends the launch.
[[noreturn]] void abandon();

bool open_buffers();
void close_buffers();
// Checks an access of the current thread: bounds, writes to inputs, and what history.h checks.
void check_access(const volatile void* pointer, uint64_t size, EmulatorAccess access, bool atomic,
                  const void* return_address);

}  // namespace emulator
