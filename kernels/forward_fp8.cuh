// The forward with E4M3 operands and block scales: the same list of tiles, in which the routed experts' have FP8
// products. The shared expert stays in bf16.
#pragma once
#include "epilogue/quantize.cuh"
#include "forward.cuh"
#include "mma/sm90_fp8.cuh"

namespace mok {

class Fp8ForwardProgram : public ForwardProgram {
 public:
  using ForwardProgram::ForwardProgram;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

  __device__ bool tile(uint32_t n, Tile& t) const {
    if (!ForwardProgram::tile(n, t)) return false;
    if (!t.shared) t.k_tiles /= kFp8TileK / kTileK, t.k_step = kFp8TileK;
    return true;
  }

  __device__ bool pull_job(uint32_t n, PullJob& job) const {
    // Quantised by the prepare kernel: this rank's own rows are pulled from the heap like everyone's.
    if (!ForwardProgram::pull_job(n, job)) return false;
    job.own_input = p_.common.own<char>(p_.common.symmetric.input);
    return true;
  }

  __device__ __forceinline__ bool compute(Tile const& t, SharedMemory& s, ProductCursor& cursor, int thread,
                                          TileTimes& times) const {
    if (t.shared) return ForwardProgram::compute(t, s, cursor, thread, times);
    Accumulator acc;
    // Found out before the product, so that the loads are not waited for after it.
    __nv_bfloat16* dst[2];
    if (t.kind == kFc2) fc2_rows(t, thread, dst);
    if (!multiply_fp8(acc, s.stages, s.pipeline, cursor, t.k_tiles, scales(t, thread), thread, s.waiter))
      return false;
    times.multiplied();
    if (t.kind == kFc2) {
      store_rows(acc, dst, t.col, p_.common.shape.hidden, thread);
    } else {
      int w = p_.common.shape.intermediate;
      size_t bytes = scaled_row_bytes(w);
      auto* gate_up = static_cast<__nv_bfloat16*>(p_.f.gate_up) + size_t(t.row) * 2 * w;
      store_scaled_fc1(acc, {gate_up, hidden_rows() + t.row * bytes, bytes, w, t.col}, thread);
    }
    return true;
  }

 private:
  __device__ char* hidden_rows() const { return p_.common.local<char>(p_.common.at.hidden); }

  __device__ BlockScales scales(Tile const& t, int thread) const {
    Common const& c = p_.common;
    bool fc1 = t.kind == kFc1;
    int i = c.shape.intermediate, k = fc1 ? c.shape.hidden : i;  // of the product
    char* rows = fc1 ? static_cast<char*>(p_.f.x_rows) : hidden_rows();
    size_t bytes = scaled_row_bytes(k);
    // FC1's second half of columns is up, I rows of the weight further on.
    int expert_rows = fc1 ? 2 * i : c.shape.hidden, second = fc1 ? i : kScaleBlock;
    if (!fc1 && t.col + kScaleBlock >= c.shape.hidden) second = 0;  // there are no such columns
    float const* weight = fc1 ? p_.f.scaled.w1_scale : p_.f.scaled.w2_scale;
    int blocks = k / kScaleBlock;
    return {row_scales(rows + (t.row + accumulator_row(thread, 0)) * bytes, k),
            weight + (size_t(t.expert) * (expert_rows / kScaleBlock) + t.col / kScaleBlock) * blocks, int(8 * bytes / 4),
            second / kScaleBlock * blocks};
  }
};

}  // namespace mok
