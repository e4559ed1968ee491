// Pulling routed rows from the ranks that own the tokens: by warps that have nothing else to do.
//
// A warp takes a few rows at a time from a counter. Its first lane moves each row in pieces from the peer's memory
// through a small ring in shared memory to its place, with the copy engine, and counts the row once it is there.
#pragma once
#include "../formats/blockwise.cuh"
#include "../formats/mxfp8.cuh"
#include "../params.cuh"
#include "../ptx/bulk.cuh"
#include "wait.cuh"

namespace mok {

constexpr int kPullSlots = 8;     // pieces in the ring of a warp
constexpr int kPullPiece = 4096;  // bytes
constexpr int kPullReads = 4;   // latest stores of which the ring may still be read
constexpr int kPullWrites = 4;  // latest stores that may not be in place yet: waiting for fewer stalls the warp
constexpr int kPullRingBytes = kPullSlots * kPullPiece;

// Some rows (Common::pull_rows) to be pulled into consecutive rows of a buffer.
struct PullJob {
  char* dst;                  // first row
  uint32_t* arrived;          // counts rows
  int row;                    // in the schedule
  uint32_t const* after;      // not before this counter
  uint32_t after_value;       // has reached this, if not null
  int after_flag, after_index;
  char const* own_input;      // [T, H] of this rank
  size_t peer_input;          // offset of the same in the peers' symmetric heaps
  // Not null: nothing is pulled; the rows at `dst`, whose block has `arrived`, are to be expanded to bf16 here.
  __nv_bfloat16* wide;
  Fp8 type;  // of the rows, in MXFP8: pull_mxfp8.cuh
};

struct PullSlot {
  char* dst;
  uint16_t bytes;
  uint16_t rows;     // to be counted once this piece is in place: of the job that it ends; else 0
  uint32_t counter;  // where: offset in the scratch
};
constexpr int kPullNotes = 16;  // pieces remembered: in the ring, or not yet known to be in place
static_assert(kPullNotes >= kPullSlots + kPullWrites);

// A job that expands rows; by a whole warp. False: the launch was stopped.
__device__ __forceinline__ bool expand(Common const& c, Waiter const& waiter, PullJob const& j) {
  bool here = j.arrived == nullptr || waiter.counter(j.arrived, MOK_TILE_ROWS, MOK_FLAG_ROWS, j.row / MOK_TILE_ROWS);
  if (!__all_sync(0xffffffffu, here)) return false;
  expand_rows(j.dst, c.row_bytes, c.shape.hidden, c.pull_rows, j.wide);
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::add_release_gpu(&c.counters().expanded.value, c.pull_rows);
  return true;
}

class Puller {
 public:
  __device__ Puller(Common const& c, char* ring, PullSlot* slots, uint64_t* full, Waiter const& w)
      : c_(c), ring_(ring), slots_(slots), full_(full), waiter_(w) {}

