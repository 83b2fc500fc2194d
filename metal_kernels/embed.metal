// inputs: tokens before place constants
// outputs: embedded following
// template: T N D BITS GROUP LENGTH
// cuda outputs: tickets
// cuda template: TICKETS
#include "constants.h"
// tokens uint32 (M,), rows of the table (N, D) in constants.h.
// before: not read; the launch waits for whoever writes it, which orders one step after another.
// following: place, int32 (16,), moved on by LENGTH tokens: slot, live rows and positions.
// tickets: uint32 (TICKETS,), zeros for attention_decode.
// embedded (M, D) in T. A thread takes one word of one row.
constexpr Parts AT = parts<T, BITS, GROUP, N, D, false>();
constexpr int VALUES = BITS == 16 ? 1 : 32 / BITS;
const int at = int(thread_position_in_grid.x);
const int row = int(thread_position_in_grid.y);
if (row == 0 && at < 16) {
  const bool moves = at < 2 || (at >= 4 && at < 8);
  following[at] = place[at] + (moves ? LENGTH : 0);
}
#ifdef MSL_CUDA
if (row == 0) {
  for (int ticket = at; ticket < TICKETS; ticket += int(threads_per_grid.x)) {
    tickets[ticket] = 0;
  }
}
#endif
if (at < D / VALUES) {
  const size_t source = size_t(tokens[row]) * (D / VALUES) + at;
  if (BITS == 16) {
    embedded[size_t(row) * D + at] = T(float(part<T>(constants, 0)[source]));
  } else {
    const uint word = constants[source];
    const size_t group = size_t(tokens[row]) * (D / GROUP) + at * VALUES / GROUP;
    const float scale = float(part<T>(constants, AT.scales)[group]);
    const float bias = float(part<T>(constants, AT.biases)[group]);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      const uint code = (word >> (i * BITS % 32)) & ((1u << (BITS % 32)) - 1u);
      embedded[size_t(row) * D + at * VALUES + i] = T(float(code) * scale + bias);
    }
  }
}
