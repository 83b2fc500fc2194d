// The memory of a model's forward: one zeroed allocation, cut into pieces by constant sizes.
#pragma once

#include "attention.h"
#include "matmul.h"

namespace husky {

constexpr int larger_of(int a, int b) { return a > b ? a : b; }

// Pieces of one allocation.
struct Carver {
  char* base;
  int64_t used = 0;

  char* take(int64_t bytes) {
    char* piece = base + used;
    used += (bytes + 63) / 64 * 64;
    return piece;
  }
  float* floats(int64_t count) { return reinterpret_cast<float*>(take(count * sizeof(float))); }
  template <int WIDTH>
  Activations<WIDTH> activations(int tokens) {
    return Activations<WIDTH>(take(Activations<WIDTH>::bytes(tokens)), tokens);
  }
};

template <typename Shape>
struct Arena {
  static constexpr int HIDDEN = Shape::HIDDEN, INTERMEDIATE = Shape::INTERMEDIATE;
  static constexpr int D = Shape::HEAD_DIM, QUERY_SIZE = Shape::HEADS * D, BLOCK = Shape::BLOCK;
  static constexpr int UNIT = 32;  // rows of a matrix that a thread takes at a time
  static constexpr int MOST_SPANS = 32;
  static constexpr int OUT_STRIDE = larger_of(round_up(D, LANES), 2 * UNIT);
  static constexpr int WIDEST = larger_of(larger_of(HIDDEN, QUERY_SIZE), INTERMEDIATE);
  using Attend = Attention<D, Shape::HEADS / Shape::KV_HEADS, typename Shape::KV>;

  // What all threads see.
  struct Shared {
    float* x;         // (BLOCK, HIDDEN), the residual stream
    float* queries;   // (BLOCK, QUERY_SIZE)
    float* partials;  // (HEADS, MOST_SPANS, Attend::PARTIAL)
    float* cosines;   // (BLOCK, D / 2)
    float* sines;
    Activations<HIDDEN> normed;
    Activations<QUERY_SIZE> attended;
    Activations<INTERMEDIATE> gated;

    explicit Shared(Carver& carver)
        : x(carver.floats((int64_t)BLOCK * HIDDEN)),
          queries(carver.floats((int64_t)BLOCK * QUERY_SIZE)),
          partials(carver.floats((int64_t)Shape::HEADS * MOST_SPANS * Attend::PARTIAL)),
          cosines(carver.floats((int64_t)BLOCK * (D / 2))),
          sines(carver.floats((int64_t)BLOCK * (D / 2))),
          normed(carver.activations<HIDDEN>(BLOCK)),
          attended(carver.activations<QUERY_SIZE>(BLOCK)),
          gated(carver.activations<INTERMEDIATE>(BLOCK)) {}
  };

  // A thread's own: a single token's activations too, which each thread makes for itself because
  // that is cheaper than waiting for another to.
  struct Private {
    char* unpacked;
    float* out;  // (BLOCK, OUT_STRIDE)
    float* attention;
    Activations<HIDDEN> normed;
    Activations<QUERY_SIZE> attended;

    explicit Private(Carver& carver)
        : unpacked(carver.take(unpacked_bytes(WIDEST))),
          out(carver.floats((int64_t)BLOCK * OUT_STRIDE)),
          attention(carver.floats(Attend::scratch_floats())),
          normed(carver.activations<HIDDEN>(1)),
          attended(carver.activations<QUERY_SIZE>(1)) {}
  };

  static int64_t bytes(int threads) {
    Carver carver{reinterpret_cast<char*>(64)};  // nobody looks there
    const Shared shared(carver);
    own(carver, threads);
    return carver.used;
  }

  // The memory of thread number `thread`, behind that of the threads before.
  static Private own(Carver& carver, int thread) {
    for (int i = 0; i < thread; ++i) const Private before(carver);
    return Private(carver);
  }
};

}  // namespace husky
