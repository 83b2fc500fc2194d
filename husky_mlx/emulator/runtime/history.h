// What is remembered of each byte that a kernel may write: enough to tell whether two accesses are
// ordered by a barrier.
#pragma once
#include "state.h"

namespace emulator {

enum Sharing : uint8_t { kOneThread, kOneSimdgroup, kOneThreadgroup, kSeveralThreadgroups };

// The latest access of its sort to a byte. group 0: none.
struct Access {
  uint32_t group;
  uint32_t epoch;
  uint32_t simd_epoch;
  int32_t code;
  uint16_t thread;
  Sharing sharing;  // reads: whose reads this record stands for
  bool atomic;
};
struct ByteHistory {
  Access write;
  Access read;
};

// A buffer or a threadgroup array.
struct Region {
  const char* kind;
  const char* name;
  unsigned char* data;  // null: slot not in use
  uint64_t size;
  uint32_t element_size;
  bool in_threadgroup;
  bool writable;
  bool initialised;
  ByteHistory* history;  // null: not tracked
  uint32_t group;        // threadgroup arrays: the group that it was last filled for
};

const char* verb(EmulatorAccess access);

// Enters an access of the current thread into the history of a region; fails the launch when it
// races with an earlier one or reads what nothing has written.
void track(const Region& region, uint64_t offset, uint64_t size, EmulatorAccess access, bool atomic,
           int64_t code);

}  // namespace emulator
