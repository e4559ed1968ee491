// The tile product on Blackwell (sm_100a, sm_103a): 128 x 256 of C in tensor memory, 64 of K a stage.
//
// One warp issues the products (tcgen05.mma) into one of two accumulators in tensor memory, and so works on the next
// tile while the consumer warps store this one. They copy it to registers first, with the copy whose layout is that of
// Hopper's wgmma: so epilogues know nothing of tensor memory. Compiled and checked, never run: see docs/blackwell.md.
#pragma once
#include <cute/tensor.hpp>
#include <cute/arch/mma_sm100_umma.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>
#include "../comm/wait.cuh"
#include "../ptx/cluster.cuh"
#include "shape.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM100_ALL) && !defined(__CUDA_ARCH_FEAT_SM103_ALL)
#error "compile for sm_100a or sm_103a: sm_100 and sm_103 have no tcgen05"
#endif

namespace mok {

constexpr int kStages = 4;
constexpr int kAccumulators = 2;      // in tensor memory, all of which they fill
constexpr int kIssuerThreads = 128;   // a warp group, because registers are given to groups; its first warp issues
constexpr int kIssuerWarp = (kProducerThreads + kConsumerThreads) / 32;
constexpr int kProducerRegisters = 48, kConsumerRegisters = 216, kIssuerRegisters = 32;
static_assert(kProducerThreads % 128 == 0);  // a warp's lanes of tensor memory follow from its number
static_assert((kProducerRegisters + 2 * kConsumerRegisters + kIssuerRegisters) * 128 <= 65536);

struct alignas(1024) Stages {
  cutlass::bfloat16_t a[kStages][kTileRows * kTileK];
  cutlass::bfloat16_t b[kStages][kTileCols * kTileK];
};

using StageCursor = RingCursor<kStages>;
using ProductCursor = RingCursor<kAccumulators>;  // of the consumers

// Of one CTA, or of two that multiply together (sm100_pair.cuh). A pair waits for `full`, `drained` and `restored` at its
// leader, the CTA of rank 0.
template <int Stages, int Ctas>
struct PipelineOf {
  uint64_t full[Stages], empty[Stages];
  uint64_t multiplied[kAccumulators];  // the tensor cores have finished a tile
  uint64_t drained[kAccumulators];     // every consumer warp has its part in registers
  uint64_t restored;                   // a tile's accumulators have been put back, to be continued
  uint32_t tensor_memory;              // address of the first accumulator

  __device__ __forceinline__ void init() {
    for (int i = 0; i < Stages; ++i) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, 1);
    }
    for (int i = 0; i < kAccumulators; ++i) {
      ptx::barrier_init(multiplied + i, 1);
      ptx::barrier_init(drained + i, Ctas * kConsumerWarps);
    }
    ptx::barrier_init(&restored, Ctas * kConsumerWarps);
  }

  // By a thread that has drained or restored its warp's part.
  static __device__ __forceinline__ void arrive(uint64_t* bar) {
    if constexpr (Ctas == 1) ptx::barrier_arrive(bar);
    else ptx::barrier_arrive_at(bar, 0);
  }
  // Once all products that this thread has started are finished; in each CTA.
  static __device__ __forceinline__ void commit(uint64_t* bar) {
    if constexpr (Ctas == 1) cutlass::arch::umma_arrive(bar);
    else cutlass::arch::umma_arrive_multicast_2x1SM(bar, 0b11);
  }
};
using Pipeline = PipelineOf<kStages, 1>;


