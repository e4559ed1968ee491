// The backward with E4M3 operands and block scales: the same list of tiles, in which the routed experts' FC1, dHidden and
// dX have FP8 products, whose weights lie K-major in copies of their own. Weight gradients and the shared expert have
// bf16 operands: x and dY are expanded from the rows that were dispatched, exactly, by the warps that pull.
#pragma once
#include "backward.cuh"
#include "epilogue/quantize.cuh"
#include "mma/sm90_fp8.cuh"

namespace mok {

class Fp8BackwardProgram : public BackwardProgram {
 public:
  using BackwardProgram::BackwardProgram;
  static constexpr bool kExpands = true;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

  static __device__ bool in_fp8(Tile const& t) { return !t.shared && (t.kind == kFc1 || t.kind == kDHidden || t.kind == kDx); }
  static __device__ bool b_major_k(Tile const& t) { return in_fp8(t) || BackwardProgram::b_major_k(t); }

  __device__ bool tile(uint32_t n, Tile& t) const {
    if (!BackwardProgram::tile(n, t)) return false;
    if (in_fp8(t)) t.k_tiles /= kFp8TileK / kTileK, t.k_step = kFp8TileK, t.at_b = t.col;
    return true;
  }

  __device__ bool ready(Tile const& t, Waiter const& w) const {
    if (!t.shared && (t.kind == kDw1 || t.kind == kDw2)) {
      // Both x and dY, of this macrobatch and of those computed before it.
      int rows = 2 * (blocks_ - t.macrobatch * ring_blocks()) * kTileRows;
      if (!w.counter(&p_.common.counters().expanded.value, rows, MOK_FLAG_ROWS, -1)) return false;
    }
    return BackwardProgram::ready(t, w);
  }

  // A macrobatch at a time: pulls as in bf16, then dY and x are expanded. Expanding waits for pulls that come before it in
  // this list, so that it cannot stop them.
  __device__ bool pull_job(uint32_t n, PullJob& job) const {
    Common const& c = p_.common;
    int i = int(n), before = 0;
    if (blocks_ == 0) return false;
    char *x_rows = static_cast<char*>(p_.b.x_rows), *dy_rows = c.local<char>(c.at.scaled_dy_rows);
    for (int m = macrobatches_ - 1; m >= 0; --m) {
      Macrobatch b = macrobatch(m);
      int each = b.count * (kTileRows / c.pull_rows), pulls = each * (b.again ? 2 : 1);
      if (i < pulls + 2 * each) {
        bool pull = i < pulls, x = pull ? b.again && i < each : i >= pulls + each;
        pull_into(x ? x_rows : dy_rows, x, m, b, i % each, before, job);
        job.own_input = c.own<char>(job.peer_input);
        if (!pull) {
          size_t row = size_t(job.dst - (x ? x_rows : dy_rows)) / c.row_bytes;
          job.wide = c.local<__nv_bfloat16>(x ? c.at.wide_x_rows : c.at.dy_rows) + row * hidden();
          if (x && !b.again) job.arrived = nullptr;  // the forward has left them
        }
        return true;
      }
      i -= pulls + 2 * each;
      before += tiles_of(b);
    }
    return false;
  }

  __device__ __forceinline__ bool compute(Tile const& t, SharedMemory& s, ProductCursor& cursor, int thread,
                                          TileTimes& times) const {
    if (!in_fp8(t)) return BackwardProgram::compute(t, s, cursor, thread, times);
    // Where things go is found out before the product, so that these loads are not waited for after it.
    int w = width(false);
    if (t.kind == kDHidden) {
      float weight[2];
      float* sums[2];
      DHiddenOutput const out = dhidden_output(t, thread, weight, sums);
      prefetch_dhidden(out, thread);
      Accumulator acc;
      if (!product(acc, t, s, cursor, thread)) return false;
      times.multiplied();
      size_t bytes = scaled_row_bytes(2 * w);
      store_scaled_dhidden(acc, out, {scaled_dgate_up() + t.row * bytes, bytes}, weight, sums, thread);
    } else if (t.kind == kDx) {
      __nv_bfloat16* dst[2];
      dx_rows(t, thread, dst);
      Accumulator acc;
      if (!product(acc, t, s, cursor, thread)) return false;
      times.multiplied();
      store_rows(acc, dst, t.col, hidden(), thread);
    } else {
      Accumulator acc;
      if (!product(acc, t, s, cursor, thread)) return false;
      times.multiplied();
      store_fc1(acc, {gate_up(false) + size_t(t.row) * 2 * w, nullptr, w, kTileRows, t.col}, thread);
    }
    return true;
  }

 private:
  __device__ __forceinline__ bool product(Accumulator& acc, Tile const& t, SharedMemory& s, ProductCursor& cursor, int thread) const {
    return multiply_fp8(acc, s.stages, s.pipeline, cursor, t.k_tiles, scales(t, thread), thread, s.waiter);
  }
  __device__ char* scaled_dgate_up() const { return p_.common.local<char>(p_.common.at.scaled_dgate_up); }

  __device__ BlockScales scales(Tile const& t, int thread) const {
    Common const& c = p_.common;
    MokScaledWeights const& q = p_.b.scaled;
    int h = hidden(), i = width(false);
    // Rows of A, of `k` values; the weight's rows of an expert, and from the tile's first 128 columns to the others.
    char* rows;
    float const* weight;
    int k, expert_rows, second = kScaleBlock;
    if (t.kind == kFc1) rows = static_cast<char*>(p_.b.x_rows), weight = q.w1_scale, k = h, expert_rows = 2 * i, second = i;
    else if (t.kind == kDHidden) rows = c.local<char>(c.at.scaled_dy_rows), weight = q.w2_t_scale, k = h, expert_rows = i;
    else rows = scaled_dgate_up(), weight = q.w1_t_scale, k = 2 * i, expert_rows = h;
    if (t.kind != kFc1 && t.col + kScaleBlock >= expert_rows) second = 0;  // there are no such columns
    size_t bytes = scaled_row_bytes(k);
    int blocks = k / kScaleBlock;
    return {row_scales(rows + (t.row + accumulator_row(thread, 0)) * bytes, k),
            weight + (size_t(t.expert) * (expert_rows / kScaleBlock) + t.col / kScaleBlock) * blocks, int(8 * bytes / 4),
            second / kScaleBlock * blocks};
  }
};

}  // namespace mok
