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

// A place in a ring of N slots: slot and the parity of its current round.
template <int N> struct Place {
  int slot = 0; u32 parity = 0;
  __device__ void advance() { if (++slot == N) { slot = 0; parity ^= 1; } }
  __device__ Place ahead(int n) const { Place q = *this; q.slot += n; if (q.slot >= N) { q.slot -= N; q.parity ^= 1; } return q; }
};
using WPlace = Place<W_SLOTS>;
using XPlace = Place<X_SLOTS>;
using SumPlace = Place<SUM_BUFFERS>;

// The attention work of this block: units (K/V head, row, split of its context), dealt to all blocks in turn.
// Packed: row in bits 0..7, K/V head in 8..13, split in 14..22, number of splits of the row in 23..31.
struct Unit {
  int row, kv_head, split, splits;
  __device__ explicit Unit(u32 packed) : row(packed & 255), kv_head((packed >> 8) & 63), split((packed >> 14) & 511), splits(packed >> 23) {}
  __device__ static u32 pack(int row, int kv_head, int split, int splits) { return row | (kv_head << 8) | (split << 14) | ((u32)splits << 23); }
};
// Whole tiles that unit `u` visits of a context of `length` tokens before the newest one.
__device__ __forceinline__ int unit_tiles(const Unit& u, int length, int split_tiles) {
  const int tiles = (length + KV_TILE - 1) / KV_TILE, first = u.split * split_tiles;
  const int left = tiles - first;
  return left < split_tiles ? left : split_tiles;
}
