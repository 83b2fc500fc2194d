// The Metal Shading Language for CUDA: what a kernel body means when nvcc or NVRTC compiles it.
// husky_mlx/cuda_source.py puts the body inside namespace metal, where these names hide CUDA's own
// (half, float4, max ...), and turns the address space words into CUDA's.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define HUSKY_CUDA 1
#define HUSKY_FUNC __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
#endif

namespace metal {

struct Float16Format {
  static constexpr bool implicit_from_float = true;
  static HUSKY_FUNC unsigned short encode(float value) {
    return __half_as_ushort(__float2half_rn(value));
  }
  static HUSKY_FUNC float decode(unsigned short bits) {
    return __half2float(__ushort_as_half(bits));
  }
};

struct Bfloat16Format {
  static constexpr bool implicit_from_float = false;
  static HUSKY_FUNC unsigned short encode(float value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
  static HUSKY_FUNC float decode(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
  }
};

}  // namespace metal

#include "prelude/types.h"
#include "prelude/vectors.h"

#define HUSKY_LIBM(name) ::name##f
#define HUSKY_FAST(name) ::__##name##f
#define HUSKY_RSQRT(x) ::rsqrtf(x)
#include "prelude/scalar_math.h"

namespace metal {

#pragma nv_diagnostic push
#pragma nv_diag_suppress 2506  // the suffix h is Metal's
HUSKY_FUNC half operator""h(long double value) { return half(static_cast<float>(value)); }
HUSKY_FUNC half operator""h(unsigned long long value) { return half(static_cast<float>(value)); }
#pragma nv_diagnostic pop

HUSKY_FUNC uint popcount(uint x) { return __popc(x); }
HUSKY_FUNC uint clz(uint x) { return __clz(x); }
HUSKY_FUNC uint ctz(uint x) { return x == 0 ? 32 : __ffs(x) - 1; }

}  // namespace metal

#include "prelude/cuda_memory.h"
#include "prelude/cuda_simd.h"

#include "prelude/matrix.h"
