// MXFP8 of bf16 numbers: what mok_megatron/formats/mxfp8.py defines, with scales rounded up. Scale and conversions are
// host code too, so that a test without a GPU can hold them to that definition.
//
// A *scaled row* is a row of FP8 values with its scales behind it, a byte for each 32 values; layout.h has its size.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cstdint>
#include <cstring>
#include "../ptx/memory.cuh"
#include "amax.cuh"

namespace mok {

constexpr int kMxBlock = 32;

enum class Fp8 { kE4M3, kE5M2 };

template <class To, class From>
__host__ __device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// The E8M0 scale, as its byte, of a block whose largest magnitude is `amax`, the bits of a bf16 number without sign:
// 2^ceil(log2(amax / max)), at least 2^-127; 255, which is NaN, for Inf and NaN. max is 1.75 * 2^8 or 1.75 * 2^15, so
// the exponent rounds up if and only if amax's significand is above 1.75.
__host__ __device__ __forceinline__ uint32_t mx_scale(uint32_t amax, Fp8 type) {
  int exponent = int(amax >> 7), up = (amax & 0x7f) > 0x60;
  if (exponent == 0xff) return 0xff;
  int scale = exponent - (type == Fp8::kE4M3 ? 8 : 15) + up;
  return scale > 0 ? scale : 0;
}
// What a scale's byte means, and the reciprocal by which values are multiplied before they are rounded: both exact.
__host__ __device__ __forceinline__ float mx_scale_value(uint32_t scale) {
  return bits_as<float>(scale == 0xff ? 0x7fc00000u : scale == 0 ? 1u << 22 : scale << 23);
}
__host__ __device__ __forceinline__ float mx_multiplier(uint32_t scale) {
  return bits_as<float>(scale == 0xff ? 0x7fc00000u : (254u - scale) << 23);
}

// Two bf16 numbers times the multiplier, to the nearest FP8, ties to even; NaN gives 0x7F.
__host__ __device__ __forceinline__ uint32_t to_mx(uint32_t pair, float multiplier, Fp8 type) {
  float2 v = make_float2(bits_as<float>(pair << 16) * multiplier, bits_as<float>(pair & 0xffff0000u) * multiplier);
  return __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, type == Fp8::kE4M3 ? __NV_E4M3 : __NV_E5M2);
}
// Two FP8 numbers times their scale, as bf16. Exact: what was a multiple of bf16's smallest number still is one after
// rounding to fewer bits. Only what rounded to 2^128 becomes Inf, as in the definition.
__host__ __device__ __forceinline__ uint32_t from_mx(uint32_t pair, float scale, Fp8 type) {
  __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(pair), type == Fp8::kE4M3 ? __NV_E4M3 : __NV_E5M2);
  float2 f = __half22float2(__half2(half));
  return bits_as<uint32_t>(__floats2bfloat162_rn(f.x * scale, f.y * scale));
}

// Bf16 numbers of one block to MXFP8 and back.
template <int Pairs>
__host__ __device__ __forceinline__ void round_to_mx(uint32_t (&pairs)[Pairs], uint32_t amax, Fp8 type) {
  uint32_t scale = mx_scale(amax, type);
  float multiplier = mx_multiplier(scale), value = mx_scale_value(scale);
#pragma unroll
  for (uint32_t& p : pairs) p = from_mx(to_mx(p, multiplier, type), value, type);
}

// A scaled row to a row of bf16; by a whole warp, `AtOnce` loads of 16 values in flight.
template <int AtOnce>
__device__ __forceinline__ void expand_mx_row(char const* row, __nv_bfloat16* wide, int values, Fp8 type) {
  constexpr int kStep = 32 * 16;
#pragma unroll 1
  for (int start = threadIdx.x % 32 * 16; start < values; start += AtOnce * kStep) {
    uint4 v[AtOnce];
    uint32_t scale[AtOnce];
#pragma unroll
    for (int j = 0; j < AtOnce; ++j) {
      int at = start + j * kStep;
      v[j] = at < values ? ptx::load_l2(row + at) : make_uint4(0, 0, 0, 0);
      scale[j] = at < values ? ptx::load_l2_byte(row + values + at / kMxBlock) : 0;
    }
#pragma unroll
    for (int j = 0; j < AtOnce; ++j) {
      int at = start + j * kStep;
      if (at >= values) continue;
      uint32_t const words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
      float value = mx_scale_value(scale[j]);
      uint32_t out[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] = from_mx(words[i / 2] >> i % 2 * 16 & 0xffff, value, type);
      ptx::store_16(wide + at, make_uint4(out[0], out[1], out[2], out[3]));
      ptx::store_16(wide + at + 8, make_uint4(out[4], out[5], out[6], out[7]));
    }
  }
}

}  // namespace mok
