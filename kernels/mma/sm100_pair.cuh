// The tile product of two CTAs on Blackwell (tcgen05, cta_group::2): 256 x 256 of C, of which each CTA has 128 rows in
// its tensor memory, where a tile of one CTA lies too: so `multiply` and the epilogues are those of one CTA.
//
// Each CTA loads its 128 rows of A and its 128 of the 256 columns of B; the leader (rank 0 of the cluster) issues for
// both. K is walked as by one CTA. Only what differs is here. The megakernel does not use it yet: see docs/blackwell.md.
#pragma once
#include "sm100.cuh"

namespace mok {

constexpr int kPairCols = kTileCols / 2;  // of B, that a CTA loads
constexpr int kPairStages = 6;            // in the shared memory of four of one CTA
constexpr uint32_t kPairStageBytesB = kPairCols * kTileK * 2;
constexpr uint32_t kPairStageBytes = 2 * (kStageBytesA + kPairStageBytesB);  // of both CTAs: what the leader expects

struct alignas(1024) PairStages {
  cutlass::bfloat16_t a[kPairStages][kTileRows * kTileK];
  cutlass::bfloat16_t b[kPairStages][kPairCols * kTileK];
};
static_assert(sizeof(PairStages) == sizeof(Stages));

using PairPipeline = PipelineOf<kPairStages, 2>;

namespace sm100 {
template <Major A, Major B>
using PairInstruction = SM100_MMA_F16BF16_2x1SM_SS<bfloat16_t, bfloat16_t, float, 2 * kTileRows, kTileCols, kMajor<A>, kMajor<B>>;
// Descriptors say what lies in one CTA's shared memory, and the other's is alike: they are those of this product.
template <Major A, Major B>
using PairHalf = decltype(make_tiled_mma(SM100_MMA_F16BF16_SS<bfloat16_t, bfloat16_t, float, kTileRows, kPairCols,
                                                              kMajor<A>, kMajor<B>>{}));
template <Major M>
using PairLayout = decltype(tile_to_shape(Atom<M>{}, Shape<Int<kTileRows>, Int<kTileK>, Int<kPairStages>>{},
                                          conditional_t<M == Major::K, Step<_1, _2, _3>, Step<_2, _1, _3>>{}));
static_assert(kPairCols == kTileRows);
}  // namespace sm100

// By all threads of both CTAs, after the barriers are initialised.
__device__ __forceinline__ void begin_products(PairPipeline& pipeline) {
  cute::TMEM::Allocator2Sm memory;
  if (threadIdx.x / 32 == kIssuerWarp) {
    __syncwarp();
    memory.allocate(kAccumulators * kTileCols, &pipeline.tensor_memory);
    memory.release_allocation_lock();
    sm100::fence_before_barrier();
  }
  ptx::cluster_sync();
  sm100::fence_after_barrier();
}
// Likewise, when they use no accumulators any more. Neither CTA may leave before: its peer's loads, commits and arrivals
// end in its shared memory. All of a CTA's waits have deadlines and see the rank's `stop`, so each one comes here.
__device__ __forceinline__ void end_products(PairPipeline& pipeline) {
  sm100::fence_before_barrier();
  ptx::cluster_sync();
  if (threadIdx.x / 32 != kIssuerWarp) return;
  __syncwarp();
  sm100::fence_after_barrier();
  cute::TMEM::Allocator2Sm().free(pipeline.tensor_memory, kAccumulators * kTileCols);
}

// By the issuing warp of the leader.
template <Major A, Major B>
__device__ __forceinline__ bool issue_pair(PairStages& stages, PairPipeline& pipeline, IssueCursor<kAccumulators, kPairStages>& cursor,
                                           Product const& p, Waiter const& waiter) {
  using namespace cute;
  auto slice = sm100::PairHalf<A, B>{}.get_slice(_0{});
  auto fragments_a = slice.make_fragment_A(slice.partition_A(make_tensor(make_smem_ptr(&stages.a[0][0]), sm100::PairLayout<A>{})));
  auto fragments_b = slice.make_fragment_B(slice.partition_B(make_tensor(make_smem_ptr(&stages.b[0][0]), sm100::PairLayout<B>{})));
  auto instruction = UMMA::make_instr_desc<bfloat16_t, bfloat16_t, float, 2 * kTileRows, kTileCols, sm100::kMajor<A>, sm100::kMajor<B>>();
  uint64_t description = UMMA::make_runtime_instr_desc<>(instruction);
  return issue(pipeline, cursor, p, waiter, [&](auto& acc, int stage, UMMA::ScaleOut scale) {
    uint32_t to = raw_pointer_cast(acc.data());
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size<2>(fragments_a); ++i) {
      UMMA::SmemDescriptor a = *fragments_a(_, _, i, stage).data(), b = *fragments_b(_, _, i, stage).data();
      sm100::PairInstruction<A, B>::fma(a.desc_, b.desc_, to, uint32_t(scale), description);
      scale = UMMA::ScaleOut::One;
    }
  });
}

}  // namespace mok
