// Causal prefill on Hopper's warpgroup products (compute capability 9.0): the tiles, keys and arithmetic of
// prefill_causal.cuh in another form.
//
//   warpgroup 0       one warp of it brings blocks of keys and of values through the page table into two rings
//   warpgroups 1, 2   64 rows of the tile each: S = Q K^T and P V in the tensor cores, the softmax in between
//
//   K(j)     ──S(j)──┐            ┌──S(j + 1)──┐
//   softmax          └──P(j)──────┤            └──P(j + 1)──
//   V(j)                          └──P(j) V(j)──┐
//
// While a warpgroup turns S(j) into weights, the tensor cores work on its P V of the block before and on the products of the
// other warpgroup. Turns at the tensor cores, kept by barriers, and leaving out multiplications of the running sum by 1 made no
// difference that could be measured.
//
// A block of the grid takes several units of work, (tile, KV head), one after another without a gap: the first S of a unit is
// begun with the last P V of the one before. Units are sorted by the host, longest first, and dealt forwards and backwards in
// turn, so that every block of the grid gets about the same.
//
// K and V of a block of keys lie in panels of 64 columns, see wgmma.cuh. Keys from `limit` on (beyond the chunk) do not exist:
// their scores are hidden, and their values are overwritten by zeros, since 0 * NaN is NaN.
//
// Compile-time: HEAD_DIM, BLOCK_M = 128, BLOCK_N (64 or 128), WARPS = 8, STAGES = 2, ROWS_SAFE, PRESCALE = 0.
#pragma once
#include "bulk_copy.cuh"
#include "prefill_causal.cuh"
#include "wgmma.cuh"

static_assert(BLOCK_M == 128 && WARPS == 8 && PRESCALE == 0, "two warpgroups of 64 rows");

constexpr int GROUP_THREADS = 128;
constexpr int GROUP_ROWS = 64;
constexpr int ALL_THREADS = THREADS + GROUP_THREADS;
// What launch bounds give every thread, dealt anew. More in all than the block was given would never be granted.
constexpr int LAUNCH_REGISTERS = 65536 / ALL_THREADS / 8 * 8;
constexpr int LOADING_REGISTERS = 40, ATTENDING_REGISTERS = 232;
static_assert(GROUP_THREADS * LOADING_REGISTERS + THREADS * ATTENDING_REGISTERS <= ALL_THREADS * LAUNCH_REGISTERS,
              "more registers than there are");
constexpr int N_PANELS = HEAD_DIM / PANEL_COLUMNS;
constexpr int KEY_PANEL_BYTES = BLOCK_N * PANEL_ROW_BYTES;
constexpr int QUERY_PANEL_BYTES = GROUP_ROWS * PANEL_ROW_BYTES;
constexpr int GROUP_Q_BYTES = N_PANELS * QUERY_PANEL_BYTES;
static_assert(2 * GROUP_Q_BYTES == Q_BYTES, "Q is the rows of two warpgroups");

// Q [2] | K [STAGES] | V [STAGES] | barriers; a unit's output is staged where its Q was, while the other Q is in use.
constexpr int WGMMA_BARRIERS = 4 * STAGES + 1;
constexpr int WGMMA_SHARED_BYTES = 2 * Q_BYTES + 2 * STAGES * KV_BYTES + 8 * WGMMA_BARRIERS;

struct PrefillWgmmaParams {
  TensorMap k, v;  // [kv_heads, n_pages * page_size, HEAD_DIM] in boxes of [1, min(page_size, BLOCK_N), 64]
  PrefillParams prefill;
  int kv_heads, units;  // tiles * kv_heads
};

// Shared addresses of the barriers. A ring's slot is full when its bytes are there, empty when every warp has read it.
struct Rings {
  u32 k, v, barriers;
  __device__ __forceinline__ u32 k_full(int s) const { return barriers + 8 * s; }
  __device__ __forceinline__ u32 v_full(int s) const { return barriers + 8 * (STAGES + s); }
  __device__ __forceinline__ u32 k_empty(int s) const { return barriers + 8 * (2 * STAGES + s); }
  __device__ __forceinline__ u32 v_empty(int s) const { return barriers + 8 * (3 * STAGES + s); }
  __device__ __forceinline__ u32 tail() const { return barriers + 8 * 4 * STAGES; }
};

