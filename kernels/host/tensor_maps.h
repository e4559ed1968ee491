// Tensor maps for the copy engine, one function an operand shape. All are four-dimensional with a box of 64 along
// the contiguous dimension, so that the kernels load every operand with the same instruction.
#pragma once
#include <cuda.h>
#include <cstdint>

namespace mok {

// Rows x K, K contiguous, a box of `box_rows` rows; `stacks` such matrices behind one another (experts).
// Coordinates (k, row, 0, stack).
int map_k_major(CUtensorMap* map, void const* data, int rows, int k, int box_rows, int stacks);

// FC1's weight [stacks, 2, width, K]: a box of 128 gate rows and the 128 up rows of the same hidden columns.
// Coordinates (k, hidden column, 0, stack).
int map_gate_up(CUtensorMap* map, void const* data, int width, int k, int stacks);

// K x columns, columns contiguous (multiples of 64), a box of 64 along K and `box_cols` columns.
// Coordinates (0, k, column / 64, stack).
int map_column_major(CUtensorMap* map, void const* data, int k, int cols, int box_cols, int stacks);

// ---- E4M3, 128 values along K a box: as many bytes, in the same places, as 64 of bf16

// Rows of E4M3 values with their scales behind them (layout.h, scaled_row_bytes); a box of 128 rows, without scales.
// Coordinates (k, row, 0, 0).
int map_scaled_rows(CUtensorMap* map, void const* data, int rows, int k);
// Rows x K, K contiguous, a box of 256 rows; coordinates (k, row, 0, stack).
int map_e4m3_columns(CUtensorMap* map, void const* data, int rows, int k, int stacks);
// As map_gate_up.
int map_e4m3_gate_up(CUtensorMap* map, void const* data, int width, int k, int stacks);

}  // namespace mok
