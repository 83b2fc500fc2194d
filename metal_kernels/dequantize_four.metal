// inputs: constants_0 constants_1 constants_2 constants_3
// outputs: weight_0 weight_1 weight_2 weight_3
// template: T BITS GROUP N_0 K_0 N_1 K_1 N_2 K_2 N_3 K_3 UNROLL THREADS
#include "dequantize_share.h"
// Four matrices of one format dequantized in one launch, weight_0 (N_0, K_0) and so on: for prompts
// that the GPU is done with sooner than the host with their launches. Grid: threadgroups of THREADS
// for each matrix, one matrix after the other.
constexpr uint SHARE = THREADS * UNROLL * 8;
constexpr uint END_0 = (size_t(N_0) * K_0 + SHARE - 1) / SHARE;
constexpr uint END_1 = END_0 + (size_t(N_1) * K_1 + SHARE - 1) / SHARE;
constexpr uint END_2 = END_1 + (size_t(N_2) * K_2 + SHARE - 1) / SHARE;
const uint tile = threadgroup_position_in_grid.x;
const uint thread_index = thread_position_in_threadgroup.x;
if (tile < END_0) {
  dequantize_share<T, BITS, GROUP, N_0, K_0, UNROLL>(
      constants_0, weight_0, tile, thread_index, THREADS);
} else if (tile < END_1) {
  dequantize_share<T, BITS, GROUP, N_1, K_1, UNROLL>(
      constants_1, weight_1, tile - END_0, thread_index, THREADS);
} else if (tile < END_2) {
  dequantize_share<T, BITS, GROUP, N_2, K_2, UNROLL>(
      constants_2, weight_2, tile - END_1, thread_index, THREADS);
} else {
  dequantize_share<T, BITS, GROUP, N_3, K_3, UNROLL>(
      constants_3, weight_3, tile - END_2, thread_index, THREADS);
}
