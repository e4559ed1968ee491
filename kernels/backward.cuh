// The backward as a list of tiles: the shared expert's dHidden and dX; then macrobatch by macrobatch, from the last,
// whose activations the forward has kept, FC1 again where they were evicted, dHidden and dX minibatch by minibatch,
// and the weight gradients; then the shared expert's weight gradients, which need nothing and fill the end.
#pragma once
#include <cuda.h>
#include "epilogue/backward.cuh"
#include "epilogue/forward.cuh"
#include "megakernel.cuh"

namespace mok {

// Tensor maps; "T" is the operand of a weight gradient, whose K runs along rows.
enum BackwardMap {
  kBXRows, kBW1, kDyRows, kBW2T, kDGateUp, kBW1T, kDGateUpT, kXRowsT, kDyRowsT, kHiddenT,
  kDy, kSharedW2T, kSharedDGateUp, kSharedW1T, kSharedDGateUpT, kXT, kDyT, kSharedHiddenT, kBackwardMaps
};

struct BackwardParams {
  CUtensorMap maps[kBackwardMaps];
  Common common;
  MokBackward b;
};

// Host: the tensor maps of the shared expert's operands; an error code, or 0.
int map_shared_backward(BackwardParams& p, MokWorkspace const& w);
// Host: the launch where the operands are E4M3 with block scales.
int backward_fp8(MokWorkspace const& w, MokSchedule const& sched, MokBackward const& b, cudaStream_t stream);
// Host: the launch in MXFP8, all of whose operands are bf16 numbers.
int launch_backward_mxfp8(BackwardParams const& p, int ctas, cudaStream_t stream);

class BackwardProgram {
 public:
  using Params = BackwardParams;

  __device__ explicit BackwardProgram(Params const& p)
      : p_(p), blocks_(p.common.schedule.info[0] / kTileRows) {
    // Without rows there is still one macrobatch, for the gradients of experts that got none.
    macrobatches_ = max(1, (blocks_ + ring_blocks() - 1) / ring_blocks());
    per_ = group_blocks(p.common.shape.minibatch_rows / kTileRows, ring_blocks(), dhidden_columns(false),
                        gridDim.x - p.common.comm_ctas);
    MokSchedule const& sched = p.common.schedule;
    if (blocks_ > 0 && pulls_freely())
      first_ = first_block(sched.expert_offsets[sched.block_expert[0] + 1] / kTileRows, p.common.shape.rank, p.common.shape.ranks);
  }

  __device__ Common const& common() const { return p_.common; }
  __device__ void const* map(int i) const { return p_.maps + i; }
  static constexpr bool kForward = false, kExpands = false, kPullsMx = false;
  static constexpr int kProducerRegisters = mok::kProducerRegisters, kConsumerRegisters = mok::kConsumerRegisters;
  static __device__ bool b_major_k(Tile const& t) { return t.kind == kFc1; }
  __device__ bool evicts() const { return false; }
  // Whether no pull waits for a tile.
  __device__ bool pulls_freely() const { return macrobatches_ == 1; }

  __device__ bool tile(uint32_t n, Tile& t) const;
  __device__ bool ready(Tile const& t, Waiter const& w) const;
  // Tiles whose results the end of the launch reads, here or on a peer.
  __device__ int pushing_tiles() const {
    return blocks_ * (dhidden_columns(false) + dx_columns(false)) + shared_head();
  }
  __device__ void completed(Tile const& t, Waiter const& w) const;
  __device__ bool pull_job(uint32_t n, PullJob& job) const;
  __device__ __forceinline__ bool compute(Tile const& t, SharedMemory& s, ProductCursor& cursor, int thread,
                                          TileTimes& times) const;
  __device__ void finish(int thread, int threads) const;

 protected:
  // Sizes. `shared`: of the shared expert.
  __device__ int ring_blocks() const { return p_.common.shape.ring_rows / kTileRows; }
  __device__ int token_blocks() const { return (p_.common.tokens + kTileRows - 1) / kTileRows; }
  __device__ int width(bool shared) const {
    return shared ? p_.common.shape.shared_intermediate : p_.common.shape.intermediate;
  }
  __device__ int hidden() const { return p_.common.shape.hidden; }
  __device__ int fc1_columns() const { return (width(false) + 127) / 128; }
  __device__ int dhidden_columns(bool shared) const { return (width(shared) + kTileCols - 1) / kTileCols; }
  __device__ int dx_columns(bool shared) const { return shared && !width(true) ? 0 : (hidden() + kTileCols - 1) / kTileCols; }
  __device__ int dw1_rows(bool shared) const { return (2 * width(shared) + kTileRows - 1) / kTileRows; }
  __device__ int dw2_rows() const { return (hidden() + kTileRows - 1) / kTileRows; }
  __device__ int dw1_tiles(bool shared) const { return dw1_rows(shared) * dx_columns(shared); }
  __device__ int dweight_tiles(bool shared) const { return dw1_tiles(shared) + dw2_rows() * dhidden_columns(shared); }
  __device__ int shared_head() const { return token_blocks() * (dhidden_columns(true) + dx_columns(true)); }

