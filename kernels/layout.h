// Where everything lies in a workspace's two buffers, computed the same way on every rank.
#pragma once
#include <cstddef>
#include <cstdint>
#include "mok_api.h"

namespace mok {

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A row of FP8 values with its scales behind it: one fp32 for 128 values, or in MXFP8 a byte for 32.
constexpr size_t scaled_row_bytes(int values) { return values + size_t(values / 32 + 15) / 16 * 16; }

constexpr bool is_mxfp8(MokShape const& s) { return s.format == MOK_FORMAT_MXFP8 || s.format == MOK_FORMAT_MXFP8_E5M2; }

// What is dispatched of a token.
inline size_t dispatched_bytes(MokShape const& s) {
  return s.format == MOK_FORMAT_BF16 ? size_t(s.hidden) * 2 : scaled_row_bytes(s.hidden);
}
// A dispatched row where it arrives: MXFP8 becomes bf16 on the way.
inline size_t row_bytes(MokShape const& s) {
  return s.format == MOK_FORMAT_FP8_BLOCK ? scaled_row_bytes(s.hidden) : size_t(s.hidden) * 2;
}

// One counter a cache line: they are hot.
struct alignas(128) Counter {
  uint32_t value;
};

// Counters of one rank, in its scratch. All but the first two start each launch at zero.
struct Counters {
  Counter epoch;   // launches completed
  Counter stop;    // set when this rank has recorded an error; never cleared
  Counter failed;  // why this launch computes no rows, as its peers will read it (Done); 0 = it does
  Counter prepare_pushed, prepare_counted;          // CTAs of the prepare kernel
  Counter next_tile, next_pull;                     // dynamic distribution of work
  Counter tiles_done, dhidden_done, shared_dhidden_done;  // whole-launch counts
  Counter tiles_pushed;                             // of those whose rows the sum over k reads, here or on a peer
  Counter next_sum;                                 // dynamic distribution of the sum over k
  Counter expanded;                                 // rows of x and dY that are there as bf16 too
  Counter exited;                                   // CTAs
};

// How a rank ended a launch, in two bits of its done flag.
enum Done : uint32_t {
  kDoneWell = 0,
  kDoneOverflowed = 1,  // it had more rows than capacity, and pushed none
  kDoneEvicted = 2,     // well, and its backward will ask for x again
  kDoneOtherStep = 3,   // it pushed none, because its peers had launched another step
};

// What a rank tells its peers about a launch, before it waits for any of them.
struct Announcement {
  uint32_t tokens;
  uint32_t signature;  // hash of the shape and the kind of step
};

class Allocator {
 public:
  size_t take(size_t bytes) {
    size_t at = next_;
    next_ += (bytes + 1023) / 1024 * 1024;
    return at;
  }
  size_t bytes() const { return next_; }

 private:
  size_t next_ = 0;
};

// Offsets in the symmetric heap. [ranks] arrays are indexed by the rank that writes the entry.
struct SymmetricLayout {
  size_t routes_flag;   // [ranks] u32: epoch of the announcement that has arrived; of the routes, if it is a forward's
  size_t input_flag;    // [ranks] u32: epoch of the input that may be pulled
  size_t done_flag;     // [2][ranks] u32: 4 * epoch + Done, when all rows have been pushed; by parity of the
                        // epoch, because a peer that needs no rows from this rank can be a launch ahead
  size_t announcement;  // [ranks] Announcement
  size_t ids;           // [ranks][max_tokens * K] i32
  size_t weights;       // [ranks][max_tokens * K] f32
  size_t input;         // [max_tokens] rows as they are dispatched: x or dY, pulled by peers
  size_t input_again;   // likewise: x in a backward that dispatches evicted rows again
  size_t slots;         // [max_tokens * K, H] bf16: rows pushed by peers
  size_t dweight;       // [max_tokens * K, dhidden column tiles] f32: partial sums pushed by peers
  size_t bytes;

