// What happens to a finished tile of the backward products.
#pragma once
#include "../mma/product.cuh"
#include "../ptx/bulk.cuh"
#include "registers.cuh"

namespace mok {

// dHidden: SwiGLU backward, and the row sums that are the gradient of the router weights.
//
// The tile holds d = dY @ W2, without the router weight w. With h = silu(gate) * up:
//   d(w) = sum of h * d;  d(up) = w * d * silu(gate);  d(gate) = w * d * up * silu'(gate);
// and w * h is stored for the weight gradient of W2, whose other operand is dY without w.
struct DHiddenOutput {
  __nv_bfloat16 const* gate_up;  // row 0 of the tile, [.., 2 * width]
  __nv_bfloat16* dgate_up;       // likewise
  __nv_bfloat16* hidden;         // row 0 of the tile, [.., width]
  int width, rows, col;
  __nv_bfloat16* rounded = nullptr;  // like dgate_up: as dX reads it, where that is not what the weight gradients read
};

// Brings what store_dhidden will read into L2: each thread half a row of the tile, gate or up.
__device__ __forceinline__ void prefetch_dhidden(DHiddenOutput const& out, int thread) {
  int row = thread / 2, cols = min(kTileCols, out.width - out.col);
  if (row < out.rows && cols > 0)
    ptx::bulk_prefetch(out.gate_up + size_t(row) * 2 * out.width + thread % 2 * out.width + out.col, cols * 2);
}

// One half of a thread's rows, 64 columns of the tile.
struct GateUp {
  uint4 gate[2], up[2];
};
__device__ __forceinline__ GateUp load_gate_up(DHiddenOutput const& out, bool const (&there)[2], int part, int thread) {
  GateUp v;
  int row = accumulator_row(thread, part / 4);
  auto const* from = out.gate_up + size_t(row) * 2 * out.width;
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    int col = out.col + part % 4 * 64 + g * 32 + thread % 4 * 8;
    bool load = part < 8 && (part / 4 == 0 ? there[0] : there[1]) && row < out.rows && col < out.width;
    v.gate[g] = load ? ptx::load_l2(from + col) : make_uint4(0, 0, 0, 0);
    v.up[g] = load ? ptx::load_l2(from + out.width + col) : make_uint4(0, 0, 0, 0);
  }
  return v;
}

// Two columns of one row: adds to `sum`, and gives what is stored as pairs of bf16. `real`: not a padding row.
__device__ __forceinline__ void swiglu_backward(uint32_t gate, uint32_t up, float d0, float d1, float w, bool real, float& sum,
                                                uint32_t& dgate, uint32_t& dup, uint32_t& hidden) {
  float2 ga = unpack(gate), u = unpack(up);
  float s0 = sigmoid(ga.x), s1 = sigmoid(ga.y), silu0 = ga.x * s0, silu1 = ga.y * s1;
  float h0 = silu0 * u.x, h1 = silu1 * u.y;
  sum = fmaf(h1, d1, fmaf(h0, d0, sum));
  float e0 = real ? w * d0 : 0.f, e1 = real ? w * d1 : 0.f;
  dup = pack(e0 * silu0, e1 * silu1);
  dgate = pack(e0 * u.x * fmaf(silu0, 1.f - s0, s0), e1 * u.y * fmaf(silu1, 1.f - s1, s1));
  hidden = pack(w * h0, w * h1);
}

// The accumulators are used up: an eighth of them is handled at a time, in a loop that moves the next eighth into its
// place. Unrolled, the code would not fit the instruction cache. Loads are one eighth ahead.
template <class Round = KeepBf16>
__device__ __forceinline__ void store_dhidden(Accumulator& acc, DHiddenOutput const& out, float const (&weight)[2],
                                              float* const (&row_sum)[2], int thread, Round const& round = {}) {
  float sum = 0.f;
  // Padding rows become zeros whatever the product says: 0 * inf of a weight is NaN, and weight gradients sum over them.
  bool const there[2] = {row_sum[0] != nullptr, row_sum[1] != nullptr};
  GateUp next = load_gate_up(out, there, 0, thread);
#pragma unroll 1
  for (int part = 0; part < 8; ++part) {
    GateUp const now = next;
    next = load_gate_up(out, there, part + 1, thread);
    int half = part / 4, row = accumulator_row(thread, half);
    size_t wide = size_t(row) * 2 * out.width;
    float w = half == 0 ? weight[0] : weight[1];
    bool real = half == 0 ? there[0] : there[1];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      float d0[4], d1[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        d0[b] = acc(4 * (4 * g + b));
        d1[b] = acc(4 * (4 * g + b) + 1);
      }
      quad_transpose(d0);
      quad_transpose(d1);
      uint32_t const gate[4] = {now.gate[g].x, now.gate[g].y, now.gate[g].z, now.gate[g].w};
      uint32_t const up[4] = {now.up[g].x, now.up[g].y, now.up[g].z, now.up[g].w};
      uint32_t dgate[4], dup[4], hidden[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        swiglu_backward(gate[p], up[p], d0[p], d1[p], w, real, sum, dgate[p], dup[p], hidden[p]);
      }
      int col = out.col + part % 4 * 64 + g * 32 + thread % 4 * 8;
      if (row < out.rows && col < out.width) {
        ptx::store_16(out.dgate_up + wide + col, as_uint4(dgate));
        ptx::store_16(out.dgate_up + wide + out.width + col, as_uint4(dup));
        ptx::store_16(out.hidden + size_t(row) * out.width + col, as_uint4(hidden));
      }
      if constexpr (!Round::kExact) {
        round(dgate);
        round(dup);
        if (row < out.rows && col < out.width) {
          ptx::store_16(out.rounded + wide + col, as_uint4(dgate));
          ptx::store_16(out.rounded + wide + out.width + col, as_uint4(dup));
        }
      }
    }
    if (part % 4 == 3) {
      sum = quad_sum(sum);
      float* to = half == 0 ? row_sum[0] : row_sum[1];
      if (to != nullptr && thread % 4 == 0) *to = sum;
      sum = 0.f;
    }
    // Eighths in order: 64 columns after 64 of the first rows, then of the second.
#pragma unroll
    for (int j = 0; j < 32; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        acc(4 * j + i) = j < 24 ? acc(4 * (j % 24 + 8) + i) : acc(4 * (j % 8) + 2 + i);
      }
    }
