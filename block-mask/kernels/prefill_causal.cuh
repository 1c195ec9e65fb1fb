// Causal prefill over packed sequences: each tile belongs to one chunk of one sequence, whose keys are read through the
// page table from position 0 (or from the window's start) up to the tile's last token.
//
//   block        |      full       | diagonal |  never visited
//   keys     0 ──┴─────────────────┴──────────┴──────────────
//                 plain(j): no mask   limit per row
//
// Compile-time: COUNT_BLOCKS (1: every block of keys that a tile brings is counted, for tests).
#pragma once
#include "prefill_attention.cuh"

#ifndef COUNT_BLOCKS
#define COUNT_BLOCKS 0
#endif

// Made by the host, longest first.
struct PrefillTile {
  int q_start, q_len;  // the chunk's rows in the packed query axis
  int slot, position;  // of its sequence; logical position of its first token
  int first_row;       // of q_len * group
  int chunk;           // what the functions see as b
  int first_block, blocks;  // of BLOCK_N keys: those that some row sees
};

struct PrefillParams {
  const bf16* q;  // [tokens, heads, D], tokens q_token_stride elements apart
  const bf16* k;
  const bf16* v;
  bf16* out;   // [tokens, heads, D], tokens out_token_stride elements apart
  float* lse;  // [tokens, heads] or null
  const PrefillTile* tiles;
  Paging paging;
  i64 q_token_stride, out_token_stride;
  int heads, group, window;
  float scale;
  const Captures* captures;  // null without functions
  u32* visited;              // one counter for all tiles, with COUNT_BLOCKS
};

// To be called by one thread for each block of keys that it has brought.
__device__ __forceinline__ void count_block(const PrefillParams& p) {
#if COUNT_BLOCKS
  atomicAdd(p.visited, 1u);
#endif
}

// Tokens that a row sees, the newest ones.
__device__ __forceinline__ int window_of(const PrefillParams& p) { return p.window > 0 ? p.window : 0x7fffffff; }

// Blocks of [from, to) are seen whole by every row of a tile; `longest` is one past the last token that any row sees.
struct FullBlocks {
  int from, to, longest;
};
__device__ __forceinline__ FullBlocks full_blocks(const PrefillParams& p, const PrefillTile& t, const QueryTile& tile) {
  // Lengths seen by the tile's first and last row.
  const int shortest = t.position + t.first_row / p.group + 1;
  const int longest = t.position + (t.first_row + tile.rows - 1) / p.group + 1;
  const int window = window_of(p);
  return {longest > window ? (longest - window + BLOCK_N - 1) / BLOCK_N : 0, shortest / BLOCK_N, longest};
}

struct CausalSource {
  typedef ConsecutiveBlock Block;
  const PrefillParams& p;
  const LaneRows& rows;
  int slot, batch;
  int first_block, count;
  int full_from, full_to, last;  // as in FullBlocks
  int lane;

  __device__ __forceinline__ int limit() const { return last; }

  __device__ __forceinline__ Block fetch(int j) const {
    Block b;
    b.first = (first_block + j) * BLOCK_N;
    if (COUNT_BLOCKS && threadIdx.x == 0) count_block(p);
#pragma unroll
    for (int i = 0; i < N_GRANULES; i++) {
      const int token = b.logical(i);
      const int page = token < last ? page_of(p.paging, slot, token) : -1;
      b.place[i] = page < 0 ? -1 : (page << p.paging.page_shift) | (token & ((1 << p.paging.page_shift) - 1));
    }
    return b;
  }

  __device__ __forceinline__ bool plain(int j, const Block& b) const {
    bool whole = !HAS_MASK_MOD && !HAS_SCORE_MOD && first_block + j >= full_from && first_block + j < full_to;
#pragma unroll
    for (int i = 0; i < N_GRANULES; i++) whole = whole && b.place[i] >= 0;
    return whole;
  }

  __device__ __forceinline__ void modify(Scores& scores, int, const Block& b) const {
    const int window = window_of(p);
    modify_scores(scores, rows, b, p.captures, batch, p.scale, true, lane, [&](int m, int j, int kv) {
      return kv < rows.limit[m][j] && kv >= rows.limit[m][j] - window;
    });
  }
};
