// The CUDA instructions that mma_queue.h is written in: copies from device to threadgroup memory that
// a lane does not wait for.

// What a lane has asked for; the hardware keeps it.
struct Copies {};

// BYTES (4, 8 or 16), which both addresses are multiples of; zeros unless `live`, and then nothing is
// read. `out` is another lane's to read after wait_for_copies and a barrier.
template <int BYTES>
inline void copy_ahead(
    thread Copies&, threadgroup uint* out, const device void* from, bool live) {
  const uint address = threadgroup_address(out);
  if constexpr (BYTES == 16) {
    // 16 bytes go past the first cache.
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                 : : "r"(address), "l"(from), "r"(live ? 16 : 0) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 : : "r"(address), "l"(from), "n"(BYTES), "r"(live ? BYTES : 0) : "memory");
  }
}

// Ends a set of this lane's copies, perhaps of none.
inline void end_copies(thread Copies&) {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for this lane's copies but those of the last LEFT sets.
template <int LEFT>
inline void wait_for_copies(thread Copies&) {
  asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory");
}