  // Runs by a whole warp, until `job(number, PullJob&)` returns false or the launch is stopped. `Expands`: there are jobs
  // that expand rows.
  template <bool Expands, class Job>
  __device__ void run(uint32_t* next, Job job) {
    int lane = threadIdx.x % 32;
    uint32_t row_bytes = c_.row_bytes;
    int stride = c_.routes_per_rank(), rows = c_.pull_rows;
    // Two jobs ahead, so that neither the counter nor the schedule is waited for: the number of the one after next
    // and the source of the next arrive while a job is under way.
    auto claim = [&] { return lane == 0 ? ptx::fetch_add_relaxed_gpu(next, 1) : 0u; };
    auto source_of = [&](uint32_t n) {
      PullJob j;
      return job(n, j) && lane < rows ? c_.schedule.row_source[j.row + lane] : -1;
    };
    uint32_t number = __shfl_sync(0xffffffffu, claim(), 0), after = claim();
    int source = source_of(number);
    for (;;) {
      PullJob j;
      if (!job(number, j)) break;
      number = __shfl_sync(0xffffffffu, after, 0);
      int const sources = source;
      source = source_of(number);
      after = claim();
      if constexpr (Expands) {
        if (j.wide != nullptr) {
          // Others may be waiting for the rows in hand, and this for theirs.
          if (!__shfl_sync(0xffffffffu, lane != 0 || flush(), 0) || !expand(c_, waiter_, j)) return;
          continue;
        }
      }
      bool ok = lane != 0 || j.after == nullptr || allowed(j);
      if (!__shfl_sync(0xffffffffu, ok, 0)) return;
      int padding = 0;
#pragma unroll 1
      for (int r = 0; r < rows; ++r) {
        int s = __shfl_sync(0xffffffffu, sources, r);
        char* dst = j.dst + size_t(r) * row_bytes;
        if (s < 0) {
          // Zeros, because weight gradients sum over padding too.
          for (uint32_t at = lane * 16; at < row_bytes; at += 512) ptx::store_16(dst + at, make_uint4(0, 0, 0, 0));
          ++padding;
        } else if (lane == 0) {
          int rank = s / stride;
          ok = ok && peer_ready(rank) && row(source_row(j, rank, s % stride / c_.shape.topk), dst, row_bytes);
        }
      }
      __syncwarp();
      if (lane == 0 && ok) {
        if (padding > 0) ptx::add_release_gpu(j.arrived, padding);
        if (padding < rows) note(j.arrived, rows - padding);
      }
      if (!__shfl_sync(0xffffffffu, ok, 0)) return;
    }
    if (lane == 0) flush();
  }

 private:
  __device__ char const* source_row(PullJob const& j, int rank, int token) const {
    char const* base = rank == c_.shape.rank ? j.own_input : c_.peer<char const>(rank, j.peer_input);
    return base + size_t(token) * c_.row_bytes;
  }

  __device__ bool allowed(PullJob const& j) {
    if (int32_t(ptx::load_acquire_gpu(j.after) - j.after_value) >= 0) return true;
    // Others may be waiting for the rows in hand, and this wait for them.
    return flush() && waiter_.counter(j.after, j.after_value, j.after_flag, j.after_index);
  }

  __device__ bool peer_ready(int rank) {
    if (rank == c_.shape.rank || (rank < 64 && (ready_ >> rank & 1))) return true;
    uint32_t const* flag = c_.own<uint32_t>(c_.symmetric.input_flag) + rank;
    if (int32_t(ptx::load_acquire_sys(flag) - waiter_.epoch) < 0) {
      if (!flush() || !waiter_.peer_flag(flag, waiter_.epoch, MOK_FLAG_INPUT, rank)) return false;
    }
    ptx::fence_async_proxy();
    if (rank < 64) ready_ |= 1ull << rank;
    return true;
  }

  __device__ bool row(char const* src, char* dst, uint32_t bytes) {
#pragma unroll 1
    for (uint32_t at = 0; at < bytes; at += kPullPiece) {
      uint32_t size = min(uint32_t(kPullPiece), bytes - at);
      while (issued_ - stored_ >= uint32_t(kPullSlots - kPullReads))
        if (!store_one()) return false;
      uint32_t slot = issued_ % kPullSlots;
      slots_[issued_ % kPullNotes] = {dst + at, uint16_t(size), 0, 0};
      ptx::barrier_arrive_expect(full_ + slot, size);
      ptx::bulk_load(ring_ + slot * kPullPiece, src + at, size, full_ + slot);
      ++issued_;
    }
    return true;
  }

  __device__ bool store_one() {
    uint32_t slot = stored_ % kPullSlots;
    if (!waiter_.barrier(full_ + slot, stored_ / kPullSlots % 2)) return false;
    PullSlot const& piece = slots_[stored_ % kPullNotes];
    ptx::bulk_store(piece.dst, ring_ + slot * kPullPiece, piece.bytes);
    ++stored_;
    ptx::bulk_wait_read<kPullReads>();
    // A count costs fences, so pieces are counted four at a time.
    if (stored_ % 4 == 0 && stored_ > kPullWrites) {
      ptx::bulk_wait<kPullWrites>();
      count_up_to(stored_ - kPullWrites);
    }
    return true;
  }

