// Quantising a rank's input once a token, where peers pull it.
#pragma once
#include "../formats/blockwise.cuh"
#include "../formats/mxfp8.cuh"
#include "../params.cuh"

namespace mok {

// What becomes of eight values of a row whose block has the largest magnitude `amax`; `first`: of their block.
struct BlockScaling {
  static constexpr int kBlock = kScaleBlock;
  __device__ __forceinline__ void store(uint4 v, uint32_t amax, char* row, int values, int column, bool first) const {
    BlockScale s = block_scale(amax);
    *reinterpret_cast<uint2*>(row + column) = {to_e4m3x4(v.x, v.y, s.multiplier), to_e4m3x4(v.z, v.w, s.multiplier)};
    if (first) row_scales(row, values)[column / kBlock] = s.scale;
  }
};
struct MxScaling {
  static constexpr int kBlock = kMxBlock;
  Fp8 type;
  __device__ MxScaling(int format, bool gradient)
      : type(gradient && format == MOK_FORMAT_MXFP8_E5M2 ? Fp8::kE5M2 : Fp8::kE4M3) {}
  __device__ __forceinline__ void store(uint4 v, uint32_t amax, char* row, int values, int column, bool first) const {
    uint32_t scale = mx_scale(amax, type);
    float m = mx_multiplier(scale);
    *reinterpret_cast<uint2*>(row + column) = {to_mx(v.x, m, type) | to_mx(v.y, m, type) << 16,
                                               to_mx(v.z, m, type) | to_mx(v.w, m, type) << 16};
    if (first) row[values + column / kBlock] = char(scale);
  }
};

// bf16 [T, H] to scaled rows in the heap, by CTAs of `Threads` threads from `first_cta` on.
template <int Threads, class Scaling>
__device__ void quantize_input(Scaling scaling, Common const& c, void const* from, size_t to, int first_cta) {
  constexpr int kAtOnce = 4, kBlockThreads = Scaling::kBlock / 8;  // loads in flight; of 16 bytes
  static_assert(Threads % 32 == 0);
  int hidden = c.shape.hidden, row_loads = hidden / 8, loads = c.tokens * row_loads;
  auto* src = static_cast<uint4 const*>(from);
  char* dst = c.own<char>(to);
  for (int base = (int(blockIdx.x) - first_cta) * kAtOnce * Threads; base < loads; base += (int(gridDim.x) - first_cta) * kAtOnce * Threads) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      int at = base + j * Threads + int(threadIdx.x);
      v[j] = at < loads ? __ldcs(src + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      int at = base + j * Threads + int(threadIdx.x);
      uint32_t amax = larger(larger(magnitudes(v[j].x), magnitudes(v[j].y)), larger(magnitudes(v[j].z), magnitudes(v[j].w)));
#pragma unroll
      for (int step = kBlockThreads / 2; step > 0; step /= 2) amax = larger(amax, __shfl_xor_sync(0xffffffffu, amax, step));
      if (at >= loads) continue;
      int token = at / row_loads, column = (at - token * row_loads) * 8;
      scaling.store(v[j], largest(amax), dst + size_t(token) * scaled_row_bytes(hidden), hidden, column,
                    threadIdx.x % kBlockThreads == 0);
    }
  }
}

}  // namespace mok
