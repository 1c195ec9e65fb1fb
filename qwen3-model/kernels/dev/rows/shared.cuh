// Shared memory of one block, and the rings through which tiles arrive.
//
//   | weight ring: W_SLOTS x 24 KiB | activation ring: X_SLOTS x 8 KiB | partial sums | residual | units | factors | barriers |
//
// A slot of the weight ring holds [tiles][rows][64] weights or, during attention, 32 tokens of K and V.
#pragma once
#include "shape.cuh"
constexpr int X_SLOT = 8 * 1024, X_SLOTS = BATCH <= 8 ? 5 : BATCH <= 16 ? 6 : 7;
constexpr int MAX_UNITS = 512;
constexpr int RESIDUAL_BYTES = up(BATCH * HIDDEN_ROWS * 4, 1024) * 1024;
constexpr int SUM_BUFFERS = SUMS_BYTES <= 16384 ? 2 : 1;
constexpr int FIXED_BYTES = X_SLOTS * X_SLOT + SUM_BUFFERS * SUMS_BYTES + RESIDUAL_BYTES + MAX_UNITS * 4 + 1024 + BATCH * 4;
constexpr int W_SLOTS = (226 * 1024 - FIXED_BYTES) / W_SLOT;   // 227 KiB less the static part
constexpr int SHARED_BYTES = W_SLOTS * W_SLOT + FIXED_BYTES;
static_assert(W_SLOTS >= 3, "the ring must hold a few tiles");

struct Shared {
  u32 w, x, sums, residual, units, factors, barriers;
  __device__ explicit Shared(u32 base) {
    w = base; x = w + W_SLOTS * W_SLOT; sums = x + X_SLOTS * X_SLOT; residual = sums + SUM_BUFFERS * SUMS_BYTES; units = residual + RESIDUAL_BYTES;
    factors = units + MAX_UNITS * 4; barriers = factors + BATCH * 4;
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
