// inputs: gate_up
// outputs: activated
// template: T N
// activated (L, N) = silu(gate) * up of gate_up (L, 2 N), which has gate's values first in each row.
// N is a multiple of 4; a thread takes four.
typedef vec<T, 4> Four;
const size_t at = thread_position_in_grid.x;
if (at < size_t(gate_up_shape[0]) * (N / 4)) {
  const size_t row = at / (N / 4);
  const device Four* gates = reinterpret_cast<const device Four*>(gate_up) + row * (N / 4);
  const Four gate = gates[at];
  const Four up = gates[at + N / 4];
  Four y;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float g = float(gate[i]);
    y[i] = T(g / (1.0f + metal::precise::exp(-g)) * float(up[i]));
  }
  reinterpret_cast<device Four*>(activated)[at] = y;
}