  // Macrobatch m holds blocks [first, first + count) and touches experts [expert, expert + experts).
  struct Macrobatch {
    int first, count, expert, experts;
    bool again;  // its activations are not kept
  };
  __device__ Macrobatch macrobatch(int m) const {
    int const* of = p_.common.schedule.block_expert;
    Macrobatch b;
    b.first = m * ring_blocks();
    b.count = min(ring_blocks(), blocks_ - b.first);
    b.again = m < macrobatches_ - 1;
    // The one that is computed last also has the experts without rows.
    b.expert = m == 0 ? 0 : of[b.first];
    b.experts = m == 0 ? p_.common.shape.experts_local : of[b.first + b.count - 1] + 1 - b.expert;
    return b;
  }
  __device__ int in_macrobatch(PhaseTile const& phase) const {
    int block = rotated_block(phase, p_.common.shape.rank, p_.common.shape.ranks) + first_;
    return pulls_freely() && block >= blocks_ ? block - blocks_ : block;
  }
  __device__ int tiles_of(Macrobatch const& b) const {
    return b.count * ((b.again ? fc1_columns() : 0) + dhidden_columns(false) + dx_columns(false)) +
           b.experts * dweight_tiles(false);
  }

  template <Major A, Major B, bool Continue = false>
  __device__ __forceinline__ bool product(Accumulator& acc, Tile const& t, SharedMemory& s, ProductCursor& cursor, int thread) const {
    return multiply<A, B, Continue>(acc, s.stages, s.pipeline, cursor, t.k_tiles, thread, s.waiter);
  }
  // The matrix that a weight-gradient tile belongs to.
  struct Gradient {
    MokGrad const& grad;
    size_t offset;  // of the expert's matrix, in elements
    int rows, cols;
  };
  __device__ __forceinline__ Gradient gradient(Tile const& t) const {
    bool dw1 = t.kind == kDw1;
    int w = width(t.shared), rows = dw1 ? 2 * w : hidden(), cols = dw1 ? hidden() : w;
    MokGrad const& grad = dw1 ? (t.shared ? p_.b.dshared_w1 : p_.b.dw1) : (t.shared ? p_.b.dshared_w2 : p_.b.dw2);
    return {grad, size_t(t.expert) * rows * cols, rows, cols};
  }
  __device__ __forceinline__ DHiddenOutput dhidden_output(Tile const& t, int thread, float (&weight)[2], float* (&sums)[2]) const;
  __device__ __forceinline__ void dx_rows(Tile const& t, int thread, __nv_bfloat16* (&dst)[2]) const;
  __device__ __nv_bfloat16* gate_up(bool shared) const {
    return static_cast<__nv_bfloat16*>(shared ? const_cast<void*>(p_.b.shared_gate_up) : p_.b.gate_up);
  }
  __device__ __forceinline__ void store_gradient(Tile const& t, Accumulator const& acc, int thread) const;
  // Where the accumulators of a tile wait, saved by macrobatch `m`.
  __device__ float* carry(Tile const& t, int m) const {
    return p_.common.local<float>(p_.common.at.carry[m % 2]) + size_t(t.number) * kTileRows * kTileCols;
  }
  __device__ Tile rows_tile(int kind, int block, int row, int expert, int column, bool shared) const;
  __device__ Tile dweight_tile(int index, bool shared, int first_row, int rows) const;
  __device__ void routed_dweight(int m, Macrobatch const& b, int t, Tile& tile) const;

  __device__ void pull_into(char* ring, bool x, int m, Macrobatch const& b, int i, int tiles_before, PullJob& job) const;

