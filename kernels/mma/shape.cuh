// What the tile products of all architectures have in common: the tile, the threads that get it, and rings.
#pragma once
#include <cstdint>

namespace mok {

constexpr int kTileRows = 128, kTileCols = 256, kTileK = 64;
// Threads of a CTA in this order: those that load and schedule, those that store, those that only issue products.
constexpr int kProducerThreads = 128, kConsumerThreads = 256, kConsumerWarps = 8;
constexpr int kAccumulatorSize = kTileRows * kTileCols / kConsumerThreads;
constexpr uint32_t kStageBytesA = kTileRows * kTileK * 2, kStageBytesB = kTileCols * kTileK * 2;

// How an operand lies in memory: K contiguous, or M (of A) or N (of B) contiguous.
enum class Major { K, MN };

// A tile's product, as far as the tensor cores are concerned.
struct Product {
  Major a, b;
  int k_tiles;    // stages along K
  bool restored;  // added to accumulators that the consumers put back
};

// Position in a ring of `Slots`: which one, and the parity of its barriers.
template <int Slots>
struct RingCursor {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == Slots) { index = 0; parity ^= 1; }
  }
};

}  // namespace mok
