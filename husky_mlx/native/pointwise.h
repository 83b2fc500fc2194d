// What happens to each token between the matrix products.
#pragma once

#include <math.h>

#include <type_traits>

#include "numbers.h"

namespace husky {

// out = x / rms(x) * weight.
template <typename T>
inline void rms_norm(const float* x, const T* weight, int width, float eps, float* out) {
  Floats squares{};
  in_vectors(width, [&](int i, int count) {
    const Floats v = load_floats(x + i, count);
    squares += v * v;
  });
  const float scale = 1 / sqrtf(sum(squares) / width + eps);
  in_vectors(width, [&](int i, int count) {
    store_floats(out + i, load_floats(x + i, count) * scale * load_floats(weight + i, count),
                 count);
  });
}

// The same in place, or nothing.
template <typename T>
inline void rms_norm_in_place(float* x, const void* weight, int width, float eps) {
  if constexpr (!std::is_same_v<T, None>)
    rms_norm(x, static_cast<const T*>(weight), width, eps, x);
}

// Cosines and sines of one position, for the D / 2 pairs of a head.
inline void rotary_row(const float* frequencies, int pairs, int64_t position, float* cosines,
                       float* sines) {
  for (int i = 0; i < pairs; ++i) {
    const double angle = (double)position * frequencies[i];
    cosines[i] = (float)cos(angle);
    sines[i] = (float)sin(angle);
  }
}

// Rotates the pairs of a head in place and scales it. Pairs are (i, i + D / 2), or neighbours.
template <int D, bool TRADITIONAL>
inline void rotate(float* head, const float* cosines, const float* sines, float scale) {
  constexpr int STEP = TRADITIONAL ? 2 : 1, APART = TRADITIONAL ? 1 : D / 2;
  for (int i = 0; i < D / 2; ++i) {
    const float a = head[i * STEP], b = head[i * STEP + APART];
    head[i * STEP] = (a * cosines[i] - b * sines[i]) * scale;
    head[i * STEP + APART] = (b * cosines[i] + a * sines[i]) * scale;
  }
}

// silu(gate) * up.
inline Floats gated(Floats gate, Floats up) { return gate / (1.0f + exponential(-gate)) * up; }

}  // namespace husky
