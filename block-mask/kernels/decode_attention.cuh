// Decode attention: one query token a row, split over the tokens of its context.
//
// Why this form: a step reads every key and value once, so the memory system is the floor. Each warp is its own pipeline:
// it copies 16 tokens of K and V at a time into its own ring of STAGES stages in shared memory and never waits for
// another warp inside an item; the copies of the next item run while this one is summed up.
//
//   item    (row, split, KV head): tokens start..end, all `group` query heads of the KV head together
//   step    64 tokens of an item, 16 a warp: warp w takes start + 16 w + 64 i
//   scores  S^T [16 tokens, heads] = K [16, D] Q^T [D, heads]        the heads are the n side of the tensor-core product,
//   sum     O^T [D, heads] += V^T [D, 16] P^T [16, heads]            padded to 8 (N_TILES = 1) or 16 (N_TILES = 2)
//
// At the end of an item the warps' sums are added in the order of the warps. A row of one split is then written out; of
// several, each block leaves its part in `partial`, and the block that arrives last adds the parts in the order of the
// splits. Arriving costs no wait: a block asks the row's counter how many came before it, goes on with its next item, and
// merges after that one. The order of every sum depends on the row's length and on the tokens of a split only: not on the
// other rows, the grid or the pages; unless rows share a prefix, see decode_shared.cuh. Several rows of one sequence can be
// computed at once with the same bits, see decode_together.cuh.
//
// In a step of many rows decode_plan deals all tokens to the blocks in equal shares. Rows are then cut where shares end, and
// the order of a row's sum depends on the lengths of all rows. The parts of a row are not counted, as a counter needs a fence, which
// waits for all copies on their way: each word of a part says itself whether it is there, and the block that has the row's last
// tokens takes the others' parts in, in their order.
//
// Compile-time: HEAD_DIM, N_TILES (1 or 2; more in decode_together.cuh), STAGES, WARPS.
#pragma once
#include "decode_plan.cuh"
#include "mma.cuh"
#include "mods.cuh"
#include "paging.cuh"
#include "softmax.cuh"
#include "tile.cuh"

struct DecodeParams {
  const bf16* q;            // [rows, heads, D], rows q_row_stride elements apart
  const bf16* k;            // this layer's cache, see paging.cuh
  const bf16* v;
  bf16* out;                // [rows, heads, D]
  float* lse;               // [rows, heads] or null
  const DecodeItem* items;  // of decode_plan
  const int* n_items;       // [2]: items, shared items; the second is -1 where tokens are dealt in equal shares
  const SharedItem* shared_items;
  const int* row_splits;    // [rows]: splits of each row, those of its shared prefix included
  const int* row_lengths;   // [rows]: tokens that each row sees
  const RowShare* row_shares;  // [rows]
  u32* shared_arrived;      // [rows, kv_heads, 2], 0 between launches: parts of a piece that are there; rows that have read them
  float* partial;           // [rows, kv_heads, max_splits, group, D]
  float2* partial_sums;     // [rows, kv_heads, max_splits, group]: maximum, sum
  u32* arrived;             // [rows, kv_heads], 0 between launches
  float* exchange;          // [blocks, group, D + 4], ABSENT between launches: where tokens are dealt, a block's part of a row
  Paging paging;
  i64 q_row_stride;
  int rows, heads, kv_heads, group, max_splits;
  float scale;
  int early;                 // copies may begin before the kernels ahead have ended, see decode_attention_stage
  int once;                  // keys and values shall not drive other things out of the second-level cache
  const Captures* captures;  // null without functions
};

constexpr int DECODE_THREADS = WARPS * 32;
constexpr int TILE_BYTES = GRANULE * ROW_BYTES;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int MAX_HEADS = 8 * N_TILES;
// The sums of the warps meet in shared memory, D / N_TILES columns at a time. The padding of 4 spreads the banks.
constexpr int PASS_COLUMNS = HEAD_DIM / N_TILES;
constexpr int PASS_STRIDE = PASS_COLUMNS + 4;
constexpr int PASS_VECTORS = PASS_COLUMNS / 4;

// Shared memory of a block; the host computes its size from the same list.
// While prefixes are shared there is a tile of SHARED_QUERIES queries behind the ring.
//   ring | sums [WARPS, group, PASS_STRIDE] f32 | maximum, sum [WARPS, MAX_HEADS] | valid [WARPS, STAGES] | flag

