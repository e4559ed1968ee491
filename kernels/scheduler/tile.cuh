// A tile of the work list, and the orders in which tiles are walked.
#pragma once
#include <cstdint>

namespace mok {

enum TileKind : int32_t { kEnd = 0, kFc1, kFc2, kDHidden, kDx, kDw1, kDw2 };

// One 128 x 256 tile of a product. Written by the scheduler warp, read by the other roles of the CTA.
struct Tile {
  int32_t kind;     // TileKind
  int32_t shared;   // of the shared expert
  int32_t k_tiles;  // stages of 64 along K; 0 = write zeros
  int32_t k0, k_step;         // coordinate along K of the first stage, and from one to the next
  int32_t map_a, at_a;        // tensor map of A; K-major: row, M-major: column / 64
  int32_t map_b, at_b;        // tensor map of B, likewise
  int32_t expert;
  int32_t block;    // block of 128 rows: global number, or of tokens
  int32_t row, col; // first row and column of the output (row in the ring, where there is one)
  int32_t carry_in, carry_out;  // weight gradients: accumulators continue those of another macrobatch
  int32_t number;   // of the weight-gradient tile within its expert; -1 = nothing to do
  int32_t macrobatch;
};

// ---- [first(0)] [first(1) second(0)] [first(2) second(1)] ... [second(last)]
//
// Two phases over `blocks` blocks of rows, minibatch by minibatch, the second phase one minibatch behind, so that
// it does not wait for tiles that are only just being computed. Without `lag`: [first(0) second(0)] [first(1) ...
struct PhaseTile {
  int phase;        // 0 or 1
  int first_block;  // of the minibatch
  int blocks;       // in the minibatch
  int index;        // within (minibatch, phase)
};

__device__ __forceinline__ PhaseTile phase_tile(int t, int blocks, int per, int n0, int n1, bool lag) {
  int batches = (blocks + per - 1) / per;
  if (!lag) {
    int b = t / (per * (n0 + n1)), r = t - b * per * (n0 + n1), size = min(per, blocks - b * per);
    return r < size * n0 ? PhaseTile{0, b * per, size, r} : PhaseTile{1, b * per, size, r - size * n0};
  }
  int head = min(per, blocks) * n0;
  if (t < head) return {0, 0, min(per, blocks), t};
  int before_last = blocks * n0 + (batches - 1) * per * n1;
  if (t >= before_last) return {1, (batches - 1) * per, blocks - (batches - 1) * per, t - before_last};
  int step = per * (n0 + n1), b = 1 + (t - head) / step, r = (t - head) % step;
  // Only the last minibatch may be short, and then what follows its first phase is still a full second phase.
  int size = min(per, blocks - b * per);
  return r < size * n0 ? PhaseTile{0, b * per, size, r} : PhaseTile{1, (b - 1) * per, per, r - size * n0};
}

// Blocks of rows that are walked together: as many minibatches as give the first phase of a group enough tiles for
// every CTA, so that the second phase of the group before it does not wait for tiles that are still being computed;
// at most half of the ring.
__device__ __forceinline__ int group_blocks(int minibatch, int ring, int n0, int ctas) {
  int minibatches = (5 * ctas / 4 + minibatch * n0 - 1) / (minibatch * n0);
  return minibatch * max(1, min(minibatches, ring / minibatch / 2));
}

// Rows first, so that concurrent tiles share the columns' operand; starting at this rank's share of the minibatch,
// so that the ranks of a group do not all pull from the same peer at once.
__device__ __forceinline__ int rotated_block(PhaseTile const& p, int rank, int ranks) {
  return p.first_block + (p.index + rank * p.blocks / ranks) % p.blocks;
}
// Where the list begins: at this rank's own rows of the first expert, which need no peer, and not with a peer's. All
// blocks follow from there, and those before it come last. Only where no place in the ring is used twice.
__device__ __forceinline__ int first_block(int expert_blocks, int rank, int ranks) { return rank * expert_blocks / ranks; }
__device__ __forceinline__ int column_tile(PhaseTile const& p) { return p.index / p.blocks; }

// Tiles of an m x n grid in bands of eight rows: both operands of concurrent tiles stay in L2.
struct GridTile {
  int m, n;
};
__device__ __forceinline__ GridTile banded_tile(int t, int m_tiles, int n_tiles) {
  constexpr int kBand = 8;
  int band = t / (kBand * n_tiles), r = t - band * kBand * n_tiles, height = min(kBand, m_tiles - band * kBand);
  return {band * kBand + r % height, r / height};
}

}  // namespace mok