// The slot and the parity of the n-th block of keys of this thread block, over all its units.
struct RingPlace {
  int slot;
  u32 parity;
  __device__ __forceinline__ RingPlace(int n) : slot(n % STAGES), parity((n / STAGES) & 1) {}
};

// The units of a thread block: forwards in even rounds, backwards in odd ones; -1 after the last.
__device__ __forceinline__ int unit_of_round(int round, int units) {
  const int n = gridDim.x, place = (round & 1) ? n - 1 - (int)blockIdx.x : (int)blockIdx.x;
  const int unit = round * n + place;
  return unit < units ? unit : -1;
}

// ---- warpgroup 0 ----

// One warp's loads of blocks of keys and values.
struct KeyLoader {
  const PrefillWgmmaParams& p;
  const Rings& rings;
  int lane;
  int box_shift;  // log2 of the rows of a box
  u32 tail_parity;

  // Row of the cache where this lane's box of the block begins, -1 if the lane has none or no key of it exists.
  __device__ __forceinline__ int place(int slot, int first, int limit) const {
    const int token = first + (lane << box_shift);
    if (lane >= (BLOCK_N >> box_shift) || token >= limit) return -1;
    const Paging& paging = p.prefill.paging;
    const int page = page_of(paging, slot, token);
    return page < 0 ? -1 : (page << paging.page_shift) | (token & ((1 << paging.page_shift) - 1));
  }

  __device__ __forceinline__ void load(const TensorMap& map, int place, int kv_head, u32 to, u32 barrier) const {
    const int boxes = __popc(__ballot_sync(0xffffffffu, place >= 0));
    if (lane == 0) barrier_expect(barrier, (boxes << box_shift) * ROW_BYTES);
    __syncwarp();
    if (place >= 0)
#pragma unroll
      for (int panel = 0; panel < N_PANELS; panel++)
        load_box(to + panel * KEY_PANEL_BYTES + (lane << box_shift) * PANEL_ROW_BYTES, map, panel * PANEL_COLUMNS, place, kv_head,
                 barrier);
  }

  __device__ __forceinline__ void load_keys(int n, int place, int kv_head) const {
    const RingPlace at(n);
    barrier_wait(rings.k_empty(at.slot), at.parity ^ 1);
    load(p.k, place, kv_head, rings.k + at.slot * KV_BYTES, rings.k_full(at.slot));
    if (COUNT_BLOCKS && lane == 0) count_block(p.prefill);
  }

  // `real`: keys of the block that exist; the rows after them become zeros before the block counts as full.
  __device__ __forceinline__ void load_values(int n, int place, int kv_head, int real) {
    const RingPlace at(n);
    const u32 to = rings.v + at.slot * KV_BYTES;
    barrier_wait(rings.v_empty(at.slot), at.parity ^ 1);
    // A page that the table does not name leaves old bytes in the block.
    const bool whole = real >= BLOCK_N && __popc(__ballot_sync(0xffffffffu, place >= 0)) == (BLOCK_N >> box_shift);
    if (whole) {
      load(p.v, place, kv_head, to, rings.v_full(at.slot));
      return;
    }
    load(p.v, place, kv_head, to, rings.tail());
    barrier_wait(rings.tail(), tail_parity);
    tail_parity ^= 1;
    for (int row = lane; row < BLOCK_N; row += 32) {
      const bool missing = __shfl_sync(0xffffffffu, place, row >> box_shift) < 0;
      if (row >= real || missing)
#pragma unroll
        for (int chunk = 0; chunk < ROW_CHUNKS; chunk++)
          store_zeros(to + (chunk / 8) * KEY_PANEL_BYTES + panel_offset(row, chunk % 8));
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(rings.v_full(at.slot));
  }

  static __device__ __forceinline__ void store_zeros(u32 shared) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
  }
};

