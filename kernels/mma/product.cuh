// The tile product of the architecture that is compiled for: one a compilation, the same for host and device code.
//
// Each file gives
//   Stages, Pipeline       operands of a tile in shared memory; barriers between those who load, multiply and store
//   Accumulator            what a consumer thread holds of a finished tile; accumulator_row(thread, half) says where
//   multiply<A, B>         by the consumer threads: gets a tile into their Accumulator
//   issue_products         by the warps that do nothing but issue products, where there are any (kIssuerThreads > 0)
//   begin_products, end_products   around all of them
#pragma once
#if __CUDA_ARCH_LIST__ == 900
#include "sm90.cuh"
#elif __CUDA_ARCH_LIST__ == 1000 || __CUDA_ARCH_LIST__ == 1030
#include "sm100.cuh"
#else
#error "compile for one of sm_90a, sm_100a and sm_103a at a time"
#endif
