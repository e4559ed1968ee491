// Finished tiles that become E4M3 operands of the next product. Blocks of scales never leave a tile: each is 128 columns
// of one row, held by the four threads that share the row.
#pragma once
#include "../formats/blockwise.cuh"
#include "backward.cuh"

namespace mok {

// FC1 as in forward.cuh, but hidden leaves as scaled rows: rounded to bf16, then to E4M3.
struct ScaledHiddenOutput {
  __nv_bfloat16* gate_up;  // row 0 of the tile, [.., 2 * width]
  char* hidden;            // row 0 of the tile, scaled rows of `width` values
  size_t row_bytes;        // from one scaled row to the next
  int width;               // I
  int col;                 // first hidden column, a multiple of 128
};

__device__ __forceinline__ void store_scaled_fc1(Accumulator const& acc, ScaledHiddenOutput const& out, int thread) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __nv_bfloat16* gate_up = out.gate_up + size_t(accumulator_row(thread, half)) * 2 * out.width;
    uint32_t hidden[16], amax = 0;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      uint32_t gate[4], up[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        int i = 4 * (4 * group + b) + 2 * half;
        gate[b] = pack(acc(i), acc(i + 1));
        up[b] = pack(acc(i + 64), acc(i + 65));
        // From the rounded values, so that the backward, which has only those, computes the same hidden.
        float2 g = unpack(gate[b]), u = unpack(up[b]);
        uint32_t h = pack(g.x * sigmoid(g.x) * u.x, g.y * sigmoid(g.y) * u.y);
        amax = larger(amax, magnitudes(h));
        hidden[4 * group + b] = h;
      }
      quad_transpose(gate);
      quad_transpose(up);
      int col = out.col + group * 32 + thread % 4 * 8;
      ptx::store_16(gate_up + col, as_uint4(gate));
      ptx::store_16(gate_up + out.width + col, as_uint4(up));
    }
    BlockScale const s = block_scale(quad_largest(amax));
    char* row = out.hidden + accumulator_row(thread, half) * out.row_bytes;
    if (thread % 4 == 0) row_scales(row, out.width)[out.col / kScaleBlock] = s.scale;
    // Two blocks of eight columns a word, so that after the exchange a thread has sixteen columns in a row.
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = to_e4m3x4(hidden[8 * part + 2 * i], hidden[8 * part + 2 * i + 1], s.multiplier);
      quad_transpose(w);
      uint4 v = {__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410), __byte_perm(w[0], w[1], 0x7632),
                 __byte_perm(w[2], w[3], 0x7632)};
      ptx::store_16(row + out.col + part * 64 + thread % 4 * 16, v);
    }
  }
}

// dHidden as in backward.cuh. d(gate) and d(up) also leave as scaled rows, for dX; the weight gradients take bf16.
struct ScaledGradientOutput {
  char* dgate_up;    // row 0 of the tile, scaled rows of 2 * width values
  size_t row_bytes;  // from one scaled row to the next
};

// Sixteen words are what a thread has of a block: four groups of 32 columns, eight columns of each.
__device__ __forceinline__ void store_scaled_block(uint32_t const (&words)[16], char* row, int values, int col, int thread) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) amax = larger(amax, magnitudes(words[i]));
  BlockScale const s = block_scale(quad_largest(amax));
  if (thread % 4 == 0) row_scales(row, values)[col / kScaleBlock] = s.scale;
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    uint2 v = {to_e4m3x4(words[4 * g], words[4 * g + 1], s.multiplier), to_e4m3x4(words[4 * g + 2], words[4 * g + 3], s.multiplier)};
    *reinterpret_cast<uint2*>(row + col + g * 32 + thread % 4 * 8) = v;
  }
}

// A quarter of the accumulators at a time, 128 columns of one row, in a loop that moves the next quarter into its place:
// unrolled, the code would not fit the instruction cache.
__device__ __forceinline__ void store_scaled_dhidden(Accumulator& acc, DHiddenOutput const& out, ScaledGradientOutput const& scaled,
                                                     float const (&weight)[2], float* const (&row_sum)[2], int thread) {
  float sum = 0.f;
  bool const there[2] = {row_sum[0] != nullptr, row_sum[1] != nullptr};
  GateUp next = load_gate_up(out, there, 0, thread);
#pragma unroll 1
  for (int part = 0; part < 4; ++part) {
    int half = part / 2, row = accumulator_row(thread, half), block = out.col + part % 2 * kScaleBlock;
    size_t wide = size_t(row) * 2 * out.width;
    float w = half == 0 ? weight[0] : weight[1];
    bool exists = block < out.width;  // alike in all threads
    bool real = half == 0 ? row_sum[0] != nullptr : row_sum[1] != nullptr;
    uint32_t dgate[16], dup[16];
    GateUp now;
    if (exists) {
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        int col = block + g * 32 + thread % 4 * 8;
        // Two groups ahead.
        if (g % 2 == 0) now = next, next = load_gate_up(out, there, 2 * part + g / 2 + 1, thread);
        uint4 const gates = now.gate[g % 2], ups = now.up[g % 2];
        uint32_t const gate[4] = {gates.x, gates.y, gates.z, gates.w}, up[4] = {ups.x, ups.y, ups.z, ups.w};
        float d0[4], d1[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          d0[b] = acc(4 * (4 * g + b));
          d1[b] = acc(4 * (4 * g + b) + 1);
        }
        quad_transpose(d0);
        quad_transpose(d1);
        uint32_t hidden[4];
#pragma unroll
        for (int p = 0; p < 4; ++p)
          swiglu_backward(gate[p], up[p], d0[p], d1[p], w, real, sum, dgate[4 * g + p], dup[4 * g + p], hidden[p]);
        ptx::store_16(out.dgate_up + wide + col, make_uint4(dgate[4 * g], dgate[4 * g + 1], dgate[4 * g + 2], dgate[4 * g + 3]));
        ptx::store_16(out.dgate_up + wide + out.width + col, make_uint4(dup[4 * g], dup[4 * g + 1], dup[4 * g + 2], dup[4 * g + 3]));
        ptx::store_16(out.hidden + size_t(row) * out.width + col, as_uint4(hidden));
      }
      char* to = scaled.dgate_up + row * scaled.row_bytes;
      store_scaled_block(dgate, to, 2 * out.width, block, thread);
      store_scaled_block(dup, to, 2 * out.width, out.width + block, thread);
    } else {
      next = load_gate_up(out, there, 2 * part + 2, thread);
    }
    if (part % 2 == 1) {
      sum = quad_sum(sum);
      float* to = half == 0 ? row_sum[0] : row_sum[1];
      if (to != nullptr && thread % 4 == 0) *to = sum;
      sum = 0.f;
    }
    // Quarters in order: 128 columns after 128 of the first rows, then of the second.
#pragma unroll
    for (int j = 0; j < 32; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) acc(4 * j + i) = j < 16 ? acc(4 * (j % 16 + 16) + i) : acc(4 * (j % 16) + 2 + i);
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) acc(4 * j + 2 + i) = acc(4 * (j + 16) + 2 + i);
    }
  }
}

}  // namespace mok
