// Attention over a prefix that several rows share: its keys and values are read once for all of them.
//
// Rows are siblings when their page tables start with the same pages (decode_plan finds them). The prefix of up to
// SHARED_QUERIES / group siblings is one more kind of item:
//
//   shared item (siblings, part of the prefix, KV head)      all siblings' queries of the KV head against one part
//   scores  S [16 queries, 64 tokens] = Q [16, D] K^T        16 queries a warp: the rows of the tensor-core product
//   sum     O [16 queries, D] += P [16, 64] V                every warp sees every token, so that all share one ring
//
// The result for a row is one more split of it, before those of its own tokens: stored and merged like them, by the block that
// completes the row's own splits. So the order of a row's sum is again fixed; but with whom it shares decides how long the
// prefix is and how it is cut. (Merged by the block that brings a part, 16 rows would wait for each other.)
//
// Included by decode_attention.cuh; uses its ring.
#pragma once

constexpr int SHARED_QUERIES = WARPS * 16;
constexpr int SHARED_TOKENS = WARPS * STAGES >= 12 && N_TILES == 1 ? 64 : 32;  // 64 want registers
constexpr int SHARED_TILE_BYTES = SHARED_TOKENS * ROW_BYTES;
constexpr int SHARED_STAGE_BYTES = 2 * SHARED_TILE_BYTES;
constexpr int SHARED_STAGES = RING_BYTES / SHARED_STAGE_BYTES;  // the host shares nothing if this is below 2
constexpr int SHARED_PENDING = SHARED_STAGES > 2 ? SHARED_STAGES - 2 : 0;

// Walks the steps of SHARED_TOKENS over the shared items of one block, the pages of the next step already in registers.
struct SharedCursor {
  int work, head, token;
  int pages[SHARED_TOKENS / GRANULE];
  SharedItem item;
};

__device__ __forceinline__ void shared_pages(SharedCursor& c, const DecodeParams& p) {
#pragma unroll
  for (int i = 0; i < SHARED_TOKENS / GRANULE; i++) {
    const int token = c.token + i * GRANULE;
    c.pages[i] = token < c.item.end ? page_of(p.paging, c.item.slot, token) : -1;
  }
}

// Starts the copies of the cursor's step into `stage` and moves on. One group of copies, empty past the end.
__device__ __forceinline__ void shared_issue(SharedCursor& c, const DecodeParams& p, u32 stage, int thread, int total, int stride) {
  if (c.work < total) {
#pragma unroll
    for (int i = 0; i < SHARED_TOKENS * ROW_CHUNKS / DECODE_THREADS; i++) {
      const int chunk = (i * DECODE_THREADS + thread) % ROW_CHUNKS, row = (i * DECODE_THREADS + thread) / ROW_CHUNKS;
      int page = c.pages[0];
#pragma unroll
      for (int g = 1; g < SHARED_TOKENS / GRANULE; g++) page = row / GRANULE == g ? c.pages[g] : page;
      const int token = c.token + row;
      const bool real = page >= 0 && token < c.item.end;
      const i64 from = token_offset(p.paging, c.head, real ? page : 0, token) + chunk * 8;
      const u32 to = stage + tile_offset(row, chunk);
      copy_16_async(to, p.k + from, real);
      copy_16_async(to + SHARED_TILE_BYTES, p.v + from, real);
    }
    c.token += SHARED_TOKENS;
    if (c.token >= c.item.end) {
      c.work += stride;
      if (c.work < total) {
        c.item = load_item<SharedItem>(p, c.work);
        c.head = c.work % p.kv_heads;
        c.token = c.item.start;
      }
    }
    if (c.work < total) shared_pages(c, p);
  }
  commit_copies();
}

// The queries of one warp as A operands: row g is query 16 warp + g, query n being head n % group of sibling n / group.
__device__ __forceinline__ void shared_load_query(u32 (&q)[HEAD_DIM / 16][4], const DecodeParams& p, const SharedItem& item,
                                                  int head, int warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int n = warp * 16 + half * 8 + (lane >> 2), sibling = n / p.group;
    const bool real = sibling < item.rows;
    const i64 row = item.first_row + (real ? sibling : 0);
    const bf16* from = p.q + row * p.q_row_stride + (i64)(head * p.group + n % p.group) * HEAD_DIM + (lane & 3) * 2;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
      q[k][half] = real ? *reinterpret_cast<const u32*>(from + k * 16) : 0;
      q[k][2 + half] = real ? *reinterpret_cast<const u32*>(from + k * 16 + 8) : 0;
    }
  }
}

// Rows g and g + 8 of a warp; elements 8 n + 2 t and the next.
struct SharedState {
  float sum[HEAD_DIM / 8][4];
  float maximum[2];
  float total[2];  // this lane's tokens only, until the end of the item
  int limit[2];    // end of the tokens that the row sees, 0 without a row
};