__device__ __forceinline__ void load_all_keys(const PrefillWgmmaParams& p, const Rings& rings, int lane) {
  constexpr int BLOCK_SHIFT = BLOCK_N == 128 ? 7 : 6;
  const int page_shift = p.prefill.paging.page_shift;
  KeyLoader loader{p, rings, lane, page_shift < BLOCK_SHIFT ? page_shift : BLOCK_SHIFT, 0};
  int n = 0, unit;
  for (int round = 0; (unit = unit_of_round(round, p.units)) >= 0; round++) {
    const PrefillTile t = p.prefill.tiles[unit / p.kv_heads];
    const int kv_head = unit % p.kv_heads, limit = t.position + t.q_len;
    int before = -1;
    // V(j - 1) after K(j): the order in which they are needed.
    for (int j = 0; j <= t.blocks; j++) {
      const int first = (t.first_block + j) * BLOCK_N;
      int place = -1;
      if (j < t.blocks) {
        place = loader.place(t.slot, first, limit);
        loader.load_keys(n + j, place, kv_head);
      }
      if (j > 0) loader.load_values(n + j - 1, before, kv_head, limit - (first - BLOCK_N));
      before = place;
    }
    n += t.blocks;
  }
}

// ---- warpgroups 1 and 2 ----

__device__ __forceinline__ QueryTile query_tile(const PrefillParams& p, const PrefillTile& t, int kv_head) {
  QueryTile tile;
  tile.q_offset = (i64)t.q_start * p.q_token_stride + (i64)kv_head * p.group * HEAD_DIM;
  tile.q_stride = p.q_token_stride;
  tile.out_offset = (i64)t.q_start * p.out_token_stride + (i64)kv_head * p.group * HEAD_DIM;
  tile.out_stride = p.out_token_stride;
  tile.group = p.group;
  tile.first_row = t.first_row;
  const int left = t.q_len * p.group - t.first_row;
  tile.rows = left < BLOCK_M ? left : BLOCK_M;
  tile.position = t.position;
  tile.head = kv_head * p.group;
  return tile;
}

// Where a chunk of a row of the tile lies: the rows of each warpgroup, in panels.
__device__ __forceinline__ u32 query_place(int row, int chunk) {
  return (row / GROUP_ROWS) * GROUP_Q_BYTES + (chunk / 8) * QUERY_PANEL_BYTES + panel_offset(row % GROUP_ROWS, chunk % 8);
}

// The warp's own rows of Q.
__device__ __forceinline__ void load_warp_queries(const bf16* q, const QueryTile& tile, u32 to, int warp, int lane) {
#pragma unroll 2
  for (int i = lane; i < WARP_ROWS * ROW_CHUNKS; i += 32) {
    const int row = warp * WARP_ROWS + i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
    const bool real = row < tile.rows;
    const int r = tile.first_row + (real ? row : 0);
    copy_16_async(to + query_place(row, chunk),
                  q + tile.q_offset + (r / tile.group) * tile.q_stride + (r % tile.group) * HEAD_DIM + chunk * 8, real);
  }
  commit_copies();
}

// scores = Q K^T, begun only.
__device__ __forceinline__ void begin_scores(Scores& scores, u64 q, u64 k) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM / 16; d++) {
    const int panel = d / 4, within = (d % 4) * 32;
    multiply_shared(scores[0], q + ((panel * QUERY_PANEL_BYTES + within) >> 4), k + ((panel * KEY_PANEL_BYTES + within) >> 4), d > 0);
  }
  commit_products();
}

// sum = P V, or sum += P V, begun only.
__device__ __forceinline__ void begin_values(RunningSum& sum, const u32 (&weights)[BLOCK_N / 16][4], u64 v, bool accumulate) {
#pragma unroll
  for (int n = 0; n < BLOCK_N / 16; n++)
    multiply_registers(sum[0], weights[n], v + ((n * 16 * PANEL_ROW_BYTES) >> 4), accumulate || n > 0);
  commit_products();
}

