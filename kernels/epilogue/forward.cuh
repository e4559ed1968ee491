// What happens to a finished tile of the forward products.
#pragma once
#include "../mma/product.cuh"
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

template <class Round = KeepBf16>
__device__ __forceinline__ void store_fc1(Accumulator const& acc, Fc1Output const& out, int thread, Round const& round = {}) {
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
      round(product);
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
//
// Threads of neighbouring rows exchange halves, so that a warp writes 128 bytes of each of four rows at a time and not
// 64 of eight: what crosses NVLink goes in full lines.
__device__ __forceinline__ void store_rows(Accumulator const& acc, __nv_bfloat16* const (&dst)[2], int col, int width, int thread) {
  bool odd = thread & 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    auto mine = reinterpret_cast<unsigned long long>(dst[half]);
    auto other = __shfl_xor_sync(0xffffffffu, mine, 4);
    auto* even_row = reinterpret_cast<__nv_bfloat16*>(odd ? other : mine);
    auto* odd_row = reinterpret_cast<__nv_bfloat16*>(odd ? mine : other);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t w[2][4];
#pragma unroll
      for (int g = 0; g < 2; ++g) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          int i = 4 * (4 * (2 * pair + g) + b) + 2 * half;
          w[g][b] = pack(acc(i), acc(i + 1));
        }
        quad_transpose(w[g]);
      }
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[0][b] : w[1][b], 4);
        if (odd) w[0][b] = got; else w[1][b] = got;
      }
      // Even threads have columns 0 .. 31 of the pair for both rows, odd ones columns 32 .. 63.
      int c = col + pair * 64 + (odd ? 32 : 0) + thread % 4 * 8;
      if (c < width) {
        if (even_row != nullptr) ptx::store_16(even_row + c, as_uint4(w[0]));
        if (odd_row != nullptr) ptx::store_16(odd_row + c, as_uint4(w[1]));
      }
    }
  }
}

}  // namespace mok
