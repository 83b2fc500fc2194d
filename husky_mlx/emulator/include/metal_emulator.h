// The Metal Shading Language for kernels that run on the CPU, one fiber a thread.
#pragma once
#include "runtime.h"

// nodebug: an access inside one of these functions carries the line of the body that called it.
#define HUSKY_FUNC inline __attribute__((always_inline, nodebug))
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))

namespace metal {

struct Float16Format {
  static constexpr bool implicit_from_float = true;
  static HUSKY_FUNC constexpr unsigned short encode(float value) {
    return __builtin_bit_cast(unsigned short, static_cast<_Float16>(value));
  }
  static HUSKY_FUNC constexpr float decode(unsigned short bits) {
    return static_cast<float>(__builtin_bit_cast(_Float16, bits));
  }
};

struct Bfloat16Format {
  static constexpr bool implicit_from_float = false;
  static HUSKY_FUNC constexpr unsigned short encode(float value) {
    const unsigned bits = __builtin_bit_cast(unsigned, value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // to nearest, ties to even
    return static_cast<unsigned short>((is_nan ? bits | 0x400000u : rounded) >> 16);
  }
  static HUSKY_FUNC constexpr float decode(unsigned short bits) {
    return __builtin_bit_cast(float, static_cast<unsigned>(bits) << 16);
  }
};

}  // namespace metal

#include "prelude/types.h"
#include "prelude/vectors.h"

#define HUSKY_LIBM(name) __builtin_##name##f
#define HUSKY_FAST(name) __builtin_##name##f
#define HUSKY_RSQRT(x) (1.0f / __builtin_sqrtf(x))
#include "prelude/scalar_math.h"

namespace metal {

constexpr half operator""h(long double value) { return half(static_cast<float>(value)); }
constexpr half operator""h(unsigned long long value) { return half(static_cast<float>(value)); }

HUSKY_FUNC uint popcount(uint x) { return __builtin_popcount(x); }
HUSKY_FUNC uint clz(uint x) { return x == 0 ? 32 : __builtin_clz(x); }
HUSKY_FUNC uint ctz(uint x) { return x == 0 ? 32 : __builtin_ctz(x); }

}  // namespace metal

#include "metal_memory.h"
#include "metal_simd.h"

#include "prelude/matrix.h"

namespace emulator {

HUSKY_FUNC metal::uint3 uint3(const unsigned* v) { return metal::uint3(v[0], v[1], v[2]); }

}  // namespace emulator

using namespace metal;
