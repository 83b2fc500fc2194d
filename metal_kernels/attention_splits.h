// The splits of a context on CUDA, merged by the threadgroup that comes last for its query vectors.
// Metal orders no threadgroups within a launch: there attention_combine does it.
#include "attention.h"

// Counts a threadgroup that is done; true, in all its threads, for the last of `splits`, which may
// then read what the others wrote before. The ticket is zero before the first and after the last.
inline bool comes_last(
    device atomic_uint* ticket, int splits, uint thread_index, threadgroup uint* before) {
  threadgroup_barrier(mem_flags::mem_device);
  if (thread_index == 0) {
    atomic_thread_fence(mem_flags::mem_device, memory_order_acq_rel);
    before[0] = atomic_fetch_add_explicit(ticket, 1u, memory_order_relaxed);
    if (before[0] == uint(splits - 1)) {
      atomic_store_explicit(ticket, 0u, memory_order_relaxed);
      atomic_thread_fence(mem_flags::mem_device, memory_order_acq_rel);
    }
  }
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  return before[0] == uint(splits - 1);
}

// Consecutive elements that a thread merges, so that one round of the threads takes all VALUES.
template <int VALUES, int THREADS>
inline constexpr int merged_together() {
  return VALUES <= THREADS ? 1 : VALUES <= 2 * THREADS ? 2 : 4;
}

// N attended elements of one query vector. `weighted`: the first of them in split 0, D floats on in
// the next; `states`: a maximum and a sum for each split.
template <int D, int N>
inline void merge_splits(
    const device float* weighted, const device float2* states, int splits, thread float* attended) {
  // Splits that are asked for before one is looked at.
  constexpr int AT_ONCE = 16;
  typedef typename WordVector<N>::type Words;
  float maximum = EMPTY_MAXIMUM;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i++) {
    attended[i] = 0.0f;
  }
#pragma unroll 1
  for (int first = 0; first < splits; first += AT_ONCE) {
    float2 found[AT_ONCE];
    Words words[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      found[u] = float2(MASKED_SCORE, 0.0f);
      words[u] = Words(0u);
      if (first + u < splits) {
        found[u] = states[first + u];
        words[u] = *reinterpret_cast<const device Words*>(weighted + size_t(first + u) * D);
      }
    }
    float raised = maximum;
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      raised = max(raised, found[u].x);
    }
    const float rescale = exp2_flushed(maximum - raised);
    maximum = raised;
    sum *= rescale;
#pragma unroll
    for (int i = 0; i < N; i++) {
      attended[i] *= rescale;
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const float weight = exp2_flushed(found[u].x - raised);
      float values[N];
      widen<float>(words[u], values);
      sum += found[u].y * weight;
#pragma unroll
      for (int i = 0; i < N; i++) {
        attended[i] += values[i] * weight;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    attended[i] /= sum;
  }
}
