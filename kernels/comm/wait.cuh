// Waiting with a deadline. Every spin of the kernels goes through a Waiter.
#pragma once
#include <cstdint>
#include "../mok_api.h"
#include "../ptx/barrier.cuh"
#include "../ptx/memory.cuh"

namespace mok {

// What a wait needs to know to give up. One a CTA, in shared memory.
//
// The code of a spin is inlined in many places, so it is small: the first failure is noted in shared memory, and one
// thread publishes it at the end of the kernel.
struct Waiter {
  uint64_t deadline;  // of %globaltimer
  uint32_t* stop;     // of this rank, in global memory; set by the first thread that gives up
  int rank;
  uint32_t epoch;
  mutable MokError noted;

  // Called now and then by a spinning thread. False: give up.
  __device__ __forceinline__ bool go_on(int flag, int peer, int index, uint32_t expected, uint32_t seen) const {
    if (stopped()) return false;
    // Waits on this rank's own counters get a second more, so that the peer behind them is named instead.
    if (ptx::nanoseconds() < deadline + (flag >= MOK_FLAG_ROWS ? 1000000000ull : 0)) return true;
    give_up(MOK_TIMEOUT, flag, peer, index, expected, seen);
    return false;
  }
  // Stops this rank's launch; its other threads see `stop` in their own waits.
  __device__ __forceinline__ void give_up(int code, int flag, int peer, int index, uint32_t expected, uint32_t seen) const {
    if (atomicExch(stop, 1u) == 0u) note(code, flag, peer, index, expected, seen);
  }
  // Notes an error and lets the launch run on, so that peers need not wait for their deadline.
  __device__ __forceinline__ void note(int code, int flag, int peer, int index, uint32_t expected, uint32_t seen) const {
    if (atomicCAS(&noted.code, MOK_OK, code) != MOK_OK) return;
    noted.flag = flag, noted.rank = rank, noted.peer = peer, noted.index = index;
    noted.expected = expected, noted.seen = seen, noted.epoch = epoch;
  }
  __device__ __forceinline__ bool stopped() const { return ptx::load_relaxed_gpu(stop) != 0; }

  // By one thread of the CTA, when the others are done. Keeps the first error of the workspace.
  __device__ void publish(MokError* error) const {
    if (noted.code == MOK_OK || *reinterpret_cast<int32_t volatile*>(&error->code) != MOK_OK) return;
    int32_t code = noted.code;
    error->flag = noted.flag;
    error->rank = noted.rank;
    error->peer = noted.peer;
    error->index = noted.index;
    error->expected = noted.expected;
    error->seen = noted.seen;
    error->epoch = noted.epoch;
    __threadfence_system();
    *reinterpret_cast<int32_t volatile*>(&error->code) = code;
    __threadfence_system();
  }

  // A counter of this rank reaches `expected` (counters only grow; the comparison survives wrapping).
  __device__ __forceinline__ bool counter(uint32_t const* p, uint32_t expected, int flag, int index) const {
#pragma unroll 1
    for (uint32_t spin = 0;; ++spin) {
      uint32_t seen = ptx::load_acquire_gpu(p);
      if (int32_t(seen - expected) >= 0) return true;
      if (spin % 256 == 255 && !go_on(flag, -1, index, expected, seen)) return false;
    }
  }
  // A flag that a peer writes into this rank's memory reaches `expected`.
  __device__ __forceinline__ bool peer_flag(uint32_t const* p, uint32_t expected, int flag, int peer) const {
#pragma unroll 1
    for (uint32_t spin = 0;; ++spin) {
      uint32_t seen = ptx::load_acquire_sys(p);
      if (int32_t(seen - expected) >= 0) return true;
      if (spin % 256 == 255 && !go_on(flag, peer, -1, expected, seen)) return false;
    }
  }
  // A barrier in shared memory completes the phase of that parity.
  __device__ __forceinline__ bool barrier(uint64_t* bar, uint32_t parity) const {
#pragma unroll 1
    for (uint32_t spin = 0; !ptx::barrier_try_wait(bar, parity); ++spin) {
      if (spin % 256 == 255 && !go_on(MOK_FLAG_PIPELINE, -1, -1, parity, 0)) return false;
    }
    return true;
  }
};

}  // namespace mok
