// The prepare kernel: what has to happen before a megakernel can start.
//
// Forward: send this rank's routes to every peer, copy or quantise x to where peers can pull it, and from all ranks'
// routes build the schedule by a counting sort. Backward: dY likewise. Both announce to the peers what step this is, and
// clear the counters of the launch.
#include "prepare.cuh"
#include "../comm/wait.cuh"
#include "quantize_input.cuh"

namespace mok {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr uint32_t kAll = 0xffffffffu;

__device__ void clear_counters(Common const& c) {
  int thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads;
  uint32_t* blocks = c.counts(c.at.rows_x);
  int n = int((c.at.block_counters_end - c.at.rows_x) / 4);
  for (int i = thread; i < n; i += threads) blocks[i] = 0;
  if (thread == 0) {
    Counters& k = c.counters();
    for (Counter* p : {&k.failed, &k.next_tile, &k.next_pull, &k.tiles_done, &k.dhidden_done, &k.shared_dhidden_done,
                       &k.tiles_pushed, &k.next_sum, &k.expanded, &k.exited})
      p->value = 0;
  }
}

// Puts x or dY where peers pull it; by CTAs from `first_cta` on.
__device__ void stage_input(Common const& c, bool gradient, void const* from, size_t to, int first_cta) {
  if (c.shape.format == MOK_FORMAT_FP8_BLOCK) return quantize_input<kThreads>(BlockScaling{}, c, from, to, first_cta);
  if (is_mxfp8(c.shape)) return quantize_input<kThreads>(MxScaling{c.shape.format, gradient}, c, from, to, first_cta);
  if (c.shape.ranks == 1) return;  // pulled from where it is
  constexpr int kAtOnce = 8;       // loads in flight
  auto* dst = c.own<uint4>(to);
  auto* src = static_cast<uint4 const*>(from);
  size_t n = size_t(c.tokens) * c.shape.hidden / 8, step = size_t(kAtOnce) * kThreads;
  for (size_t base = (blockIdx.x - first_cta) * step + threadIdx.x; base < n; base += (gridDim.x - first_cta) * step) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (base + j * kThreads < n) v[j] = __ldcs(src + base + j * kThreads);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (base + j * kThreads < n) dst[base + j * kThreads] = v[j];
  }
}

// Tells every peer what step this is; by one CTA.
__device__ void announce(Common const& c, Waiter const& waiter) {
  for (int peer = threadIdx.x; peer < c.shape.ranks; peer += kThreads) {
    c.peer<Announcement>(peer, c.symmetric.announcement)[c.shape.rank] = {uint32_t(c.tokens), c.signature};
    ptx::store_release_sys(c.peer<uint32_t>(peer, c.symmetric.routes_flag) + c.shape.rank, waiter.epoch);
  }
}

// Writes this rank's routes into every peer's memory, nearest rank number first so that not all write to rank 0.
__device__ void send_routes(Common const& c, int32_t const* ids, float const* weights, Waiter const& waiter) {
  int n = c.tokens * c.shape.topk, experts = c.shape.ranks * c.shape.experts_local;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < n; i += gridDim.x * kThreads)
    if (ids[i] < -1 || ids[i] >= experts) waiter.note(MOK_BAD_ROUTE, MOK_FLAG_NONE, -1, i, experts, uint32_t(ids[i]));
  size_t mine = size_t(c.shape.rank) * c.shape.max_tokens * c.shape.topk;
  for (int step = 0; step < c.shape.ranks; ++step) {
    int peer = (c.shape.rank + step) % c.shape.ranks;
    auto* peer_ids = c.peer<int32_t>(peer, c.symmetric.ids) + mine;
    auto* peer_weights = c.peer<float>(peer, c.symmetric.weights) + mine;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < n; i += gridDim.x * kThreads) {
      peer_ids[i] = ids[i];
      peer_weights[i] = weights[i];
    }
  }
  ptx::fence_sys();
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0)
    last = ptx::fetch_add_acq_rel_sys(&c.counters().prepare_pushed.value, 1) == gridDim.x - 1;
  __syncthreads();
  if (last) announce(c, waiter);
}

// A schedule without rows. The launch goes through all else, and tells its peers why, so that none waits in vain.
__device__ void schedule_nothing(Common const& c, Done why) {
  if (blockIdx.x != 0) return;
  for (int e = threadIdx.x; e <= c.shape.experts_local; e += kThreads) {
    c.schedule.expert_offsets[e] = 0;
    if (e < c.shape.experts_local) c.schedule.expert_rows[e] = 0;
  }
  if (threadIdx.x < 3) c.schedule.info[threadIdx.x] = 0;
  if (threadIdx.x == 0) c.counters().failed.value = why;
}

// CTAs that sort: more where there are many routes.
__device__ int sort_ctas(Common const& c) {
  int routes = c.shape.ranks * c.shape.max_tokens * c.shape.topk;
  return min(int(gridDim.x), min(kSortCtas, max(32, routes / 8192)));
}

