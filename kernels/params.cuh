// What both kernels get from the host.
#pragma once
#include "layout.h"

namespace mok {

struct Common {
  MokShape shape;
  MokSchedule schedule;
  SymmetricLayout symmetric;
  ScratchLayout at;      // offsets in `scratch`
  char* const* peers;    // [ranks] symmetric heaps
  char* scratch;
  MokError* error;
  uint64_t timeout_ns;
  int32_t comm_ctas;
  MokTraceTile* trace;
  int32_t trace_tiles;
  int32_t tokens;        // T
  int32_t pull_rows;     // rows that a warp pulls at a time
  uint32_t row_bytes;    // of a dispatched row where it arrives
  uint32_t signature;    // of this step, to be the same on every rank

  __device__ Counters& counters() const { return *reinterpret_cast<Counters*>(scratch); }
  __device__ uint32_t* counts(size_t offset) const { return reinterpret_cast<uint32_t*>(scratch + offset); }
  template <class T>
  __device__ T* local(size_t offset) const { return reinterpret_cast<T*>(scratch + offset); }
  template <class T>
  __device__ T* peer(int rank, size_t offset) const { return reinterpret_cast<T*>(peers[rank] + offset); }
  template <class T>
  __device__ T* own(size_t offset) const { return peer<T>(shape.rank, offset); }

  // Routes of one rank in the numbering of row_source.
  __device__ int routes_per_rank() const { return schedule.info[1] * shape.topk; }
};

}  // namespace mok
