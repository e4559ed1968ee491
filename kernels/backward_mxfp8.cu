// The backward megakernel in MXFP8. Compiled for Hopper only: Blackwell is to have products of its own for it.
#if __CUDA_ARCH_LIST__ == 900
#include "backward_mxfp8.cuh"
#include "host/launch.h"

int mok::launch_backward_mxfp8(BackwardParams const& p, int ctas, cudaStream_t stream) {
  return launch("the backward megakernel (MXFP8)", megakernel<MxBackwardProgram>, p, ctas, kThreads, sizeof(SharedMemory), stream);
}

#else
#include "backward.cuh"
#include "host/error.h"

int mok::launch_backward_mxfp8(BackwardParams const&, int, cudaStream_t) {
  return fail("MXFP8 needs compute capability 9.0; choose the format bf16");
}
#endif
