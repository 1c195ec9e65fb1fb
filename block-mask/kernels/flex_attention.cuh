// Attention over a block mask whose blocks are pages of the cache.
//
//   per (batch, head, query block)   full_count, full_blocks[..]: every key seen, score function only
//                                    part_count, part_blocks[..]: mask function and length apply
//   a block                          physical index: where its keys lie; logical index: what the functions see,
//                                    -1 when the row's slot does not own the page (nothing is read or seen)
//
// Full blocks are visited first, then partial ones, each in the order of its list. Blocks are cut into granules of 16
// keys, so BLOCK_N and the page size are independent.
#pragma once
#include "prefill_attention.cuh"

struct FlexParams {
  const bf16* q;  // strides below, D contiguous
  const bf16* k;
  const bf16* v;
  bf16* out;   // the strides of q
  float* lse;  // [batch, heads, q_len] or null
  const int* full_count;     // [mask_batch, mask_heads, q_blocks]
  const int* full_physical;  // [mask_batch, mask_heads, q_blocks, kv_blocks]
  const int* full_logical;
  const int* part_count;
  const int* part_physical;
  const int* part_logical;
  const int* kv_length;  // [batch], logical
  i64 head_stride;       // of the cache, elements
  i64 q_batch_stride, q_head_stride, q_token_stride;
  int q_len, heads, group;
  int mask_batch, mask_heads;  // 1 = shared by all
  int q_blocks, kv_blocks;     // of the mask
  int block_q, tiles_per_block;
  int block_granules_shift;    // log2(page_size / 16)
  float scale;
  Mods mods;
};

struct MaskSource {
  const FlexParams& p;
  const LaneRows& rows;
  i64 lists;  // offset of this row's lists
  int full_granules, part_granules, full_blocks_n, count;
  int length, batch, lane;

  __device__ __forceinline__ int limit() const { return length; }

  __device__ __forceinline__ KeyBlock fetch(int j) const {
    const bool full = j < full_blocks_n;
    const int* physical = (full ? p.full_physical : p.part_physical) + lists;
    const int* logical = (full ? p.full_logical : p.part_logical) + lists;
    const int granules = full ? full_granules : part_granules, first = (full ? j : j - full_blocks_n) * N_GRANULES;
    KeyBlock b;
#pragma unroll
    for (int i = 0; i < N_GRANULES; i++) {
      const int granule = first + i, at = granule >> p.block_granules_shift;
      const int within = (granule & ((1 << p.block_granules_shift) - 1)) * GRANULE;
      const int where = granule < granules ? __ldg(physical + at) : -1, what = granule < granules ? __ldg(logical + at) : -1;
      const bool real = where >= 0 && what >= 0;
      b.physical[i] = real ? (where << (p.block_granules_shift + 4)) + within : -1;
      b.logical[i] = real ? (what << (p.block_granules_shift + 4)) + within : 0;
    }
    return b;
  }

  __device__ __forceinline__ bool plain(int j, const KeyBlock& b) const {
    bool whole = !HAS_SCORE_MOD && j < full_blocks_n;
#pragma unroll
    for (int i = 0; i < N_GRANULES; i++) whole = whole && b.physical[i] >= 0;
    return whole;
  }

  __device__ __forceinline__ void modify(Scores& scores, int j, const KeyBlock& b) const {
    modify_scores(scores, rows, b, p.mods, batch, p.scale, j >= full_blocks_n, lane, [&](int, int, int kv) { return kv < length; });
  }
};
