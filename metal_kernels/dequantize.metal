// inputs: constants
// outputs: weight
// template: T BITS GROUP N K UNROLL
#include "dequantize_share.h"
// weight (N, K) in T: a matrix dequantized. Grid: threads of UNROLL times eight values.
dequantize_share<T, BITS, GROUP, N, K, UNROLL>(
    constants, weight, threadgroup_position_in_grid.x, thread_position_in_threadgroup.x,
    threads_per_threadgroup.x);