__device__ __forceinline__ void pack_weights(u32 (&packed)[BLOCK_N / 16][4], const Scores& weights) {
#pragma unroll
  for (int n = 0; n < BLOCK_N / 16; n++) {
    packed[n][0] = pack_bf16(weights[0][2 * n][0], weights[0][2 * n][1]);
    packed[n][1] = pack_bf16(weights[0][2 * n][2], weights[0][2 * n][3]);
    packed[n][2] = pack_bf16(weights[0][2 * n + 1][0], weights[0][2 * n + 1][1]);
    packed[n][3] = pack_bf16(weights[0][2 * n + 1][2], weights[0][2 * n + 1][3]);
  }
}

// What a warp's rows see of the blocks of a unit.
struct CausalView {
  LaneRows rows;
  int first_block, blocks, full_from, full_to, chunk;

  __device__ __forceinline__ CausalView(const PrefillParams& p, const PrefillTile& t, const QueryTile& tile, int warp, int lane)
      : rows(lane_rows(tile, warp, lane)), first_block(t.first_block), blocks(t.blocks), chunk(t.chunk) {
    const FullBlocks full = full_blocks(p, t, tile);
    full_from = full.from;
    full_to = full.to;
  }

  __device__ __forceinline__ void hide(Scores& scores, int j, const PrefillParams& p, int lane) const {
    const int block = first_block + j;
#if !HAS_MASK_MOD && !HAS_SCORE_MOD
    if (block >= full_from && block < full_to) return;
#endif
    ConsecutiveBlock keys;
    keys.first = block * BLOCK_N;
#pragma unroll
    for (int i = 0; i < N_GRANULES; i++) keys.place[i] = 0;
    const int window = window_of(p);
    modify_scores(scores, rows, keys, p.captures, chunk, p.scale, true, lane, [&](int m, int row, int kv) {
      return kv < rows.limit[m][row] && kv >= rows.limit[m][row] - window;
    });
  }
};

// Named barriers of the two warpgroups; 0 is __syncthreads.
constexpr int GROUP_BARRIER = 1;