// Walks the steps of one warp over the items of one block, one step ahead of memory: the page of the next step and the
// next item are already in registers when they are needed.
template <class Item>
struct DecodeCursor {
  int work;  // item * kv_heads + head
  int head;
  int token;
  int page;
  Item item, ahead;
};

template <class Item>
__device__ __forceinline__ Item load_item(const DecodeParams& p, int work);

template <>
__device__ __forceinline__ DecodeItem load_item<DecodeItem>(const DecodeParams& p, int work) {
  const int4* from = reinterpret_cast<const int4*>(p.items + work / p.kv_heads);
  int4 a = __ldg(from), b = __ldg(from + 1);
  DecodeItem i;
  i.row = a.x, i.slot = a.y, i.start = a.z, i.end = a.w;
  i.split = b.x, i.splits = b.y, i.first = b.z, i.position = b.w;
  // A work list made for more rows than these buffers have: nothing is done for the rows too many.
  if (i.row >= p.rows) i.row = 0, i.end = i.start, i.splits = 0;
  return i;
}

template <>
__device__ __forceinline__ SharedItem load_item<SharedItem>(const DecodeParams& p, int work) {
  const int4* from = reinterpret_cast<const int4*>(p.shared_items + work / p.kv_heads);
  const int4 a = __ldg(from), b = __ldg(from + 1);
  SharedItem i;
  i.first_row = a.x, i.rows = a.y, i.slot = a.z, i.split = a.w;
  i.start = b.x, i.end = b.y, i.piece = b.z, i.unused = 0;
  // Likewise.
  if (i.first_row + i.rows > p.rows) i.rows = 0;
  return i;
}

// Whether it stands behind the last item of a block whose share is shorter in items than others.
__device__ __forceinline__ bool ends_list(const DecodeItem& item) { return item.splits < 0; }
__device__ __forceinline__ bool ends_list(const SharedItem&) { return false; }

// Whether copies may be marked as read once: not in decode_together.cuh.
__device__ __forceinline__ constexpr bool reads_once(const DecodeItem&) { return true; }
__device__ __forceinline__ constexpr bool reads_once(const SharedItem&) { return false; }

template <class Item>
__device__ __forceinline__ void cursor_settle(DecodeCursor<Item>& c, const DecodeParams& p, int warp, int total, int stride) {
  while (c.work < total && c.token >= c.item.end) {
    if (ends_list(c.item)) {
      c.work = total;
      break;
    }
    c.work += stride;
    c.item = c.ahead;
    c.head = c.work % p.kv_heads;
    if (c.work + stride < total) c.ahead = load_item<Item>(p, c.work + stride);
    c.token = c.item.start + warp * GRANULE;
  }
  if (c.work < total) c.page = page_of(p.paging, c.item.slot, c.token);
}

// At the warp's first step from `first` on, the first item of block `block` of `blocks`.
template <class Item>
__device__ __forceinline__ void cursor_start(DecodeCursor<Item>& c, const DecodeParams& p, const Item& first, int block, int blocks,
                                             int warp, int total) {
  c.work = block;
  c.head = block % p.kv_heads;
  c.item = c.ahead = first;
  if (block + blocks < total) c.ahead = load_item<Item>(p, block + blocks);
  c.token = c.item.start + warp * GRANULE;
  cursor_settle(c, p, warp, total, blocks);
}

// The first `n` tokens of a granule; zeros for the others.
template <bool ONCE>
__device__ __forceinline__ void copy_granule(const bf16* k, const bf16* v, u32 stage, int n, int lane) {
#pragma unroll
  for (int i = 0; i < GRANULE * ROW_CHUNKS / 32; i++) {
    const int chunk = (i * 32 + lane) % ROW_CHUNKS, row = (i * 32 + lane) / ROW_CHUNKS;
    const int from = row * HEAD_DIM + chunk * 8;
    const u32 to = stage + tile_offset(row, chunk);
    if (ONCE) {
      copy_16_async_once(to, k + from, row < n);
      copy_16_async_once(to + TILE_BYTES, v + from, row < n);
    } else {
      copy_16_async(to, k + from, row < n);
      copy_16_async(to + TILE_BYTES, v + from, row < n);
    }
  }
}

