// Runs the threads of one threadgroup after another, each thread on its own stack, switching only
// where threads wait for each other: simdgroup operations and barriers.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "stack_switch.h"
#include "state.h"

namespace emulator {

Run run;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
char* stacks;
uint64_t random_state;

unsigned random_below(unsigned limit) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<unsigned>((random_state >> 16) % limit);
}

unsigned greatest_common_divisor(unsigned a, unsigned b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}

Simdgroup& simdgroup_of(const Thread& thread) {
  return run.simdgroups[thread.attributes.simdgroup_index_in_threadgroup];
}

void make_runnable(Thread& thread) {
  thread.operation = nullptr;
  run.runnable[run.runnable_count++] = static_cast<unsigned>(&thread - run.threads);
}

void thread_main() {
  Thread& me = *run.current;
  emulator_thread(run.pointers, &me.attributes);
  me.returned = true;
  switch_stack(&me.stack_pointer, run.scheduler_stack);
  __builtin_unreachable();
}

void set_attributes(EmulatorThread& a, unsigned index) {
  const uint32_t* size = run.launch->threads;
  const unsigned place[3] = {index % size[0], index / size[0] % size[1],
                             index / (size[0] * size[1])};
  for (int d = 0; d < 3; d++) {
    a.thread_position_in_threadgroup[d] = place[d];
    a.threadgroup_position_in_grid[d] = run.group[d];
    a.thread_position_in_grid[d] = run.group[d] * size[d] + place[d];
    a.threadgroups_per_grid[d] = run.launch->threadgroups[d];
    a.threads_per_grid[d] = run.launch->threadgroups[d] * size[d];
    a.threads_per_threadgroup[d] = size[d];
  }
  a.thread_index_in_threadgroup = index;
  a.simdgroup_index_in_threadgroup = index / kLanes;
  a.thread_index_in_simdgroup = index % kLanes;
  a.simdgroups_per_threadgroup = run.thread_count / kLanes;
}

bool same_wait(const Thread& a, const Thread& b) {
  if (a.returned || b.returned) return a.returned && b.returned;
  return a.place.line == b.place.line && strcmp(a.place.file, b.place.file) == 0 &&
         strcmp(a.operation, b.operation) == 0;
}

// No thread can run and some have not returned: says who waits where.
void report_divergence() {
  char text[700] = "";
  size_t used = 0;
  bool at_barrier = false;
  for (unsigned first = 0, last; first < run.thread_count; first = last) {
    const Thread& thread = run.threads[first];
    for (last = first + 1; last < run.thread_count; last++)
      if (!same_wait(thread, run.threads[last])) break;
    if (used > 500) {
      snprintf(text + used, sizeof text - used, "; ...");
      break;
    }
    used += snprintf(text + used, sizeof text - used, "%sthreads %u-%u ", used ? "; " : "", first,
                     last - 1);
    if (thread.returned) {
      used += snprintf(text + used, sizeof text - used, "have returned");
    } else {
      at_barrier = at_barrier || strstr(thread.operation, "barrier") != nullptr;
      used += snprintf(text + used, sizeof text - used, "wait at %s (%s line %u)",
                       thread.operation, thread.place.file, thread.place.line);
    }
  }
  record_failure(at_barrier ? "divergent barrier" : "divergent simd operation",
                 "threads that have to meet are at different places in threadgroup "
                 "(%u, %u, %u): %s",
                 run.group[0], run.group[1], run.group[2], text);
}

void run_threadgroup(unsigned number) {
  Launch& launch = *run.launch;
  run.group[0] = number % launch.threadgroups[0];
  run.group[1] = number / launch.threadgroups[0] % launch.threadgroups[1];
  run.group[2] = number / (launch.threadgroups[0] * launch.threadgroups[1]);
  run.group_number = number + 1;
  run.runnable_count = run.at_barrier = run.epoch[0] = run.epoch[1] = 0;
  run.acquired = {};
  for (unsigned i = 0; i < run.thread_count / kLanes; i++) {
    Simdgroup& simdgroup = run.simdgroups[i];
    simdgroup.arrived = simdgroup.round = simdgroup.epoch[0] = simdgroup.epoch[1] = 0;
  }
  for (unsigned i = 0; i < run.thread_count; i++) {
    Thread& thread = run.threads[i];
    thread.returned = thread.fenced = false;
    thread.updated = nullptr;
    set_attributes(thread.attributes, i);
    // Different starting offsets keep 1024 stacks out of one cache set.
    char* top = stacks + (i + 1) * kStackBytes - i % 61 * 64;
    thread.stack_pointer = prepare_stack(top, thread_main);
    make_runnable(thread);
  }
  while (run.runnable_count > 0) {
    const unsigned chosen = random_below(run.runnable_count);
    run.current = &run.threads[run.runnable[chosen]];
    run.runnable[chosen] = run.runnable[--run.runnable_count];
    switch_stack(&run.scheduler_stack, run.current->stack_pointer);
    if (run.failed) return;
  }
  for (unsigned i = 0; i < run.thread_count; i++)
    if (!run.threads[i].returned) return report_divergence();
}

