// Prefill attention: tiles of BLOCK_M query rows against the keys of one slot, BLOCK_N at a time, on tensor cores.
//
// Query rows are (token, head of the group): the query heads that share a KV head lie in one tile and share its loads,
// and a short chunk fills its tile `group` times better.
//
//   row r of a tile      token  (first_row + r) / group,  head  kv_head * group + (first_row + r) % group
//   warp w               rows  w * WARP_ROWS .. + WARP_ROWS of the tile, all keys: its softmax needs no other warp
//   keys                 granules of 16 tokens; BLOCK_N / 16 of them form a block. A granule has a physical place (for the
//                        loads) and a logical one (for the masks); the source of granules is the only difference between
//                        causal prefill (0, 16, 32, ... through the page table) and a block mask (its lists, in order)
//
//   STAGES = 1           K and V have one buffer each: V(j) travels during Q K(j)^T, K(j + 1) during P V(j)
//   STAGES = 2           two buffers each: block j + 1 travels during all of block j
//
// Keys are visited in the order of the source, from the first one on, in blocks that begin at multiples of BLOCK_N, and a
// hidden key adds exactly 0: a row's sum does not depend on how its sequence was cut into chunks (and so on which row of
// which tile it became), nor on where its pages lie. For that every copy of a statement must round alike: see `product`.
//
// Compile-time: HEAD_DIM, BLOCK_M (64 or 128), BLOCK_N (32, 64 or 128), WARPS, STAGES (1 or 2),
// ROWS_SAFE (every row sees a key in its first block: the guards against empty rows are left out), PRESCALE.
#pragma once
#include "mma.cuh"
#include "mods.cuh"
#include "paging.cuh"
#include "softmax.cuh"
#include "tile.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = BLOCK_M / WARPS;
constexpr int M_TILES = WARP_ROWS / 16;
constexpr int N_COLUMN_TILES = BLOCK_N / 8;
constexpr int N_GRANULES = BLOCK_N / GRANULE;
constexpr int Q_BYTES = BLOCK_M * ROW_BYTES;
constexpr int KV_BYTES = BLOCK_N * ROW_BYTES;
static_assert(WARP_ROWS == 16 || WARP_ROWS == 32, "a warp takes 16 or 32 rows");
static_assert(STAGES == 1 || STAGES == 2, "STAGES must be 1 or 2");

// Q | K [STAGES] | V [STAGES]
constexpr int PREFILL_SHARED_BYTES = Q_BYTES + 2 * STAGES * KV_BYTES;

// Up to BLOCK_M query rows of one sequence (or one batch row) and one KV head (or query head).
struct QueryTile {
  // Elements to token 0 of the sequence, first head of the tile, and between tokens, in Q and in the output.
  i64 q_offset, q_stride, out_offset, out_stride;
  int group;     // heads per token in the tile
  int first_row, rows;
  int position;  // logical position of token 0
  int head;      // first query head
};

// A block of keys is BLOCK_N / 16 granules: where the first token of each lies within a KV head (-1: nothing there), and
// its logical position. Both must be indexed by constants, so that they stay in registers.
struct ListedBlock {
  int place[N_GRANULES];
  int position[N_GRANULES];
  __device__ __forceinline__ int logical(int i) const { return position[i]; }
};

// Consecutive logical positions.
struct ConsecutiveBlock {
  int place[N_GRANULES];
  int first;
  __device__ __forceinline__ int logical(int i) const { return first + i * GRANULE; }
};

__device__ __forceinline__ void load_query_tile(const bf16* q, const QueryTile& tile, u32 to, int thread) {
#pragma unroll 4
  for (int i = thread; i < BLOCK_M * ROW_CHUNKS; i += THREADS) {
    const int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
    const bool real = row < tile.rows;
    const int r = tile.first_row + (real ? row : 0);
    copy_16_async(to + tile_offset(row, chunk),
                  q + tile.q_offset + (r / tile.group) * tile.q_stride + (r % tile.group) * HEAD_DIM + chunk * 8, real);
  }
}