  Params const& p_;
  int blocks_, macrobatches_;
  int per_;  // blocks in a group of minibatches
  int first_ = 0;  // the block that comes first, if there is one macrobatch
};

// ---- the list

__device__ inline bool BackwardProgram::tile(uint32_t n, Tile& t) const {
  int i = int(n);
  if (i < shared_head()) {
    int dhidden = token_blocks() * dhidden_columns(true);
    bool first = i < dhidden;
    GridTile g = banded_tile(first ? i : i - dhidden, token_blocks(), first ? dhidden_columns(true) : dx_columns(true));
    t = rows_tile(first ? kDHidden : kDx, g.m, g.m * kTileRows, 0, g.n, true);
    return true;
  }
  i -= shared_head();
  for (int m = macrobatches_ - 1; m >= 0; --m) {
    Macrobatch b = macrobatch(m);
    int size = tiles_of(b);
    if (i >= size) {
      i -= size;
      continue;
    }
    int per = per_, fc1 = b.again ? b.count * fc1_columns() : 0;
    int rows = b.count * (dhidden_columns(false) + dx_columns(false));
    if (i >= fc1 + rows) {
      routed_dweight(m, b, i - fc1 - rows, t);
      return true;
    }
    PhaseTile phase = i < fc1 ? phase_tile(i, b.count, per, fc1_columns(), 0, false)
                              : phase_tile(i - fc1, b.count, per, dhidden_columns(false), dx_columns(false), true);
    int block = b.first + in_macrobatch(phase);
    t = rows_tile(i < fc1 ? kFc1 : phase.phase == 0 ? kDHidden : kDx, block, (block - b.first) * kTileRows,
                  p_.common.schedule.block_expert[block], column_tile(phase), false);
    t.macrobatch = m;
    return true;
  }
  if (i >= dweight_tiles(true)) return false;
  t = dweight_tile(i, true, 0, p_.common.tokens);
  return true;
}

__device__ inline Tile BackwardProgram::rows_tile(int kind, int block, int row, int expert, int column, bool shared) const {
  Tile t = {};
  t.kind = kind, t.shared = shared, t.block = block, t.row = row, t.expert = expert;
  t.at_a = row, t.k_step = kTileK;
  if (kind == kFc1) {
    t.col = t.at_b = column * 128;
    t.k_tiles = hidden() / kTileK;
    t.map_a = kBXRows, t.map_b = kBW1;
    return t;
  }
  t.col = column * kTileCols, t.at_b = t.col / 64;
  t.k_tiles = (kind == kDHidden ? hidden() : 2 * width(shared)) / kTileK;
  if (kind == kDHidden) t.map_a = shared ? kDy : kDyRows, t.map_b = shared ? kSharedW2T : kBW2T;
  else t.map_a = shared ? kSharedDGateUp : kDGateUp, t.map_b = shared ? kSharedW1T : kBW1T;
  return t;
}

// Sums over rows go from the last to the first, as macrobatches do, so that cutting an expert changes nothing.
__device__ inline Tile BackwardProgram::dweight_tile(int index, bool shared, int first_row, int rows) const {
  Tile t = {};
  bool dw1 = index < dw1_tiles(shared);
  GridTile g = dw1 ? banded_tile(index, dw1_rows(shared), dx_columns(shared))
                   : banded_tile(index - dw1_tiles(shared), dw2_rows(), dhidden_columns(shared));
  t.kind = dw1 ? kDw1 : kDw2, t.shared = shared, t.number = index;
  t.row = g.m * kTileRows, t.col = g.n * kTileCols, t.at_a = t.row / 64, t.at_b = t.col / 64;
  t.k_tiles = (rows + kTileK - 1) / kTileK, t.k_step = -kTileK, t.k0 = first_row + (t.k_tiles - 1) * kTileK;
  if (dw1) t.map_a = shared ? kSharedDGateUpT : kDGateUpT, t.map_b = shared ? kXT : kXRowsT;
  else t.map_a = shared ? kDyT : kDyRowsT, t.map_b = shared ? kSharedHiddenT : kHiddenT;
  return t;
}

__device__ inline void BackwardProgram::routed_dweight(int m, Macrobatch const& b, int i, Tile& tile) const {
  MokSchedule const& sched = p_.common.schedule;
  int expert = b.expert + i / dweight_tiles(false);
  int begin = sched.expert_offsets[expert], end = begin + sched.expert_rows[expert];
  int from = m * p_.common.shape.ring_rows, to = from + p_.common.shape.ring_rows;
  int low = max(begin, from), high = min(end, to);
  tile = dweight_tile(i % dweight_tiles(false), false, low - from, max(0, high - low));
  tile.expert = expert;
  tile.macrobatch = m;
  tile.carry_in = high > low && end > to;
  tile.carry_out = high > low && begin < from;
  // Nothing here, but something elsewhere: -1 leaves the gradient alone.
  if (high <= low && end > begin) tile.number = -1;
}

// ---- dependencies

__device__ inline bool BackwardProgram::ready(Tile const& t, Waiter const& w) const {
  Common const& c = p_.common;
  Counters const& k = c.counters();
  switch (t.kind) {
    case kFc1:
      return w.counter(c.counts(c.at.rows_x) + t.block, kTileRows, MOK_FLAG_ROWS, t.block);
    case kDHidden:
      if (t.shared) return true;
      if (t.macrobatch < macrobatches_ - 1 &&
          !w.counter(c.counts(c.at.fc1) + t.block, fc1_columns(), MOK_FLAG_FC1, t.block))
        return false;
      return w.counter(c.counts(c.at.rows_dy) + t.block, kTileRows, MOK_FLAG_ROWS, t.block);
    case kDx:
      return w.counter(c.counts(t.shared ? c.at.shared_dhidden : c.at.dhidden) + t.block, dhidden_columns(t.shared),
                       MOK_FLAG_DHIDDEN, t.block);
    default:
      if (t.shared)
        return w.counter(&k.shared_dhidden_done.value, token_blocks() * dhidden_columns(true), MOK_FLAG_DHIDDEN, -1);
      // Blocks of this macrobatch and of those computed before it.
      return w.counter(&k.dhidden_done.value, (blocks_ - t.macrobatch * ring_blocks()) * dhidden_columns(false), MOK_FLAG_DHIDDEN, -1);
  }
}

__device__ inline void BackwardProgram::completed(Tile const& t, Waiter const& w) const {
  Common const& c = p_.common;
  Counters& k = c.counters();
  if (t.kind == kFc1) ptx::add_release_gpu(c.counts(c.at.fc1) + t.block, 1);
  if (t.kind == kDHidden) {
    ptx::add_release_gpu(c.counts(t.shared ? c.at.shared_dhidden : c.at.dhidden) + t.block, 1);
    ptx::add_release_gpu(t.shared ? &k.shared_dhidden_done.value : &k.dhidden_done.value, 1);
  }
  // The shared expert's last tiles may run early, and are no part of any macrobatch.
  if (!t.shared) ptx::add_release_gpu(&k.tiles_done.value, 1);
  if (t.kind == kDHidden || t.kind == kDx) tile_pushed(c, w, pushing_tiles(), evicts());
}

// ---- arithmetic

__device__ __forceinline__ void BackwardProgram::store_gradient(Tile const& t, Accumulator const& acc,
                                                                int thread) const {
  if (t.carry_out) {
    save_accumulator(acc, carry(t, t.macrobatch), thread);
    return;
  }
  Gradient g = gradient(t);
  if (t.k_tiles == 0 && g.grad.accumulate) return;
  store_dweight(acc, g.grad, g.offset, g.rows, g.cols, t.row, t.col, thread);
}

// Where a dHidden tile goes; also each of the thread's rows' router weight, and where its share of that gradient goes.
__device__ __forceinline__ DHiddenOutput BackwardProgram::dhidden_output(Tile const& t, int thread, float (&weight)[2],
                                                                         float* (&sums)[2]) const {
  Common const& c = p_.common;
  int w = width(t.shared), stride = c.routes_per_rank(), columns = dhidden_columns(t.shared), column = t.col / kTileCols;
  size_t row = t.row;
  sums[0] = sums[1] = nullptr;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int r = accumulator_row(thread, half);
    if (t.shared) {
      bool in = t.row + r < c.tokens;
      weight[half] = in && p_.b.shared_scale != nullptr ? p_.b.shared_scale[t.row + r] : 1.f;
      if (in) sums[half] = c.local<float>(c.at.shared_dscale) + (row + r) * columns + column;
    } else {
      int source = c.schedule.row_source[t.block * kTileRows + r];
      weight[half] = c.schedule.row_weight[t.block * kTileRows + r];
      if (source >= 0)
        sums[half] = c.peer<float>(source / stride, c.symmetric.dweight) + size_t(source % stride) * columns + column;
    }
  }
  auto* dgate_up = c.local<__nv_bfloat16>(t.shared ? c.at.shared_dgate_up : c.at.dgate_up);
  auto* weighted_hidden = c.local<__nv_bfloat16>(t.shared ? c.at.shared_hidden : c.at.hidden);
  return {gate_up(t.shared) + row * 2 * w, dgate_up + row * 2 * w, weighted_hidden + row * w, w,
          t.shared ? c.tokens - t.row : kTileRows, t.col};
}