__device__ __forceinline__ void attend(const PrefillWgmmaParams& params, const Rings& rings, unsigned char* shared, int group,
                                       int thread) {
  const PrefillParams& p = params.prefill;
  const int lane = thread & 31, warp = group * 4 + (thread >> 5);
  const u32 q_tiles = shared_address(shared);
  const u64 q = operand_descriptor(q_tiles + group * GROUP_Q_BYTES, 0);
  const u64 k = operand_descriptor(rings.k, 0), v = operand_descriptor(rings.v, KEY_PANEL_BYTES);
#if HAS_SCORE_MOD
  const float scale_log2 = LOG2_E;
#else
  const float scale_log2 = p.scale * LOG2_E;
#endif
  const auto tile_of = [&](int unit) { return p.tiles[unit / params.kv_heads]; };
  const auto queries_of = [&](const PrefillTile& t, int unit) { return query_tile(p, t, unit % params.kv_heads); };
  const auto queries_are_there = [&] {
    wait_copies<0>();
    fence_async_proxy();
    stage_barrier(GROUP_BARRIER + group, GROUP_THREADS);
  };

  int unit = unit_of_round(0, params.units), following = unit_of_round(1, params.units), round = 1;
  if (unit < 0) return;
  PrefillTile t = tile_of(unit);
  QueryTile tile = queries_of(t, unit);
  CausalView view(p, t, tile, warp, lane);
  load_warp_queries(p.q, tile, q_tiles, warp, lane);
  queries_are_there();
  CausalView next_view = view;
  if (following >= 0) {
    t = tile_of(following);
    tile = queries_of(t, following);
    next_view = CausalView(p, t, tile, warp, lane);
    load_warp_queries(p.q, tile, q_tiles + Q_BYTES, warp, lane);
  }

  RunningSum sum;
  Softmax softmax;
  Scores scores;
  u32 packed[BLOCK_N / 16][4];
  float rescale[2];
  softmax.reset();
  const RingPlace at(0);
  barrier_wait(rings.k_full(at.slot), at.parity);
  fence_products();
  begin_scores(scores, q, k);
  wait_products<0>();
  pin_registers(scores[0]);
  if (lane == 0) barrier_arrive(rings.k_empty(at.slot));
  view.hide(scores, 0, p, lane);
#pragma unroll
  for (int i = 0; i < 2; i++) weigh(scores, softmax, scale_log2, 0, i);  // there is no sum yet
  pack_weights(packed, scores);
  barrier_wait(rings.v_full(at.slot), at.parity);

  // `packed` holds the weights of block j of `unit`, the n-th of all.
  int n = 0, j = 0, q_tile = 0;
  while (j + 1 < view.blocks || following >= 0) {
    const RingPlace now(n), next(n + 1);
    const bool last = j + 1 == view.blocks;
    const bool accumulate = j > 0;
    const Softmax finished = softmax;
    if (last) {
      queries_are_there();
      view = next_view;
      q_tile ^= 1;
      j = -1;
      softmax.reset();
    }
    barrier_wait(rings.k_full(next.slot), next.parity);
    pin_registers(sum[0]);
    fence_products();
    begin_scores(scores, q + ((q_tile * Q_BYTES) >> 4), k + ((next.slot * KV_BYTES) >> 4));
    begin_values(sum, packed, v + ((now.slot * KV_BYTES) >> 4), accumulate);
    wait_products<1>();
    pin_registers(scores[0]);
    if (lane == 0) barrier_arrive(rings.k_empty(next.slot));
    view.hide(scores, j + 1, p, lane);
#pragma unroll
    for (int i = 0; i < 2; i++) rescale[i] = weigh(scores, softmax, scale_log2, 0, i);
    pin_registers(scores[0]);
    // A total is never negative. The assembler does not know, so it cannot move this wait, and the one after it, up before
    // the softmax, which is there to be done meanwhile.
    const bool negative = softmax.total[0][0] < 0.f || softmax.total[0][1] < 0.f;
    barrier_wait(rings.v_full(next.slot), next.parity ^ (u32)negative);
    wait_products<0>();
    pin_registers(sum[0]);
    if (lane == 0) barrier_arrive(rings.v_empty(now.slot));
    pack_weights(packed, scores);
    if (last) {
      t = tile_of(unit);
      tile = queries_of(t, unit);
      stage_barrier(GROUP_BARRIER + group, GROUP_THREADS);  // no warp reads the unit's Q any more
      store_query_tile(sum, finished, tile, p.out, p.lse, (i64)t.q_start * p.heads + tile.head, p.heads, scale_log2,
                       shared + (q_tile ^ 1) * Q_BYTES, warp, lane, query_place);
      unit = following;
      following = unit_of_round(++round, params.units);
      if (following >= 0) {
        t = tile_of(following);
        tile = queries_of(t, following);
        next_view = CausalView(p, t, tile, warp, lane);
        __syncwarp();
        load_warp_queries(p.q, tile, q_tiles + (q_tile ^ 1) * Q_BYTES, warp, lane);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) rescale_sum(sum, rescale[i], 0, i);
    }
    n++;
    j++;
  }

  const RingPlace now(n);
  pin_registers(sum[0]);
  fence_products();
  begin_values(sum, packed, v + ((now.slot * KV_BYTES) >> 4), j > 0);
  wait_products<0>();
  pin_registers(sum[0]);
  t = tile_of(unit);
  tile = queries_of(t, unit);
  stage_barrier(GROUP_BARRIER + group, GROUP_THREADS);
  store_query_tile(sum, softmax, tile, p.out, p.lse, (i64)t.q_start * p.heads + tile.head, p.heads, scale_log2,
                   shared + q_tile * Q_BYTES, warp, lane, query_place);
}
