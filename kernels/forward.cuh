// The forward as a list of tiles: the shared expert's, then minibatch by minibatch FC1 and FC2.
#pragma once
#include <cuda.h>
#include "epilogue/forward.cuh"
#include "megakernel.cuh"

namespace mok {

enum ForwardMap { kXRows, kW1, kHidden, kW2, kX, kSharedW1, kSharedHidden, kSharedW2, kForwardMaps };

struct ForwardParams {
  CUtensorMap maps[kForwardMaps];
  Common common;
  MokForward f;
};

// Host: the tensor maps of the shared expert's operands; an error code, or 0.
int map_shared_forward(ForwardParams& p, MokWorkspace const& w);
// Host: the launch where the operands are E4M3 with block scales.
int forward_fp8(MokWorkspace const& w, MokSchedule const& sched, MokForward const& f, cudaStream_t stream);
// Host: the launch in MXFP8, all of whose operands are bf16 numbers.
int launch_forward_mxfp8(ForwardParams const& p, int ctas, cudaStream_t stream);

class ForwardProgram {
 public:
  using Params = ForwardParams;

  __device__ explicit ForwardProgram(Params const& p)
      : p_(p), blocks_(p.common.schedule.info[0] / kTileRows) {
    MokShape const& s = p.common.shape;
    per_ = group_blocks(s.minibatch_rows / kTileRows, ring_blocks(), fc1_columns(), gridDim.x - p.common.comm_ctas);
    MokSchedule const& sched = p.common.schedule;
    if (blocks_ > 0 && !evicts())
      first_ = first_block(sched.expert_offsets[sched.block_expert[0] + 1] / kTileRows, s.rank, s.ranks);
  }

  __device__ Common const& common() const { return p_.common; }
  __device__ void const* map(int i) const { return p_.maps + i; }
  static constexpr bool kForward = true, kExpands = false, kPullsMx = false;
  static constexpr int kProducerRegisters = mok::kProducerRegisters, kConsumerRegisters = mok::kConsumerRegisters;
  static __device__ bool b_major_k(Tile const&) { return true; }
  // Whether the backward will have to pull x again.
  __device__ bool evicts() const { return blocks_ > ring_blocks(); }
  // Whether no pull waits for a tile, so that even those who multiply may pull before their first tile.
  __device__ bool pulls_freely() const { return !evicts(); }

  // Tile `n` of the list; false past its end.
  __device__ bool tile(uint32_t n, Tile& tile) const {
    MokShape const& s = p_.common.shape;
    int t = int(n), tokens = token_blocks();
    int shared1 = tokens * shared_fc1_columns(), shared2 = s.shared_intermediate ? tokens * fc2_columns() : 0;
    if (t < shared1) {
      GridTile g = banded_tile(t, tokens, shared_fc1_columns());
      tile = fc1(g.m, g.m * kTileRows, 0, g.n, kX, kSharedW1, true);
      return true;
    }
    if ((t -= shared1) < shared2) {
      GridTile g = banded_tile(t, tokens, fc2_columns());
      tile = fc2(g.m, g.m * kTileRows, 0, g.n, kSharedHidden, kSharedW2, true);
      return true;
    }
    t -= shared2;
    if (t >= blocks_ * (fc1_columns() + fc2_columns())) return false;
    // In a ring of one minibatch, FC1 of the next would wait for FC2 of this one.
    PhaseTile phase = phase_tile(t, blocks_, per_, fc1_columns(), fc2_columns(), s.ring_rows >= 2 * s.minibatch_rows);
    int block = block_at(phase), column = column_tile(phase);
    int row = block % ring_blocks() * kTileRows, expert = p_.common.schedule.block_expert[block];
    tile = phase.phase == 0 ? fc1(block, row, expert, column, kXRows, kW1, false)
                            : fc2(block, row, expert, column, kHidden, kW2, false);
    return true;
  }

