// Quantising a rank's input once a token, where peers pull it.
#pragma once
#include "../formats/blockwise.cuh"
#include "../params.cuh"

namespace mok {

// bf16 [T, H] to scaled rows in the heap, by CTAs of `Threads` threads from `first_cta` on. Sixteen threads a block of 128.
template <int Threads>
__device__ void quantize_input(Common const& c, void const* from, size_t to, int first_cta) {
  constexpr int kAtOnce = 4, kBlockThreads = kScaleBlock / 8;  // loads in flight; of 16 bytes
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
      BlockScale s = block_scale(largest(amax));
      int token = at / row_loads, column = (at - token * row_loads) * 8;
      char* row = dst + size_t(token) * c.row_bytes;
      *reinterpret_cast<uint2*>(row + column) = {to_e4m3x4(v[j].x, v[j].y, s.multiplier), to_e4m3x4(v[j].z, v[j].w, s.multiplier)};
      if (threadIdx.x % kBlockThreads == 0) row_scales(row, hidden)[column / kScaleBlock] = s.scale;
    }
  }
}

}  // namespace mok
