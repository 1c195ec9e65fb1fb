// The matrix warps' part of a product: partial[batch, rows] = X[batch, k of this block] · W[rows, k of this block]^T for
// each chunk of rows, tile by tile as the rings deliver them; then every value goes to the block that sums it.
//
// X is the mma's A operand (16 batch rows), W its B operand (8 weight rows). Warps divide the tile's rows, and the
// batch where it has more than 16 rows. In an accumulator, a lane
// holds batch rows g and g+8 (g = lane / 4): both belong to rank g, so a lane sends all that it has to one block.
#pragma once
#include "shared.cuh"

__device__ int p_sink;
__device__ __forceinline__ void send(u32 s, float a, float b, u32 barrier) {
#if ASYNC_SUMS
  store_cluster_async(s, a, b, barrier);
#else
  store_cluster(s, a, b);
#endif
}

template <int ROW_TILES, int TILES>   // ROW_TILES: 8-row tiles per warp; rows past a chunk's end are multiplied (whatever stands there) and ignored
__device__ void matrix_stage(const Shared& sh, WPlace& w, XPlace& x, SumPlace& sums, int warp, int lane, u32 rank, int chunks) {
  constexpr bool RESIDENT = TILES <= X_SLOTS;     // the activation tiles stay for all chunks
  const int group = warp % ROW_GROUPS, part = warp / ROW_GROUPS;
  const u32 a_row = part * 16 * M_TILES + (lane & 15), a_piece = lane >> 4;
  const u32 b_row = group * ROW_TILES * 8 + (lane & 7) + ((lane >> 4) << 3), b_piece = (lane >> 3) & 1;
  for (int chunk = 0; chunk < chunks; chunk++) {
    float acc[M_TILES][ROW_TILES][4] = {};
    for (int t = 0; t < TILES; t++) {
      const XPlace xt = RESIDENT ? x.ahead(t) : x;
      barrier_wait(sh.x_full(xt.slot), xt.parity);
      barrier_wait(sh.w_full(w.slot), w.parity);
      const u32 xs = sh.x + xt.slot * X_SLOT, ws = sh.w + w.slot * W_SLOT;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        u32 a[M_TILES][4], b[ROW_TILES + 1][2];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) load_matrix4(xs + swizzled(a_row + m * 16, k * 2 + a_piece), a[m]);
#pragma unroll
        for (int n = 0; n + 1 < ROW_TILES; n += 2) load_matrix4(ws + swizzled(b_row + n * 8, k * 2 + b_piece), b[n]);
        if (ROW_TILES & 1) load_matrix2(ws + swizzled(group * ROW_TILES * 8 + (ROW_TILES - 1) * 8 + (lane & 7), k * 2 + b_piece), b[ROW_TILES - 1]);
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
          for (int m = 0; m < M_TILES; m++) mma(acc[m][n], a[m], b[n][0], b[n][1]);
      }
      __syncwarp();
      if (lane == 0) { barrier_arrive(sh.w_empty(w.slot)); if (!RESIDENT || chunk == chunks - 1) barrier_arrive(sh.x_empty(xt.slot)); }
      w.advance();
      if (!RESIDENT) x.advance();
    }
    // Wait until every block has read what this buffer held, then send.
#if NO_SEND
    if (acc[0][0][0] == 12345.678f) p_sink = 1; continue;
#endif
    barrier_wait_cluster(sh.sums_free(sums.slot), sums.parity ^ 1);
    const u32 to = lane >> 2;
    const u32 target = cluster_address(sh.sums + sums.slot * SUMS_BYTES, to) + (rank * ROWS_PER_RANK * SUM_STRIDE + group * ROW_TILES * 8 + (lane & 3) * 2) * 4;
    const u32 landed = cluster_address(sh.sums_full(sums.slot), to);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) {
        const u32 row = part * 2 * M_TILES + m * 2;
        send(target + (row * SUM_STRIDE + n * 8) * 4, acc[m][n][0], acc[m][n][1], landed);
        send(target + ((row + 1) * SUM_STRIDE + n * 8) * 4, acc[m][n][2], acc[m][n][3], landed);
      }
#if !ASYNC_SUMS
    __syncwarp();
    if (lane < RANKS) barrier_arrive_cluster(cluster_address(sh.sums_full(sums.slot), lane));
#endif
    sums.advance();
  }
  if (RESIDENT) x = x.ahead(TILES);
}
