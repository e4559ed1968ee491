// Moving accumulator elements between the four threads that share rows, and packing them.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>
#include "../ptx/memory.cuh"

namespace mok {

__device__ __forceinline__ uint32_t pack(float a, float b) {
  __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&v);
}
__device__ __forceinline__ float2 unpack(uint32_t v) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&v));
}

// Thread q of four holds word q of blocks 0 .. 3 in w[0 .. 3]; afterwards it holds words 0 .. 3 of block q.
// Accumulators come as 8-column blocks spread over four threads; this makes 16-byte accesses of them.
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4]) {
  bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    if (odd) w[i] = got; else w[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
    if (high) w[i] = got; else w[i + 2] = got;
  }
}
__device__ __forceinline__ void quad_transpose(float (&f)[4]) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = __float_as_uint(f[i]);
  quad_transpose(w);
#pragma unroll
  for (int i = 0; i < 4; ++i) f[i] = __uint_as_float(w[i]);
}
__device__ __forceinline__ uint4 as_uint4(uint32_t const (&w)[4]) { return make_uint4(w[0], w[1], w[2], w[3]); }

// What the next product reads of 32 columns of a row, of which each of four threads has some: here bf16 as it is.
struct KeepBf16 {
  static constexpr bool kExact = true;
  __device__ __forceinline__ void operator()(uint32_t (&)[4]) const {}
};

// In one order for four threads, so that the sum is the same in every run.
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// Four instructions; relative error about 2^-21. exp(-x) of infinity gives 0, as it should.
__device__ __forceinline__ float sigmoid(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + e));
  return r;
}

}  // namespace mok
