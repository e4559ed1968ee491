// Why racecheck is not asked about the megakernel: it takes the way in which its roles hand shared memory on for races.
//
//     nvcc -arch=sm_90a -I kernels tests/megakernel/racecheck_pattern.cu -o pattern
//     compute-sanitizer --tool racecheck ./pattern 0     every lane arrives: no hazard
//     compute-sanitizer --tool racecheck ./pattern 1     one lane arrives for its warp, after __syncwarp: hazards
//
// Two warps write one buffer in turns, and a third reads it in between, ordered by mbarriers alone.
#include <cstdio>
#include <cstdlib>
#include "ptx/barrier.cuh"
using namespace mok;
__device__ void wait(uint64_t* b, uint32_t p) { while (!ptx::barrier_try_wait(b, p)) {} }
__global__ void pattern(int elected, int* out) {
  __shared__ int rows[32];
  __shared__ uint64_t full[2], turn[2];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) { ptx::barrier_init(full + i, elected ? 1 : 32); ptx::barrier_init(turn + i, elected ? 1 : 32); }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  auto arrive = [&](uint64_t* b) { __syncwarp(); if (!elected || lane == 0) ptx::barrier_arrive(b); };
  int sum = 0;
  for (int n = 0; n < 8; ++n) {
    if (warp < 2) {
      wait(turn + warp, (n & 1) ^ (warp ^ 1));
      rows[lane] = 100 * n + 10 * warp + lane;
      arrive(full + warp);
    } else {
      for (int g = 0; g < 2; ++g) {
        wait(full + g, n & 1);
        sum += rows[lane];
        arrive(turn + (g ^ 1));
      }
    }
  }
  if (warp == 2) out[lane] = sum;
}
int main(int, char** a) {
  int* out; cudaMallocManaged(&out, 128);
  pattern<<<1, 96>>>(atoi(a[1]), out);
  printf("elected %s: %s, lane 0 summed %d\n", a[1], cudaGetErrorString(cudaDeviceSynchronize()), out[0]);
}