  // Waits for the inputs of a tile, and for the place of its output.
  __device__ bool ready(Tile const& t, Waiter const& w) const {
    Common const& c = p_.common;
    if (t.kind == kFc1) {
      if (t.shared) return true;
      int reuse = t.block - ring_blocks();  // the hidden rows of this block are still read by FC2
      if (reuse >= 0 && !w.counter(c.counts(c.at.fc2) + reuse, fc2_columns(), MOK_FLAG_FC2, reuse)) return false;
      return w.counter(c.counts(c.at.rows_x) + t.block, kTileRows, MOK_FLAG_ROWS, t.block);
    }
    if (t.shared) return w.counter(c.counts(c.at.shared_fc1) + t.block, shared_fc1_columns(), MOK_FLAG_FC1, t.block);
    return w.counter(c.counts(c.at.fc1) + t.block, fc1_columns(), MOK_FLAG_FC1, t.block);
  }

  // Tiles whose rows the sum over k reads.
  __device__ int pushing_tiles() const {
    return fc2_columns() * (blocks_ + (p_.common.shape.shared_intermediate ? token_blocks() : 0));
  }
  // Counts a tile whose outputs are stored.
  __device__ void completed(Tile const& t, Waiter const& w) const {
    Common const& c = p_.common;
    if (t.kind == kFc1) {
      ptx::add_release_gpu(c.counts(t.shared ? c.at.shared_fc1 : c.at.fc1) + t.block, 1);
      return;
    }
    if (!t.shared) ptx::add_release_gpu(c.counts(c.at.fc2) + t.block, 1);
    tile_pushed(c, w, pushing_tiles(), evicts());
  }

  // Rows are pulled in the order in which tiles need them.
  __device__ bool pull_job(uint32_t n, PullJob& job) const {
    Common const& c = p_.common;
    int rows_each = p_.common.pull_rows, jobs_a_block = kTileRows / rows_each;
    if (n >= uint32_t(blocks_) * jobs_a_block) return false;
    int first = int(n / jobs_a_block) / per_ * per_;
    PhaseTile phase{0, first, min(per_, blocks_ - first), int(n / jobs_a_block) - first};
    int block = block_at(phase);
    int part = (n % jobs_a_block + c.shape.rank * jobs_a_block / c.shape.ranks) % jobs_a_block;
    int reuse = block - ring_blocks();
    job.row = block * kTileRows + part * rows_each;
    job.dst = static_cast<char*>(p_.f.x_rows) +
              (size_t(block % ring_blocks()) * kTileRows + part * rows_each) * c.row_bytes;
    job.arrived = c.counts(c.at.rows_x) + block;
    job.after = reuse >= 0 ? c.counts(c.at.fc1) + reuse : nullptr;
    job.after_value = fc1_columns();
    job.after_flag = MOK_FLAG_FC1;
    job.after_index = reuse;
    job.own_input = static_cast<char const*>(p_.f.x);
    job.peer_input = c.symmetric.input;
    job.wide = nullptr;
    return true;
  }

  // Multiplies a tile and stores it; by all threads that multiply.
  __device__ __forceinline__ bool compute(Tile const& t, SharedMemory& s, ProductCursor& cursor, int thread,
                                          TileTimes& times) const {
    Common const& c = p_.common;
    Accumulator acc;
    int h = c.shape.hidden;
    __nv_bfloat16* dst[2] = {nullptr, nullptr};
    if (t.kind == kFc2) fc2_rows(t, thread, dst);
    if (!multiply<Major::K, Major::K>(acc, s.stages, s.pipeline, cursor, t.k_tiles, thread, s.waiter))
      return false;
    times.multiplied();
    if (t.kind == kFc2) {
      store_rows(acc, dst, t.col, h, thread);
      return true;
    }
    store_fc1(acc, fc1_output(t), thread);
    return true;
  }

