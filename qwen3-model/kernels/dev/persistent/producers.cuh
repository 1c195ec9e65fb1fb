// Two threads feed the rings. The weight thread walks the whole step and waits for nothing but free slots: weights and the
// older K/V do not depend on this step's activations. The activation thread waits for the blocks that write its columns.
#pragma once
#include "shared.cuh"

#ifndef INTERLEAVE
#define INTERLEAVE 1
#endif
// The first column of tile t of block `rank`: tiles are dealt to the ranks in turn, so that the cluster reads rows of weights
// in contiguous pieces of 1 KiB.
__device__ __forceinline__ int k_column(int rank, int t, int tiles) { return (INTERLEAVE ? t * RANKS + rank : rank * tiles + t) * K_TILE; }

struct WeightProducer {
  const Shared& sh; WPlace w;
  __device__ explicit WeightProducer(const Shared& s) : sh(s) { w.parity = 1; }
  __device__ u32 claim(u32 bytes) { barrier_wait(sh.w_empty(w.slot), w.parity); barrier_expect(sh.w_full(w.slot), bytes); return sh.w + w.slot * W_SLOT; }
  // `units` 8-row units from row `row` on: a base box and single units behind it in the slot.
  __device__ void rows(u32 s, const TensorMap* pair, int base, int x, int row, int units) {
    copy_box(s, pair, x, row, sh.w_full(w.slot));
    for (int i = base; i < units; i++) copy_box(s + i * UNIT * 128, pair + 1, x, row + i * UNIT, sh.w_full(w.slot));
  }
  __device__ void matrix(const TensorMap* pair, int base, int rank, int tiles, int top, Share part) {
    const int n = part.last - part.first, row = top + part.first * UNIT;
    for (int t = 0; t < tiles; t++) { const u32 s = claim(n * UNIT * 128); rows(s, pair, base, k_column(rank, t, tiles), row, n); w.advance(); }
  }
  __device__ void gate_up(const Parameters& p, int rank, int layer, Share part) {
    const int n = part.last - part.first, row = layer * 2 * INTERMEDIATE + part.first * UNIT;
    for (int t = 0; t < HIDDEN_TILES; t++) {
      const u32 s = claim(2 * n * UNIT * 128); const int x = k_column(rank, t, HIDDEN_TILES);
      rows(s, p.maps.gate_up, p.gate_base, x, row, n); rows(s + UP_ROW * 128, p.maps.gate_up, p.gate_base, x, INTERMEDIATE + row, n); w.advance();
    }
  }
  __device__ void keys_values(const Parameters& p, int layer, int n_units) {
    const TensorMap *k = &p.maps.k, *v = &p.maps.v;
    const int step = min(KV_TILE, 1 << p.page_shift);
    for (int wave = 0; wave < n_units; wave += MATRIX_WARPS)
      for (int round = 0; round < p.split_tiles; round++) {
        bool any = false;
        for (int i = 0; i < MATRIX_WARPS && wave + i < n_units; i++) {
          u32 packed; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(packed) : "r"(sh.units + (wave + i) * 4));
          const Unit u(packed); const int length = p.positions[u.row];
          if (round >= unit_tiles(u, length, p.split_tiles)) continue;
          any = true;
          const int start = (u.split * p.split_tiles + round) * KV_TILE, slot = p.slots[u.row];
          const u32 s = claim(KV_TILE * HEAD_DIM * 2 * 2);
          for (int o = 0; o < KV_TILE; o += step) {
            // A tile may reach past the last page in use: it then reads page 0 (valid memory), and the rows are masked.
            const bool owned = start + o < length;
            const int y = (int)((u64)(layer * KV_HEADS + u.kv_head) * p.cache_positions + (owned ? physical(p, slot, start + o) : 0));
#pragma unroll
            for (int half = 0; half < 2; half++) {
              copy_box(s + half * KV_TILE * 128 + o * 128, k, half * 64, y, sh.w_full(w.slot));
              copy_box(s + KV_TILE * 256 + half * KV_TILE * 128 + o * 128, v, half * 64, y, sh.w_full(w.slot));
            }
          }
          w.advance();
        }
        if (!any) break;
      }
  }
  __device__ void run(const Parameters& p, int cluster, int clusters, int rank, int n_units) {
    const Share qkv = share(QKV / UNIT, cluster, clusters), hidden = share(HIDDEN / UNIT, cluster, clusters), gate = share(INTERMEDIATE / UNIT, cluster, clusters);
    const int qkv_chunks = chunk_count(qkv, QKV_MOST), gate_chunks = chunk_count(gate, GATE_UNITS);
    for (int layer = 0; layer < p.n_layers; layer++) {
      for (int i = 0; i < qkv_chunks; i++) matrix(p.maps.qkv, p.qkv_base, rank, HIDDEN_TILES, layer * QKV, chunk(qkv, i, qkv_chunks));
      keys_values(p, layer, n_units);
      matrix(p.maps.o, p.hidden_base, rank, ATTENTION_TILES, layer * HIDDEN, hidden);
      for (int i = 0; i < gate_chunks; i++) gate_up(p, rank, layer, chunk(gate, i, gate_chunks));
      matrix(p.maps.down, p.hidden_base, rank, INTER_TILES, layer * HIDDEN, hidden);
    }
    // The last chunk of the vocabulary may reach past its end: the copy engine fills with zeros and counts the bytes.
    for (int c = cluster; c < VOCABULARY_CHUNKS; c += clusters) matrix(&p.maps.head, TILE_UNITS, rank, HIDDEN_TILES, 0, {c * TILE_UNITS, (c + 1) * TILE_UNITS});
  }
};

struct ActivationProducer {
  const Shared& sh; XPlace x;
  __device__ explicit ActivationProducer(const Shared& s) : sh(s) { x.parity = 1; }
  __device__ void load(const TensorMap* map, int rank, int tiles, int chunks) {
    for (int c = 0; c < (tiles <= X_SLOTS ? 1 : chunks); c++)
      for (int t = 0; t < tiles; t++) {
        barrier_wait(sh.x_empty(x.slot), x.parity); barrier_expect(sh.x_full(x.slot), X_SLOT);
        copy_box(sh.x + x.slot * X_SLOT, map, k_column(rank, t, tiles), 0, sh.x_full(x.slot)); x.advance();
      }
  }
  __device__ void after(const Parameters& p, Counter which, u32 target) { wait_for(p.counters + which, target); fence_async_global(); }
  __device__ void run(const Parameters& p, int cluster, int clusters, int rank) {
    const int qkv_chunks = chunk_count(share(QKV / UNIT, cluster, clusters), QKV_MOST), gate_chunks = chunk_count(share(INTERMEDIATE / UNIT, cluster, clusters), GATE_UNITS);
    for (int layer = 0; layer < p.n_layers; layer++) {
      const u32 n = clusters * RANKS * (layer + 1);
      after(p, HIDDEN_DONE, n); load(&p.maps.x_in, rank, HIDDEN_TILES, qkv_chunks);
      after(p, ATTENTION_DONE, n); load(&p.maps.attention, rank, ATTENTION_TILES, 1);
      after(p, O_DONE, n); load(&p.maps.x_post, rank, HIDDEN_TILES, gate_chunks);
      after(p, INTER_DONE, n); load(&p.maps.inter, rank, INTER_TILES, 1);
    }
    after(p, HIDDEN_DONE, clusters * RANKS * (p.n_layers + 1)); load(&p.maps.x_in, rank, HIDDEN_TILES, (VOCABULARY_CHUNKS - cluster + clusters - 1) / clusters);
  }
};