// Starts the copies of the cursor's step into `stage` and moves on. One group of copies, empty past the end.
template <class Item>
__device__ __forceinline__ void decode_issue(DecodeCursor<Item>& c, const DecodeParams& p, u32 stage, int* valid, int warp,
                                             int lane, int total, int stride) {
  if (c.work < total) {
    // Nothing is read past the length or from a page that the slot does not have: it may hold NaN.
    int n = c.item.end - c.token;
    n = c.page < 0 ? 0 : n > GRANULE ? GRANULE : n;
    const i64 offset = token_offset(p.paging, c.head, c.page < 0 ? 0 : c.page, c.token);
    const bf16* k = p.k + offset;
    const bf16* v = p.v + offset;
    // The next page is asked for ahead of these copies.
    c.token += WARPS * GRANULE;
    cursor_settle(c, p, warp, total, stride);
    // Two forms, as a hint of usual keeping is slower than none.
    if (reads_once(c.item) && p.once) copy_granule<true>(k, v, stage, n, lane);
    else copy_granule<false>(k, v, stage, n, lane);
    if (lane == 0) *valid = n;
  }
  commit_copies();
}

// Query heads as B operands in registers: q[n][k] holds head 8 n + g, elements 16 k + 2 t and 16 k + 8 + 2 t.
struct DecodeQuery {
  u32 q[N_TILES][HEAD_DIM / 16][2];

  __device__ __forceinline__ void operands(u32 (&b)[N_TILES][2], int k) const {
#pragma unroll
    for (int n = 0; n < N_TILES; n++) b[n][0] = q[n][k][0], b[n][1] = q[n][k][1];
  }
};

__device__ __forceinline__ void decode_load_query(DecodeQuery& query, const DecodeParams& p, const DecodeItem& item, int head,
                                                  int lane) {
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    const int in_group = n * 8 + (lane >> 2);
    const bool real = in_group < p.group;
    const bf16* from = p.q + item.row * p.q_row_stride + (i64)(head * p.group + (real ? in_group : 0)) * HEAD_DIM + (lane & 3) * 2;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
      query.q[n][k][0] = real ? *reinterpret_cast<const u32*>(from + k * 16) : 0;
      query.q[n][k][1] = real ? *reinterpret_cast<const u32*>(from + k * 16 + 8) : 0;
    }
  }
}

__device__ __forceinline__ RowShare load_share(const DecodeParams& p, int row) {
  const int4 a = __ldg(reinterpret_cast<const int4*>(p.row_shares + row));
  RowShare share;
  share.piece = a.x, share.parts = a.y, share.rows = a.z, share.unused = 0;
  return share;
}

// A row whose split this block has written out: whether it was the last one to arrive is learnt an item later.
struct PendingRow {
  int row, head, splits;  // splits <= 1: there is nothing to merge
  u32 arrived_before;     // in thread 0
  RowShare share;         // likewise
};

// The running sum of one warp: heads 8 n + 2 t and the next; elements 16 m + g and 16 m + g + 8.
struct DecodeState {
  float sum[HEAD_DIM / 16][N_TILES][4];
  float maximum[N_TILES][2];
  float total[N_TILES][2];  // this lane's tokens only, until the end of the item
};

__device__ __forceinline__ void decode_reset(DecodeState& s) {
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
#pragma unroll
    for (int m = 0; m < HEAD_DIM / 16; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) s.sum[m][n][i] = 0.f;
    s.maximum[n][0] = s.maximum[n][1] = NEG_INFINITY;
    s.total[n][0] = s.total[n][1] = 0.f;
  }
}

// 16 tokens, of which the first `valid` exist. `sees(n, j, kv)`: whether head 8 n + 2 t + j sees token `kv`.
template <class Item, class Query, class Sees>
__device__ __forceinline__ void decode_step(DecodeState& s, const Query& query, const Sees& sees, const DecodeParams& p,
                                            const Item& item, int head, u32 stage, int token, int valid, int lane) {
  const int g = lane >> 2;
  float score[N_TILES][4];
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) score[n][i] = 0.f;
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++) {
    u32 a[4], b[N_TILES][2];
    load_matrices(a, stage + tile_rows_offset(lane, 0, k * 2));
    query.operands(b, k);
#pragma unroll
    for (int n = 0; n < N_TILES; n++) mma_16x8x16(score[n], a, b[n][0], b[n][1]);
  }
  u32 weights[N_TILES][2];
  float rescale[N_TILES][2];
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int in_tile = g + (i >> 1) * 8, kv = token + in_tile;
      bool visible = in_tile < valid && sees(n, i & 1, kv);
#if HAS_MASK_MOD || HAS_SCORE_MOD
      const int in_group = n * 8 + (lane & 3) * 2 + (i & 1);
      // The functions may index captured buffers: they are called for real heads and tokens only.
      visible = visible && in_group < p.group;