// Walks a range of the routes of all ranks, in (rank, token, k) order, 32 at a time: visit(expert or -1, rank, route, weight).
struct RouteRange {
  int const* first_route;  // [ranks + 1] in shared memory: routes of the ranks before
  int begin, end;

  template <bool kWeights, class Visit>
  __device__ void walk(Common const& c, Visit visit) const {
    constexpr int kAhead = 8;  // loads in flight
    int lane = threadIdx.x % 32, rank = 0;
    size_t stride = size_t(c.shape.max_tokens) * c.shape.topk;
    int first_expert = c.shape.rank * c.shape.experts_local;
    auto const* ids = c.own<int32_t>(c.symmetric.ids);
    auto const* weights = c.own<float>(c.symmetric.weights);
    for (int base = begin; base < end; base += 32 * kAhead) {
      int expert[kAhead], of[kAhead], route[kAhead];
      float weight[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        int i = base + 32 * j + lane;
        expert[j] = -1, of[j] = route[j] = 0, weight[j] = 0.f;
        if (i >= end) continue;
        while (i >= first_route[rank + 1]) ++rank;
        of[j] = rank, route[j] = i - first_route[rank];
        expert[j] = ids[rank * stride + route[j]];
        if (kWeights) weight[j] = weights[rank * stride + route[j]];
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (base + 32 * j >= end) break;
        int local = expert[j] - first_expert;
        visit(expert[j] >= 0 && local >= 0 && local < c.shape.experts_local ? local : -1, of[j], route[j], weight[j]);
      }
    }
  }
};

__device__ uint32_t scan_warp(uint32_t v) {  // inclusive
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    uint32_t below = __shfl_up_sync(kAll, v, d);
    if (int(threadIdx.x % 32) >= d) v += below;
  }
  return v;
}

