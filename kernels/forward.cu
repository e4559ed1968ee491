// The forward megakernel's launch.
#include "forward.cuh"
#include "host/launch.h"
#include "host/tensor_maps.h"

using namespace mok;

int mok::map_shared_forward(ForwardParams& p, MokWorkspace const& w) {
  MokShape const& s = w.shape;
  MokForward const& f = p.f;
  if (s.shared_intermediate == 0 || f.tokens == 0) return 0;
  char* hidden = static_cast<char*>(w.scratch) + p.common.at.shared_hidden;
  int e = map_k_major(p.maps + kX, f.x, f.tokens, s.hidden, kTileRows, 1);
  if (!e) e = map_gate_up(p.maps + kSharedW1, f.shared_w1, s.shared_intermediate, s.hidden, 1);
  if (!e) e = map_k_major(p.maps + kSharedHidden, hidden, f.tokens, s.shared_intermediate, kTileRows, 1);
  if (!e) e = map_k_major(p.maps + kSharedW2, f.shared_w2, s.hidden, s.shared_intermediate, kTileCols, 1);
  return e;
}

extern "C" int mok_forward(MokWorkspace const* w, MokSchedule const* sched, MokForward const* f, void* stream) {
  if (int e = check_call(*w, f->tokens)) return e;
  if (w->shape.format == MOK_FORMAT_FP8_BLOCK) return forward_fp8(*w, *sched, *f, static_cast<cudaStream_t>(stream));
  MokShape const& s = w->shape;
  ForwardParams p{{}, make_common(*w, *sched, f->tokens, w->forward_comm_ctas, true), *f};
  auto* scratch = static_cast<char*>(w->scratch);
  bool mx = is_mxfp8(s);
  void const *w1 = mx ? f->scaled.w1 : f->w1, *w2 = mx ? f->scaled.w2 : f->w2;
  int e = map_k_major(p.maps + kXRows, f->x_rows, s.ring_rows, s.hidden, kTileRows, 1);
  if (!e) e = map_gate_up(p.maps + kW1, w1, s.intermediate, s.hidden, s.experts_local);
  if (!e) e = map_k_major(p.maps + kHidden, scratch + p.common.at.hidden, s.ring_rows, s.intermediate, kTileRows, 1);
  if (!e) e = map_k_major(p.maps + kW2, w2, s.hidden, s.intermediate, kTileCols, s.experts_local);
  if (!e) e = map_shared_forward(p, *w);
  if (e) return e;
  if (mx) return launch_forward_mxfp8(p, w->num_ctas, static_cast<cudaStream_t>(stream));
  return launch("the forward megakernel", megakernel<ForwardProgram>, p, w->num_ctas, kThreads, sizeof(SharedMemory),
                static_cast<cudaStream_t>(stream));
}
