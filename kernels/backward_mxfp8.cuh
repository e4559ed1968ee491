// The backward in MXFP8, with the products of bf16: rows are expanded to bf16 while they are pulled, and dHidden's epilogue
// stores d(gate, up) twice, as it is for the weight gradients and rounded to MXFP8 for dX. The weight gradients' operands
// are those of bf16, of which x and dY are numbers that MXFP8 has. The shared expert is bf16 as it is.
#pragma once
#include "backward.cuh"
#include "comm/pull_mxfp8.cuh"
#include "epilogue/mxfp8.cuh"

namespace mok {

class MxBackwardProgram : public BackwardProgram {
 public:
  using BackwardProgram::BackwardProgram;
  static constexpr bool kExpands = true, kPullsMx = true;

  __device__ bool pull_job(uint32_t n, PullJob& job) const {
    if (!BackwardProgram::pull_job(n, job)) return false;
    job.type = job.peer_input == p_.common.symmetric.input ? gradients() : Fp8::kE4M3;
    return true;
  }

  __device__ __forceinline__ bool compute(Tile const& t, SharedMemory& s, ProductCursor& cursor, int thread,
                                          TileTimes& times) const {
    if (t.shared || t.kind != kDHidden) return BackwardProgram::compute(t, s, cursor, thread, times);
    Accumulator acc;
    float weight[2];
    float* sums[2];
    DHiddenOutput out = dhidden_output(t, thread, weight, sums);
    out.rounded = p_.common.local<__nv_bfloat16>(p_.common.at.rounded_dgate_up) + size_t(t.row) * 2 * out.width;
    prefetch_dhidden(out, thread);
    if (!product<Major::K, Major::MN>(acc, t, s, cursor, thread)) return false;
    times.multiplied();
    store_dhidden(acc, out, weight, sums, thread, RoundToMx{gradients()});
    return true;
  }

 private:
  __device__ Fp8 gradients() const { return p_.common.shape.format == MOK_FORMAT_MXFP8_E5M2 ? Fp8::kE5M2 : Fp8::kE4M3; }
};

}  // namespace mok
