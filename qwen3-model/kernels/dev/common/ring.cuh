// The rings and the attention work of both variants. Needs the variant's sizes (shared.cuh) before it.
#pragma once
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