// `limit`: tokens at or past it do not exist; their rows become zeros, never what memory holds there.
template <class Block>
__device__ __forceinline__ void load_key_block(const bf16* from, const Block& block, int limit, u32 to, int thread) {
#pragma unroll
  for (int i = 0; i < BLOCK_N * ROW_CHUNKS / THREADS; i++) {
    constexpr int STEP = THREADS / ROW_CHUNKS;  // rows between this thread's copies: 8, 16 or 32
    const int row = thread / ROW_CHUNKS + i * STEP, chunk = thread % ROW_CHUNKS;
    int physical, logical;
    if constexpr (STEP <= GRANULE) {
      // The granule is known at compile time: STEP divides 16.
      physical = block.place[i * STEP / GRANULE];
      logical = block.logical(i * STEP / GRANULE);
    } else {
      // Two granules apart: the thread is in the upper or the lower one.
      const bool upper = thread / ROW_CHUNKS >= GRANULE;
      physical = upper ? block.place[i * 2 + 1] : block.place[i * 2];
      logical = upper ? block.logical(i * 2 + 1) : block.logical(i * 2);
    }
    const bool real = physical >= 0 && logical + row % GRANULE < limit;
    const i64 place = real ? ((i64)physical + row % GRANULE) * HEAD_DIM : 0;
    copy_16_async(to + tile_offset(row, chunk), from + place + chunk * 8, real);
  }
}

// The running sum of one warp. Row of (m, i): m * 16 + g + (i >> 1) * 8; columns 8 d + 2 t and the next.
typedef float RunningSum[M_TILES][HEAD_DIM / 8][4];

// What the weights in it are relative to, and what they come to.
struct Softmax {
  float maximum[M_TILES][2];
  float total[M_TILES][2];  // this lane's columns only, until the end

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
      maximum[m][0] = maximum[m][1] = NEG_INFINITY;
      total[m][0] = total[m][1] = 0.f;
    }
  }
};

typedef float Scores[M_TILES][N_COLUMN_TILES][4];