void report_note() {
  if (run.failed || run.note[0] == '\0') return;
  char text[sizeof run.note];
  memcpy(text, run.note, sizeof text);
  run.note[0] = '\0';
  run.launch->failure.code[0] = run.note_code;
  record_failure("uninitialised read", "%s (at {0})", text);
}

bool wait_together(const Thread* threads, unsigned count) {
  for (unsigned i = 1; i < count; i++)
    if (!same_wait(threads[0], threads[i])) return false;
  return true;
}

// `memory`: what the operation orders, as in emulator_simdgroup_barrier.
void wait_for_simdgroup(Thread& me, const char* operation, EmulatorPlace place, unsigned memory) {
  me.operation = operation;
  me.place = place;
  Simdgroup& simdgroup = simdgroup_of(me);
  Thread* lanes = &me - me.attributes.thread_index_in_simdgroup;
  if (++simdgroup.arrived == kLanes && wait_together(lanes, kLanes)) {
    simdgroup.arrived = 0;
    simdgroup.round++;
    for (int i = 0; i < 2; i++) simdgroup.epoch[i] += memory >> i & 1;
    for (unsigned i = 0; i < kLanes; i++) make_runnable(lanes[i]);
  }
  switch_stack(&me.stack_pointer, run.scheduler_stack);
}

}  // namespace

void record_failure(const char* kind, const char* format, ...) {
  if (run.failed) return;
  run.failed = true;
  Failure& failure = run.launch->failure;
  snprintf(failure.kind, sizeof failure.kind, "%s", kind);
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(failure.message, sizeof failure.message, format, arguments);
  va_end(arguments);
  if (run.note[0] != '\0' && strcmp(kind, "race") != 0) {
    failure.code[1] = run.note_code;
    snprintf(failure.message + length, sizeof failure.message - length,
             "; before that, %s (at {1})", run.note);
  }
}

void abandon() {
  void* ignored;
  switch_stack(&ignored, run.scheduler_stack);
  __builtin_unreachable();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

const void* emulator_exchange(const char* operation, const void* value, unsigned size,
                              EmulatorPlace place) {
  Thread& me = *run.current;
  Simdgroup& simdgroup = simdgroup_of(me);
  unsigned char* values = simdgroup.values[simdgroup.round & 1];
  memcpy(values + me.attributes.thread_index_in_simdgroup * size, value, size);
  wait_for_simdgroup(me, operation, place, 0);
  return values;
}

unsigned emulator_lane() { return run.current->attributes.thread_index_in_simdgroup; }

void emulator_simdgroup_barrier(unsigned memory, EmulatorPlace place) {
  wait_for_simdgroup(*run.current, "simdgroup_barrier", place, memory);
}

void emulator_threadgroup_barrier(unsigned memory, EmulatorPlace place) {
  Thread& me = *run.current;
  me.operation = "threadgroup_barrier";
  me.place = place;
  if (++run.at_barrier == run.thread_count && wait_together(run.threads, run.thread_count)) {
    run.at_barrier = 0;
    for (int i = 0; i < 2; i++) run.epoch[i] += memory >> i & 1;
    for (unsigned i = 0; i < run.thread_count; i++) make_runnable(run.threads[i]);
  }
  switch_stack(&me.stack_pointer, run.scheduler_stack);
}

void emulator_device_fence() {
  Thread& me = *run.current;
  me.fenced = true;
  me.fence_epoch = run.epoch[0];
  if (me.updated != nullptr) run.acquired = {me.updated, me.fence_epoch};
}

// Returns 0, or 1 with launch->failure filled in. Not for two threads at once.
int emulator_launch(Launch* launch) {
  run.launch = launch;
  run.failed = false;
  run.note[0] = '\0';
  run.thread_count = launch->threads[0] * launch->threads[1] * launch->threads[2];
  random_state = 0x9E3779B97F4A7C15ull * (launch->seed + 1ull);
  if (stacks == nullptr) {
    void* memory = mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      record_failure("memory", "no address space for the stacks of 1024 threads");
      return 1;
    }
    stacks = static_cast<char*>(memory);
  }
  if (open_buffers()) {
    const unsigned total =
        launch->threadgroups[0] * launch->threadgroups[1] * launch->threadgroups[2];
    unsigned stride = 1 + random_below(total);
    while (greatest_common_divisor(stride, total) != 1) stride++;
    uint64_t number = random_below(total);
    for (unsigned i = 0; i < total && !run.failed; i++) {
      run_threadgroup(static_cast<unsigned>(number));
      number = (number + stride) % total;
    }
    report_note();
  }
  close_buffers();
  return run.failed;
}
}
