// The MXFP8 tile product in a kernel of its own, to be compiled and looked at, not run: operands by TMA, scales by bulk
// copies, products by the issuing warp, accumulators to memory by the consumers; all three pairs of majors.
#include <cuda.h>
#include <cuda_runtime.h>
#include "mma/sm100_mxfp8.cuh"
#include "ptx/bulk.cuh"

using namespace mok;

struct Job {
  Product product;
  int at_a, at_b, scales_a, scales_b, scale_stride;
};
struct Params {
  CUtensorMap a, b;
  char const *scales_a, *scales_b;
  float* out;
  Job const* jobs;
  int count;
  uint32_t* stop;
};
struct Shared {
  MxStages stages;
  Pipeline pipeline;
  Waiter waiter;
};

__global__ __launch_bounds__(kProducerThreads + kConsumerThreads + kIssuerThreads, 1) void mxfp8_tiles(
    __grid_constant__ Params const p) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<Shared*>(raw);
  int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    s.waiter = {ptx::nanoseconds() + 1000000000ull, p.stop, 0, 1, {}};
    s.pipeline.init();
    ptx::barrier_init_fence();
  }
  __syncthreads();
  begin_products(s.pipeline);
  if (warp < 4) {
    ptx::registers_release<kMxProducerRegisters>();
    if (threadIdx.x == 0) {
      StageCursor cursor;
      for (int n = 0; n < p.count; ++n) {
        Job j = p.jobs[n];
        for (int k = 0; k < j.product.k_tiles; ++k) {
          if (!s.waiter.barrier(s.pipeline.empty + cursor.index, cursor.parity ^ 1)) break;
          uint64_t* full = s.pipeline.full + cursor.index;
          ptx::barrier_arrive_expect(full, kMxStageBytes);
          ptx::tma_load(s.stages.a[cursor.index], &p.a, full, k * kMxTileK, j.at_a, 0, 0);
          ptx::tma_load(s.stages.b[cursor.index], &p.b, full, k * kMxTileK, j.at_b, 0, 0);
          ptx::bulk_load(s.stages.scales_a[cursor.index], p.scales_a + j.scales_a + k * 512, 512, full);
          for (int half = 0; half < 2; ++half)
            ptx::bulk_load(s.stages.scales_b[cursor.index] + half * 512, p.scales_b + j.scales_b + half * j.scale_stride + k * 512, 512, full);
          cursor.advance();
        }
      }
    }
  } else if (warp >= kIssuerWarp) {
    ptx::registers_release<kMxIssuerRegisters>();
    if (warp == kIssuerWarp) {
      IssueCursor<kMxAccumulators> cursor;
      constexpr Major k = Major::K, mn = Major::MN;
      for (int n = 0; n < p.count; ++n) {
        Product q = p.jobs[n].product;
        bool ok = q.a == mn   ? issue_mxfp8<mn, mn>(s.stages, s.pipeline, cursor, q, s.waiter)
                  : q.b == mn ? issue_mxfp8<k, mn>(s.stages, s.pipeline, cursor, q, s.waiter)
                              : issue_mxfp8<k, k>(s.stages, s.pipeline, cursor, q, s.waiter);
        if (!ok) break;
      }
    }
  } else {
    ptx::registers_acquire<kMxConsumerRegisters>();
    int thread = threadIdx.x - kProducerThreads;
    RingCursor<kMxAccumulators> cursor;
    for (int n = 0; n < p.count; ++n) {
      Accumulator acc;
      if (!multiply<Major::K, Major::K>(acc, s.stages, s.pipeline, cursor, p.jobs[n].product.k_tiles, thread, s.waiter)) break;
#pragma unroll
      for (int i = 0; i < kAccumulatorSize; ++i) {
        int row = accumulator_row(thread, i / 2 % 2), col = i / 4 * 8 + thread % 4 * 2 + i % 2;
        p.out[(size_t(n) * kTileRows + row) * kTileCols + col] = acc(i);
      }
    }
  }
  __syncthreads();
  end_products(s.pipeline);
}
