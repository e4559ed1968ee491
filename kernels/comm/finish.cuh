// The end of a launch: telling peers that all rows are pushed, waiting for theirs, and the sum over k.
#pragma once
#include "../epilogue/registers.cuh"
#include "../params.cuh"
#include "wait.cuh"

namespace mok {

constexpr int kFinishThreads = 256, kFinishBarrier = 1;

// By kFinishThreads threads of every compute CTA, after their last tile. False: the launch was stopped.
//
// Two bits travel with the flag: `failed` (this rank overflowed and pushed nothing) and `evicts` (the backward will
// ask for x again). The forward leaves in the schedule whether any rank will.
__device__ inline bool exchange_done(Common const& c, Waiter const& waiter, int thread, int compute_ctas, bool evicts,
                                     bool forward) {
  constexpr uint32_t kFailed = 1, kEvicts = 2;
  uint32_t const of_this_epoch = waiter.epoch % 2 * c.shape.ranks;
  ptx::fence_sys();  // this thread's pushes, before any flag below
  ptx::named_barrier(kFinishBarrier, kFinishThreads);
  Counters& counters = c.counters();
  if (thread == 0 && !waiter.stopped()) {
    if (ptx::fetch_add_acq_rel_sys(&counters.compute_finished.value, 1) == uint32_t(compute_ctas) - 1) {
      uint32_t done = 4 * waiter.epoch + (evicts ? kEvicts : 0) + (counters.failed.value ? kFailed : 0);
      for (int step = 0; step < c.shape.ranks; ++step) {
        int peer = (c.shape.rank + step) % c.shape.ranks;
        ptx::store_release_sys(c.peer<uint32_t>(peer, c.symmetric.done_flag) + of_this_epoch + c.shape.rank, done);
      }
    }
  }
  for (int peer = thread; peer < c.shape.ranks; peer += kFinishThreads) {
    uint32_t const* flag = c.own<uint32_t>(c.symmetric.done_flag) + of_this_epoch + peer;
    if (!waiter.peer_flag(flag, 4 * waiter.epoch, MOK_FLAG_DONE, peer)) continue;
    if (int(blockIdx.x) != c.comm_ctas) continue;  // one CTA is enough for what follows
    uint32_t bits = ptx::load_acquire_sys(flag) - 4 * waiter.epoch;
    if ((bits & kFailed) && peer != c.shape.rank) waiter.note(MOK_PEER_FAILED, MOK_FLAG_DONE, peer, -1, 0, 1);
    if (forward && (bits & kEvicts)) atomicOr(c.schedule.info + 2, 1);
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

__device__ inline void sum_over_k(SumOverK const& s, int warp, int warps) {
  int lane = threadIdx.x % 32;
  for (int t = warp; t < s.tokens; t += warps) {
    bool there = lane < s.topk && s.ids[t * s.topk + lane] >= 0;
    float weight = there && s.weights != nullptr ? s.weights[t * s.topk + lane] : 1.f;
    uint32_t mask = __ballot_sync(0xffffffffu, there);
    float scale = s.extra != nullptr && s.scale != nullptr ? s.scale[t] : 1.f;
    auto const* rows = s.slots + size_t(t) * s.topk * s.hidden;
    // Two columns' worth of rows at a time, so that enough loads are in flight.
    for (int start = 0; start < s.hidden; start += 512) {
      int base = start + lane * 8;
      float sum[2][8] = {};
      for (int k0 = 0; k0 < s.topk; k0 += 4) {
        uint4 v[2][4];
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            int col = base + c * 256;
            bool load = col < s.hidden && k0 + i < s.topk && (mask >> (k0 + i) & 1);
            v[c][i] = load ? ptx::load_l2(rows + size_t(k0 + i) * s.hidden + col) : make_uint4(0, 0, 0, 0);
          }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float w = __shfl_sync(0xffffffffu, weight, (k0 + i) % 32);
          if (k0 + i >= s.topk || !(mask >> (k0 + i) & 1)) continue;
#pragma unroll
          for (int c = 0; c < 2; ++c) add_scaled(sum[c], w, v[c][i]);
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        int col = base + c * 256;
        if (col >= s.hidden) continue;
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
