// The tile product on Hopper: 128 x 256 of C in the registers of two warp groups, 64 of K a stage.
//
// Everything that is Hopper's alone about the product is here: shared-memory layouts, wgmma, and which thread
// holds which element. What other files see is listed in product.cuh.
#pragma once
#include <cute/tensor.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cutlass/numeric_types.h>
#include "../comm/wait.cuh"
#include "shape.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile for sm_90a: sm_90 has no wgmma"
#endif

namespace mok {

constexpr int kStages = 4;
constexpr int kIssuerThreads = 0;  // the consumers issue their own products
constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;

using StageCursor = RingCursor<kStages>;
using ProductCursor = StageCursor;  // of the consumers

struct alignas(1024) Stages {
  cutlass::bfloat16_t a[kStages][kTileRows * kTileK];
  cutlass::bfloat16_t b[kStages][kTileCols * kTileK];
};

struct Pipeline {
  uint64_t full[kStages], empty[kStages];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, kConsumerWarps);
    }
  }
};
__device__ __forceinline__ void begin_products(Pipeline&) {}
__device__ __forceinline__ void end_products(Pipeline&) {}
template <class Next>
__device__ __forceinline__ void issue_products(Stages&, Pipeline&, Waiter const&, Next) {}

namespace sm90 {
using namespace cute;
template <Major M>
using Atom = conditional_t<M == Major::K, GMMA::Layout_K_SW128_Atom<cutlass::bfloat16_t>,
                           GMMA::Layout_MN_SW128_Atom<cutlass::bfloat16_t>>;
// A box of TMA fills all of K for 64 columns before the next 64, so MN-major atoms are stacked along K first.
template <Major M, int Extent>
using Layout = decltype(tile_to_shape(Atom<M>{}, Shape<Int<Extent>, Int<kTileK>, Int<kStages>>{},
                                      conditional_t<M == Major::K, Step<_1, _2, _3>, Step<_2, _1, _3>>{}));
template <Major M>
inline constexpr GMMA::Major kMajor = M == Major::K ? GMMA::Major::K : GMMA::Major::MN;
template <Major A, Major B>
using Mma = decltype(make_tiled_mma(SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<kMajor<A>, kMajor<B>>{},
                                    cute::Layout<Shape<_2, _1, _1>>{}));
}  // namespace sm90

// Element 4 * j + 2 * h + i of a thread is row accumulator_row(thread, h), column 8 * j + 2 * (thread % 4) + i.
using Accumulator = decltype(cute::partition_fragment_C(
    sm90::Mma<Major::K, Major::K>{}, cute::Shape<cute::Int<kTileRows>, cute::Int<kTileCols>>{}));

__device__ __forceinline__ int accumulator_row(int thread, int half) {
  return thread / 128 * 64 + thread % 128 / 32 * 16 + thread % 32 / 4 + half * 8;
}

__device__ __forceinline__ void clear(Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < kAccumulatorSize; ++i) acc(i) = 0.f;
}

// acc = A * B over `k_tiles` stages, or acc += A * B if `Continue`, which is slower: where accumulators come from
// anything but wgmma, the compiler keeps wgmma asynchronous only if each stage is waited for. The bits are the same.
// False: the launch was stopped.
template <Major A, Major B, bool Continue = false>
__device__ __forceinline__ bool multiply(Accumulator& acc, Stages& stages, Pipeline& pipeline, ProductCursor& cursor,
                                         int k_tiles, int thread, Waiter const& waiter) {
  using namespace cute;
  sm90::Mma<A, B> mma;
  auto slice = mma.get_slice(thread);
  auto fragments_a = slice.make_fragment_A(
      slice.partition_A(make_tensor(make_smem_ptr(&stages.a[0][0]), sm90::Layout<A, kTileRows>{})));
  auto fragments_b = slice.make_fragment_B(
      slice.partition_B(make_tensor(make_smem_ptr(&stages.b[0][0]), sm90::Layout<B, kTileCols>{})));
  mma.accumulate_ = Continue ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(acc);
  int previous = -1;
#pragma unroll 1
  for (int k = 0; k < k_tiles; ++k) {
    if (!waiter.barrier(pipeline.full + cursor.index, cursor.parity)) { warpgroup_wait<0>(); return false; }
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size<2>(fragments_a); ++i) {
      gemm(mma, fragments_a(_, _, i, cursor.index), fragments_b(_, _, i, cursor.index), acc);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    // One stage stays in flight, so that the tensor cores do not wait for this loop.
    warpgroup_wait<Continue ? 0 : 1>();
    if (Continue) warpgroup_fence_operand(acc);
    int finished = Continue ? cursor.index : previous;
    if (finished >= 0 && thread % 32 == 0) ptx::barrier_arrive(pipeline.empty + finished);
    if (!Continue) previous = cursor.index;
    cursor.advance();
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(acc);
  if (previous >= 0 && thread % 32 == 0) ptx::barrier_arrive(pipeline.empty + previous);
  if (k_tiles == 0 && !Continue) clear(acc);
  return true;
}

}  // namespace mok
