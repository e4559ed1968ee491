// The tile product of two CTAs in a kernel of its own, to be compiled and looked at, not run: each CTA loads its half of
// both operands and stores its 128 rows; all three pairs of majors.
#include <cuda.h>
#include <cuda_runtime.h>
#include "mma/sm100_pair.cuh"

using namespace mok;

struct Job {
  Product product;
  int at_a[2], at_b[2];
};
struct Params {
  CUtensorMap a, b;
  float* out;
  Job const* jobs;
  int count;
  uint32_t* stop;
};
struct Shared {
  PairStages stages;
  PairPipeline pipeline;
  Waiter waiter;
};
static_assert(sizeof(Shared) <= 227 * 1024);

__global__ __cluster_dims__(2, 1, 1) __launch_bounds__(kProducerThreads + kConsumerThreads + kIssuerThreads, 1) void pair_tiles(
    __grid_constant__ Params const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<Shared*>(raw);
  int warp = threadIdx.x / 32;
  uint32_t rank = ptx::cluster_rank();
  constexpr Major k = Major::K, mn = Major::MN;
  if (threadIdx.x == 0) {
    s.waiter = {ptx::nanoseconds() + 1000000000ull, p.stop, 0, 1, {}};
    s.pipeline.init();
    ptx::barrier_init_fence();
  }
  __syncthreads();
  begin_products(s.pipeline);
  if (warp < 4) {
    ptx::registers_release<kProducerRegisters>();
    if (threadIdx.x == 0) {
      RingCursor<kPairStages> cursor;
      bool ok = true;
      for (int n = 0; ok && n < p.count; ++n) {
        Job const& j = p.jobs[n];
        for (int i = 0; i < j.product.k_tiles; ++i) {
          ok = s.waiter.barrier(s.pipeline.empty + cursor.index, cursor.parity ^ 1);
          if (!ok) break;
          uint64_t* full = s.pipeline.full + cursor.index;
          if (rank == 0) ptx::barrier_arrive_expect(full, kPairStageBytes);
          bool along_a = j.product.a == k, along_b = j.product.b == k;
          ptx::tma_load_of_pair(s.stages.a[cursor.index], &p.a, full, along_a ? i * kTileK : 0, along_a ? j.at_a[rank] : i * kTileK,
                                along_a ? 0 : j.at_a[rank], 0);
          ptx::tma_load_of_pair(s.stages.b[cursor.index], &p.b, full, along_b ? i * kTileK : 0, along_b ? j.at_b[rank] : i * kTileK,
                                along_b ? 0 : j.at_b[rank], 0);
          cursor.advance();
        }
      }
    }
  } else if (warp >= kIssuerWarp) {
    ptx::registers_release<kIssuerRegisters>();
    if (warp == kIssuerWarp && rank == 0) {
      IssueCursor<kAccumulators, kPairStages> cursor;
      for (int n = 0; n < p.count; ++n) {
        Product q = p.jobs[n].product;
        bool ok = q.a == mn   ? issue_pair<mn, mn>(s.stages, s.pipeline, cursor, q, s.waiter)
                  : q.b == mn ? issue_pair<k, mn>(s.stages, s.pipeline, cursor, q, s.waiter)
                              : issue_pair<k, k>(s.stages, s.pipeline, cursor, q, s.waiter);
        if (!ok) break;
      }
    }
  } else {
    ptx::registers_acquire<kConsumerRegisters>();
    int thread = threadIdx.x - kProducerThreads;
    RingCursor<kAccumulators> cursor;
    for (int n = 0; n < p.count; ++n) {
      Accumulator acc;
      if (!multiply<k, k>(acc, s.stages, s.pipeline, cursor, p.jobs[n].product.k_tiles, thread, s.waiter)) break;
#pragma unroll
      for (int i = 0; i < kAccumulatorSize; ++i) {
        int row = int(rank) * kTileRows + accumulator_row(thread, i / 2 % 2), col = i / 4 * 8 + thread % 4 * 2 + i % 2;
        p.out[(size_t(n) * 2 * kTileRows + row) * kTileCols + col] = acc(i);
      }
    }
  }
  __syncthreads();
  end_products(s.pipeline);
}
