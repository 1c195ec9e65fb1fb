// Decode attention of neighbouring rows of one sequence at once, each with the bits that it has alone: the tokens of a prompt
// where nothing may depend on how it was cut.
//
// The same warps take the same tokens in the same order, and the same instructions sum them up. Only the n side of the
// products is wider, up to 8 N_TILES query heads of several rows, so that a read of K and V serves them all:
//
//   item    (rows first_row .., split, KV head), one split of them all (decode_plan with `together`)
//   query   n is head n % group of row first_row + n / group; queries lie in shared memory, as registers hold the sums
//
// What a row does not see weighs exactly 0, which changes neither its maximum nor its sums. A row's splits are stored and
// merged as those of decode_attention.cuh; the block that brings the last one merges at once.
//
// Compile-time: N_TILES even.
#pragma once
#include "decode_attention.cuh"

static_assert(N_TILES % 2 == 0, "two tiles of query heads are loaded together");

constexpr int QUERY_BYTES = MAX_HEADS * ROW_BYTES;
constexpr int QUERY_COPIES = (MAX_HEADS * ROW_CHUNKS + DECODE_THREADS - 1) / DECODE_THREADS;

// Shared memory of a block; the host computes its size from the same list.
struct TogetherShared {
  u32 ring;          // RING_BYTES
  u32 queries;       // [MAX_HEADS, D] bf16, a tile of tile.cuh
  float* sums;       // [WARPS, heads, PASS_STRIDE], room for MAX_HEADS
  float2* softmax;   // [WARPS, MAX_HEADS]: maximum, sum
  int2* rows;        // [MAX_HEADS]: tokens that the query's row sees, its splits
  int* complete;     // [MAX_HEADS]: splits of the rows whose last one came, or 0
  int* valid;        // [WARPS, STAGES]
};

__device__ __forceinline__ TogetherShared together_shared(unsigned char* shared) {
  TogetherShared s;
  s.ring = shared_address(shared);
  s.queries = s.ring + RING_BYTES;
  s.sums = reinterpret_cast<float*>(shared + RING_BYTES + QUERY_BYTES);
  s.softmax = reinterpret_cast<float2*>(s.sums + WARPS * MAX_HEADS * PASS_STRIDE);
  s.rows = reinterpret_cast<int2*>(s.softmax + WARPS * MAX_HEADS);
  s.complete = reinterpret_cast<int*>(s.rows + MAX_HEADS);
  s.valid = s.complete + MAX_HEADS;
  return s;
}

// What a thread fetches of an item's queries while the item before it is computed.
struct QueriesAhead {
  uint4 chunks[QUERY_COPIES];
  int2 row;  // of query `thread`
};

__device__ __forceinline__ void together_fetch(QueriesAhead& ahead, const DecodeParams& p, const SharedItem& item, int head, int thread) {
#pragma unroll
  for (int i = 0; i < QUERY_COPIES; i++) {
    const int at = i * DECODE_THREADS + thread, n = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS;
    ahead.chunks[i] = make_uint4(0, 0, 0, 0);
    if (n < item.rows * p.group) {
      const i64 row = item.first_row + n / p.group;
      const bf16* from = p.q + row * p.q_row_stride + (i64)(head * p.group + n % p.group) * HEAD_DIM + chunk * 8;
      ahead.chunks[i] = *reinterpret_cast<const uint4*>(from);
    }
  }
  ahead.row = make_int2(0, 0);
  if (thread < item.rows * p.group) {
    const int row = item.first_row + thread / p.group;
    ahead.row = make_int2(p.row_lengths[row], p.row_splits[row]);
  }
}

__device__ __forceinline__ void together_put(const QueriesAhead& ahead, const TogetherShared& to, unsigned char* shared, int thread) {
#pragma unroll
  for (int i = 0; i < QUERY_COPIES; i++) {
    const int at = i * DECODE_THREADS + thread, n = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS;
    if (n < MAX_HEADS) *reinterpret_cast<uint4*>(shared + RING_BYTES + tile_offset(n, chunk)) = ahead.chunks[i];
  }
  if (thread < MAX_HEADS) to.rows[thread] = ahead.row;
}

// Query heads as B operands, from shared memory.
struct TogetherQuery {
  u32 tile;
  int lane;

  __device__ __forceinline__ void operands(u32 (&b)[N_TILES][2], int k) const {
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      u32 two[4];
      load_matrices(two, tile + tile_rows_offset(lane, n * 8, k * 2));
      b[n][0] = two[0], b[n][1] = two[2];
      b[n + 1][0] = two[1], b[n + 1][1] = two[3];
    }
  }
};

