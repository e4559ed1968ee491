// Pulling rows in MXFP8: they travel as scaled rows and become bf16 on the way, which is exact, so that the products are
// those of bf16.
#pragma once
#include "../formats/mxfp8.cuh"
#include "pull.cuh"

namespace mok {

// By a whole warp, with ordinary loads and stores, until `enough()`. A warp has no rows in hand when it waits, so that
// nothing waits for it. `Ahead`: jobs are claimed one ahead, by a warp that does all that it has claimed, whatever
// `enough()` says. `AtOnce`: loads in flight. False: no job is left, or the launch was stopped.
template <int AtOnce, bool Ahead, class Job, class Enough>
__device__ __forceinline__ bool pull_expanded(Common const& c, Waiter const& waiter, uint32_t* next, Job job, Enough enough) {
  int lane = threadIdx.x % 32, stride = c.routes_per_rank(), hidden = c.shape.hidden;
  int ready = c.shape.rank;  // a peer known to be ready
  auto claim = [&] { return lane == 0 ? ptx::fetch_add_relaxed_gpu(next, 1) : 0u; };
  uint32_t ahead = Ahead ? claim() : 0;
  while (Ahead || !enough()) {
    PullJob j;
    if (!job(__shfl_sync(0xffffffffu, Ahead ? ahead : claim(), 0), j)) return false;
    if (Ahead) ahead = claim();
    int sources = lane < c.pull_rows ? c.schedule.row_source[j.row + lane] : 0;
    bool free = j.after == nullptr || waiter.counter(j.after, j.after_value, j.after_flag, j.after_index);
    if (!__all_sync(0xffffffffu, free)) return false;
#pragma unroll 1
    for (int r = 0; r < c.pull_rows; ++r) {
      int s = __shfl_sync(0xffffffffu, sources, r), rank = s < 0 ? c.shape.rank : s / stride;
      char* to = j.dst + size_t(r) * c.row_bytes;
      if (s < 0) {
        // Zeros, because weight gradients sum over padding too.
        for (uint32_t at = lane * 16; at < c.row_bytes; at += 512) ptx::store_16(to + at, make_uint4(0, 0, 0, 0));
        continue;
      }
      if (rank != ready && rank != c.shape.rank) {
        uint32_t const* flag = c.own<uint32_t>(c.symmetric.input_flag) + rank;
        if (!__all_sync(0xffffffffu, waiter.peer_flag(flag, waiter.epoch, MOK_FLAG_INPUT, rank))) return false;
        ready = rank;
      }
      // This rank's own rows come from the heap too: the prepare kernel has quantised them there.
      char const* from = c.peer<char const>(rank, j.peer_input) + size_t(s % stride / c.shape.topk) * scaled_row_bytes(hidden);
      expand_mx_row<AtOnce>(from, reinterpret_cast<__nv_bfloat16*>(to), hidden, j.type);
    }
    __syncwarp();
    if (lane == 0) ptx::add_release_gpu(j.arrived, c.pull_rows);
  }
  return true;
}

}  // namespace mok
