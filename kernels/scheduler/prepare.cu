// The prepare kernel: what has to happen before a megakernel can start.
//
// Forward: send this rank's routes to every peer, copy x where peers can pull it, and from all ranks' routes build
// the schedule by a counting sort. Backward: copy dY where peers can pull it. Both clear the counters of the launch.
#include "prepare.cuh"
#include "../comm/wait.cuh"

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
                       &k.compute_finished, &k.exited})
      p->value = 0;
  }
}

__device__ void copy_input(Common const& c, void const* from, size_t to) {
  if (c.shape.ranks == 1) return;  // pulled from where it is
  auto* dst = c.own<uint4>(to);
  auto* src = static_cast<uint4 const*>(from);
  size_t n = size_t(c.tokens) * c.shape.hidden / 8, stride = size_t(gridDim.x) * kThreads;
  for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += stride) dst[i] = src[i];
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
  if (!last) return;
  for (int peer = threadIdx.x; peer < c.shape.ranks; peer += kThreads) {
    c.peer<Announcement>(peer, c.symmetric.announcement)[c.shape.rank] = {uint32_t(c.tokens), c.signature};
    ptx::store_release_sys(c.peer<uint32_t>(peer, c.symmetric.routes_flag) + c.shape.rank, waiter.epoch);
  }
}

// Walks a range of the routes of all ranks, in (rank, token, k) order, 32 at a time: visit(expert or -1, rank, route).
struct RouteRange {
  int const* first_route;  // [ranks + 1] in shared memory: routes of the ranks before
  int begin, end;

  template <class Visit>
  __device__ void walk(Common const& c, Visit visit) const {
    int lane = threadIdx.x % 32, rank = 0;
    size_t stride = size_t(c.shape.max_tokens) * c.shape.topk;
    int first_expert = c.shape.rank * c.shape.experts_local;
    for (int base = begin; base < end; base += 32) {
      int i = base + lane, expert = -1, route = 0;
      if (i < end) {
        while (i >= first_route[rank + 1]) ++rank;
        route = i - first_route[rank];
        int global = c.own<int32_t>(c.symmetric.ids)[rank * stride + route];
        int local = global - first_expert;
        expert = global >= 0 && local >= 0 && local < c.shape.experts_local ? local : -1;
      }
      visit(expert, rank, route);
    }
  }
};

