// A tile of rows of HEAD_DIM bf16 in shared memory, 16-byte chunks swizzled:
//
//   chunk c of row r lies at  r * row bytes + ((c ^ (r & 7)) * 16)
//
// so that the eight rows of one ldmatrix, which share c, fall into different banks, and so do the chunks of one row.
#pragma once
#include "async_copy.cuh"

constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int ROW_CHUNKS = HEAD_DIM / 8;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "HEAD_DIM must be 64 or 128");

__device__ __forceinline__ u32 tile_offset(int row, int chunk) {
  return (u32)(row * ROW_BYTES + ((chunk ^ (row & 7)) << 4));
}

// What lane `lane` passes to load_matrices for the A operand (rows as they lie, 16 x 16 at chunks `chunk`, `chunk + 1`).
__device__ __forceinline__ u32 tile_rows_offset(int lane, int row, int chunk) {
  return tile_offset(row + (lane & 15), chunk + (lane >> 4));
}

// What lane `lane` passes to load_matrices_transposed when the 16 rows of the tile are the inner dimension:
// r[0], r[2] are rows 0-7, 8-15 of chunk `chunk`, r[1], r[3] those of `chunk + 1`. The A operand of (tile)^T.
__device__ __forceinline__ u32 tile_columns_offset(int lane, int row, int chunk) {
  return tile_offset(row + (lane & 7) + ((lane >> 4) << 3), chunk + ((lane >> 3) & 1));
}