// Adds the warps' sums and hands the rows' results on. Between two barriers of all threads.
__device__ __forceinline__ void together_finish(const DecodeState& s, const DecodeParams& p, const SharedItem& item, int head,
                                                const TogetherShared& at, int warp, int lane) {
  const int thread = warp * 32 + lane, heads = item.rows * p.group;
  decode_put_softmax(s, at.softmax, warp, lane);
#pragma unroll
  for (int pass = 0; pass < N_TILES; pass++) {
    if (pass) __syncthreads();
    decode_put_sums(s, at.sums, pass, heads, warp, lane);
    __syncthreads();
    for (int u = thread; u < heads * PASS_VECTORS; u += DECODE_THREADS) {
      const int n = u / PASS_VECTORS, column = u % PASS_VECTORS * 4, in_group = n % p.group;
      const int2 row_of = at.rows[n];
      if (item.split > 0 && row_of.x <= item.start) continue;  // the row ends before this split
      float maximum, total;
      float4 sum;
      decode_add_warps(at.sums, at.softmax, heads, n, column, maximum, total, sum);
      const int row = item.first_row + n / p.group, h = head * p.group + in_group, to = pass * PASS_COLUMNS + column;
      if (row_of.y == 1) {
        store_output(p, row, h, to, sum, inverse_sum(total));
        if (p.lse && to == 0) p.lse[(i64)row * p.heads + h] = log_sum_exp(maximum, total);
      } else {
        const i64 part = (((i64)row * p.kv_heads + head) * p.max_splits + item.split) * p.group + in_group;
        *reinterpret_cast<float4*>(p.partial + part * HEAD_DIM + to) = sum;
        if (to == 0) p.partial_sums[part] = make_float2(maximum, total);
      }
    }
  }
  __syncthreads();  // the parts of all threads lie before the arrivals
  if (thread < item.rows) {
    const int2 row_of = at.rows[thread * p.group];
    u32* arrived = p.arrived + (i64)(item.first_row + thread) * p.kv_heads + head;
    const bool counts = row_of.y > 1 && row_of.x > item.start;
    const bool complete = counts && arrive_release(arrived) == (u32)row_of.y - 1;
    if (complete) {
      fence_acquire();  // the other blocks' parts are seen after the barrier
      *arrived = 0;     // ready for the next launch
    }
    at.complete[thread] = complete ? row_of.y : 0;
  }
  __syncthreads();
  // A row to each warp, or the one row to all.
  const bool alone = item.rows == 1;
  for (int i = alone ? 0 : warp; i < item.rows; i += WARPS) {
    PendingRow row;
    row.row = item.first_row + i, row.head = head, row.splits = at.complete[i], row.arrived_before = 0, row.share = no_share();
    if (row.splits > 1) decode_merge_splits(p, row, alone ? thread : lane, alone ? DECODE_THREADS : 32);
  }
}

// All items of block `block` of `blocks`, by all threads of the block.
__device__ __forceinline__ void decode_together_stage(const DecodeParams& p, unsigned char* shared, int block, int blocks) {
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int total = p.n_items[1] * p.kv_heads;
  if (block >= total) return;
  const TogetherShared at = together_shared(shared);
  const u32 ring = at.ring + warp * STAGES * STAGE_BYTES;
  int* valid = at.valid + warp * STAGES;

  DecodeCursor<SharedItem> cursor;
  SharedItem item = load_item<SharedItem>(p, block);
  cursor_start(cursor, p, item, block, blocks, warp, total);
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) decode_issue(cursor, p, ring + s * STAGE_BYTES, valid + s, warp, lane, total, blocks);

  QueriesAhead ahead;
  together_fetch(ahead, p, item, block % p.kv_heads, thread);
  int stage = 0;
  for (int work = block; work < total; work += blocks) {
    const int head = work % p.kv_heads;
    const bool more = work + blocks < total;
    const SharedItem next = more ? load_item<SharedItem>(p, work + blocks) : item;
    together_put(ahead, at, shared, thread);
    __syncthreads();
    // From shared memory each time: registers are short.
    const auto sees = [&](int n, int j, int kv) { return kv < at.rows[n * 8 + (lane & 3) * 2 + j].x; };
    const TogetherQuery query = {at.queries, lane};
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
    if (more) together_fetch(ahead, p, next, (work + blocks) % p.kv_heads, thread);
    together_finish(state, p, item, head, at, warp, lane);
    item = next;
  }
  wait_copies<0>();
}
