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
    uint32_t amax = 0;
#pragma unroll
    for (uint32_t p : pairs) amax = larger(amax, magnitudes(p));
    round_to_mx(pairs, quad_largest(amax), type);
  }
};

}  // namespace mok