  explicit SymmetricLayout(MokShape const& s) {
    Allocator a;
    size_t routes = size_t(s.max_tokens) * s.topk, row = dispatched_bytes(s);
    // In bf16 a rank alone pulls its input from where it is; in FP8 it has to be quantised.
    bool staged = s.ranks > 1 || s.format != MOK_FORMAT_BF16;
    routes_flag = a.take(s.ranks * 4ull);
    input_flag = a.take(s.ranks * 4ull);
    done_flag = a.take(2 * s.ranks * 4ull);
    announcement = a.take(s.ranks * sizeof(Announcement));
    ids = a.take(s.ranks * routes * 4);
    weights = a.take(s.ranks * routes * 4);
    input = a.take(staged ? s.max_tokens * row : 0);
    input_again = a.take(staged && s.capacity_rows > s.ring_rows ? s.max_tokens * row : 0);
    slots = a.take(routes * s.hidden * 2);
    dweight = a.take(routes * ceil_div(s.intermediate, 256) * 4);
    bytes = a.bytes();
  }
};

constexpr int kSortCtas = 128;  // CTAs that count and place routes in the prepare kernel, at most

// Offsets in the scratch.
struct ScratchLayout {
  size_t counters;
  size_t rows_x, rows_dy, fc1, fc2, dhidden;  // [capacity_rows / 128] u32 each: per block of rows
  size_t shared_fc1, shared_dhidden;          // [max_tokens / 128] u32 each
  size_t block_counters_end;                  // all of the above but `counters` are one range to clear
  size_t histogram;                           // [kSortCtas][E_local] u32
  size_t hidden;                              // [ring_rows, I] bf16; weighted hidden in the backward
  size_t dgate_up, dy_rows;                   // [ring_rows, 2I], [ring_rows, H] bf16
  // With block scales: rows of E4M3, and x as bf16 for the weight gradients.
  size_t scaled_dgate_up, scaled_dy_rows;     // [ring_rows] scaled rows of 2I and H values
  size_t rounded_dgate_up;                    // in MXFP8: [ring_rows, 2I] bf16, as dX reads it
  size_t wide_x_rows;                         // [ring_rows, H] bf16
  size_t shared_hidden, shared_dgate_up, shared_out;  // [max_tokens, Is], [.., 2Is], [.., H] bf16
  size_t shared_dscale;                       // [max_tokens, column tiles of Is] f32
  // fp32 accumulators of an expert that the end of a macrobatch cuts. Two: a macrobatch may continue one expert and
  // begin to compute another.
  size_t carry[2];
  size_t bytes;

  explicit ScratchLayout(MokShape const& s) {
    Allocator a;
    size_t blocks = s.capacity_rows / MOK_TILE_ROWS, tokens = s.max_tokens, ring = s.ring_rows;
    size_t shared_blocks = ceil_div(s.max_tokens, MOK_TILE_ROWS);
    size_t i = s.intermediate, is = s.shared_intermediate, h = s.hidden;
    counters = a.take(sizeof(Counters));
    rows_x = a.take(blocks * 4);
    rows_dy = a.take(blocks * 4);
    fc1 = a.take(blocks * 4);
    fc2 = a.take(blocks * 4);
    dhidden = a.take(blocks * 4);
    shared_fc1 = a.take(shared_blocks * 4);
    shared_dhidden = a.take(shared_blocks * 4);
    block_counters_end = a.bytes();
    histogram = a.take(size_t(kSortCtas) * s.experts_local * 4);
    hidden = a.take(ring * i * 2);
    dgate_up = a.take(ring * i * 4);
    dy_rows = a.take(ring * h * 2);
    bool scaled = s.format == MOK_FORMAT_FP8_BLOCK;
    scaled_dgate_up = a.take(scaled ? ring * scaled_row_bytes(2 * s.intermediate) : 0);
    scaled_dy_rows = a.take(scaled ? ring * scaled_row_bytes(s.hidden) : 0);
    rounded_dgate_up = a.take(is_mxfp8(s) ? ring * i * 4 : 0);
    wide_x_rows = a.take(scaled ? ring * h * 2 : 0);
    shared_hidden = a.take(tokens * is * 2);
    shared_dgate_up = a.take(tokens * is * 4);
    shared_out = a.take(is ? tokens * h * 2 : 0);
    shared_dscale = a.take(tokens * ceil_div(s.shared_intermediate, 256) * 4);
    size_t tiles = size_t(ceil_div(2 * s.intermediate, 128)) * ceil_div(s.hidden, 256) +
                   size_t(ceil_div(s.hidden, 128)) * ceil_div(s.intermediate, 256);
    for (size_t& c : carry) c = a.take(s.capacity_rows > s.ring_rows ? tiles * 128 * 256 * 4 : 0);
    bytes = a.bytes();
  }
};

}  // namespace mok
