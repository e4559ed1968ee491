// The end of a launch: telling peers that all rows are pushed, waiting for theirs, and the sum over k.
#pragma once
#include "../epilogue/registers.cuh"
#include "../params.cuh"
#include "wait.cuh"

namespace mok {

constexpr int kFinishThreads = 256, kFinishBarrier = 1;

__device__ inline uint32_t* done_flag(Common const& c, int at, int from, uint32_t epoch) {
  return c.peer<uint32_t>(at, c.symmetric.done_flag) + epoch % 2 * c.shape.ranks + from;
}
// Tells every peer that all rows are pushed; by one thread, which has acquired all that was pushed.
__device__ inline void announce_done(Common const& c, Waiter const& waiter, bool evicts) {
  uint32_t failed = c.counters().failed.value, how = failed ? failed : evicts ? kDoneEvicted : kDoneWell;
  uint32_t done = 4 * waiter.epoch + how;
  for (int step = 0; step < c.shape.ranks; ++step)
    ptx::store_release_sys(done_flag(c, (c.shape.rank + step) % c.shape.ranks, c.shape.rank, waiter.epoch), done);
}

// Counts a tile whose rows the sum over k will read, here or on a peer, and announces the end after the last of `total`.
// By one thread, after a barrier with those that stored the tile.
__device__ inline void tile_pushed(Common const& c, Waiter const& waiter, int total, bool evicts) {
  if (ptx::fetch_add_acq_rel_sys(&c.counters().tiles_pushed.value, 1) == uint32_t(total) - 1)
    announce_done(c, waiter, evicts);
}

// By kFinishThreads threads of every compute CTA, after their last tile. False: the launch was stopped. The forward
// leaves in the schedule whether any rank will ask for x again.
__device__ inline bool await_done(Common const& c, Waiter const& waiter, int thread, bool forward) {
  for (int peer = thread; peer < c.shape.ranks; peer += kFinishThreads) {
    uint32_t const* flag = done_flag(c, c.shape.rank, peer, waiter.epoch);
    if (!waiter.peer_flag(flag, 4 * waiter.epoch, MOK_FLAG_DONE, peer)) continue;
    if (int(blockIdx.x) != c.comm_ctas) continue;  // one CTA is enough for what follows
    uint32_t how = ptx::load_acquire_sys(flag) - 4 * waiter.epoch;
    if (forward && how == kDoneEvicted) atomicOr(c.schedule.info + 2, 1);
    if (peer == c.shape.rank) continue;
    if (how == kDoneOverflowed) waiter.note(MOK_PEER_FAILED, MOK_FLAG_DONE, peer, -1, 0, 1);
    if (how == kDoneOtherStep) waiter.note(MOK_SHAPE_MISMATCH, MOK_FLAG_DONE, peer, -1, c.signature, 0);
  }
  ptx::named_barrier(kFinishBarrier, kFinishThreads);
  return !waiter.stopped();
}

// out[t] = sum over k of weights[t, k] * slots[t * K + k] (+ scale[t] * extra[t]), in fp32 in the order of k.
struct SumOverK {
  __nv_bfloat16 const* slots;  // [T * K, H]
  int32_t const* ids;          // [T, K]; -1 = nothing in the slot
  float const* weights;        // [T, K], or null for 1
  __nv_bfloat16 const* extra;  // [T, H], or null
  float const* scale;          // [T], or null for 1
  __nv_bfloat16* out;          // [T, H]
  int tokens, topk, hidden;
};

__device__ __forceinline__ void add_scaled(float (&sum)[8], float w, uint4 v) {
  uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    float2 f = unpack(words[p]);
    sum[2 * p] = fmaf(w, f.x, sum[2 * p]);
    sum[2 * p + 1] = fmaf(w, f.y, sum[2 * p + 1]);
  }
}

// By whole warps, which take pieces of a token's columns from a counter, so that all end together.
constexpr int kSumColumns = 2048;  // a piece

__device__ inline void sum_over_k(SumOverK const& s, uint32_t* next) {
  constexpr int kColumns = 4;
  int lane = threadIdx.x % 32, pieces = (s.hidden + kSumColumns - 1) / kSumColumns;
  auto claim = [&] { return lane == 0 ? ptx::fetch_add_relaxed_gpu(next, 1) : 0u; };
  uint32_t claimed = claim();
  for (;;) {
    int piece = int(__shfl_sync(0xffffffffu, claimed, 0)), t = piece / pieces;
    if (t >= s.tokens) return;
    claimed = claim();  // on its way while this piece is summed
    bool there = lane < s.topk && s.ids[t * s.topk + lane] >= 0;
    float weight = there && s.weights != nullptr ? s.weights[t * s.topk + lane] : 1.f;
    uint32_t mask = __ballot_sync(0xffffffffu, there);
    float scale = s.extra != nullptr && s.scale != nullptr ? s.scale[t] : 1.f;
    auto const* rows = s.slots + size_t(t) * s.topk * s.hidden;
    int first = piece % pieces * kSumColumns, end = min(s.hidden, first + kSumColumns);
    // Four columns' worth of rows at a time, so that enough loads are in flight.
    for (int start = first; start < end; start += 256 * kColumns) {
      int base = start + lane * 8;
      float sum[kColumns][8] = {};
      for (int k0 = 0; k0 < s.topk; k0 += 4) {
        uint4 v[kColumns][4];
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            int col = base + c * 256;
            bool load = col < end && k0 + i < s.topk && (mask >> (k0 + i) & 1);
            v[c][i] = load ? ptx::load_l2(rows + size_t(k0 + i) * s.hidden + col) : make_uint4(0, 0, 0, 0);
          }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float w = __shfl_sync(0xffffffffu, weight, (k0 + i) % 32);
          if (k0 + i >= s.topk || !(mask >> (k0 + i) & 1)) continue;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) add_scaled(sum[c], w, v[c][i]);
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        int col = base + c * 256;
        if (col >= end) continue;
        if (s.extra != nullptr) add_scaled(sum[c], scale, ptx::load_l2(s.extra + size_t(t) * s.hidden + col));
        uint32_t w[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) w[p] = pack(sum[c][2 * p], sum[c][2 * p + 1]);
        ptx::store_16(s.out + size_t(t) * s.hidden + col, as_uint4(w));
      }
    }
  }
}

}  // namespace mok
