// The prepare kernel's interface; see prepare.cu.
#pragma once
#include "../params.cuh"

namespace mok {

constexpr int kMaxRanks = 128;

struct PrepareParams {
  Common common;
  void const* input;     // [T, H] bf16: x or dY
  void const* input_again;  // [T, H] bf16: x in the backward, copied if any rank will dispatch rows again
  int32_t const* ids;    // [T, K], or null in the backward, which has its schedule already
  float const* weights;  // [T, K]
  bool forward;          // ids may be null when T = 0
};

__global__ void prepare_kernel(__grid_constant__ PrepareParams const p);
size_t prepare_shared_bytes(int experts);
int prepare_threads();

}  // namespace mok
