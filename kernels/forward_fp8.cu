// The forward megakernel's launch with E4M3 operands and block scales. Hopper's tensor cores only.
#if __CUDA_ARCH_LIST__ == 900
#include "forward_fp8.cuh"
#include "host/launch.h"
#include "host/tensor_maps.h"

namespace mok {

int forward_fp8(MokWorkspace const& w, MokSchedule const& sched, MokForward const& f, cudaStream_t stream) {
  MokShape const& s = w.shape;
  ForwardParams p{{}, make_common(w, sched, f.tokens, w.forward_comm_ctas, true), f};
  auto* scratch = static_cast<char*>(w.scratch);
  MokScaledWeights const& q = f.scaled;
  int e = map_scaled_rows(p.maps + kXRows, f.x_rows, s.ring_rows, s.hidden);
  if (!e) e = map_e4m3_gate_up(p.maps + kW1, q.w1, s.intermediate, s.hidden, s.experts_local);
  if (!e) e = map_scaled_rows(p.maps + kHidden, scratch + p.common.at.hidden, s.ring_rows, s.intermediate);
  if (!e) e = map_e4m3_columns(p.maps + kW2, q.w2, s.hidden, s.intermediate, s.experts_local);
  if (!e) e = map_shared_forward(p, w);
  if (e) return e;
  return launch("the forward megakernel (FP8)", megakernel<Fp8ForwardProgram>, p, w.num_ctas, kThreads, sizeof(SharedMemory), stream);
}

}  // namespace mok

#else
#include "forward.cuh"
#include "host/error.h"

int mok::forward_fp8(MokWorkspace const&, MokSchedule const&, MokForward const&, cudaStream_t) {
  return fail("FP8 with block scales needs compute capability 9.0; choose the format bf16");
}
#endif
