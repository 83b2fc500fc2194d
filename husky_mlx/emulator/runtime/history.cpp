// Races: two accesses to a byte, one of them a write, that no barrier orders. Threads of one
// threadgroup pass its barriers together, so counters say it all: no vector clocks are needed.
// Between threadgroups, which run one after another here, one order is known: all pass a barrier,
// then one thread a fence and an atomic update; in the later threadgroup one thread updates the
// same word, then passes a fence, and then all a barrier.
#include <stdio.h>

#include "history.h"

namespace emulator {

namespace {

Access this_access(bool threadgroup_memory, int64_t code, bool atomic) {
  const EmulatorThread& thread = run.current->attributes;
  const Simdgroup& simdgroup = run.simdgroups[thread.simdgroup_index_in_threadgroup];
  return {run.group_number,
          run.epoch[threadgroup_memory],
          simdgroup.epoch[threadgroup_memory],
          static_cast<int32_t>(code),
          static_cast<uint16_t>(thread.thread_index_in_threadgroup),
          kOneThread,
          atomic};
}

// Whether the threadgroup of `earlier` handed over before `now`, to a fence before a barrier that
// the current threadgroup has passed since.
bool handed_over(const Access& earlier, const Access& now) {
  const Handover& released = run.released[earlier.group];
  return released.word != nullptr && released.word == run.acquired.word &&
         earlier.epoch < released.epoch && now.epoch > run.acquired.epoch;
}

// Whether a barrier, a handover or being the same thread puts `earlier` before `now`.
bool ordered(const Access& earlier, const Access& now) {
  if (earlier.atomic && now.atomic) return true;
  if (earlier.sharing == kSeveralThreadgroups) return false;
  if (earlier.group != now.group) return handed_over(earlier, now);
  if (earlier.epoch != now.epoch) return true;
  if (earlier.sharing == kOneThreadgroup) return false;
  if (earlier.thread / kLanes != now.thread / kLanes) return false;
  if (earlier.simd_epoch != now.simd_epoch) return true;
  return earlier.sharing == kOneThread && earlier.thread == now.thread;
}

// Merges a read into the record so that the record is unordered with a later write whenever one of
// the reads that it stands for is.
void add_read(Access& record, Access now) {
  const bool same_group = record.group == now.group && record.sharing != kSeveralThreadgroups;
  if (record.group != 0 && !(same_group && record.epoch != now.epoch)) {
    const bool same_simdgroup = record.thread / kLanes == now.thread / kLanes;
    if (!same_group) {
      now.sharing = kSeveralThreadgroups;
    } else if (record.sharing == kOneThreadgroup || !same_simdgroup) {
      now.sharing = kOneThreadgroup;
    } else if (record.simd_epoch == now.simd_epoch &&
               (record.sharing == kOneSimdgroup || record.thread != now.thread)) {
      now.sharing = kOneSimdgroup;
    }
    now.atomic = now.atomic && record.atomic;
  }
  record = now;
}

[[noreturn]] void fail_race(const Region& region, uint64_t offset, const Access& earlier,
                            const char* earlier_verb, const Access& now, EmulatorAccess access) {
  run.launch->failure.code[0] = now.code;
  run.launch->failure.code[1] = earlier.code;
  record_failure("race",
                 "%s of element %llu of %s '%s' by thread %u of threadgroup %u (at {0}) and %s by "
                 "thread %u of threadgroup %u (at {1}): no barrier orders them",
                 verb(access), static_cast<unsigned long long>(offset / region.element_size),
                 region.kind, region.name, now.thread, now.group - 1, earlier_verb, earlier.thread,
                 earlier.group - 1);
  abandon();
}

// Noted rather than reported at once: the write that comes too late makes it a race.
void note_uninitialised(const Region& region, uint64_t offset, const Access& now) {
  if (run.note[0] != '\0') return;
  run.note_code = now.code;
  snprintf(run.note, sizeof run.note,
           "thread %u of threadgroup %u reads element %llu of %s '%s', which nothing has written",
           now.thread, now.group - 1,
           static_cast<unsigned long long>(offset / region.element_size), region.kind,
           region.name);
}

}  // namespace

const char* verb(EmulatorAccess access) {
  return access == EMULATOR_READ ? "read" : access == EMULATOR_WRITE ? "write" : "atomic update";
}

void track(const Region& region, uint64_t offset, uint64_t size, EmulatorAccess access, bool atomic,
           int64_t code) {
  const Access now = this_access(region.in_threadgroup, code, atomic);
  Thread& me = *run.current;
  if (access == EMULATOR_UPDATE && !region.in_threadgroup) {
    me.updated = region.data + offset;
    if (me.fenced) run.released[run.group_number] = {me.updated, me.fence_epoch};
  }
  for (uint64_t i = offset; i < offset + size; i++) {
    ByteHistory& byte = region.history[i];
    if (region.in_threadgroup && byte.write.group != now.group) byte.write.group = 0;
    if (region.in_threadgroup && byte.read.group != now.group) byte.read.group = 0;
    const bool written = byte.write.group != 0;
    if (access != EMULATOR_WRITE && !written && !region.initialised)
      note_uninitialised(region, i, now);
    if (written && !ordered(byte.write, now))
      fail_race(region, i, byte.write, "write", now, access);
    if (access == EMULATOR_READ) {
      add_read(byte.read, now);
    } else {
      if (byte.read.group != 0 && !ordered(byte.read, now))
        fail_race(region, i, byte.read, "read", now, access);
      byte.write = now;
    }
  }
}

}  // namespace emulator
