// The copy engine: bulk copies of contiguous bytes, and TMA loads of tiles.
#pragma once
#include <cstdint>
#include "barrier.cuh"

namespace mok::ptx {

// Global (local or a peer's) to shared; completes on `bar`. 16-byte aligned, multiple of 16 bytes.
__device__ __forceinline__ void bulk_load(void* dst, void const* src, uint32_t bytes, uint64_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(dst)), "l"(src), "r"(bytes), "r"(shared_address(bar)) : "memory");
}
// Shared to global, as a group of its own.
__device__ __forceinline__ void bulk_store(void* dst, void const* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(shared_address(src)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most `Pending` of this thread's latest groups are incomplete; the others' writes are visible.
template <int Pending>
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory"); }

// Likewise, but only until shared memory has been read.
template <int Pending>
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory"); }

// Global to L2 only.
__device__ __forceinline__ void bulk_prefetch(void const* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

// One box of a four-dimensional tensor map.
__device__ __forceinline__ void tma_load(void* dst, void const* map, uint64_t* bar, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          shared_address(dst)), "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
__device__ __forceinline__ void prefetch_map(void const* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace mok::ptx
