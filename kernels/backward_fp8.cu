// The backward megakernel's launch with E4M3 operands and block scales. Hopper's tensor cores only.
#if __CUDA_ARCH_LIST__ == 900
#include "backward_fp8.cuh"
#include "host/launch.h"
#include "host/tensor_maps.h"

namespace mok {

int backward_fp8(MokWorkspace const& w, MokSchedule const& sched, MokBackward const& b, cudaStream_t stream) {
  MokShape const& s = w.shape;
  MokScaledWeights const& q = b.scaled;
  BackwardParams p{{}, make_common(w, sched, b.tokens, w.backward_comm_ctas, false), b};
  ScratchLayout const& at = p.common.at;
  auto* scratch = static_cast<char*>(w.scratch);
  int i = s.intermediate, h = s.hidden, ring = s.ring_rows, experts = s.experts_local;
  int e = map_scaled_rows(p.maps + kBXRows, b.x_rows, ring, h);
  if (!e) e = map_e4m3_gate_up(p.maps + kBW1, q.w1, i, h, experts);
  if (!e) e = map_scaled_rows(p.maps + kDyRows, scratch + at.scaled_dy_rows, ring, h);
  if (!e) e = map_e4m3_columns(p.maps + kBW2T, q.w2_t, i, h, experts);
  if (!e) e = map_scaled_rows(p.maps + kDGateUp, scratch + at.scaled_dgate_up, ring, 2 * i);
  if (!e) e = map_e4m3_columns(p.maps + kBW1T, q.w1_t, h, 2 * i, experts);
  if (!e) e = map_column_major(p.maps + kDGateUpT, scratch + at.dgate_up, ring, 2 * i, kTileRows, 1);
  if (!e) e = map_column_major(p.maps + kXRowsT, scratch + at.wide_x_rows, ring, h, kTileCols, 1);
  if (!e) e = map_column_major(p.maps + kDyRowsT, scratch + at.dy_rows, ring, h, kTileRows, 1);
  if (!e) e = map_column_major(p.maps + kHiddenT, scratch + at.hidden, ring, i, kTileCols, 1);
  if (!e) e = map_shared_backward(p, w);
  if (e) return e;
  return launch("the backward megakernel (FP8)", megakernel<Fp8BackwardProgram>, p, w.num_ctas, kThreads, sizeof(SharedMemory), stream);
}

}  // namespace mok

#else
#include "backward.cuh"
#include "host/error.h"

int mok::backward_fp8(MokWorkspace const&, MokSchedule const&, MokBackward const&, cudaStream_t) {
  return fail("FP8 with block scales needs compute capability 9.0; choose the format bf16");
}
#endif
