// Host code that both directions share.
#pragma once
#include <cuda_runtime.h>
#include "../params.cuh"
#include "error.h"

namespace mok {

// Everything about a workspace and call that cannot work, as one message; 0 if nothing.
int check_call(MokWorkspace const& w, int tokens);

Common make_common(MokWorkspace const& w, MokSchedule const& s, int tokens, int comm_ctas, bool forward);

int launch_prepare(MokWorkspace const& w, MokSchedule const& s, int tokens, bool forward, void const* input,
                   void const* input_again, int32_t const* ids, float const* weights, cudaStream_t stream);

// Launches a kernel with `shared_bytes` of dynamic shared memory.
template <class Kernel, class Params>
int launch(char const* name, Kernel kernel, Params const& params, int ctas, int threads, size_t shared_bytes, cudaStream_t stream) {
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (e == cudaSuccess) {
    kernel<<<ctas, threads, shared_bytes, stream>>>(params);
    e = cudaGetLastError();
  }
  return e == cudaSuccess ? 0 : fail("cannot launch %s: %s", name, cudaGetErrorString(e));
}

}  // namespace mok
