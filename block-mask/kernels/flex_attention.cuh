// Attention over a block mask whose blocks are pages of the cache.
//
//   lists[(batch, head of the mask, query block)]  where its entries begin and how many are full, how many partial
//   entries                                        full ones first, then partial ones, each in the order of the sequence:
//                                                  physical page (where the keys lie), logical block (what functions see)
//   full     every key is seen; the score function still applies
//   partial  the mask function and the length apply
//
// With CONTIGUOUS the full entries of every list are neighbours in both, and so are the partial ones, which the host has
// checked: then the first of each is all that is read.
//
// Blocks are cut into granules of 16 keys, so BLOCK_N and the page size are independent. A block that no list names is
// never touched.
#pragma once
#include "prefill_attention.cuh"

struct BlockList {
  int first, full, partial, reserved;
};

struct BlockEntry {
  int physical, logical;
};

// The queries of one batch row.
struct BatchSpan {
  int row;       // of its first query on a packed axis, else 0
  int q_len;
  int position;  // logical position of its first query
  int kv_length;
};

struct FlexParams {
  const bf16* q;  // D contiguous
  const bf16* k;
  const bf16* v;
  bf16* out;   // laid out as q
  float* lse;  // or null
  const BatchSpan* spans;  // [batch]
  const BlockList* lists;  // [batch, mask_heads, q_blocks]
  const BlockEntry* entries;
  i64 head_stride;  // of the cache, elements
  i64 q_batch_stride, q_head_stride, q_token_stride;  // batch stride 0 on a packed axis
  i64 lse_batch_stride, lse_head_stride, lse_token_stride;
  int group, mask_heads, q_blocks, block_q;
  int tiles_per_block;       // ceil(block_q / BLOCK_M)
  int block_granules_shift;  // log2(page_size / 16)
  float scale;
  const Captures* captures;  // null without functions
};

struct MaskSource {
  typedef ListedBlock Block;
  const FlexParams& p;
  const LaneRows& rows;
  BlockList list;
  int full_count, count;  // blocks of BLOCK_N keys, the full ones first
  int length, batch, lane;

  __device__ __forceinline__ int limit() const { return length; }

  __device__ __forceinline__ Block fetch(int j) const {
    const bool full = j < full_count;
    const int entries = full ? list.full : list.partial, granules = entries << p.block_granules_shift;
    const int first = (full ? j : j - full_count) * N_GRANULES;
    const int2* from = reinterpret_cast<const int2*>(p.entries + list.first + (full ? 0 : list.full));
    Block b;
#pragma unroll
    for (int i = 0; i < N_GRANULES; i++) {
      const int granule = first + i;
      [[maybe_unused]] const int within = (granule & ((1 << p.block_granules_shift) - 1)) * GRANULE;
      b.place[i] = -1;
      b.position[i] = 0;
      if (granule < granules) {
#if CONTIGUOUS
        // One load serves the whole list.
        const int2 entry = __ldg(from);
        b.place[i] = (entry.x << (p.block_granules_shift + 4)) + granule * GRANULE;
        b.position[i] = (entry.y << (p.block_granules_shift + 4)) + granule * GRANULE;
#else
        const int2 entry = __ldg(from + (granule >> p.block_granules_shift));
        b.place[i] = (entry.x << (p.block_granules_shift + 4)) + within;
        b.position[i] = (entry.y << (p.block_granules_shift + 4)) + within;
#endif
      }
    }
    return b;
  }

  __device__ __forceinline__ bool plain(int j, const Block& b) const {
    return !HAS_SCORE_MOD && j < full_count && b.place[N_GRANULES - 1] >= 0;
  }

  __device__ __forceinline__ void modify(Scores& scores, int j, const Block& b) const {
    modify_scores(scores, rows, b, p.captures, batch, p.scale, j >= full_count, lane,
                  [&](int, int, int kv) { return kv < length; });
  }
};