// SHARED_TOKENS tokens from `token` on.
__device__ __forceinline__ void shared_step(SharedState& s, const u32 (&q)[HEAD_DIM / 16][4], const DecodeParams& p, u32 stage,
                                            int token, int lane) {
  float score[SHARED_TOKENS / 8][4];
#pragma unroll
  for (int n = 0; n < SHARED_TOKENS / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) score[n][i] = 0.f;
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++) {
#pragma unroll
    for (int n = 0; n < SHARED_TOKENS / 16; n++) {
      u32 b[4];
      load_matrices(b, stage + tile_rows_offset(lane, n * 16, k * 2));
      mma_16x8x16(score[n * 2], q[k], b[0], b[2]);
      mma_16x8x16(score[n * 2 + 1], q[k], b[1], b[3]);
    }
  }
  float rescale[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float maximum = s.maximum[half];
#pragma unroll
    for (int n = 0; n < SHARED_TOKENS / 8; n++) {
#pragma unroll
      for (int i = half * 2; i < half * 2 + 2; i++) {
        const bool visible = token + n * 8 + (lane & 3) * 2 + (i & 1) < s.limit[half];
        score[n][i] = visible ? product(score[n][i], p.scale * LOG2_E) : NEG_INFINITY;
        maximum = fmaxf(maximum, score[n][i]);
      }
    }
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
    const float base = finite_maximum(maximum);
    rescale[half] = exp2_approx(s.maximum[half] - base);
    s.maximum[half] = maximum;
    float total = 0.f;
#pragma unroll
    for (int n = 0; n < SHARED_TOKENS / 8; n++) {
#pragma unroll
      for (int i = half * 2; i < half * 2 + 2; i++) {
        score[n][i] = exp2_approx(score[n][i] - base);
        total += score[n][i];
      }
    }
    s.total[half] = fmaf(s.total[half], rescale[half], total);
  }
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s.sum[n][i] *= rescale[i >> 1];
#pragma unroll
  for (int k = 0; k < SHARED_TOKENS / 16; k++) {
    u32 a[4];
    a[0] = pack_bf16(score[2 * k][0], score[2 * k][1]);
    a[1] = pack_bf16(score[2 * k][2], score[2 * k][3]);
    a[2] = pack_bf16(score[2 * k + 1][0], score[2 * k + 1][1]);
    a[3] = pack_bf16(score[2 * k + 1][2], score[2 * k + 1][3]);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; n++) {
      u32 b[4];
      load_matrices_transposed(b, stage + SHARED_TILE_BYTES + tile_columns_offset(lane, k * 16, n * 2));
      mma_16x8x16(s.sum[2 * n], a, b[0], b[2]);
      mma_16x8x16(s.sum[2 * n + 1], a, b[1], b[3]);
    }
  }
}

// Stores one part of the siblings of a warp.
__device__ __forceinline__ void shared_store(SharedState& s, const DecodeParams& p, const SharedItem& item, int head, int warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float total = s.total[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const int n = warp * 16 + half * 8 + (lane >> 2), sibling = n / p.group;
    if (s.limit[half] == 0) continue;
    const i64 row = item.first_row + sibling;
    const i64 part = ((row * p.kv_heads + head) * p.max_splits + item.split) * p.group + n % p.group;
    float2* to = reinterpret_cast<float2*>(p.partial + part * HEAD_DIM + (lane & 3) * 2);
#pragma unroll
    for (int m = 0; m < HEAD_DIM / 8; m++) to[m * 4] = make_float2(s.sum[m][half * 2], s.sum[m][half * 2 + 1]);
    if ((lane & 3) == 0) p.partial_sums[part] = make_float2(s.maximum[half], total);
  }
}

// All shared items of block `block` of `blocks`; `total` of them, each KV head counted.
__device__ __forceinline__ void decode_shared_stage(const DecodeParams& p, unsigned char* shared, int block, int blocks,
                                                    int barrier, int total) {
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  if (block >= total) return;
  const u32 ring = shared_address(shared);
  SharedCursor cursor;
  cursor.work = block;
  cursor.head = block % p.kv_heads;
  cursor.item = load_item<SharedItem>(p, block);
  cursor.token = cursor.item.start;
  shared_pages(cursor, p);
#pragma unroll
  for (int s = 0; s < SHARED_STAGES - 1; s++) shared_issue(cursor, p, ring + s * SHARED_STAGE_BYTES, thread, total, blocks);
  int stage = 0;
  for (int work = block; work < total; work += blocks) {
    const SharedItem item = load_item<SharedItem>(p, work);
    const int head = work % p.kv_heads;
    const bool busy = warp * 16 < item.rows * p.group;
    u32 q[HEAD_DIM / 16][4];
    if (busy) shared_load_query(q, p, item, head, warp, lane);
    SharedState state;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) state.sum[n][i] = 0.f;
    state.maximum[0] = state.maximum[1] = NEG_INFINITY;
    state.total[0] = state.total[1] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int sibling = (warp * 16 + half * 8 + (lane >> 2)) / p.group;
      state.limit[half] = sibling < item.rows ? item.end : 0;
    }
    for (int token = item.start; token < item.end; token += SHARED_TOKENS) {
      wait_copies<SHARED_PENDING>();
      stage_barrier(barrier, DECODE_THREADS);  // everyone's copies have landed, and everyone is done with the stage filled next
      const int fill = stage == 0 ? SHARED_STAGES - 1 : stage - 1;
      shared_issue(cursor, p, ring + fill * SHARED_STAGE_BYTES, thread, total, blocks);
      if (busy) shared_step(state, q, p, ring + stage * SHARED_STAGE_BYTES, token, lane);
      stage = stage == SHARED_STAGES - 1 ? 0 : stage + 1;
    }
    if (busy) shared_store(state, p, item, head, warp, lane);
    stage_barrier(barrier, DECODE_THREADS);  // the parts of all threads lie before the arrivals
    // Merged with the rows' own splits.
    if (thread == 0) arrive_release(p.shared_arrived + ((i64)item.piece * p.kv_heads + head) * 2);
  }
  wait_copies<0>();
  stage_barrier(barrier, DECODE_THREADS);  // the ring is free for the rows' own items
}
