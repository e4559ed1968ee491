// The forward in MXFP8, with the products of bf16: rows are expanded to bf16 while they are pulled, the weights are bf16
// numbers that MXFP8 has, and FC1's epilogue rounds hidden to such. The shared expert is bf16 as it is.
#pragma once
#include "comm/pull_mxfp8.cuh"
#include "epilogue/mxfp8.cuh"
#include "forward.cuh"

namespace mok {

class MxForwardProgram : public ForwardProgram {
 public:
  using ForwardProgram::ForwardProgram;
  static constexpr bool kExpands = true, kPullsMx = true;

  __device__ bool pull_job(uint32_t n, PullJob& job) const {
    if (!ForwardProgram::pull_job(n, job)) return false;
    job.type = Fp8::kE4M3;
    return true;
  }

  __device__ __forceinline__ bool compute(Tile const& t, SharedMemory& s, ProductCursor& cursor, int thread,
                                          TileTimes& times) const {
    if (t.shared || t.kind != kFc1) return ForwardProgram::compute(t, s, cursor, thread, times);
    Accumulator acc;
    if (!multiply<Major::K, Major::K>(acc, s.stages, s.pipeline, cursor, t.k_tiles, thread, s.waiter)) return false;
    times.multiplied();
    store_fc1(acc, fc1_output(t), thread, RoundToMx{Fp8::kE4M3});
    return true;
  }
};

}  // namespace mok