__device__ void prepare(PrepareParams const& p, Waiter const& waiter) {
  extern __shared__ uint32_t table[];  // [kWarps][E_local], then [E_local + 1] offsets, then [E_local] rows
  __shared__ int first_route[kMaxRanks + 1];
  __shared__ int longest;
  __shared__ bool stopped, other_step;
  Common const& c = p.common;
  Counters& counters = c.counters();
  uint32_t epoch = waiter.epoch;
  int ranks = c.shape.ranks, experts = c.shape.experts_local, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (p.forward) send_routes(c, p.ids, p.weights, waiter);
  else if (blockIdx.x == 0) announce(c, waiter);
  clear_counters(c);
  int sorters = sort_ctas(c);
  // Those that sort copy nothing, if there are enough others.
  int first_copier = p.forward && int(gridDim.x) > 2 * sorters ? sorters : 0;
  if (int(blockIdx.x) >= first_copier) {
    stage_input(c, !p.forward, p.input, c.symmetric.input, first_copier);
    if (p.input_again != nullptr && c.schedule.info[2]) stage_input(c, false, p.input_again, c.symmetric.input_again, first_copier);
  }
  if (!p.forward || int(blockIdx.x) >= sorters) return;

  // ---- all ranks' routes are here
  if (threadIdx.x == 0) stopped = other_step = false;
  __syncthreads();
  for (int r = threadIdx.x; r < ranks; r += kThreads) {
    if (!waiter.peer_flag(c.own<uint32_t>(c.symmetric.routes_flag) + r, epoch, MOK_FLAG_ROUTES, r)) {
      stopped = true;
      continue;
    }
    Announcement a = c.own<Announcement>(c.symmetric.announcement)[r];
    if (a.signature != c.signature || a.tokens > uint32_t(c.shape.max_tokens)) {
      if (blockIdx.x == 0) waiter.note(MOK_SHAPE_MISMATCH, MOK_FLAG_ROUTES, r, -1, c.signature, a.signature);
      other_step = true;
    }
    first_route[r + 1] = int(a.tokens) * c.shape.topk;
  }
  __syncthreads();
  if (stopped) return;
  if (other_step) return schedule_nothing(c, kDoneOtherStep);
  if (threadIdx.x == 0) {
    first_route[0] = longest = 0;
    for (int r = 0; r < ranks; ++r) {
      longest = max(longest, first_route[r + 1]);
      first_route[r + 1] += first_route[r];
    }
  }
  for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) table[i] = 0;
  __syncthreads();

  // ---- count: each warp a contiguous range of routes
  int total = first_route[ranks], warps = sorters * kWarps;
  int each = (total + warps - 1) / warps, me = blockIdx.x * kWarps + warp;
  RouteRange range{first_route, min(total, me * each), min(total, (me + 1) * each)};
  uint32_t* mine = table + warp * experts;
  range.walk<false>(c, [&](int expert, int, int, float) {
    uint32_t same = __match_any_sync(kAll, expert);
    if (expert >= 0 && lane == __ffs(same) - 1) mine[expert] += __popc(same);
    __syncwarp();
  });
  __syncthreads();
  uint32_t* histogram = c.counts(c.at.histogram);
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    uint32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += table[w * experts + e];
    histogram[blockIdx.x * experts + e] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_gpu();
    ptx::add_release_gpu(&counters.prepare_counted.value, 1);
    stopped = !waiter.counter(&counters.prepare_counted.value, sorters, MOK_FLAG_PREPARE, -1);
  }
  __syncthreads();
  if (stopped) return;

  // ---- offsets of experts; then the first row of each warp for each expert, in `table`
  uint32_t *offsets = table + kWarps * experts, *rows = offsets + experts + 1;
  for (int e = warp; e < experts; e += kWarps) {
    uint32_t before = 0, all = 0;
    for (int b = lane; b < sorters; b += 32) {
      uint32_t n = __ldcg(histogram + b * experts + e);
      if (b < int(blockIdx.x)) before += n;
      all += n;
    }
    before = __reduce_add_sync(kAll, before);
    all = __reduce_add_sync(kAll, all);
    uint32_t n = lane < kWarps ? table[lane * experts + e] : 0, sum = scan_warp(n);
    if (lane < kWarps) table[lane * experts + e] = before + sum - n;
    if (lane == 0) rows[e] = all;
  }
  __syncthreads();
  __shared__ uint32_t used;
  if (warp == 0) {
    uint32_t at = 0;
    for (int first = 0; first < experts; first += 32) {
      int e = first + lane;
      uint32_t n = e < experts ? (rows[e] + MOK_TILE_ROWS - 1) / MOK_TILE_ROWS * MOK_TILE_ROWS : 0, sum = scan_warp(n);
      if (e < experts) offsets[e] = at + sum - n;
      at += __shfl_sync(kAll, sum, 31);
    }
    if (lane == 0) offsets[experts] = used = at;
  }
  __syncthreads();
  if (used > uint32_t(c.shape.capacity_rows)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) waiter.note(MOK_OVERFLOW, MOK_FLAG_NONE, -1, -1, c.shape.capacity_rows, used);
    return schedule_nothing(c, kDoneOverflowed);
  }
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e <= experts; e += kThreads) c.schedule.expert_offsets[e] = offsets[e];
    for (int e = threadIdx.x; e < experts; e += kThreads) c.schedule.expert_rows[e] = rows[e];
    if (threadIdx.x == 0) {
      c.schedule.info[0] = used;
      c.schedule.info[1] = longest / c.shape.topk;
      c.schedule.info[2] = 0;
    }
  }

  // ---- place
  range.walk<true>(c, [&](int expert, int rank, int route, float weight) {
    uint32_t same = __match_any_sync(kAll, expert);
    if (expert >= 0) {
      uint32_t row = offsets[expert] + mine[expert] + __popc(same & ((1u << lane) - 1));
      c.schedule.row_source[row] = rank * longest + route;
      c.schedule.row_weight[row] = weight;
    }
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) mine[expert] += __popc(same);
    __syncwarp();
  });
  // ---- padding, and the expert of each block of rows
  for (int e = blockIdx.x; e < experts; e += sorters) {
    for (uint32_t row = offsets[e] + rows[e] + threadIdx.x; row < offsets[e + 1]; row += kThreads) {
      c.schedule.row_source[row] = -1;
      c.schedule.row_weight[row] = 0.f;
    }
    for (uint32_t b = offsets[e] / MOK_TILE_ROWS + threadIdx.x; b < offsets[e + 1] / MOK_TILE_ROWS; b += kThreads)
      c.schedule.block_expert[b] = e;
  }
  for (int row = int(used) + blockIdx.x * kThreads + threadIdx.x; row < c.shape.capacity_rows; row += sorters * kThreads)
    c.schedule.row_source[row] = -1;
}

}  // namespace

__global__ __launch_bounds__(kThreads) void prepare_kernel(__grid_constant__ PrepareParams const p) {
  __shared__ Waiter waiter;
  Common const& c = p.common;
  if (threadIdx.x == 0) {
    Counters& counters = c.counters();
    waiter = {ptx::nanoseconds() + c.timeout_ns, &counters.stop.value, c.shape.rank, counters.epoch.value + 1, {}};
  }
  __shared__ bool stopped;
  if (threadIdx.x == 0) stopped = waiter.stopped();
  __syncthreads();
  // A rank that has given up does nothing more: peers may still be reading what an earlier launch left.
  if (stopped) return;
  prepare(p, waiter);
  __syncthreads();
  if (threadIdx.x == 0) waiter.publish(c.error);
}

size_t prepare_shared_bytes(int experts) { return (size_t(kWarps + 2) * experts + 1) * 4; }
int prepare_threads() { return kThreads; }

}  // namespace mok