namespace sm100 {
using namespace cute;
template <Major M>
inline constexpr UMMA::Major kMajor = M == Major::K ? UMMA::Major::K : UMMA::Major::MN;
template <Major A, Major B>
using Mma = decltype(make_tiled_mma(SM100_MMA_F16BF16_SS<bfloat16_t, bfloat16_t, float, kTileRows, kTileCols,
                                                         kMajor<A>, kMajor<B>>{}));
template <Major M>
using Atom = conditional_t<M == Major::K, UMMA::Layout_K_SW128_Atom<bfloat16_t>, UMMA::Layout_MN_SW128_Atom<bfloat16_t>>;
// A box of TMA fills all of K for 64 columns before the next 64, so MN-major atoms are stacked along K first.
template <Major M, int Extent>
using OperandLayout = decltype(tile_to_shape(Atom<M>{}, Shape<Int<Extent>, Int<kTileK>, Int<kStages>>{},
                                      conditional_t<M == Major::K, Step<_1, _2, _3>, Step<_2, _1, _3>>{}));

// Copies between tensor memory and registers of a warp: 16 rows and half of a tile's columns. The whole of them would
// be 128 registers in one instruction, which ptxas refuses where a launch starts with 128 a thread.
using Load = SM100_TMEM_LOAD_16dp256b16x;
using Store = SM100_TMEM_STORE_16dp256b16x;
constexpr int kCopies = 2, kCopyCols = kTileCols / kCopies;

// The tile in tensor memory: a row a lane, a column a 32-bit word.
template <class Pipeline>
__device__ __forceinline__ auto accumulator(Pipeline const& pipeline, int index) {
  auto tile = partition_fragment_C(Mma<Major::K, Major::K>{}, Shape<Int<kTileRows>, Int<kTileCols>>{});
  tile.data() = pipeline.tensor_memory + index * kTileCols;
  return tile;
}

// First row of a consumer's warp. A warp reaches 32 lanes of tensor memory, by its number modulo 4; the two warps with
// the same lanes, one a warp group, take half each.
__host__ __device__ constexpr int first_row(int thread) { return thread % 128 / 32 * 32 + thread / 128 * 16; }

// What a warp copies, one copy a column.
template <class Pipeline>
__device__ __forceinline__ auto warp_rows(Pipeline const& pipeline, int index, int thread) {
  auto tile = accumulator(pipeline, index);
  auto at = tile.layout()(make_coord(make_coord(first_row(thread), 0), 0, 0));
  return make_tensor(tile.data() + at, Layout<Shape<Shape<Int<kCopyCols>, _16>, Int<kCopies>>,
                                              Stride<Stride<_1, TMEM::DP<float>>, Int<kCopyCols>>>{});
}

// tcgen05 instructions of different threads are ordered by barriers only between these two.
__device__ __forceinline__ void fence_before_barrier() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void fence_after_barrier() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
// Its own instructions need whole warps, so that a warp gives up as one.
__device__ __forceinline__ bool wait(Waiter const& waiter, uint64_t* bar, uint32_t parity) {
  return __all_sync(0xffffffffu, waiter.barrier(bar, parity));
}
}  // namespace sm100

// Element 4 * j + 2 * h + i of a thread is row accumulator_row(thread, h), column 8 * j + 2 * (thread % 4) + i.
using Accumulator = decltype(cute::make_tensor<float>(
    cute::Shape<cute::Int<kAccumulatorSize / sm100::kCopies>, cute::Int<sm100::kCopies>>{}));

__host__ __device__ __forceinline__ constexpr int accumulator_row(int thread, int half) {
  return sm100::first_row(thread) + thread % 32 / 4 + half * 8;
}

__device__ __forceinline__ void clear(Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < kAccumulatorSize; ++i) acc(i) = 0.f;
}

// By all threads of the CTA. There is one CTA an SM, so all of tensor memory is there to be had.
__device__ __forceinline__ void begin_products(Pipeline& pipeline) {
  cute::TMEM::Allocator1Sm memory;
  if (threadIdx.x / 32 == kIssuerWarp) {
    __syncwarp();
    memory.allocate(kAccumulators * kTileCols, &pipeline.tensor_memory);
    memory.release_allocation_lock();
    sm100::fence_before_barrier();
  }
  __syncthreads();
  sm100::fence_after_barrier();
}
// When no thread uses accumulators any more.
__device__ __forceinline__ void end_products(Pipeline& pipeline) {
  if (threadIdx.x / 32 != kIssuerWarp) return;
  __syncwarp();
  sm100::fence_after_barrier();
  cute::TMEM::Allocator1Sm().free(pipeline.tensor_memory, kAccumulators * kTileCols);
}

// Where the issuing warp stands.
template <int Accumulators, int Stages = kStages>
struct IssueCursor {
  RingCursor<Stages> stage;
  RingCursor<Accumulators> accumulator;
  uint32_t restored = 0;  // parity
};

// Starts a tile's product. `start(accumulator, stage, scale)` starts that of one stage, added to the accumulators if
// `scale` is One. By the whole issuing warp, of which the instructions choose a thread.
template <class Pipeline, int Accumulators, int Stages, class Start>
__device__ __forceinline__ bool issue(Pipeline& pipeline, IssueCursor<Accumulators, Stages>& cursor, Product const& p,
                                      Waiter const& waiter, Start start) {
  using namespace cute;
  if (p.k_tiles == 0) return true;
  int index = cursor.accumulator.index;
  if (!sm100::wait(waiter, pipeline.drained + index, cursor.accumulator.parity ^ 1)) return false;
  if (p.restored) {
    if (!sm100::wait(waiter, &pipeline.restored, cursor.restored)) return false;
    cursor.restored ^= 1;
  }
  auto acc = sm100::accumulator(pipeline, index);
  auto scale = p.restored ? UMMA::ScaleOut::One : UMMA::ScaleOut::Zero;
#pragma unroll 1
  for (int k = 0; k < p.k_tiles; ++k) {
    if (!sm100::wait(waiter, pipeline.full + cursor.stage.index, cursor.stage.parity)) return false;
    sm100::fence_after_barrier();
    start(acc, cursor.stage.index, scale);
    scale = UMMA::ScaleOut::One;
    Pipeline::commit(pipeline.empty + cursor.stage.index);  // once the products have read it
    cursor.stage.advance();
  }
  Pipeline::commit(pipeline.multiplied + index);
  cursor.accumulator.advance();
  return true;
}

