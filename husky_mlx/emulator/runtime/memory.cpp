// Where buffers and threadgroup arrays live, and the check of every access to them.
#include <string.h>
#include <sys/mman.h>

#include "history.h"

namespace emulator {

namespace {

// Every buffer has an address range of its own, in the middle of it, so that an address some way
// outside still tells which buffer was meant.
constexpr uint64_t kSlotBits = 30;
constexpr uint64_t kSlotBytes = 1ull << kSlotBits;
constexpr uint64_t kSlotCount = kMaxBuffers + kMaxArrays;
constexpr uint64_t kDataOffset = kSlotBytes / 2;
// Code and constant tables of a kernel lie this close to its entry.
constexpr int64_t kProgramBytes = 1 << 24;

Region regions[kSlotCount];
unsigned char* arena;

void* reserve(uint64_t size, int protection) {
  void* memory =
      mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

bool open_region(Region& region, uint64_t size, bool tracked) {
  region.data = arena + (&region - regions) * kSlotBytes + kDataOffset;
  region.size = size;
  region.history = nullptr;
  if (tracked)
    region.history = static_cast<ByteHistory*>(
        reserve((size + 1) * sizeof(ByteHistory), PROT_READ | PROT_WRITE));
  if (size > kSlotBytes / 4 || (tracked && region.history == nullptr) ||
      mprotect(region.data, size + 1, PROT_READ | PROT_WRITE) != 0) {
    record_failure("memory", "%s '%s' of %llu bytes does not fit", region.kind, region.name,
                   static_cast<unsigned long long>(size));
    return false;
  }
  return true;
}

int64_t code_offset(const void* code) {
  return static_cast<const char*>(code) - reinterpret_cast<const char*>(&emulator_thread);
}

[[noreturn]] void fail_bounds(const Region* region, int64_t offset, uint64_t size,
                              EmulatorAccess access, int64_t code) {
  const unsigned thread = run.current->attributes.thread_index_in_threadgroup;
  run.launch->failure.code[0] = code;
  if (region == nullptr) {
    record_failure("out of bounds",
                   "%s of %llu bytes outside every buffer by thread %u of threadgroup %u (at {0})",
                   verb(access), static_cast<unsigned long long>(size), thread,
                   run.group_number - 1);
  } else {
    record_failure("out of bounds",
                   "%s of %llu bytes at byte %lld of %s '%s', which has %llu, by thread %u of "
                   "threadgroup %u (at {0})",
                   verb(access), static_cast<unsigned long long>(size),
                   static_cast<long long>(offset), region->kind, region->name,
                   static_cast<unsigned long long>(region->size), thread, run.group_number - 1);
  }
  abandon();
}

bool is_own_memory(const void* address) {
  const char* here = static_cast<const char*>(address);
  const char* frame = static_cast<const char*>(__builtin_frame_address(0));
  const int64_t from_frame = here - frame;
  if (from_frame > -65536 && from_frame < 262144) return true;
  const int64_t from_program = code_offset(address);
  return from_program > -kProgramBytes && from_program < kProgramBytes;
}

}  // namespace

void check_access(const volatile void* pointer, uint64_t size, EmulatorAccess access, bool atomic,
                  const void* return_address) {
  const unsigned char* address =
      const_cast<const unsigned char*>(static_cast<const volatile unsigned char*>(pointer));
  const uint64_t in_arena = static_cast<uint64_t>(address - arena);
  const int64_t code = code_offset(return_address) - 1;  // inside the call, for its line
  if (in_arena >= kSlotCount * kSlotBytes) {
    if (!is_own_memory(address)) fail_bounds(nullptr, 0, size, access, code);
    return;
  }
  const Region& region = regions[in_arena >> kSlotBits];
  if (region.data == nullptr) fail_bounds(nullptr, 0, size, access, code);
  const int64_t offset = address - region.data;
  if (offset < 0 || offset + size > region.size) fail_bounds(&region, offset, size, access, code);
  if (access != EMULATOR_READ && !region.writable) {
    run.launch->failure.code[0] = code;
    record_failure("write to input",
                   "thread %u of threadgroup %u writes to %s '%s' (at {0}); mutable_input() is the "
                   "way to update an input in place",
                   run.current->attributes.thread_index_in_threadgroup, run.group_number - 1,
                   region.kind, region.name);
    abandon();
  }
  if (region.history != nullptr)
    track(region, static_cast<uint64_t>(offset), size, access, atomic, code);
}

namespace {

void report_unwritten(const Region& region) {
  uint64_t unwritten = 0, first = 0;
  for (uint64_t i = region.size; i-- > 0;)
    if (region.history[i].write.group == 0) {
      unwritten++;
      first = i;
    }
  if (unwritten > 0)
    record_failure("unwritten output",
                   "%llu of %llu bytes of output '%s' are never written, the first in element %llu",
                   static_cast<unsigned long long>(unwritten),
                   static_cast<unsigned long long>(region.size), region.name,
                   static_cast<unsigned long long>(first / region.element_size));
}

// threadgroups are numbered from 1
uint64_t released_bytes(const Launch& launch) {
  const uint64_t total =
      1ull * launch.threadgroups[0] * launch.threadgroups[1] * launch.threadgroups[2];
  return (total + 1) * sizeof(Handover);
}

}  // namespace

bool open_buffers() {
  arena = static_cast<unsigned char*>(reserve(kSlotCount * kSlotBytes, PROT_NONE));
  if (arena == nullptr) {
    record_failure("memory", "no address space for the buffers (%llu GiB are reserved, not used)",
                   static_cast<unsigned long long>(kSlotCount * kSlotBytes >> 30));
    return false;
  }
  const Launch& launch = *run.launch;
  run.released =
      static_cast<Handover*>(reserve(released_bytes(launch), PROT_READ | PROT_WRITE));
  if (run.released == nullptr) {
    record_failure("memory", "no address space for what threadgroups hand over");
    return false;
  }
  for (unsigned i = 0; i < launch.buffer_count; i++) {
    const Buffer& buffer = launch.buffers[i];
    const bool is_output = buffer.role == Role::output;
    Region& region = regions[i];
    region.kind = is_output ? "output" : buffer.role == Role::input ? "input" : "shape of input";
    region.name = buffer.name;
    region.in_threadgroup = false;
    region.element_size = buffer.element_size;
    region.writable = is_output;
    region.initialised = !is_output;
    const bool tracked =
        launch.check && (is_output || (buffer.role == Role::input && launch.track_inputs));
    if (!open_region(region, buffer.size, tracked)) return false;
    if (is_output)
      memset(region.data, static_cast<int>(launch.fill), buffer.size);
    else
      memcpy(region.data, buffer.data, buffer.size);
    run.pointers[i] = region.data;
  }
  return true;
}

void close_buffers() {
  const Launch& launch = *run.launch;
  for (unsigned i = 0; i < launch.buffer_count && !run.failed; i++) {
    Region& region = regions[i];
    Buffer& buffer = launch.buffers[i];
    if (!region.writable) continue;
    if (buffer.role == Role::output && region.history != nullptr) report_unwritten(region);
    memcpy(buffer.data, region.data, region.size);
    buffer.written = 1;
  }
  for (Region& region : regions) {
    if (region.history != nullptr)
      munmap(region.history, (region.size + 1) * sizeof(ByteHistory));
    region.data = nullptr;
    region.history = nullptr;
    region.group = 0;
  }
  if (run.released != nullptr) munmap(run.released, released_bytes(launch));
  run.released = nullptr;
  if (arena != nullptr) munmap(arena, kSlotCount * kSlotBytes);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void* emulator_threadgroup_array(unsigned index, const char* name, unsigned size,
                                 unsigned element_size) {
  Region& region = regions[kMaxBuffers + index];
  if (region.group == run.group_number) return region.data;
  region.kind = "threadgroup array";
  region.in_threadgroup = true;
  region.name = name;
  region.element_size = element_size;
  region.writable = true;
  region.initialised = false;
  if (region.data == nullptr && !open_region(region, size, run.launch->check)) abandon();
  region.group = run.group_number;
  memset(region.data, static_cast<int>(run.launch->fill), size);
  uint64_t total = 0;
  for (unsigned i = kMaxBuffers; i < kSlotCount; i++)
    if (regions[i].group == run.group_number) total += regions[i].size;
  if (total > run.launch->threadgroup_memory) {
    record_failure("threadgroup memory",
                   "%llu bytes of threadgroup memory with '%s'; the limit is %u",
                   static_cast<unsigned long long>(total), name,
                   run.launch->threadgroup_memory);
    abandon();
  }
  return region.data;
}

void emulator_make_mutable(const void* pointer) {
  const int64_t in_arena = static_cast<const unsigned char*>(pointer) - arena;
  const uint64_t slot = static_cast<uint64_t>(in_arena) >> kSlotBits;
  if (slot >= run.launch->buffer_count || run.launch->buffers[slot].role != Role::input) {
    record_failure("write to input", "mutable_input() was given a pointer into no input");
    abandon();
  }
  regions[slot].writable = true;
}

void emulator_atomic(const volatile void* pointer, EmulatorAccess access) {
  check_access(pointer, 4, access, true, __builtin_return_address(0));
}
unsigned emulator_load_word(const volatile void* pointer) {
  return *static_cast<const volatile unsigned*>(pointer);
}
void emulator_store_word(volatile void* pointer, unsigned value) {
  *static_cast<volatile unsigned*>(pointer) = value;
}
}