  // The job that ends with the latest piece has `rows` rows.
  __device__ void note(uint32_t* arrived, uint32_t rows) {
    if (counted_ == issued_) {
      count(arrived, rows);
    } else {
      PullSlot& last = slots_[(issued_ - 1) % kPullNotes];
      last.rows = uint16_t(rows);
      last.counter = uint32_t(reinterpret_cast<char*>(arrived) - c_.scratch);
    }
  }

  // All pieces before `end` are in place.
  __device__ void count_up_to(uint32_t end) {
    ptx::fence_async_proxy();
    for (; counted_ < end; ++counted_) {
      PullSlot const& piece = slots_[counted_ % kPullNotes];
      if (piece.rows > 0) count(c_.counts(piece.counter), piece.rows);
    }
  }
  __device__ void count(uint32_t* arrived, uint32_t rows) {
    ptx::add_release_gpu(arrived, rows);
  }

  __device__ bool flush() {
    while (stored_ < issued_)
      if (!store_one()) return false;
    ptx::bulk_wait<0>();
    count_up_to(stored_);
    return true;
  }

  Common const& c_;
  char* ring_;
  PullSlot* slots_;
  uint64_t* full_;
  Waiter const& waiter_;
  uint64_t ready_ = 0;  // peers known to be ready
  uint32_t issued_ = 0, stored_ = 0, counted_ = 0;
};

// Rows pulled by a warp that would only wait otherwise, with ordinary loads and stores: many such warps are faster than
// the copy engine's rings, at the price of their registers. Until `enough()`. Where a job may have to wait for a tile, this
// must not be used: the warp is one of those that finish tiles. False: no job is left, or the launch was stopped.
template <bool Expands, class Job, class Enough>
__device__ __forceinline__ bool pull_until(Common const& c, Waiter const& waiter, uint32_t* next, Job job, Enough enough) {
  constexpr int kAtOnce = 8;  // loads in flight
  int lane = threadIdx.x % 32, stride = c.routes_per_rank(), quads = c.row_bytes / 16;
  int ready = c.shape.rank;   // a peer known to be ready
  while (!enough()) {
    PullJob j;
    if (!job(__shfl_sync(0xffffffffu, lane == 0 ? ptx::fetch_add_relaxed_gpu(next, 1) : 0u, 0), j)) return false;
    if (Expands && j.wide != nullptr) {
      if (!expand(c, waiter, j)) return false;
      continue;
    }
    int sources = lane < c.pull_rows ? c.schedule.row_source[j.row + lane] : 0;
    for (int r = 0; r < c.pull_rows; ++r) {
      int s = __shfl_sync(0xffffffffu, sources, r), rank = s < 0 ? c.shape.rank : s / stride;
      if (rank != ready && rank != c.shape.rank) {
        uint32_t const* flag = c.own<uint32_t>(c.symmetric.input_flag) + rank;
        if (!__all_sync(0xffffffffu, waiter.peer_flag(flag, waiter.epoch, MOK_FLAG_INPUT, rank))) return false;
        ready = rank;
      }
      char const* base = rank == c.shape.rank ? j.own_input : c.peer<char const>(rank, j.peer_input);
      auto* from = reinterpret_cast<uint4 const*>(base) + (s < 0 ? 0 : size_t(s % stride / c.shape.topk) * quads);
      auto* to = reinterpret_cast<uint4*>(j.dst) + size_t(r) * quads;
      for (int first = lane; first < quads; first += 32 * kAtOnce) {
        uint4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          v[i] = make_uint4(0, 0, 0, 0);
          if (s >= 0 && first + 32 * i < quads) v[i] = ptx::load_l2(from + first + 32 * i);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (first + 32 * i < quads) ptx::store_16(to + first + 32 * i, v[i]);
      }
    }
    __syncwarp();
    if (lane == 0) ptx::add_release_gpu(j.arrived, c.pull_rows);
  }
  return true;
}

}  // namespace mok