template <Major A, Major B>
__device__ __forceinline__ bool issue_bf16(Stages& stages, Pipeline& pipeline, IssueCursor<kAccumulators>& cursor,
                                           Product const& p, Waiter const& waiter) {
  using namespace cute;
  sm100::Mma<A, B> mma;
  auto slice = mma.get_slice(_0{});
  auto fragments_a = slice.make_fragment_A(
      slice.partition_A(make_tensor(make_smem_ptr(&stages.a[0][0]), sm100::OperandLayout<A, kTileRows>{})));
  auto fragments_b = slice.make_fragment_B(
      slice.partition_B(make_tensor(make_smem_ptr(&stages.b[0][0]), sm100::OperandLayout<B, kTileCols>{})));
  return issue(pipeline, cursor, p, waiter, [&](auto& acc, int stage, UMMA::ScaleOut scale) {
    mma.accumulate_ = scale;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size<2>(fragments_a); ++i) {
      gemm(mma, fragments_a(_, _, i, stage), fragments_b(_, _, i, stage), acc);
      mma.accumulate_ = UMMA::ScaleOut::One;
    }
  });
}

// The issuing warp group's role, until `next(n, Product&)` returns false for the n-th tile or the launch is stopped.
template <class Next>
__device__ __forceinline__ void issue_products(Stages& stages, Pipeline& pipeline, Waiter const& waiter, Next next) {
  constexpr Major k = Major::K, mn = Major::MN;
  ptx::registers_release<kIssuerRegisters>();
  if (threadIdx.x / 32 != kIssuerWarp) return;
  IssueCursor<kAccumulators> cursor;
  Product p;
  bool ok = true;
  for (uint32_t n = 0; ok && next(n, p); ++n) {
    if (p.a == mn) ok = issue_bf16<mn, mn>(stages, pipeline, cursor, p, waiter);
    else if (p.b == mn) ok = issue_bf16<k, mn>(stages, pipeline, cursor, p, waiter);
    else ok = issue_bf16<k, k>(stages, pipeline, cursor, p, waiter);
  }
}

// acc = what the issuing warp computes for this tile; `Continue`: of which acc is the start. The bits are the same as
// if it had never left tensor memory. False: the launch was stopped.
template <Major A, Major B, bool Continue = false, class Operands, class Pipeline, int Accumulators>
__device__ __forceinline__ bool multiply(Accumulator& acc, Operands&, Pipeline& pipeline, RingCursor<Accumulators>& cursor,
                                         int k_tiles, int thread, Waiter const& waiter) {
  using namespace cute;
  if (k_tiles == 0) {
    if (!Continue) clear(acc);
    return true;
  }
  auto rows = sm100::warp_rows(pipeline, cursor.index, thread);
  if (Continue) {
    // This warp has drained the accumulators' last tile itself, so nothing else uses its rows.
    copy(Copy_Atom<sm100::Store, float>{}, acc, rows);
    cutlass::arch::fence_view_async_tmem_store();
    sm100::fence_before_barrier();
    __syncwarp();
    if (thread % 32 == 0) Pipeline::arrive(&pipeline.restored);
  }
  if (!sm100::wait(waiter, pipeline.multiplied + cursor.index, cursor.parity)) return false;
  sm100::fence_after_barrier();
  copy(Copy_Atom<sm100::Load, float>{}, rows, acc);
  cutlass::arch::fence_view_async_tmem_load();
  // The compiler sees no other reason to keep what uses the elements behind the wait.
#pragma unroll
  for (int i = 0; i < kAccumulatorSize; ++i) asm volatile("" : "+f"(acc(i))::"memory");
  sm100::fence_before_barrier();
  __syncwarp();
  if (thread % 32 == 0) Pipeline::arrive(pipeline.drained + cursor.index);
  cursor.advance();
  return true;
}

}  // namespace mok
