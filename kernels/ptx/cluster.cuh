// A cluster of two CTAs: barriers in each other's shared memory, and loads that count there. For Blackwell's pairs.
#pragma once
#include <cstdint>
#include "barrier.cuh"

namespace mok::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// By all threads of the cluster. It has no deadline: only where each CTA is bound to arrive.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
// At the barrier that CTA `rank` of the cluster has where this one has `bar`.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* bar, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(bar)), "r"(rank) : "memory");
}
// One box to this CTA's shared memory, counted by the barrier of the pair's leader (bit 24 of an address in the
// cluster's shared memory tells the two CTAs of a pair apart; CUTLASS calls it Sm100MmaPeerBitMask).
__device__ __forceinline__ void tma_load_of_pair(void* dst, void const* map, uint64_t* bar, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          shared_address(dst)), "l"(map), "r"(shared_address(bar) & 0xFEFFFFFFu), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

}  // namespace mok::ptx
