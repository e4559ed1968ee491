// E4M3 with block scales: what mok_megatron/formats/blockwise.py defines, for scales that are powers of two.
//
// A *scaled row* is a row of E4M3 values with its scales behind it, one fp32 for each 128 values, so that both travel
// in one copy; layout.h has its size.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include "../ptx/memory.cuh"
#include "amax.cuh"

namespace mok {

constexpr int kScaleBlock = 128;

__device__ __forceinline__ float* row_scales(char* row, int values) { return reinterpret_cast<float*>(row + values); }

struct BlockScale {
  float multiplier;  // of the values before they are rounded
  float scale;       // of the rounded values: 1 / multiplier
};

// From the largest magnitude of a block of bf16 numbers, as its bits. 448 / amax, and of that the power of two at or
// below it, on the bits: with amax = m * 2^e it is 2^(8 - e), or half of that if m > 1.75. Exact for every bf16 number.
__device__ __forceinline__ BlockScale block_scale(uint32_t amax) {
  uint32_t exponent = amax >> 7, above = (amax & 0x7f) > 0x60;
  if (amax == 0) return {1.f, 1.f};
  if (exponent == 0xff) return {__uint_as_float(0x7fc00000u), __uint_as_float(0x7fc00000u)};
  // Subnormal and very small: the quotient would be Inf, and is the largest bf16 number's power of two, 2^127.
  uint32_t of_multiplier = exponent == 0 ? 254u : min(254u, 262u - exponent - above);
  uint32_t of_scale = 254u - of_multiplier;
  return {__uint_as_float(of_multiplier << 23), __uint_as_float(of_scale ? of_scale << 23 : 1u << 22)};
}

// Two bf16 numbers times the multiplier, to the nearest E4M3, ties to even; NaN gives 0x7F.
__device__ __forceinline__ uint32_t to_e4m3x2(uint32_t pair, float multiplier) {
  float low = __uint_as_float(pair << 16) * multiplier, high = __uint_as_float(pair & 0xffff0000u) * multiplier;
  uint16_t v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ uint32_t to_e4m3x4(uint32_t first, uint32_t second, float multiplier) {
  return to_e4m3x2(first, multiplier) | to_e4m3x2(second, multiplier) << 16;
}

// Two E4M3 numbers times their scale, as bf16: exact where the product is in bf16's range.
__device__ __forceinline__ uint32_t from_e4m3x2(uint32_t pair, float scale) {
  uint32_t half;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half) : "h"(uint16_t(pair)));
  float2 f = __half22float2(*reinterpret_cast<__half2*>(&half));
  __nv_bfloat162 v = __floats2bfloat162_rn(f.x * scale, f.y * scale);
  return *reinterpret_cast<uint32_t*>(&v);
}

// Scaled rows to rows of bf16; by a whole warp.
__device__ __forceinline__ void expand_rows(char* rows, size_t row_bytes, int values, int count, __nv_bfloat16* wide) {
  constexpr int kAtOnce = 4, kStep = 32 * 16;  // loads in flight; values of one
  int lane = threadIdx.x % 32;
  for (int r = 0; r < count; ++r, rows += row_bytes, wide += values) {
#pragma unroll 1
    for (int start = lane * 16; start < values; start += kAtOnce * kStep) {
      uint4 v[kAtOnce];
      float scale[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        int at = start + j * kStep;
        v[j] = at < values ? ptx::load_l2(rows + at) : make_uint4(0, 0, 0, 0);
        scale[j] = at < values ? ptx::load_l2_f32(row_scales(rows, values) + at / kScaleBlock) : 0.f;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        int at = start + j * kStep;
        if (at >= values) continue;
        uint32_t const w[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
        uint32_t out[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out[2 * i] = from_e4m3x2(w[i] & 0xffff, scale[j]);
          out[2 * i + 1] = from_e4m3x2(w[i] >> 16, scale[j]);
        }
        ptx::store_16(wide + at, make_uint4(out[0], out[1], out[2], out[3]));
        ptx::store_16(wide + at + 8, make_uint4(out[4], out[5], out[6], out[7]));
      }
    }
  }
}

}  // namespace mok