  // Where an FC1 tile goes.
  __device__ __forceinline__ Fc1Output fc1_output(Tile const& t) const {
    Common const& c = p_.common;
    int width = t.shared ? c.shape.shared_intermediate : c.shape.intermediate;
    Fc1Output out;
    out.gate_up = static_cast<__nv_bfloat16*>(t.shared ? p_.f.shared_gate_up : p_.f.gate_up) + size_t(t.row) * 2 * width;
    out.hidden = c.local<__nv_bfloat16>(t.shared ? c.at.shared_hidden : c.at.hidden) + size_t(t.row) * width;
    out.width = width;
    out.rows = t.shared ? c.tokens - t.row : kTileRows;
    out.col = t.col;
    return out;
  }

  // Where the thread's rows of an FC2 tile go; null if nowhere.
  __device__ __forceinline__ void fc2_rows(Tile const& t, int thread, __nv_bfloat16* (&dst)[2]) const {
    Common const& c = p_.common;
    int h = c.shape.hidden, stride = c.routes_per_rank();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int r = accumulator_row(thread, half), source = t.shared ? 0 : c.schedule.row_source[t.block * kTileRows + r];
      dst[half] = nullptr;
      if (!t.shared && source >= 0) dst[half] = c.peer<__nv_bfloat16>(source / stride, c.symmetric.slots) + size_t(source % stride) * h;
      if (t.shared && t.row + r < c.tokens) dst[half] = c.local<__nv_bfloat16>(c.at.shared_out) + size_t(t.row + r) * h;
    }
  }

  // After all peers' rows have arrived.
  __device__ void finish(int, int) const {
    Common const& c = p_.common;
    bool shared = c.shape.shared_intermediate > 0;
    sum_over_k({c.own<__nv_bfloat16>(c.symmetric.slots), p_.f.topk_ids, p_.f.topk_weights,
                shared ? c.local<__nv_bfloat16>(c.at.shared_out) : nullptr, p_.f.shared_scale,
                static_cast<__nv_bfloat16*>(p_.f.y), c.tokens, c.shape.topk, c.shape.hidden},
               &c.counters().next_sum.value);
  }

 protected:
  __device__ int block_at(PhaseTile const& phase) const {
    int block = rotated_block(phase, p_.common.shape.rank, p_.common.shape.ranks) + first_;
    return block < blocks_ ? block : block - blocks_;
  }
  __device__ int token_blocks() const { return (p_.common.tokens + kTileRows - 1) / kTileRows; }
  __device__ int ring_blocks() const { return p_.common.shape.ring_rows / kTileRows; }
  __device__ int fc1_columns() const { return (p_.common.shape.intermediate + 127) / 128; }
  __device__ int shared_fc1_columns() const { return (p_.common.shape.shared_intermediate + 127) / 128; }
  __device__ int fc2_columns() const { return (p_.common.shape.hidden + kTileCols - 1) / kTileCols; }

  __device__ Tile fc1(int block, int row, int expert, int column, int map_a, int map_b, bool shared) const {
    Tile t = {};
    t.kind = kFc1, t.shared = shared, t.block = block, t.row = row, t.expert = expert, t.col = column * 128;
    t.k_tiles = p_.common.shape.hidden / kTileK, t.k_step = kTileK;
    t.map_a = map_a, t.at_a = row, t.map_b = map_b, t.at_b = t.col;
    return t;
  }
  __device__ Tile fc2(int block, int row, int expert, int column, int map_a, int map_b, bool shared) const {
    Tile t = {};
    MokShape const& s = p_.common.shape;
    t.kind = kFc2, t.shared = shared, t.block = block, t.row = row, t.expert = expert, t.col = column * kTileCols;
    t.k_tiles = (shared ? s.shared_intermediate : s.intermediate) / kTileK, t.k_step = kTileK;
    t.map_a = map_a, t.at_a = row, t.map_b = map_b, t.at_b = t.col;
    return t;
  }

  Params const& p_;
  int blocks_;  // blocks of 128 routed rows of this rank
  int per_;     // of them in a group of minibatches
  int first_ = 0;  // the one that comes first
};

}  // namespace mok
