// See tensor_maps.h. The driver encodes the maps; its entry point is looked up, so that nothing links libcuda.
#include "tensor_maps.h"
#include <cuda_runtime.h>
#include "../layout.h"
#include "error.h"

namespace mok {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder() {
  static Encode const found = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
      p = nullptr;
    return reinterpret_cast<Encode>(p);
  }();
  return found;
}

int encode(CUtensorMap* map, void const* data, cuuint64_t const (&dims)[4], cuuint64_t const (&strides)[3],
           cuuint32_t const (&box)[4], CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) {
  cuuint32_t const step[4] = {1, 1, 1, 1};
  if (encoder() == nullptr) return fail("this CUDA driver has no cuTensorMapEncodeTiled; install a driver of CUDA 12.0 or later");
  CUresult r = encoder()(map, type, 4, const_cast<void*>(data), dims, strides, box, step,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? 0 : fail("cuTensorMapEncodeTiled refused an operand (CUresult %d): is it aligned to 16 bytes?", int(r));
}

constexpr cuuint64_t kElement = 2;  // bytes of bf16

}  // namespace

int map_k_major(CUtensorMap* map, void const* data, int rows, int k, int box_rows, int stacks) {
  cuuint64_t row = k * kElement, stack = row * cuuint64_t(rows);
  return encode(map, data, {cuuint64_t(k), cuuint64_t(rows), 1, cuuint64_t(stacks)}, {row, stack, stack},
                {64, cuuint32_t(box_rows), 1, 1});
}

int map_gate_up(CUtensorMap* map, void const* data, int width, int k, int stacks) {
  cuuint64_t row = k * kElement, half = row * cuuint64_t(width);
  return encode(map, data, {cuuint64_t(k), cuuint64_t(width), 2, cuuint64_t(stacks)}, {row, half, 2 * half}, {64, 128, 2, 1});
}

int map_column_major(CUtensorMap* map, void const* data, int k, int cols, int box_cols, int stacks) {
  cuuint64_t row = cols * kElement, stack = row * cuuint64_t(k);
  return encode(map, data, {64, cuuint64_t(k), cuuint64_t(cols) / 64, cuuint64_t(stacks)}, {row, 128, stack},
                {64, 64, cuuint32_t(box_cols) / 64, 1});
}

int map_scaled_rows(CUtensorMap* map, void const* data, int rows, int k) {
  cuuint64_t row = scaled_row_bytes(k), all = row * cuuint64_t(rows);
  return encode(map, data, {cuuint64_t(k), cuuint64_t(rows), 1, 1}, {row, all, all}, {128, 128, 1, 1}, CU_TENSOR_MAP_DATA_TYPE_UINT8);
}

int map_e4m3_columns(CUtensorMap* map, void const* data, int rows, int k, int stacks) {
  cuuint64_t row = k, stack = row * cuuint64_t(rows);
  return encode(map, data, {row, cuuint64_t(rows), 1, cuuint64_t(stacks)}, {row, stack, stack}, {128, 256, 1, 1}, CU_TENSOR_MAP_DATA_TYPE_UINT8);
}

int map_e4m3_gate_up(CUtensorMap* map, void const* data, int width, int k, int stacks) {
  cuuint64_t row = k, half = row * cuuint64_t(width);
  return encode(map, data, {row, cuuint64_t(width), 2, cuuint64_t(stacks)}, {row, half, 2 * half}, {128, 128, 2, 1}, CU_TENSOR_MAP_DATA_TYPE_UINT8);
}

}  // namespace mok
