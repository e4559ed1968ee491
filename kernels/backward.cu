// The backward megakernel's launch.
#include "backward.cuh"
#include "host/launch.h"
#include "host/tensor_maps.h"

using namespace mok;

int mok::map_shared_backward(BackwardParams& p, MokWorkspace const& w) {
  MokShape const& s = w.shape;
  MokBackward const& b = p.b;
  if (s.shared_intermediate == 0 || b.tokens == 0) return 0;
  int is = s.shared_intermediate, t = b.tokens, h = s.hidden;
  auto* scratch = static_cast<char*>(w.scratch);
  char *dgate_up = scratch + p.common.at.shared_dgate_up, *hidden = scratch + p.common.at.shared_hidden;
  int e = map_k_major(p.maps + kDy, b.dy, t, h, kTileRows, 1);
  if (!e) e = map_column_major(p.maps + kSharedW2T, b.shared_w2, h, is, kTileCols, 1);
  if (!e) e = map_k_major(p.maps + kSharedDGateUp, dgate_up, t, 2 * is, kTileRows, 1);
  if (!e) e = map_column_major(p.maps + kSharedW1T, b.shared_w1, 2 * is, h, kTileCols, 1);
  if (!e) e = map_column_major(p.maps + kSharedDGateUpT, dgate_up, t, 2 * is, kTileRows, 1);
  if (!e) e = map_column_major(p.maps + kXT, b.x, t, h, kTileCols, 1);
  if (!e) e = map_column_major(p.maps + kDyT, b.dy, t, h, kTileRows, 1);
  if (!e) e = map_column_major(p.maps + kSharedHiddenT, hidden, t, is, kTileCols, 1);
  return e;
}

extern "C" int mok_backward(MokWorkspace const* w, MokSchedule const* sched, MokBackward const* b, void* stream) {
  if (int e = check_call(*w, b->tokens)) return e;
  if (w->shape.format == MOK_FORMAT_FP8_BLOCK) return backward_fp8(*w, *sched, *b, static_cast<cudaStream_t>(stream));
  MokShape const& s = w->shape;
  BackwardParams p{{}, make_common(*w, *sched, b->tokens, w->backward_comm_ctas, false), *b};
  auto* scratch = static_cast<char*>(w->scratch);
  char *dy = scratch + p.common.at.dy_rows, *dgate_up = scratch + p.common.at.dgate_up, *hidden = scratch + p.common.at.hidden;
  int i = s.intermediate, h = s.hidden, ring = s.ring_rows, experts = s.experts_local;
  bool mx = is_mxfp8(s);
  void const *w1 = mx ? b->scaled.w1 : b->w1, *w1_t = mx ? b->scaled.w1_t : b->w1, *w2_t = mx ? b->scaled.w2_t : b->w2;
  char* of_dx = mx ? scratch + p.common.at.rounded_dgate_up : dgate_up;
  int e = map_k_major(p.maps + kBXRows, b->x_rows, ring, h, kTileRows, 1);
  if (!e) e = map_gate_up(p.maps + kBW1, w1, i, h, experts);
  if (!e) e = map_k_major(p.maps + kDyRows, dy, ring, h, kTileRows, 1);
  if (!e) e = map_column_major(p.maps + kBW2T, w2_t, h, i, kTileCols, experts);
  if (!e) e = map_k_major(p.maps + kDGateUp, of_dx, ring, 2 * i, kTileRows, 1);
  if (!e) e = map_column_major(p.maps + kBW1T, w1_t, 2 * i, h, kTileCols, experts);
  if (!e) e = map_column_major(p.maps + kDGateUpT, dgate_up, ring, 2 * i, kTileRows, 1);
  if (!e) e = map_column_major(p.maps + kXRowsT, b->x_rows, ring, h, kTileCols, 1);
  if (!e) e = map_column_major(p.maps + kDyRowsT, dy, ring, h, kTileRows, 1);
  if (!e) e = map_column_major(p.maps + kHiddenT, hidden, ring, i, kTileCols, 1);
  if (!e) e = map_shared_backward(p, *w);
  if (e) return e;
  if (mx) return launch_backward_mxfp8(p, w->num_ctas, static_cast<cudaStream_t>(stream));
  return launch("the backward megakernel", megakernel<BackwardProgram>, p, w->num_ctas, kThreads, sizeof(SharedMemory),
                static_cast<cudaStream_t>(stream));
}