// Where the thread's rows of a dX tile go; null if nowhere.
__device__ __forceinline__ void BackwardProgram::dx_rows(Tile const& t, int thread, __nv_bfloat16* (&dst)[2]) const {
  Common const& c = p_.common;
  int h = hidden(), stride = c.routes_per_rank();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int r = accumulator_row(thread, half), source = t.shared ? 0 : c.schedule.row_source[t.block * kTileRows + r];
    dst[half] = nullptr;
    if (!t.shared && source >= 0) dst[half] = c.peer<__nv_bfloat16>(source / stride, c.symmetric.slots) + size_t(source % stride) * h;
    if (t.shared && t.row + r < c.tokens) dst[half] = c.local<__nv_bfloat16>(c.at.shared_out) + size_t(t.row + r) * h;
  }
}

__device__ __forceinline__ bool BackwardProgram::compute(Tile const& t, SharedMemory& s, ProductCursor& cursor,
                                                         int thread, TileTimes& times) const {
  Accumulator acc;
  constexpr Major k = Major::K, mn = Major::MN;

  if (t.kind == kFc1) {
    if (!product<k, k>(acc, t, s, cursor, thread)) return false;
    times.multiplied();
    store_fc1(acc, {gate_up(false) + size_t(t.row) * 2 * width(false), nullptr, width(false), kTileRows, t.col}, thread);
    return true;
  }
  if (t.kind == kDHidden) {
    float weight[2];
    float* sums[2];
    DHiddenOutput const out = dhidden_output(t, thread, weight, sums);
    prefetch_dhidden(out, thread);
    if (!product<k, mn>(acc, t, s, cursor, thread)) return false;
    times.multiplied();
    store_dhidden(acc, out, weight, sums, thread);
    return true;
  }
  if (t.kind == kDx) {
    __nv_bfloat16* dst[2];
    dx_rows(t, thread, dst);
    if (!product<k, mn>(acc, t, s, cursor, thread)) return false;
    times.multiplied();
    store_rows(acc, dst, t.col, hidden(), thread);
    return true;
  }
  if (t.number < 0) return true;
  if (!t.carry_out) {
    Gradient g = gradient(t);
    prefetch_dweight(g.grad, g.offset, g.rows, g.cols, t.row, t.col, thread);
  }
  if (t.carry_in) {
    Accumulator sum;
    restore_accumulator(sum, carry(t, t.macrobatch + 1), thread);
    if (!product<mn, mn, true>(sum, t, s, cursor, thread)) return false;
    times.multiplied();
    store_gradient(t, sum, thread);
    return true;
  }
  if (!product<mn, mn>(acc, t, s, cursor, thread)) return false;
  times.multiplied();
  store_gradient(t, acc, thread);
  return true;
}

