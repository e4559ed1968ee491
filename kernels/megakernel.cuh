// The frame that both directions share: a persistent kernel whose warps have fixed roles.
//
//   communication CTA   up to 7 warps pull rows
//   compute CTA         warp 0 loads operands, warp 1 takes tiles from the list, warp 2 signals finished tiles,
//                       warp 3 pulls rows (when there are no communication CTAs), warps 4 .. 11 multiply and store;
//                       on Blackwell warp 12 issues the products that they store
//
// A Program (forward.cuh, backward.cuh) says which tiles there are, what each waits for, and what becomes of it.
// Tiles are taken in the order of one list and wait only for earlier tiles and for pulled rows, which wait only for
// peers' inputs and for earlier tiles: so the earliest unfinished tile can always go on.
#pragma once
#include "comm/finish.cuh"
#include "comm/pull_mxfp8.cuh"
#include "mma/product.cuh"
#include "params.cuh"
#include "scheduler/tile.cuh"
#include "trace.cuh"

namespace mok {

constexpr int kThreads = kProducerThreads + kConsumerThreads + kIssuerThreads;
constexpr int kTileSlots = 4;    // tiles known to a CTA at once
constexpr int kClaimLead = 8;    // stages before the end of a tile at which the next one is taken
constexpr int kCommWarps = 7;    // of a communication CTA: what shared memory has rings for

struct SharedMemory {
  Stages stages;
  char pull_ring[kPullRingBytes];  // a communication CTA uses `stages` too, as six more rings
  PullSlot pull_slots[kCommWarps][kPullNotes];
  uint64_t pull_full[kCommWarps][kPullSlots];
  Pipeline pipeline;
  uint64_t tile_full[kTileSlots], tile_done[kTileSlots], tile_empty[kTileSlots];
  uint64_t claim;  // the producer is about to need another tile
  Waiter waiter;
  bool stopped;  // before this launch: then it does nothing, having no schedule, and peers may still read
  Tile tiles[kTileSlots];
};
static_assert(sizeof(Stages) + kPullRingBytes == kCommWarps * kPullRingBytes);
static_assert(sizeof(SharedMemory) <= 227 * 1024);

__device__ __forceinline__ void init_barriers(SharedMemory& s) {
  s.pipeline.init();
  for (int i = 0; i < kTileSlots; ++i) {
    ptx::barrier_init(s.tile_full + i, 1);
    ptx::barrier_init(s.tile_done + i, kConsumerWarps);
    ptx::barrier_init(s.tile_empty + i, kIssuerThreads > 0 ? 2 : 1);
  }
  for (int w = 0; w < kCommWarps; ++w)
    for (int i = 0; i < kPullSlots; ++i) ptx::barrier_init(&s.pull_full[w][i], 1);
  ptx::barrier_init(&s.claim, 1);
  ptx::barrier_init_fence();
}

__device__ __forceinline__ Major a_major(int kind) { return kind == kDw1 || kind == kDw2 ? Major::MN : Major::K; }
__device__ __forceinline__ Major b_major(int kind) { return kind == kFc1 || kind == kFc2 ? Major::K : Major::MN; }

// ---- roles of one thread each

template <class Program>
__device__ __forceinline__ void schedule_tiles(Program const& program, SharedMemory& s) {
  uint32_t* next = &program.common().counters().next_tile.value;
  for (uint32_t n = 0;; ++n) {
    uint32_t slot = n % kTileSlots, parity = n / kTileSlots % 2;
    bool ok = n == 0 || s.waiter.barrier(&s.claim, (n - 1) % 2);
    ok = ok && s.waiter.barrier(s.tile_empty + slot, parity ^ 1);
    Tile tile;
    // Waits for the tile's inputs before anyone sees it: the barrier passes on what this thread has acquired.
    ok = ok && program.tile(ptx::fetch_add_relaxed_gpu(next, 1), tile) && program.ready(tile, s.waiter);
    if (!ok) tile.kind = kEnd;
    s.tiles[slot] = tile;
    ptx::barrier_arrive(s.tile_full + slot);
    if (!ok) return;
  }
}

template <class Program>
__device__ __forceinline__ void load_operands(Program const& program, SharedMemory& s) {
  StageCursor cursor;
  for (uint32_t n = 0;; ++n) {
    uint32_t slot = n % kTileSlots;
    if (!s.waiter.barrier(s.tile_full + slot, n / kTileSlots % 2)) return;
    Tile const t = s.tiles[slot];
    if (t.kind == kEnd) return;
    ptx::fence_async_proxy();  // what other SMs stored, before the copy engine reads it
    bool a_major_k = a_major(t.kind) == Major::K, b_major_k = Program::b_major_k(t);
    void const* map_a = program.map(t.map_a);
    void const* map_b = program.map(t.map_b);
    int expert = a_major_k ? t.expert : 0, claim_at = max(0, t.k_tiles - kClaimLead);
    if (t.k_tiles == 0) ptx::barrier_arrive(&s.claim);
#pragma unroll 1
    for (int i = 0, k = t.k0; i < t.k_tiles; ++i, k += t.k_step) {
      if (i == claim_at) ptx::barrier_arrive(&s.claim);
      if (!s.waiter.barrier(s.pipeline.empty + cursor.index, cursor.parity ^ 1)) return;
      uint64_t* full = s.pipeline.full + cursor.index;
      ptx::barrier_arrive_expect(full, kStageBytesA + kStageBytesB);
      if (a_major_k) ptx::tma_load(s.stages.a[cursor.index], map_a, full, k, t.at_a, 0, 0);
      else ptx::tma_load(s.stages.a[cursor.index], map_a, full, 0, k, t.at_a, 0);
      if (b_major_k) ptx::tma_load(s.stages.b[cursor.index], map_b, full, k, t.at_b, 0, expert);
      else ptx::tma_load(s.stages.b[cursor.index], map_b, full, 0, k, t.at_b, expert);
      cursor.advance();
    }
  }
}

template <class Program>
__device__ __forceinline__ void signal_tiles(Program const& program, SharedMemory& s) {
  for (uint32_t n = 0;; ++n) {
    uint32_t slot = n % kTileSlots, parity = n / kTileSlots % 2;
    if (!s.waiter.barrier(s.tile_full + slot, parity) || s.tiles[slot].kind == kEnd) return;
    if (!s.waiter.barrier(s.tile_done + slot, parity)) return;
    ptx::fence_gpu();
    ptx::fence_async_proxy();
    program.completed(s.tiles[slot], s.waiter);
    ptx::barrier_arrive(s.tile_empty + slot);
  }
}

// ---- roles of whole warps

template <class Program>
__device__ __forceinline__ void pull_rows(Program const& program, SharedMemory& s, int ring) {
  char* memory = ring == 0 ? s.pull_ring : reinterpret_cast<char*>(&s.stages) + (ring - 1) * kPullRingBytes;
  Common const& c = program.common();
  if constexpr (Program::kPullsMx) {
    pull_expanded<4, true>(c, s.waiter, &c.counters().next_pull.value, [&](uint32_t n, PullJob& job) { return program.pull_job(n, job); },
                           [] { return false; });
    return;
  }
  Puller puller(c, memory, s.pull_slots[ring], s.pull_full[ring], s.waiter);
  puller.template run<Program::kExpands>(&c.counters().next_pull.value, [&](uint32_t n, PullJob& job) { return program.pull_job(n, job); });
}

// By the warps that only issue products, where there are any.
__device__ __forceinline__ void issue_tiles(SharedMemory& s) {
  issue_products(s.stages, s.pipeline, s.waiter, [&s](uint32_t n, Product& product) {
    uint32_t slot = n % kTileSlots;
    if (!__all_sync(0xffffffffu, s.waiter.barrier(s.tile_full + slot, n / kTileSlots % 2))) return false;
    Tile const& t = s.tiles[slot];
    product = {a_major(t.kind), b_major(t.kind), t.k_tiles, t.carry_in != 0};
    bool end = t.kind == kEnd;
    __syncwarp();
    if (!end && threadIdx.x % 32 == 0) ptx::barrier_arrive(s.tile_empty + slot);
    return !end;
  });
}

template <class Program>
__device__ __forceinline__ uint32_t multiply_tiles(Program const& program, SharedMemory& s, int thread) {
  ProductCursor cursor;
  Common const& c = program.common();
  auto pull = [&](uint64_t* tile, uint32_t parity) {
    auto job = [&](uint32_t n, PullJob& job) { return program.pull_job(n, job); };
    auto enough = [&] { return __any_sync(0xffffffffu, thread % 32 == 0 && ptx::barrier_try_wait(tile, parity)); };
    uint32_t* next = &c.counters().next_pull.value;
    if constexpr (Program::kPullsMx) return pull_expanded<8, false>(c, s.waiter, next, job, enough);
    else return pull_until<Program::kExpands>(c, s.waiter, next, job, enough);
  };
  bool more = program.pulls_freely() && pull(s.tile_full, 0);
  for (uint32_t n = 0;; ++n) {
    uint32_t slot = n % kTileSlots, parity = n / kTileSlots % 2;
    // In FP8 a tile may wait for rows to be expanded.
    if (Program::kExpands && more && n > 0) more = pull(s.tile_full + slot, parity);
    TileTimes times(c, thread, n);
    if (!s.waiter.barrier(s.tile_full + slot, parity)) return n;
    Tile const& t = s.tiles[slot];
    times.started();
    if (t.kind == kEnd || !program.compute(t, s, cursor, thread, times)) return n;
    times.stored(t.kind, t.block, t.col);
    __syncwarp();
    if (thread % 32 == 0) ptx::barrier_arrive(s.tile_done + slot);
  }
}

template <class Program>
__global__ __launch_bounds__(kThreads, 1) void megakernel(__grid_constant__ typename Program::Params const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<SharedMemory*>(raw);
  Common const& c = p.common;
  Counters& counters = c.counters();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    s.waiter = {ptx::nanoseconds() + c.timeout_ns, &counters.stop.value, c.shape.rank, counters.epoch.value + 1, {}};
    s.stopped = s.waiter.stopped();
    init_barriers(s);
  }
  __syncthreads();
  if (s.stopped) return;
  // The prepare kernel has put the input where peers can pull it.
  if (blockIdx.x == 0)
    for (int peer = threadIdx.x; peer < c.shape.ranks; peer += kThreads)
      ptx::store_release_sys(c.peer<uint32_t>(peer, c.symmetric.input_flag) + c.shape.rank, s.waiter.epoch);

