// The forward megakernel in MXFP8. Compiled for Hopper only: Blackwell is to have products of its own for it.
#if __CUDA_ARCH_LIST__ == 900
#include "forward_mxfp8.cuh"
#include "host/launch.h"

int mok::launch_forward_mxfp8(ForwardParams const& p, int ctas, cudaStream_t stream) {
  return launch("the forward megakernel (MXFP8)", megakernel<MxForwardProgram>, p, ctas, kThreads, sizeof(SharedMemory), stream);
}

#else
#include "forward.cuh"
#include "host/error.h"

int mok::launch_forward_mxfp8(ForwardParams const&, int, cudaStream_t) {
  return fail("MXFP8 needs compute capability 9.0; choose the format bf16");
}
#endif