#endif
#if HAS_MASK_MOD
      visible = visible && mask_mod(item.row, head * p.group + in_group, item.position, kv, *p.captures);
#endif
#if HAS_SCORE_MOD
      if (visible)
        score[n][i] = product(score_mod(product(score[n][i], p.scale), item.row, head * p.group + in_group, item.position, kv, *p.captures), LOG2_E);
#else
      score[n][i] = product(score[n][i], p.scale * LOG2_E);
#endif
      if (!visible) score[n][i] = NEG_INFINITY;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float maximum = fmaxf(score[n][j], score[n][j + 2]);
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 4));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 8));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 16));
      maximum = fmaxf(maximum, s.maximum[n][j]);
      const float base = finite_maximum(maximum);
      rescale[n][j] = exp2_approx(s.maximum[n][j] - base);
      s.maximum[n][j] = maximum;
      score[n][j] = exp2_approx(score[n][j] - base);
      score[n][j + 2] = exp2_approx(score[n][j + 2] - base);
      s.total[n][j] = fmaf(s.total[n][j], rescale[n][j], score[n][j] + score[n][j + 2]);
    }
    weights[n][0] = transpose_matrix(pack_bf16(score[n][0], score[n][1]));
    weights[n][1] = transpose_matrix(pack_bf16(score[n][2], score[n][3]));
  }
#pragma unroll
  for (int m = 0; m < HEAD_DIM / 16; m++) {
    u32 a[4];
    load_matrices_transposed(a, stage + TILE_BYTES + tile_columns_offset(lane, 0, m * 2));
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) s.sum[m][n][i] *= rescale[n][i & 1];
      mma_16x8x16(s.sum[m][n], a, weights[n][0], weights[n][1]);
    }
  }
}

#include "decode_merge.cuh"

__device__ __forceinline__ u32* decode_flag(const DecodeParams& p, unsigned char* shared) {
  return reinterpret_cast<u32*>(shared + RING_BYTES + WARPS * p.group * PASS_STRIDE * 4 + WARPS * MAX_HEADS * 8) + WARPS * STAGES;
}

// Leaves a warp's maxima and the sums of its weights for the others.
__device__ __forceinline__ void decode_put_softmax(const DecodeState& s, float2* softmax, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float total = s.total[n][j];
      total += __shfl_xor_sync(0xffffffffu, total, 4);
      total += __shfl_xor_sync(0xffffffffu, total, 8);
      total += __shfl_xor_sync(0xffffffffu, total, 16);
      if (g == 0) softmax[warp * MAX_HEADS + n * 8 + t * 2 + j] = make_float2(s.maximum[n][j], total);
    }
  }
}

// Leaves columns PASS_COLUMNS pass.. of a warp's sums of the first `heads` heads for the others.
__device__ __forceinline__ void decode_put_sums(const DecodeState& s, float* sums, int pass, int heads, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int m = 0; m < PASS_COLUMNS / 16; m++)
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int head = n * 8 + t * 2 + (i & 1);
        if (head < heads) sums[(warp * heads + head) * PASS_STRIDE + m * 16 + g + (i >> 1) * 8] = s.sum[pass * (PASS_COLUMNS / 16) + m][n][i];
      }
}

// Adds what the warps left of one head in four columns, in the order of the warps.
__device__ __forceinline__ void decode_add_warps(const float* sums, const float2* softmax, int heads, int head, int column,
                                                 float& maximum, float& total, float4& sum) {
  maximum = NEG_INFINITY;
#pragma unroll
  for (int w = 0; w < WARPS; w++) maximum = fmaxf(maximum, softmax[w * MAX_HEADS + head].x);
  const float base = finite_maximum(maximum);
  total = 0.f;
  sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float weight = exp2_approx(softmax[w * MAX_HEADS + head].x - base);
    const float4 x = *reinterpret_cast<const float4*>(sums + (w * heads + head) * PASS_STRIDE + column);
    total = fmaf(softmax[w * MAX_HEADS + head].y, weight, total);
    add_weighted(sum, x, weight);
  }
}