// scores = Q K^T for the warp's rows; `q`: shared address of its first row's tile (a multiple of 16 rows).
__device__ __forceinline__ void multiply_keys(Scores& scores, u32 q, u32 k, int lane) {
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int n = 0; n < N_COLUMN_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) scores[m][n][i] = 0.f;
#pragma unroll
  for (int d = 0; d < HEAD_DIM / 16; d++) {
    u32 a[M_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) load_matrices(a[m], q + tile_rows_offset(lane, m * 16, d * 2));
#pragma unroll
    for (int n = 0; n < BLOCK_N / 16; n++) {
      // Keys are the n side: matrices 0, 1 are chunks 2 d, 2 d + 1 of keys 0-7, matrices 2, 3 those of keys 8-15.
      u32 b[4];
      load_matrices(b, k + tile_offset(n * 16 + (lane & 7) + ((lane >> 4) << 3), d * 2 + ((lane >> 3) & 1)));
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        mma_16x8x16(scores[m][2 * n], a[m], b[0], b[1]);
        mma_16x8x16(scores[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Scores of rows (m, j) become weights in base 2, relative to the new maximum. Returns what the rows' running sum has to be
// multiplied by, which is exactly 1 while the maximum stays.
__device__ __forceinline__ float weigh(Scores& scores, Softmax& s, float scale_log2, int m, int j) {
  float maximum = s.maximum[m][j];
#pragma unroll
  for (int n = 0; n < N_COLUMN_TILES; n++) maximum = fmaxf(maximum, fmaxf(scores[m][n][2 * j], scores[m][n][2 * j + 1]));
  maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
  maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
#if ROWS_SAFE
  const float base = product(maximum, scale_log2);
#else
  const float base = product(finite_maximum(maximum), scale_log2);
#endif
  const float rescale = exp2_approx(product(s.maximum[m][j], scale_log2) - base);
  s.maximum[m][j] = maximum;
  float total = 0.f;
#pragma unroll
  for (int n = 0; n < N_COLUMN_TILES; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float weight = exp2_approx(fmaf(scores[m][n][2 * j + c], scale_log2, -base));
      scores[m][n][2 * j + c] = weight;
      total += weight;
    }
  s.total[m][j] = fmaf(s.total[m][j], rescale, total);
  return rescale;
}

__device__ __forceinline__ void rescale_sum(RunningSum& sum, float rescale, int m, int j) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM / 8; d++) {
    sum[m][d][2 * j] *= rescale;
    sum[m][d][2 * j + 1] *= rescale;
  }
}

// Scores become weights; the running sum is rescaled to the new maximum.
__device__ __forceinline__ void soften(Scores& scores, RunningSum& sum, Softmax& s, float scale_log2) {
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int j = 0; j < 2; j++) rescale_sum(sum, weigh(scores, s, scale_log2, m, j), m, j);
}

__device__ __forceinline__ void multiply_values(RunningSum& sum, const Scores& weights, u32 v, int lane) {
#pragma unroll
  for (int n = 0; n < BLOCK_N / 16; n++) {
    // The C layout of two score tiles is the A layout of 16 keys.
    u32 a[M_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
      a[m][0] = pack_bf16(weights[m][2 * n][0], weights[m][2 * n][1]);
      a[m][1] = pack_bf16(weights[m][2 * n][2], weights[m][2 * n][3]);
      a[m][2] = pack_bf16(weights[m][2 * n + 1][0], weights[m][2 * n + 1][1]);
      a[m][3] = pack_bf16(weights[m][2 * n + 1][2], weights[m][2 * n + 1][3]);
    }
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
      u32 b[4];  // transposed: keys 0-7 and 8-15 of chunk 2 d, then of chunk 2 d + 1
      load_matrices_transposed(b, v + tile_offset(n * 16 + (lane & 15), d * 2 + (lane >> 4)));
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        mma_16x8x16(sum[m][2 * d], a[m], b[0], b[1]);
        mma_16x8x16(sum[m][2 * d + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Divides, and writes the warp's rows through its own rows of the Q tile so that memory sees 16-byte stores.
// `place(row, chunk)`: where a chunk of a row lies from `q_tile` on.
template <class Place>
__device__ __forceinline__ void store_query_tile(const RunningSum& sum, const Softmax& s, const QueryTile& tile, bf16* out, float* lse,
                                                 i64 lse_offset, i64 lse_token_stride, float scale_log2, unsigned char* q_tile,
                                                 int warp, int lane, const Place& place) {
  const int g = lane >> 2, t = lane & 3;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float total = s.total[m][j];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const float inverse = inverse_sum(total);
      const int row = warp * WARP_ROWS + m * 16 + j * 8 + g;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; d++)
        *reinterpret_cast<u32*>(q_tile + place(row, d) + t * 4) = pack_bf16(sum[m][d][2 * j] * inverse, sum[m][d][2 * j + 1] * inverse);
      if (lse && t == 0 && row < tile.rows) {
        const int r = tile.first_row + row;
        lse[lse_offset + (r / tile.group) * lse_token_stride + r % tile.group] = log_sum_exp(product(s.maximum[m][j], scale_log2), total);
      }
    }
  __syncwarp();
  out += tile.out_offset;
#pragma unroll 4
  for (int i = lane; i < WARP_ROWS * ROW_CHUNKS; i += 32) {
    const int row = warp * WARP_ROWS + i / ROW_CHUNKS, chunk = i % ROW_CHUNKS, r = tile.first_row + row;
    if (row < tile.rows)
      *reinterpret_cast<uint4*>(out + (r / tile.group) * tile.out_stride + (r % tile.group) * HEAD_DIM + chunk * 8) =
          *reinterpret_cast<const uint4*>(q_tile + place(row, chunk));
  }
}

// What the functions see of each of this lane's rows.
struct LaneRows {
  int limit[M_TILES][2];  // causal: tokens at or past it are hidden; position of the query plus one
  int head[M_TILES][2];
};

__device__ __forceinline__ LaneRows lane_rows(const QueryTile& tile, int warp, int lane) {
  LaneRows rows;
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int row = warp * WARP_ROWS + m * 16 + j * 8 + (lane >> 2);
      if (row >= tile.rows) row = tile.rows - 1;  // rows of padding repeat the last one and are not written
      const int r = tile.first_row + row;
      rows.limit[m][j] = tile.position + r / tile.group + 1;
      rows.head[m][j] = tile.head + r % tile.group;
    }
  return rows;
}

// Hides keys and applies the functions. `Visible(m, j, granule, kv)` says whether a key is there for a row.
template <class Block, class Visible>
__device__ __forceinline__ void modify_scores(Scores& scores, const LaneRows& rows, const Block& keys, const Captures* captures,
                                              int batch, float scale, bool use_mask_mod, int lane, const Visible& visible) {
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int n = 0; n < N_COLUMN_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int j = i >> 1, kv = keys.logical(n / 2) + (n & 1) * 8 + (lane & 3) * 2 + (i & 1);
        bool seen = keys.place[n / 2] >= 0 && visible(m, j, kv);
#if HAS_MASK_MOD
        seen = seen && (!use_mask_mod || mask_mod(batch, rows.head[m][j], rows.limit[m][j] - 1, kv, *captures));
#endif
#if HAS_SCORE_MOD
        if (seen) scores[m][n][i] = score_mod(product(scores[m][n][i], scale), batch, rows.head[m][j], rows.limit[m][j] - 1, kv, *captures);
#endif
        if (!seen) scores[m][n][i] = NEG_INFINITY;
      }
}

// Multiplies the Q tile by the softmax scale in place: exact, since the host allows it for powers of two only. A barrier follows.
__device__ __forceinline__ void prescale_query(unsigned char* q_tile, float scale, int thread) {
  u32* pairs = reinterpret_cast<u32*>(q_tile);
#pragma unroll 4
  for (int i = thread; i < Q_BYTES / 4; i += THREADS) pairs[i] = pack_bf16(bf16_low(pairs[i]) * scale, bf16_high(pairs[i]) * scale);
  __syncthreads();
}

// One tile. `Source` has: a type Block; int count; bool plain(j) (nothing is hidden in block j and no function applies);
// Block fetch(j); int limit() (tokens at or past it are not read); void modify(scores, j, block).
template <class Source>
__device__ __forceinline__ void prefill_tile(const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse, i64 lse_offset,
                                             i64 lse_token_stride, float scale, const QueryTile& tile, const Source& source,
                                             unsigned char* shared) {
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const u32 q_tile = shared_address(shared), k_ring = q_tile + Q_BYTES, v_ring = k_ring + STAGES * KV_BYTES;
  const u32 q_rows = q_tile + warp * WARP_ROWS * ROW_BYTES;
  // With a score function the scores are already scaled when they reach the softmax; so they are when Q was.
#if HAS_SCORE_MOD || PRESCALE
  const float scale_log2 = LOG2_E;
#else
  const float scale_log2 = scale * LOG2_E;
#endif
  RunningSum sum;
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 8; d++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[m][d][i] = 0.f;
  Softmax softmax;
  softmax.reset();
  const int count = source.count;
  typename Source::Block next;
  if (count > 0) next = source.fetch(0);
  load_query_tile(q, tile, q_tile, thread);
  if (count > 0) load_key_block(k, next, source.limit(), k_ring, thread);
  commit_copies();
#if STAGES == 2
  if (count > 0) load_key_block(v, next, source.limit(), v_ring, thread);
  commit_copies();
#endif
  for (int j = 0; j < count; j++) {
    const typename Source::Block block = next;
    const bool more = j + 1 < count;
    if (more) next = source.fetch(j + 1);
    Scores scores;
#if STAGES == 1
    wait_copies<0>();
    __syncthreads();  // K(j) has landed; every warp is done with V(j - 1)
    if (PRESCALE && j == 0) prescale_query(shared, scale, thread);
    load_key_block(v, block, source.limit(), v_ring, thread);
    commit_copies();
    multiply_keys(scores, q_rows, k_ring, lane);
    if (!source.plain(j, block)) source.modify(scores, j, block);
    wait_copies<0>();
    __syncthreads();  // V(j) has landed; every warp is done with K(j)
    if (more) load_key_block(k, next, source.limit(), k_ring, thread);
    commit_copies();
    soften(scores, sum, softmax, scale_log2);
    multiply_values(sum, scores, v_ring, lane);
#else
    const u32 now = (j & 1) * KV_BYTES, then = KV_BYTES - now;
    if (more) load_key_block(k, next, source.limit(), k_ring + then, thread);
    commit_copies();
    wait_copies<2>();
    __syncthreads();  // K(j) has landed; every warp is done with V(j - 1)
    if (PRESCALE && j == 0) prescale_query(shared, scale, thread);
    multiply_keys(scores, q_rows, k_ring + now, lane);
    if (!source.plain(j, block)) source.modify(scores, j, block);
    if (more) load_key_block(v, next, source.limit(), v_ring + then, thread);
    commit_copies();
    soften(scores, sum, softmax, scale_log2);
    wait_copies<2>();
    __syncthreads();  // V(j) has landed; every warp is done with K(j)
    multiply_values(sum, scores, v_ring + now, lane);
#endif
  }
  wait_copies<0>();
  __syncthreads();
  store_query_tile(sum, softmax, tile, out, lse, lse_offset, lse_token_stride, scale_log2, shared, warp, lane, tile_offset);
}
