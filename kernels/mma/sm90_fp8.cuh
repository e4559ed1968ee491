// The tile product of E4M3 operands with block scales: 128 x 256 of C, one block of 128 along K a stage.
//
// A row of A has one scale for each 128 values of K, B one for each 128 columns and 128 of K. The tensor cores sum the
// 128 products of a block; the sum is multiplied by both scales and added in fp32: their own accumulators keep fewer
// bits than fp32, and the scales change from block to block anyway. One half of the columns at a time, in 64 registers
// beside the 128 of the tile; while one warp group adds, the other's products run.
//
// Stages are those of sm90.cuh: 128 bytes along K, in the same swizzle.
#pragma once
#include "sm90.cuh"

namespace mok {

constexpr int kFp8TileK = 128;
static_assert(kFp8TileK == kTileK * 2, "a stage of E4M3 has as many bytes as one of bf16");

// Where a thread finds the scales of its part of a tile: consecutive fp32, one for each block along K.
struct BlockScales {
  float const* row;     // of its first row (accumulator_row)
  float const* column;  // of the tile's columns 0 .. 127
  int eight_rows;       // to its second row, and
  int second;           // to columns 128 .. 255, in floats
};

namespace sm90 {
using E4m3Atom = GMMA::Layout_K_SW128_Atom<cutlass::float_e4m3_t>;
template <int Extent>
using E4m3Layout = decltype(tile_to_shape(E4m3Atom{}, Shape<Int<Extent>, Int<kFp8TileK>, Int<kStages>>{}));
using E4m3Mma = decltype(make_tiled_mma(SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>{},
                                        cute::Layout<Shape<_2, _1, _1>>{}));
}  // namespace sm90

// The scales of four blocks along K, a block a thread of the quad that shares the rows.
struct ScaleGroup {
  float rows[2], columns[2];

  __device__ __forceinline__ void load(BlockScales const& s, int block, int blocks) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = block < blocks ? ptx::load_l2_f32(s.row + i * s.eight_rows + block) : 0.f;
      columns[i] = block < blocks ? ptx::load_l2_f32(s.column + i * s.second + block) : 0.f;
    }
  }
};

// acc = A * B over `blocks` stages. Element order of `acc` as in sm90.cuh. False: the launch was stopped.
__device__ __forceinline__ bool multiply_fp8(Accumulator& acc, Stages& stages, Pipeline& pipeline,
                                             StageCursor& cursor, int blocks, BlockScales const& scales, int thread,
                                             Waiter const& waiter) {
  using namespace cute;
  sm90::E4m3Mma mma;
  auto slice = mma.get_slice(thread);
  auto* a = reinterpret_cast<cutlass::float_e4m3_t*>(&stages.a[0][0]);
  auto* b = reinterpret_cast<cutlass::float_e4m3_t*>(&stages.b[0][0]);
  auto fragments_a = slice.make_fragment_A(slice.partition_A(make_tensor(make_smem_ptr(a), sm90::E4m3Layout<kTileRows>{})));
  auto fragments_b = slice.make_fragment_B(slice.partition_B(make_tensor(make_smem_ptr(b), sm90::E4m3Layout<kTileCols>{})));
  auto sum = partition_fragment_C(mma, Shape<Int<kTileRows>, Int<kTileCols / 2>>{});
  clear(acc);
  int lane = thread % 32;
  ScaleGroup next;
  next.load(scales, lane % 4, blocks);
#pragma unroll 1
  for (int first = 0; first < blocks; first += 4) {
    ScaleGroup const now = next;
    next.load(scales, first + 4 + lane % 4, blocks);
    int const end = min(4, blocks - first);
#pragma unroll 1
    for (int i = 0; i < end; ++i) {
      if (!waiter.barrier(pipeline.full + cursor.index, cursor.parity)) return false;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma.accumulate_ = GMMA::ScaleOut::Zero;
        warpgroup_fence_operand(sum);
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < size<2>(fragments_a); ++k) {
          gemm(mma, fragments_a(_, _0{}, k, cursor.index), fragments_b(_, half, k, cursor.index), sum(_, _0{}, _0{}));
          mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        // Beside the products, and not before them: whatever comes between two halves is time of the tensor cores.
        float column = __shfl_sync(0xffffffffu, now.columns[half], i, 4);
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) scale[r] = __shfl_sync(0xffffffffu, now.rows[r], i, 4) * column;
        warpgroup_wait<0>();
        warpgroup_fence_operand(sum);
        if (half == 1 && lane == 0) ptx::barrier_arrive(pipeline.empty + cursor.index);
#pragma unroll
        for (int j = 0; j < kAccumulatorSize / 2; ++j) {
          int at = half * (kAccumulatorSize / 2) + j;
          acc(at) = fmaf(sum(j), scale[j / 2 % 2], acc(at));
        }
      }
      cursor.advance();
    }
  }
  return true;
}

}  // namespace mok