// Adds the warps' sums and hands the item's result on. `pending` is the row of the item before, which is merged here if
// this block brought its last split, and becomes this item's row.
template <bool DEALT>
__device__ __forceinline__ void decode_finish_item(DecodeState& s, const DecodeParams& p, const DecodeItem& item, int head,
                                                   const RowShare& share, PendingRow& pending, unsigned char* shared, int warp, int lane, int barrier,
                                                   int block) {
  float* sums = reinterpret_cast<float*>(shared + RING_BYTES);
  float2* softmax = reinterpret_cast<float2*>(sums + WARPS * p.group * PASS_STRIDE);
  u32* flag = decode_flag(p, shared);
  const int thread = warp * 32 + lane;
  if (!DEALT) decode_settle_arrival(p, pending, flag, thread);
  // The only split of the row's own tokens takes the parts of its shared prefix in at once.
  const bool joins = !DEALT && share.parts > 0 && item.splits == share.parts + 1;
  // Where tokens are dealt the block that has a row's last tokens finishes it.
  const bool gathers = DEALT && item.splits > 1 && item.split == item.splits - 1;
  if (joins && thread == 0) {
    wait_for_shared(p, share, head);
    fence_acquire();
  }
  decode_put_softmax(s, softmax, warp, lane);
  const i64 part = (((i64)item.row * p.kv_heads + head) * p.max_splits + item.split) * p.group;
#pragma unroll
  for (int pass = 0; pass < N_TILES; pass++) {
    if (pass) stage_barrier(barrier, DECODE_THREADS);
    decode_put_sums(s, sums, pass, p.group, warp, lane);
    stage_barrier(barrier, DECODE_THREADS);
    for (int u = thread; u < p.group * PASS_VECTORS; u += DECODE_THREADS) {
      const int in_group = u / PASS_VECTORS, column = u % PASS_VECTORS * 4;
      float maximum, total;
      float4 sum;
      decode_add_warps(sums, softmax, p.group, in_group, column, maximum, total, sum);
      const int at = pass * PASS_COLUMNS + column, h = head * p.group + in_group;
      if (joins) decode_join_shared(p, item.row, head, in_group, at, share.parts, maximum, total, sum);
      if (gathers) decode_gather(p, item.split, block, in_group, at, maximum, total, sum);
      if (item.splits == 1 || joins || gathers) {
        store_output(p, item.row, h, at, sum, inverse_sum(total));
        if (p.lse && at == 0) p.lse[(i64)item.row * p.heads + h] = log_sum_exp(maximum, total);
      } else if (DEALT && item.splits > 1) {
        float* to = exchange_part(p, block, in_group);
        store_words(to + at, words_of(sum));
        if (at == 0) store_words(to + HEAD_DIM, words_of(make_float4(maximum, total, 0.f, 0.f)));
      } else if (item.splits > 1) {
        *reinterpret_cast<float4*>(p.partial + (part + in_group) * HEAD_DIM + at) = sum;
        if (at == 0) p.partial_sums[part + in_group] = make_float2(maximum, total);
      }
    }
  }
  // Read between two barriers: the next item writes it before its first one.
  const bool merge = !DEALT && pending.splits > 1 && *flag;
  stage_barrier(barrier, DECODE_THREADS);
  const PendingRow before = pending;
  pending.row = item.row, pending.head = head, pending.splits = joins || DEALT ? 0 : item.splits;
  if (gathers) decode_clear_parts(p, item.split, block, thread);
  // The barrier has put the parts of all threads before this; the answer travels during the next item.
  if (thread == 0 && joins) leave_shared(p, share, head);
  if (thread == 0 && pending.splits > 1) {
    pending.arrived_before = arrive_release(p.arrived + (i64)item.row * p.kv_heads + head);
    pending.share = share;
  }
  if (merge) decode_merge_splits(p, before, thread, DECODE_THREADS);
}

#include "decode_shared.cuh"