  Program program(p);
  if (blockIdx.x == 0 && threadIdx.x == 0 && program.pushing_tiles() == 0) announce_done(c, s.waiter, program.evicts());
  bool moves_only = int(blockIdx.x) < c.comm_ctas;
  if (!moves_only) begin_products(s.pipeline);
  if (moves_only) {
    if (warp < kCommWarps) pull_rows(program, s, warp);
  } else if (warp < 4) {
    ptx::registers_release<Program::kProducerRegisters>();
    if (warp == 3) {
      if (c.comm_ctas == 0) pull_rows(program, s, 0);
    } else if (lane == 0) {
      if (warp == 0) load_operands(program, s);
      if (warp == 1) schedule_tiles(program, s);
      if (warp == 2) signal_tiles(program, s);
    }
  } else if (warp >= (kProducerThreads + kConsumerThreads) / 32) {
    issue_tiles(s);
  } else {
    ptx::registers_acquire<Program::kConsumerRegisters>();
    int thread = threadIdx.x - kProducerThreads;
    uint32_t tiles = multiply_tiles(program, s, thread);
    TileTimes times(c, thread, tiles);
    if (await_done(c, s.waiter, thread, Program::kForward)) {
      times.started();
      program.finish((int(blockIdx.x) - c.comm_ctas) * kConsumerThreads + thread, (gridDim.x - c.comm_ctas) * kConsumerThreads);
      times.multiplied();
      times.stored(kTraceFinish, 0, 0);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) s.waiter.publish(c.error);
  if (s.waiter.stopped()) {
    // Loads may be on their way into this CTA's shared memory; it must outlive them.
    for (int i = 0; i < 1000; ++i) __nanosleep(1000);
  } else if (threadIdx.x == 0 && ptx::fetch_add_acq_rel_sys(&counters.exited.value, 1) == gridDim.x - 1) {
    counters.prepare_pushed.value = counters.prepare_counted.value = 0;
    counters.epoch.value = s.waiter.epoch;
  }
  if (!moves_only) end_products(s.pipeline);
}

}  // namespace mok
