// The tile product on Blackwell of MXFP8 operands: E4M3 with an E8M0 scale for 32 values along K, applied by the tensor
// cores (kind::mxf8f6f4). 128 x 256 of C, 128 of K a stage, which is as many bytes as 64 of bf16.
//
// Only what differs from bf16 is here. The megakernel does not use it yet: see docs/blackwell.md.
#pragma once
#include <cutlass/detail/sm100_blockscaled_layout.hpp>
#include "../formats/mxfp8.cuh"
#include "sm100.cuh"

namespace mok {

constexpr int kMxTileK = 128;
// One accumulator: two fill tensor memory, and scales must go there too. The registers of the consumers are the second.
constexpr int kMxAccumulators = 1;
// Descriptors of scales take more registers of the issuing warp.
constexpr int kMxProducerRegisters = 48, kMxConsumerRegisters = 208, kMxIssuerRegisters = 48;
static_assert((kMxProducerRegisters + 2 * kMxConsumerRegisters + kMxIssuerRegisters) * 128 <= 65536);
constexpr int kMxScaleBytesA = kTileRows * kMxTileK / kMxBlock, kMxScaleBytesB = kTileCols * kMxTileK / kMxBlock;
constexpr uint32_t kMxStageBytes = kStageBytesA + kStageBytesB + kMxScaleBytesA + kMxScaleBytesB;

// Scales lie in blocks of 512 bytes for 128 rows (of A, or columns of B) and 128 of K, the blocks of the same rows
// behind one another, in global and in shared memory: so any block is one bulk copy. Byte of the scale of `row` and of
// the `block`-th 32 values along a K of `blocks` times 32:
__host__ __device__ constexpr size_t mx_scale_offset(int row, int block, int blocks) {
  return (size_t(row / 128) * ((blocks + 3) / 4) + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

struct alignas(1024) MxStages {
  cutlass::float_e4m3_t a[kStages][kTileRows * kMxTileK];
  cutlass::float_e4m3_t b[kStages][kTileCols * kMxTileK];
  cutlass::float_ue8m0_t scales_a[kStages][kMxScaleBytesA];
  cutlass::float_ue8m0_t scales_b[kStages][kMxScaleBytesB];
};
static_assert(sizeof(MxStages::a) + sizeof(MxStages::b) == sizeof(Stages));

namespace sm100 {
using Mx = cutlass::float_e4m3_t;
using MxScale = cutlass::float_ue8m0_t;
template <Major A, Major B>
using MxMma = decltype(make_tiled_mma(
    SM100_MMA_MXF8F6F4_SS<Mx, Mx, float, MxScale, kTileRows, kTileCols, kMajor<A>, kMajor<B>>{}));
template <Major M>
using MxAtom = conditional_t<M == Major::K, UMMA::Layout_K_SW128_Atom<Mx>, UMMA::Layout_MN_SW128_Atom<Mx>>;
// As for bf16, with boxes of 128 bytes that are 128 columns.
template <Major M, int Extent>
using MxOperandLayout = decltype(tile_to_shape(MxAtom<M>{}, Shape<Int<Extent>, Int<kMxTileK>, Int<kStages>>{},
                                               conditional_t<M == Major::K, Step<_1, _2, _3>, Step<_2, _1, _3>>{}));
// Scales of a stage, in shared memory and (its fragments) in tensor memory.
using MxScales = cutlass::detail::Sm1xxBlockScaledConfig<kMxBlock>;
using MxTile = Shape<Int<kTileRows>, Int<kTileCols>, Int<kMxTileK>>;
using MxScalesA = decltype(MxScales::deduce_smem_layoutSFA(MxMma<Major::K, Major::K>{}, MxTile{}));
using MxScalesB = decltype(MxScales::deduce_smem_layoutSFB(MxMma<Major::K, Major::K>{}, MxTile{}));
constexpr int kMxColumnsA = kMxScaleBytesA / 128, kMxColumnsB = kMxScaleBytesB / 128;  // 32-bit columns of 128 lanes
static_assert(kMxAccumulators * kTileCols + kMxColumnsA + kMxColumnsB <= kAccumulators * kTileCols);

template <class Fragment, class Layout>
__device__ __forceinline__ auto mx_scale_fragment(Layout layout, Pipeline const& pipeline, int column) {
  auto scales = make_tensor<Fragment>(shape(layout));
  scales.data() = pipeline.tensor_memory + kMxAccumulators * kTileCols + column;
  return scales;
}

// Starts the copy of a stage's scales from shared to tensor memory, ordered before the products that follow.
template <class Fragment, class Layout>
__device__ __forceinline__ void mx_copy_scales(MxScale* stage, Layout layout, Fragment const& fragment) {
  using Copy = SM100_UTCCP_4x32dp128bit_1cta;
  auto from = make_tensor(make_smem_ptr(stage), filter_zeros(layout));
  auto to = make_tensor(fragment.data(), filter_zeros(fragment.layout()));
  auto tiled = make_utccp_copy(Copy{}, to);
  auto slice = tiled.get_slice(0);
  auto source = get_utccp_smem_desc_tensor<Copy>(slice.partition_S(from));
  auto target = slice.partition_D(to);
  if (elect_one_sync()) copy(tiled, source, target);
}
}  // namespace sm100

template <Major A, Major B>
__device__ __forceinline__ bool issue_mxfp8(MxStages& stages, Pipeline& pipeline, IssueCursor<kMxAccumulators>& cursor,
                                            Product const& p, Waiter const& waiter) {
  using namespace cute;
  using Mma = sm100::MxMma<A, B>;
  Mma mma;
  auto slice = mma.get_slice(_0{});
  auto fragments_a = slice.make_fragment_A(
      slice.partition_A(make_tensor(make_smem_ptr(&stages.a[0][0]), sm100::MxOperandLayout<A, kTileRows>{})));
  auto fragments_b = slice.make_fragment_B(
      slice.partition_B(make_tensor(make_smem_ptr(&stages.b[0][0]), sm100::MxOperandLayout<B, kTileCols>{})));
  auto scales_a = sm100::mx_scale_fragment<typename Mma::FrgTypeSFA>(sm100::MxScalesA{}, pipeline, 0);
  auto scales_b = sm100::mx_scale_fragment<typename Mma::FrgTypeSFB>(sm100::MxScalesB{}, pipeline, sm100::kMxColumnsA);
  return issue(pipeline, cursor, p, waiter, [&](auto& acc, int stage, UMMA::ScaleOut scale) {
    sm100::mx_copy_scales(stages.scales_a[stage], sm100::MxScalesA{}, scales_a);
    sm100::mx_copy_scales(stages.scales_b[stage], sm100::MxScalesB{}, scales_b);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size<2>(fragments_a); ++i) {
      gemm(mma.with(scale, scales_a(_, _, i), scales_b(_, _, i)), fragments_a(_, _, i, stage), fragments_b(_, _, i, stage), acc);
      scale = UMMA::ScaleOut::One;
    }
  });
}

}  // namespace mok