// The items of block `block` of `blocks`, of which `item` is the first. `waits`: the kernels ahead are still to be waited for. `DEALT`:
// the list is one of equal shares of all tokens.
template <bool DEALT>
__device__ __forceinline__ void decode_own_items(const DecodeParams& p, unsigned char* shared, DecodeItem item, int total, int block,
                                                 int blocks, int barrier, bool waits) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (block >= total) {
    if (waits) wait_for_kernels_ahead();
    return;
  }
  const u32 ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;
  int* valid = reinterpret_cast<int*>(shared + RING_BYTES + WARPS * p.group * PASS_STRIDE * 4 + WARPS * MAX_HEADS * 8) + warp * STAGES;

  DecodeCursor<DecodeItem> cursor;
  cursor_start(cursor, p, item, block, blocks, warp, total);
  int issued = 0;
  if (waits) {
#pragma unroll 1
    while (issued < STAGES - 1 && cursor.work < total && cursor.token + GRANULE <= cursor.item.position) {
      decode_issue(cursor, p, ring + issued * STAGE_BYTES, valid + issued, warp, lane, total, blocks);
      issued++;
    }
    wait_for_kernels_ahead();
  }
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++)
    if (s >= issued) decode_issue(cursor, p, ring + s * STAGE_BYTES, valid + s, warp, lane, total, blocks);

  DecodeQuery query;
  decode_load_query(query, p, item, block % p.kv_heads, lane);
  PendingRow pending;
  pending.row = pending.head = pending.splits = 0;
  pending.arrived_before = 0;
  pending.share = no_share();
  RowShare share = !DEALT ? load_share(p, item.row) : no_share();
  int stage = 0;
  for (int work = block; work < total; work += blocks) {
    const int head = work % p.kv_heads;
    if (ends_list(item)) break;
    const bool more = work + blocks < total;
    const DecodeItem next = more ? load_item<DecodeItem>(p, work + blocks) : item;
    const auto sees = [&](int, int, int kv) { return kv >= item.first; };
    DecodeState state;
    decode_reset(state);
    for (int token = item.start + warp * GRANULE; token < item.end; token += WARPS * GRANULE) {
      wait_copies<STAGES - 2>();
      __syncwarp();  // every lane's copies have landed, and every lane is done with the stage filled next
      const int fill = stage == 0 ? STAGES - 1 : stage - 1;
      decode_issue(cursor, p, ring + fill * STAGE_BYTES, valid + fill, warp, lane, total, blocks);
      decode_step(state, query, sees, p, item, head, ring + stage * STAGE_BYTES, token, valid[stage], lane);
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    // The next query travels while this item is summed up.
    if (more) decode_load_query(query, p, next, (work + blocks) % p.kv_heads, lane);
    decode_finish_item<DEALT>(state, p, item, head, share, pending, shared, warp, lane, barrier, block);
    item = next;
    if (!DEALT && more) share = load_share(p, item.row);
  }
  if (!DEALT && pending.splits > 1) {
    u32* flag = decode_flag(p, shared);
    decode_settle_arrival(p, pending, flag, warp * 32 + lane);
    stage_barrier(barrier, DECODE_THREADS);
    if (*flag) decode_merge_splits(p, pending, warp * 32 + lane, DECODE_THREADS);
  }
  wait_copies<0>();
}

// The whole stage for block `block` of `blocks`. `barrier`: a named barrier of the WARPS warps that run the stage.
//
// With `early` the first copies begin before the kernels ahead in the stream have ended; those that make the queries and the newest
// keys and values of this layer are usually still running, and others may be. What is read before the wait is
//   the work list and the page table, of which decode_plan writes the one and an upload ahead of it the other,
//   keys and values of granules that end before the row's newest token.
// decode_plan is no programmatic launch: it begins when everything ahead of it in the stream has ended and is visible, so that
// earlier steps, copies of pages and uploads are behind it. It does not trigger its dependents either: nothing behind it begins
// before it has ended, and a fence has by then brought its list to the second-level cache. What may still run are therefore
// kernels of the step itself, and of those the host says, by `early`, that they write newest tokens only. That is true of a decode
// step, but not of a pass with prompts. The host leaves the first launch after a plan to wait: then each multiprocessor has waited
// for the list once before it is read early, and no older one can be in a first-level cache.
// Nothing is written before the wait. Where prefixes are shared everything waits.
__device__ __forceinline__ void decode_attention_stage(const DecodeParams& p, unsigned char* shared, int block, int blocks,
                                                       int barrier) {
  bool waits = p.early;
  if (!waits) wait_for_kernels_ahead();
  const int2 counts = *reinterpret_cast<const int2*>(p.n_items);
  // Asked for together with how many there are: a list has one for every block, if an old one.
  DecodeItem item = load_item<DecodeItem>(p, block);
  const int total = counts.x * p.kv_heads;
  if (counts.y < 0) {
    decode_own_items<true>(p, shared, item, total, block, blocks, barrier, waits);
    return;
  }
  // Shared items come first in one numbering of all work, which the blocks take in turn.
  const int shared_total = counts.y * p.kv_heads;
  if (shared_total > 0) {
    if (waits) wait_for_kernels_ahead(), waits = false;
    decode_shared_stage(p, shared, block, blocks, barrier, shared_total);
    block = (block + blocks - shared_total % blocks) % blocks;
    item = load_item<DecodeItem>(p, block);
  }
  decode_own_items<false>(p, shared, item, total, block, blocks, barrier, waits);
}