__device__ void prepare(PrepareParams const& p, Waiter const& waiter) {
  extern __shared__ uint32_t table[];  // [kWarps][E_local], then [E_local + 1] offsets
  __shared__ int first_route[kMaxRanks + 1];
  __shared__ int longest;
  __shared__ bool stopped;
  Common const& c = p.common;
  Counters& counters = c.counters();
  uint32_t epoch = waiter.epoch;
  int ranks = c.shape.ranks, experts = c.shape.experts_local, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (p.forward) send_routes(c, p.ids, p.weights, waiter);
  clear_counters(c);
  copy_input(c, p.input, c.symmetric.input);
  if (p.input_again != nullptr && c.schedule.info[2]) copy_input(c, p.input_again, c.symmetric.input_again);
  int sort_ctas = min(int(gridDim.x), kSortCtas);
  if (!p.forward || int(blockIdx.x) >= sort_ctas) return;

  // ---- all ranks' routes are here
  if (threadIdx.x == 0) stopped = false;
  __syncthreads();
  for (int r = threadIdx.x; r < ranks; r += kThreads) {
    if (!waiter.peer_flag(c.own<uint32_t>(c.symmetric.routes_flag) + r, epoch, MOK_FLAG_ROUTES, r)) {
      stopped = true;
      continue;
    }
    Announcement a = c.own<Announcement>(c.symmetric.announcement)[r];
    if (a.signature != c.signature || a.tokens > uint32_t(c.shape.max_tokens)) {
      waiter.give_up(MOK_SHAPE_MISMATCH, MOK_FLAG_ROUTES, r, -1, c.signature, a.signature);
      stopped = true;
    }
    first_route[r + 1] = int(a.tokens) * c.shape.topk;
  }
  __syncthreads();
  if (stopped) return;
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
  int total = first_route[ranks], warps = sort_ctas * kWarps;
  int each = (total + warps - 1) / warps, me = blockIdx.x * kWarps + warp;
  RouteRange range{first_route, min(total, me * each), min(total, (me + 1) * each)};
  uint32_t* mine = table + warp * experts;
  range.walk(c, [&](int expert, int, int) {
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
    stopped = !waiter.counter(&counters.prepare_counted.value, sort_ctas, MOK_FLAG_PREPARE, -1);
  }
  __syncthreads();
  if (stopped) return;

  // ---- offsets of experts; then the first row of each warp for each expert, in `table`
  uint32_t* offsets = table + kWarps * experts;
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    uint32_t before = 0, all = 0;
    for (int b = 0; b < sort_ctas; ++b) {
      uint32_t n = __ldcg(histogram + b * experts + e);
      if (b < int(blockIdx.x)) before += n;
      all += n;
    }
    offsets[e] = all;
    for (int w = 0; w < kWarps; ++w) {
      uint32_t n = table[w * experts + e];
      table[w * experts + e] = before;
      before += n;
    }
  }
  __syncthreads();
  __shared__ uint32_t used;
  if (threadIdx.x == 0) {
    uint32_t at = 0;
    for (int e = 0; e < experts; ++e) {
      uint32_t n = offsets[e];
      if (blockIdx.x == 0) c.schedule.expert_rows[e] = n;
      offsets[e] = at;
      at += (n + MOK_TILE_ROWS - 1) / MOK_TILE_ROWS * MOK_TILE_ROWS;
    }
    offsets[experts] = used = at;
  }
  __syncthreads();
  bool overflow = used > uint32_t(c.shape.capacity_rows);
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e <= experts; e += kThreads) c.schedule.expert_offsets[e] = overflow ? 0 : offsets[e];
    if (overflow)
      for (int e = threadIdx.x; e < experts; e += kThreads) c.schedule.expert_rows[e] = 0;
    if (threadIdx.x == 0) {
      c.schedule.info[0] = overflow ? 0 : used;
      c.schedule.info[1] = longest / c.shape.topk;
      c.schedule.info[2] = 0;
      if (overflow) {
        counters.failed.value = 1;
        waiter.note(MOK_OVERFLOW, MOK_FLAG_NONE, -1, -1, c.shape.capacity_rows, used);
      }
    }
  }
  if (overflow) return;

  // ---- place
  range.walk(c, [&](int expert, int rank, int route) {
    uint32_t same = __match_any_sync(kAll, expert);
    if (expert >= 0) {
      uint32_t row = offsets[expert] + mine[expert] + __popc(same & ((1u << lane) - 1));
      c.schedule.row_source[row] = rank * longest + route;
      c.schedule.row_weight[row] = c.own<float>(c.symmetric.weights)[size_t(rank) * c.shape.max_tokens * c.shape.topk + route];
    }
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) mine[expert] += __popc(same);
    __syncwarp();
  });
  // ---- padding, and the expert of each block of rows
  for (int e = blockIdx.x; e < experts; e += sort_ctas) {
    uint32_t rows = 0;
    for (int b = 0; b < sort_ctas; ++b) rows += __ldcg(histogram + b * experts + e);
    for (uint32_t row = offsets[e] + rows + threadIdx.x; row < offsets[e + 1]; row += kThreads) {
      c.schedule.row_source[row] = -1;
      c.schedule.row_weight[row] = 0.f;
    }
    for (uint32_t b = offsets[e] / MOK_TILE_ROWS + threadIdx.x; b < offsets[e + 1] / MOK_TILE_ROWS; b += kThreads)
      c.schedule.block_expert[b] = e;
  }
  for (int row = int(used) + blockIdx.x * kThreads + threadIdx.x; row < c.shape.capacity_rows; row += sort_ctas * kThreads)
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

size_t prepare_shared_bytes(int experts) { return (size_t(kWarps + 1) * experts + 1) * 4; }
int prepare_threads() { return kThreads; }

}  // namespace mok
