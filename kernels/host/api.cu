// The parts of the C interface that are not a megakernel: sizes, errors, checks, the prepare launches.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include "../scheduler/prepare.cuh"
#include "launch.h"

namespace mok {
namespace {
thread_local char message[1024] = "";

// FNV-1a over the fields that every rank must share.
uint32_t signature(MokShape s, bool forward) {
  s.rank = 0;
  uint32_t h = forward ? 2166136261u : 2166136262u;
  for (unsigned char c : *reinterpret_cast<unsigned char (*)[sizeof(MokShape)]>(&s)) h = (h ^ c) * 16777619u;
  return h;
}

// About 16 KB at a time: so many that counting them is cheap, so few that many warps share the first block of rows.
int pull_rows(MokShape const& s) {
  int rows = 1;
  while (rows < 8 && 2 * rows * dispatched_bytes(s) <= 16384) rows *= 2;
  return rows;
}
}  // namespace

int fail(char const* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return 1;
}
char const* last_error() { return message; }

int check_call(MokWorkspace const& w, int tokens) {
  MokShape const& s = w.shape;
  char text[sizeof message] = "";
  auto require = [&](bool ok, char const* what) {
    if (!ok) snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", *text ? "; " : "", what);
  };
  require(s.ranks >= 1 && s.ranks <= kMaxRanks && s.rank >= 0 && s.rank < s.ranks, "ranks must be 1 to 128 and rank one of them");
  require(s.hidden > 0 && s.hidden % 64 == 0, "hidden must be a multiple of 64");
  require(s.intermediate > 0 && s.intermediate % 64 == 0, "intermediate must be a multiple of 64");
  require(s.shared_intermediate >= 0 && s.shared_intermediate % 64 == 0, "shared_intermediate must be a multiple of 64");
  require(s.experts_local >= 1 && s.experts_local <= 2048, "experts_local must be 1 to 2048");
  require(s.format == MOK_FORMAT_BF16 || s.format == MOK_FORMAT_FP8_BLOCK || is_mxfp8(s), "format must be a MokFormat");
  require(s.format != MOK_FORMAT_FP8_BLOCK || (s.hidden % 128 == 0 && s.intermediate % 128 == 0),
          "hidden and intermediate must be multiples of 128 in FP8 with block scales");
  require(s.topk >= 1 && s.topk <= 32, "topk must be 1 to 32");
  require(s.minibatch_rows > 0 && s.minibatch_rows % MOK_TILE_ROWS == 0, "minibatch_rows must be a multiple of 128");
  require(s.minibatch_rows > 0 && s.ring_rows > 0 && s.ring_rows % s.minibatch_rows == 0, "ring_rows must be a multiple of minibatch_rows");
  require(s.capacity_rows > 0 && s.capacity_rows % MOK_TILE_ROWS == 0, "capacity_rows must be a multiple of 128");
  require(int64_t(s.ranks) * s.max_tokens * s.topk < (1ll << 31), "ranks * max_tokens * topk must be below 2^31");
  require(tokens >= 0 && tokens <= s.max_tokens, "tokens must be 0 to max_tokens");
  require(w.forward_comm_ctas >= 0 && w.forward_comm_ctas < w.num_ctas && w.backward_comm_ctas >= 0 && w.backward_comm_ctas < w.num_ctas,
          "there must be more CTAs than communication CTAs");
  require(w.peers && w.scratch && w.error && w.timeout_ns > 0, "peers, scratch, error and timeout_ns must be set");
  return *text ? fail("%s", text) : 0;
}

Common make_common(MokWorkspace const& w, MokSchedule const& s, int tokens, int comm_ctas, bool forward) {
  return Common{w.shape, s, SymmetricLayout(w.shape), ScratchLayout(w.shape), reinterpret_cast<char* const*>(w.peers),
                static_cast<char*>(w.scratch), w.error, uint64_t(w.timeout_ns), comm_ctas, w.trace, w.trace_tiles, tokens, pull_rows(w.shape), uint32_t(row_bytes(w.shape)), signature(w.shape, forward)};
}

int launch_prepare(MokWorkspace const& w, MokSchedule const& s, int tokens, bool forward, void const* input,
                   void const* input_again, int32_t const* ids, float const* weights, cudaStream_t stream) {
  if (int e = check_call(w, tokens)) return e;
  PrepareParams p{make_common(w, s, tokens, 0, forward), input, input_again, ids, weights, forward};
  return launch("the prepare kernel", prepare_kernel, p, w.num_ctas, prepare_threads(), prepare_shared_bytes(w.shape.experts_local), stream);
}

}  // namespace mok

using namespace mok;

extern "C" {

size_t mok_symmetric_bytes(MokShape const* s) { return SymmetricLayout(*s).bytes; }
size_t mok_scratch_bytes(MokShape const* s) { return ScratchLayout(*s).bytes; }
size_t mok_row_bytes(MokShape const* s) { return row_bytes(*s); }
char const* mok_last_error(void) { return last_error(); }
int mok_api_version(void) { return MOK_API_VERSION; }

size_t mok_struct_bytes(char const* name) {
  struct { char const* name; size_t bytes; } const known[] = {
      {"MokShape", sizeof(MokShape)},       {"MokError", sizeof(MokError)},     {"MokWorkspace", sizeof(MokWorkspace)},
      {"MokSchedule", sizeof(MokSchedule)}, {"MokForward", sizeof(MokForward)}, {"MokGrad", sizeof(MokGrad)},
      {"MokBackward", sizeof(MokBackward)}, {"MokScaledWeights", sizeof(MokScaledWeights)}, {"MokTraceTile", sizeof(MokTraceTile)},
  };
  for (auto const& k : known)
    if (strcmp(k.name, name) == 0) return k.bytes;
  return 0;
}

int mok_forward_prepare(MokWorkspace const* w, MokSchedule const* s, MokForward const* f, void* stream) {
  return launch_prepare(*w, *s, f->tokens, true, f->x, nullptr, f->topk_ids, f->topk_weights, static_cast<cudaStream_t>(stream));
}
int mok_backward_prepare(MokWorkspace const* w, MokSchedule const* s, MokBackward const* b, void* stream) {
  return launch_prepare(*w, *s, b->tokens, false, b->dy, b->x, nullptr, nullptr, static_cast<cudaStream_t>(stream));
}

}  // extern "C"
