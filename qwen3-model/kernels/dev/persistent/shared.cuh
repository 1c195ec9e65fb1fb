// Shared memory of one block, and the ring through which tiles arrive.
//
//   | weight ring: W_SLOTS x 22 KiB | activation ring: X_SLOTS x BATCH*128 B | partial sums | residual | units | barriers |
//
// A slot of the weight ring holds a weight tile (up to 176 rows x 64 columns) or, during attention, 32 tokens of K and V.
#pragma once
#include "shape.cuh"
constexpr int W_SLOT = MAX_ROWS * 128, X_SLOT = BATCH * 128;
constexpr int X_SLOTS = BATCH == 64 ? 7 : 8;
constexpr int MAX_UNITS = 512;
constexpr int RESIDUAL_STRIDE = MAX_ROWS;                      // a cluster's columns of the residual stream
constexpr int SUM_BUFFERS = BATCH == 64 ? 1 : 2;
constexpr int SUMS_BYTES = RANKS * ROWS_PER_RANK * SUM_STRIDE * 4, RESIDUAL_BYTES = ROWS_PER_RANK * RESIDUAL_STRIDE * 4;
constexpr int FIXED_BYTES = X_SLOTS * X_SLOT + SUM_BUFFERS * SUMS_BYTES + RESIDUAL_BYTES + MAX_UNITS * 4 + 1024;
constexpr int W_SLOTS = (226 * 1024 - FIXED_BYTES) / W_SLOT;   // 227 KiB less the static part
constexpr int SHARED_BYTES = W_SLOTS * W_SLOT + FIXED_BYTES;
static_assert(W_SLOTS >= 4, "the ring must hold a few tiles");

struct Shared {
  u32 w, x, sums, residual, units, barriers;
  __device__ explicit Shared(u32 base) {
    w = base; x = w + W_SLOTS * W_SLOT; sums = x + X_SLOTS * X_SLOT; residual = sums + SUM_BUFFERS * SUMS_BYTES; units = residual + RESIDUAL_BYTES;
    barriers = units + MAX_UNITS * 4;
  }
  __device__ u32 w_full(int i) const { return barriers + i * 8; }
  __device__ u32 w_empty(int i) const { return barriers + (W_SLOTS + i) * 8; }
  __device__ u32 x_full(int i) const { return barriers + (2 * W_SLOTS + i) * 8; }
  __device__ u32 x_empty(int i) const { return barriers + (2 * W_SLOTS + X_SLOTS + i) * 8; }
  __device__ u32 sums_full(int i) const { return barriers + (2 * W_SLOTS + 2 * X_SLOTS + i) * 8; }
  __device__ u32 sums_free(int i) const { return sums_full(SUM_BUFFERS + i); }
};
static_assert((2 * W_SLOTS + 2 * X_SLOTS + 2 * SUM_BUFFERS) * 8 + 16 <= 1024, "barriers fit");

#include "../common/ring.cuh"