#pragma unroll
    for (int j = 0; j < 24; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) acc(4 * j + 2 + i) = acc(4 * (j + 8) + 2 + i);
    }
  }
}

// Brings what a weight-gradient tile is added to into L2: each thread half a row of the tile.
__device__ __forceinline__ void prefetch_dweight(MokGrad const& grad, size_t offset, int rows, int cols, int row0, int col0, int thread) {
  int row = row0 + thread / 2, col = col0 + thread % 2 * (kTileCols / 2), n = min(kTileCols / 2, cols - col);
  int size = grad.dtype == MOK_GRAD_FP32 ? 4 : 2;
  if (grad.accumulate && row < rows && n > 0)
    ptx::bulk_prefetch(static_cast<char const*>(grad.data) + (offset + size_t(row) * cols + col) * size, n * size);
}

// Weight gradient: added to, or written over, a matrix [rows, cols] of fp32 or bf16.
__device__ __forceinline__ void store_dweight(Accumulator const& acc, MokGrad const& grad, size_t offset, int rows, int cols,
                                              int row0, int col0, int thread) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = row0 + accumulator_row(thread, half);
    size_t at = offset + size_t(row) * cols;
    if (grad.dtype == MOK_GRAD_FP32) {
      float* data = static_cast<float*>(grad.data) + at;
      bool odd = thread & 1;
#pragma unroll
      for (int b = 0; b < 32; b += 2) {
        // Of two blocks of 8 columns, even threads take the first and odd ones the second, four columns each.
        int i = 4 * b + 2 * half;
        float x0 = acc(i), x1 = acc(i + 1), y0 = acc(i + 4), y1 = acc(i + 5);
        float got0 = __shfl_xor_sync(0xffffffffu, odd ? x0 : y0, 1), got1 = __shfl_xor_sync(0xffffffffu, odd ? x1 : y1, 1);
        float4 v = odd ? make_float4(got0, got1, y0, y1) : make_float4(x0, x1, got0, got1);
        int col = col0 + 8 * b + (odd ? 8 : 0) + (thread & 2) * 2;
        if (row < rows && col < cols) {
          if (grad.accumulate) ptx::add_f32x4(data + col, v.x, v.y, v.z, v.w);
          else *reinterpret_cast<float4*>(data + col) = v;
        }
      }
    } else {
      auto* data = static_cast<__nv_bfloat16*>(grad.data) + at;
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        float d0[4], d1[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          int i = 4 * (4 * g + b) + 2 * half;
          d0[b] = acc(i);
          d1[b] = acc(i + 1);
        }
        quad_transpose(d0);
        quad_transpose(d1);
        int col = col0 + g * 32 + thread % 4 * 8;
        if (row < rows && col < cols) {
          uint32_t w[4];
          uint4 old = grad.accumulate ? ptx::load_l2(data + col) : make_uint4(0, 0, 0, 0);
          uint32_t const before[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
          for (int p = 0; p < 4; ++p) {
            float2 b = unpack(before[p]);
            w[p] = grad.accumulate ? pack(b.x + d0[p], b.y + d1[p]) : pack(d0[p], d1[p]);
          }
          ptx::store_16(data + col, as_uint4(w));
        }
      }
    }
  }
}

// Accumulators of a tile as they are, to be continued by another tile with the same threads.
__device__ __forceinline__ void save_accumulator(Accumulator const& acc, float* tile, int thread) {
#pragma unroll
  for (int i = 0; i < kAccumulatorSize; i += 4)
    reinterpret_cast<float4*>(tile)[i / 4 * kConsumerThreads + thread] = make_float4(acc(i), acc(i + 1), acc(i + 2), acc(i + 3));
}
__device__ __forceinline__ void restore_accumulator(Accumulator& acc, float const* tile, int thread) {
#pragma unroll
  for (int i = 0; i < kAccumulatorSize; i += 4) {
    float4 v = ptx::load_l2_f32x4(tile + (i / 4 * kConsumerThreads + thread) * 4);
    acc(i) = v.x, acc(i + 1) = v.y, acc(i + 2) = v.z, acc(i + 3) = v.w;
  }
}

}  // namespace mok
