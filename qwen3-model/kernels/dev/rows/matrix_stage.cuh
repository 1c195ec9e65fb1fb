// The matrix warps' part of a product: partial[batch, rows] = X[batch, …] · W[rows, …]^T over the block's rows, tile by tile
// as the rings deliver them. W is the mma's A operand (16 rows), X its B operand (8 batch rows). Every warp adds its part of
// k; the parts meet in the sums buffer as [part][batch][row].
#pragma once
#include "shared.cuh"

template <class D, int TILES, int SLOTS>   // tiles per slot, slots per product
__device__ void matrix_stage(const Shared& sh, WPlace& w, XPlace& x, SumPlace& sums, int warp, int lane, int chunks) {
  const int kp = warp % D::k, rp = (warp / D::k) % D::r, bp = warp / (D::k * D::r);
  constexpr int STEPS = TILES * 4 / D::k;  // of 16 columns, per warp and slot
  static_assert(TILES * 4 % D::k == 0 && (TILES % X_TILES == 0 || X_TILES % TILES == 0), "warps and rings share a slot evenly");
  const u32 a_row = rp * D::tiles * 16 + (lane & 15), a_piece = lane >> 4;
  const u32 b_row = bp * D::columns * 8 + (lane & 7) + (D::columns > 1 ? (lane >> 4) << 3 : 0), b_piece = (lane >> 3) & 1;
  for (int chunk = 0; chunk < chunks; chunk++) {
    float acc[D::tiles][D::columns][4] = {};
    int in_x = 0;                          // tile within the activation slot
    for (int slot = 0; slot < SLOTS; slot++) {
      barrier_wait(sh.w_full(w.slot), w.parity);
      const u32 ws = sh.w + w.slot * W_SLOT;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        if (in_x == 0) barrier_wait(sh.x_full(x.slot), x.parity);
        const u32 xs = sh.x + x.slot * X_SLOT + in_x * BATCH * 128;
#pragma unroll
        for (int k = 0; k < 4; k++) {
          if ((t * 4 + k) / STEPS != kp) continue;
          u32 a[D::tiles][4], b[D::columns + 1][2];
#pragma unroll
          for (int m = 0; m < D::tiles; m++) load_matrix4(ws + swizzled(t * D::rows + a_row + m * 16, k * 2 + a_piece), a[m]);
          if constexpr (D::columns == 1) load_matrix2(xs + swizzled(b_row, k * 2 + b_piece), b[0]);
          else {
#pragma unroll
            for (int n = 0; n < D::columns; n += 2) load_matrix4(xs + swizzled(b_row + n * 8, k * 2 + b_piece), b[n]);
          }
#pragma unroll
          for (int m = 0; m < D::tiles; m++)
#pragma unroll
            for (int n = 0; n < D::columns; n++) mma(acc[m][n], a[m], b[n][0], b[n][1]);
        }
        if (++in_x == X_TILES) { in_x = 0; __syncwarp(); if (lane == 0) barrier_arrive(sh.x_empty(x.slot)); x.advance(); }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(sh.w_empty(w.slot));
      w.advance();
    }
    barrier_wait(sh.sums_free(sums.slot), sums.parity ^ 1);
    const u32 target = sh.sums + sums.slot * SUMS_BYTES + (kp * BATCH + bp * D::columns * 8 + (lane & 3) * 2) * D::stride * 4;
#pragma unroll
    for (int m = 0; m < D::tiles; m++) {
      const int row = (rp * D::tiles + m) * 16 + (lane >> 2);
#pragma unroll
      for (int n = 0; n < D::columns; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (row + (i >> 1) * 8 < D::rows) asm volatile("st.shared.f32 [%0], %1;" ::"r"(target + ((n * 8 + (i & 1)) * D::stride + row + (i >> 1) * 8) * 4), "f"(acc[m][n][i]) : "memory");
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(sh.sums_full(sums.slot));
    sums.advance();
  }
}