__device__ inline void BackwardProgram::finish(int thread, int threads) const {
  Common const& c = p_.common;
  bool shared = width(true) > 0;
  sum_over_k({c.own<__nv_bfloat16>(c.symmetric.slots), p_.b.topk_ids, nullptr,
              shared ? c.local<__nv_bfloat16>(c.at.shared_out) : nullptr, nullptr, static_cast<__nv_bfloat16*>(p_.b.dx),
              c.tokens, c.shape.topk, hidden()},
             &c.counters().next_sum.value);
  int columns = dhidden_columns(false);
  float const* partial = c.own<float>(c.symmetric.dweight);
  for (int i = thread; i < c.tokens * c.shape.topk; i += threads) {
    float sum = 0.f;
    if (p_.b.topk_ids[i] >= 0)
      for (int n = 0; n < columns; ++n) sum += ptx::load_l2_f32(partial + size_t(i) * columns + n);
    p_.b.dtopk_weights[i] = sum;
  }
  if (!shared || p_.b.dshared_scale == nullptr) return;
  columns = dhidden_columns(true);
  for (int t = thread; t < c.tokens; t += threads) {
    float sum = 0.f;
    for (int n = 0; n < columns; ++n) sum += ptx::load_l2_f32(c.local<float>(c.at.shared_dscale) + size_t(t) * columns + n);
    p_.b.dshared_scale[t] = sum;
  }
}

}  // namespace mok

#include "backward_pulls.cuh"
