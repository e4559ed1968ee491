// What happens to a finished tile of the forward products.
#pragma once
#include "../mma/sm90.cuh"
#include "registers.cuh"

namespace mok {

// FC1: columns 0 .. 127 of the tile are gate, 128 .. 255 the up of the same hidden columns.
struct Fc1Output {
  __nv_bfloat16* gate_up;  // row 0 of the tile, [.., 2 * width]
  __nv_bfloat16* hidden;   // row 0 of the tile, [.., width]; null when only gate and up are wanted
  int width;               // I
  int rows;                // rows of the tile that exist
  int col;                 // first hidden column
};

__device__ __forceinline__ void store_fc1(Accumulator const& acc, Fc1Output const& out, int thread) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = accumulator_row(thread, half);
    __nv_bfloat16* gate_up = out.gate_up + size_t(row) * 2 * out.width;
    __nv_bfloat16* hidden = out.hidden + size_t(row) * out.width;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      uint32_t gate[4], up[4], product[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        int i = 4 * (4 * group + b) + 2 * half;
        gate[b] = pack(acc(i), acc(i + 1));
        up[b] = pack(acc(i + 64), acc(i + 65));
        // From the rounded values, so that the backward, which has only those, computes the same hidden.
        float2 g = unpack(gate[b]), u = unpack(up[b]);
        product[b] = pack(g.x * sigmoid(g.x) * u.x, g.y * sigmoid(g.y) * u.y);
      }
      quad_transpose(gate);
      quad_transpose(up);
      quad_transpose(product);
      int col = out.col + group * 32 + thread % 4 * 8;
      if (row < out.rows && col < out.width) {
        ptx::store_16(gate_up + col, as_uint4(gate));
        ptx::store_16(gate_up + out.width + col, as_uint4(up));
        if (out.hidden != nullptr) ptx::store_16(hidden + col, as_uint4(product));
      }
    }
  }
}

// Rows of a product to wherever each row belongs: `dst[half]` is the thread's row, or null to drop it.
__device__ __forceinline__ void store_rows(Accumulator const& acc, __nv_bfloat16* const (&dst)[2], int col, int width, int thread) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      uint32_t w[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        int i = 4 * (4 * group + b) + 2 * half;
        w[b] = pack(acc(i), acc(i + 1));
      }
      quad_transpose(w);
      int c = col + group * 32 + thread % 4 * 8;
      if (dst[half] != nullptr && c < width) ptx::store_16(dst[half] + c, as_uint4(w));
    }
  }
}

}  // namespace mok
