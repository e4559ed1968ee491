// The backward's pulls: dY, and x again where the forward has not kept it.
#pragma once
#include "backward.cuh"

namespace mok {

// Job `i` of those that pull x, or dY, of a macrobatch into a ring.
__device__ inline void BackwardProgram::pull_into(char* ring, bool x, int m, Macrobatch const& b, int i, int tiles_before,
                                                  PullJob& job) const {
  Common const& c = p_.common;
  int rows_each = c.pull_rows, jobs_a_block = kTileRows / rows_each;
  int first = i / jobs_a_block / per_ * per_;
  PhaseTile phase{0, first, min(per_, b.count - first), i / jobs_a_block - first};
  int in_ring = in_macrobatch(phase), block = b.first + in_ring;
  int part = (i % jobs_a_block + c.shape.rank * jobs_a_block / c.shape.ranks) % jobs_a_block;
  job.row = block * kTileRows + part * rows_each;
  job.dst = ring + (size_t(in_ring) * kTileRows + part * rows_each) * c.row_bytes;
  job.arrived = c.counts(x ? c.at.rows_x : c.at.rows_dy) + block;
  // Everything that reads the ring's rows of the macrobatches before.
  job.after = b.again ? &c.counters().tiles_done.value : nullptr;
  job.after_value = tiles_before;
  job.after_flag = MOK_FLAG_MACROBATCH;
  job.after_index = m;
  job.own_input = static_cast<char const*>(x ? p_.b.x : p_.b.dy);
  job.peer_input = x ? c.symmetric.input_again : c.symmetric.input;
  job.wide = nullptr;
}

__device__ inline bool BackwardProgram::pull_job(uint32_t n, PullJob& job) const {
  Common const& c = p_.common;
  int i = int(n), before = 0;
  if (blocks_ == 0) return false;
  for (int m = macrobatches_ - 1; m >= 0; --m) {
    Macrobatch b = macrobatch(m);
    int each = b.count * (kTileRows / c.pull_rows), jobs = each * (b.again ? 2 : 1);
    if (i < jobs) {
      bool x = b.again && i < each;  // x first: FC1 comes first
      pull_into(x ? static_cast<char*>(p_.b.x_rows) : c.local<char>(c.at.dy_rows), x, m, b, i % each, before, job);
      return true;
    }
    i -= jobs;
    before += tiles_of(b);
  }
  return false;
}

}  // namespace mok
