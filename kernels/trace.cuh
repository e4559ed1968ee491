// When each CTA handled which tile, if the host asked for it.
#pragma once
#include "params.cuh"
#include "ptx/barrier.cuh"

namespace mok {

constexpr int kTraceFinish = 7;  // kind of the entry for the end: waiting for peers, then the sum over k

// By all multiplying threads; the first one records.
class TileTimes {
 public:
  __device__ __forceinline__ TileTimes(Common const& c, int thread, uint32_t n) : entry_(nullptr) {
    if (c.trace == nullptr || thread != 0 || n >= uint32_t(c.trace_tiles)) return;
    entry_ = c.trace + size_t(blockIdx.x) * c.trace_tiles + n;
    entry_->waiting = ptx::nanoseconds();
  }
  __device__ __forceinline__ void started() {
    if (entry_ != nullptr) entry_->started = ptx::nanoseconds();
  }
  __device__ __forceinline__ void multiplied() {
    if (entry_ != nullptr) entry_->multiplied = ptx::nanoseconds();
  }
  __device__ __forceinline__ void stored(int kind, int block, int column) {
    if (entry_ == nullptr) return;
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    entry_->stored = ptx::nanoseconds();
    entry_->block = block;
    entry_->column = column;
    entry_->sm = int32_t(sm);
    entry_->kind = kind;
  }

 private:
  MokTraceTile* entry_;
};

}  // namespace mok
