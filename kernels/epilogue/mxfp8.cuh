// Finished tiles that become MXFP8 operands of the next product: stored as the bf16 numbers that MXFP8 has.
#pragma once
#include "../formats/mxfp8.cuh"
#include "backward.cuh"
#include "forward.cuh"

namespace mok {

// How the epilogues round what the next product reads: 32 columns of one row, which are a block, held by the four threads
// that share the row.
struct RoundToMx {
  static constexpr bool kExact = false;
  Fp8 type;

  __device__ __forceinline__ void operator()(uint32_t (&pairs)[4]) const {
    // As integers; Inf and NaN are larger than all others, so nothing hides them.
    uint32_t amax = 0;
#pragma unroll
    for (uint32_t p : pairs) amax = __vmaxu2(amax, p & 0x7fff7fffu);
    amax = __vmaxu2(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = __vmaxu2(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
    round_to_mx(pairs, max(amax & 0xffffu, amax >> 16), type);
  }
};

}  // namespace mok
