// Two threads feed the rings. The weight thread walks the whole step and waits for nothing but free slots: weights and the
// older K/V do not depend on this step's activations. The activation thread waits for the blocks that write its columns.
#pragma once
#include "shared.cuh"

struct WeightProducer {
  const Shared& sh; WPlace w;
  __device__ explicit WeightProducer(const Shared& s) : sh(s) { w.parity = 1; }
  __device__ u32 claim(u32 bytes) { barrier_wait(sh.w_empty(w.slot), w.parity); barrier_expect(sh.w_full(w.slot), bytes); return sh.w + w.slot * W_SLOT; }
  __device__ void matrix(const TensorMap* map, int rows, int tiles, int slots, int row) {
    for (int i = 0; i < slots; i++) { const u32 s = claim(rows * tiles * 128); copy_box3(s, map, 0, row, i * tiles, sh.w_full(w.slot)); w.advance(); }
  }
  __device__ void gate_up(const TensorMap* map, int row) {
    for (int i = 0; i < HIDDEN / K_TILE; i++) {
      const u32 s = claim(2 * GATE_ROWS * 128);
      copy_box3(s, map, 0, row, i, sh.w_full(w.slot)); copy_box3(s + UP_ROW * 128, map, 0, INTERMEDIATE + row, i, sh.w_full(w.slot)); w.advance();
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
            if (step == KV_TILE) { copy_box3(s, k, 0, y, 0, sh.w_full(w.slot)); copy_box3(s + KV_TILE * 256, v, 0, y, 0, sh.w_full(w.slot)); }
            else {
#pragma unroll
              for (int half = 0; half < 2; half++) {
                copy_box3(s + half * KV_TILE * 128 + o * 128, k, 0, y, half, sh.w_full(w.slot));
                copy_box3(s + KV_TILE * 256 + half * KV_TILE * 128 + o * 128, v, 0, y, half, sh.w_full(w.slot));
              }
            }
          }
          w.advance();
        }
        if (!any) break;
      }
  }
  __device__ void run(const Parameters& p, int block, int n_units) {
    for (int layer = 0; layer < p.n_layers; layer++) {
      matrix(&p.maps.qkv, QKV_ROWS, QKV_TILES, HIDDEN / K_TILE / QKV_TILES, layer * QKV + first_row(QKV, block));
      keys_values(p, layer, n_units);
      matrix(&p.maps.o, HIDDEN_ROWS, O_TILES, ATTENTION / K_TILE / O_TILES, layer * HIDDEN + first_row(HIDDEN, block));
      gate_up(&p.maps.gate_up, layer * 2 * INTERMEDIATE + first_row(INTERMEDIATE, block));
      matrix(&p.maps.down, HIDDEN_ROWS, DOWN_TILES, INTERMEDIATE / K_TILE / DOWN_TILES, layer * HIDDEN + first_row(HIDDEN, block));
    }
    // Rows past the end of the vocabulary: the copy engine fills with zeros and counts the bytes.
    for (int c = 0; c < HEAD_CHUNKS; c++) matrix(&p.maps.head, HEAD_ROWS, 1, HIDDEN / K_TILE, first_row(VOCABULARY, block) + c * HEAD_ROWS);
  }
};

struct ActivationProducer {
  const Shared& sh; XPlace x;
  __device__ explicit ActivationProducer(const Shared& s) : sh(s) { x.parity = 1; }
  __device__ void load(const TensorMap* map, int columns) {
    for (int t = 0; t < columns / K_TILE; t += X_TILES) {
      barrier_wait(sh.x_empty(x.slot), x.parity); barrier_expect(sh.x_full(x.slot), X_SLOT);
      copy_box3(sh.x + x.slot * X_SLOT, map, 0, 0, t, sh.x_full(x.slot)); x.advance();
    }
  }
  __device__ void after(const Parameters& p, Counter which, u32 target) { wait_for(p.counters + which, target); fence_async_global(); }
  __device__ void run(const Parameters& p) {
    for (int layer = 0; layer < p.n_layers; layer++) {
      const u32 n = BLOCKS * (layer + 1);
      after(p, HIDDEN_DONE, n); load(&p.maps.x_in, HIDDEN);
      after(p, ATTENTION_DONE, n); load(&p.maps.attention, ATTENTION);
      after(p, O_DONE, n); load(&p.maps.x_post, HIDDEN);
      after(p, INTER_DONE, n); load(&p.maps.inter, INTERMEDIATE);
    }
    after(p, HIDDEN_DONE, BLOCKS * (p.n_layers + 1));
    for (int c = 0; c < HEAD_CHUNKS; c++) load(&p.maps.x_in, HIDDEN);
  }
};
