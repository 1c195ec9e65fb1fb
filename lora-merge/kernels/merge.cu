// LoRA merge: out = round_bf16(gain * W0 + sum_i t_i * left_i * right_i), all matrices of a refresh in few launches.
//
// WHY THIS FORM
//   A refresh moves 4 bytes per weight (W0 in, merged out): 14.5 GB for Qwen3-4B, 3.4 ms on an H200. The arithmetic is
//   2 * rank operations per weight: more than the f32 units can do in that time, so it runs on the tensor cores, in f16
//   with f32 factors in two parts, x = high + low + rest, |rest| <= 2^-22 |x|. The products low*high, high*low and
//   high*high are summed, which leaves 3 * 2^-22; small products go first, while the sum is small. Powers of two bring
//   the factors into f16's range: one per term for `right`, one per row for `left`. Factors that have 11 significant
//   bits (adapters stored in bf16 or f16) need high*high alone.
//
// WHY IT IS STILL EXACT
//   Each element carries a bound on its error: (what the split leaves + what the tensor core's truncating additions
//   lose) * |left row| * |right column|. Both ends of the interval, computed with directed roundings, are rounded to
//   bf16: where they agree, that is the correctly rounded result. The others (one in a thousand at rank 32) are computed
//   again in f64 by four lanes each, eight at a time, with the operations of the CPU's merge in the same order: both give the same bits.
//
// TWO KERNELS
//   prepare   splits the factors, writes them in the order in which the tensor cores read them (fragments), and the norms
//   merge_*   one warp = 16 rows x 128 columns at a time, and never waits for the other warps of its block:
//
//              right [rank, 128]    fragments in shared memory, for all rows of the block's item
//            +------------------+
//   left     |      16 sums     |   W0 and left come by asynchronous copies, one tile ahead, into the warp's own place
//   [16,rank]|    of 16 x 8     |
//            +------------------+
//
// Column of fragment j (0..15), index n (0..7):  32 * (j / 4) + 4 * n + j % 4.  So a thread holds 8 neighbouring columns
// of W0 and of the output: 16 bytes. Nothing is subtracted, and the former content of `out` is never read.

#include "merge_tile.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) prepare(const __grid_constant__ Params p) {
  u32 warp = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (p.doubts && blockIdx.x == 0 && threadIdx.x == 0) p.doubts->count = 0, p.doubts->capacity = p.capacity;
  if (warp >= p.n_warps) return;
  u32 lower = 0, upper = p.n_matrices;
  while (upper - lower > 1) {
    u32 middle = (lower + upper) / 2;
    if (p.matrices[middle].first_warp <= warp) lower = middle; else upper = middle;
  }
  const Matrix m = p.matrices[lower];
  u32 item = warp - m.first_warp, row_tiles = ceil_div(m.rows, TILE_ROWS);
  if (item < row_tiles)
    prepare_left(m, item, lane);
  else
    prepare_right(m, (item - row_tiles) / 4, (item - row_tiles) % 4, lane);
}

// Left factors in stages of two steps, in two places by turns, like W0. With more than one stage of split factors they
// come twice: for the small products, then for the great ones.
// GENERAL: with gains, and with `right` of any rank, read where `prepare` wrote it.
template <bool SPLIT, bool GENERAL>
__device__ __forceinline__ void merge(const Params& p) {
  constexpr u32 PARTS = SPLIT ? 2 : 1;
  constexpr u32 LEFT_PLACES = PARTS * STAGE_STEPS * 32;
  constexpr u32 WARP_PLACES = 2 * W0_PLACES + 2 * LEFT_PLACES + 2;
  extern __shared__ __align__(16) uint4 shared[];
  const Item item = find_item(p, PARTS);
  const u32 steps = item.steps, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
  float* norms = (float*)shared;
  u32* next_tile = (u32*)(norms + TILE_COLUMNS);
  uint4* right_place = shared + HEAD_PLACES;
  uint4* place = right_place + p.right_bytes / 16 + warp * WARP_PLACES;
  uint4* left_place = place + 2 * W0_PLACES;
  u32* waiting = (u32*)(left_place + 2 * LEFT_PLACES);
  load_columns(item, norms, GENERAL ? nullptr : right_place, steps * PARTS * STEP_PLACES);
  const uint4* right = GENERAL ? item.right : right_place;
  commit_copies();
  if (threadIdx.x == 0) *next_tile = item.first_tile + (blockDim.x >> 5);

  const u32 once = ceil_div(steps, STAGE_STEPS);
  const bool twice = GENERAL && once > 1;
  const u32 stages = twice ? 2 * once : once;
  auto load_stage = [&](u32 tile, u32 stage, u32 slot, u32 w0_slot) {
    if (tile < item.last_tile) {
      u32 step0 = (twice && stage >= once ? stage - once : stage) * STAGE_STEPS;
      u32 n = min((u32)STAGE_STEPS, steps - step0) * 32;
      const uint4* from = item.left + ((size_t)tile * PARTS * steps + step0) * 32;
      uint4* to = left_place + slot * LEFT_PLACES;
      for (u32 i = lane; i < n; i += 32) copy_16_async(to + i, from + i, true);
      if (SPLIT && !(twice && stage >= once))
        for (u32 i = lane; i < n; i += 32)
          copy_16_async(to + STAGE_STEPS * 32 + i, from + (size_t)steps * 32 + i, true);
      if (stage == 0) load_w0(item, tile, place + w0_slot * W0_PLACES);
    }
    commit_copies();
  };

  u32 tile = item.first_tile + warp, slot = 0, w0_slot = 0;
  load_stage(tile, 0, 0, 0);
  wait_copies<1>();
  __syncthreads();  // `right` and the norms are there

  Found found;
  while (tile < item.last_tile) {
    u32 next = fetch_tile(next_tile);
    float2 factors[2];
    load_factors(item, tile, g, factors);
    float sums[FRAGMENTS][4];
    clear(sums);
    for (u32 stage = 0; stage < stages; ++stage) {
      bool last = stage + 1 == stages;
      load_stage(last ? next : tile, last ? 0 : stage + 1, slot ^ 1, w0_slot ^ (last ? 1 : 0));
      wait_copies<1>();
      __syncwarp();
      const uint4* left = left_place + slot * LEFT_PLACES + lane;
      bool again = twice && stage >= once;
      u32 step0 = (again ? stage - once : stage) * STAGE_STEPS;
      u32 n = min((u32)STAGE_STEPS, steps - step0);
      if (SPLIT && !again) {
        for (u32 step = 0; step < n; ++step) {
          const uint4* b = right + (size_t)(step0 + step) * PARTS * STEP_PLACES + lane;
          multiply(sums, left[(STAGE_STEPS + step) * 32], b);
          multiply(sums, left[step * 32], b + STEP_PLACES);
        }
      }
      if (!twice || again) {
        for (u32 step = 0; step < n; ++step)
          multiply(sums, left[step * 32], right + (size_t)(step0 + step) * PARTS * STEP_PLACES + lane);
      }
      __syncwarp();  // the slot may be written again
      slot ^= 1;
    }
    const uint4* w0 = place + w0_slot * W0_PLACES;
    u32 doubts[2] = {0, 0};
    round_columns<GENERAL, 0, 4>(item, tile, sums, factors, norms, w0, doubts, found);
    settle(item, tile, doubts, waiting, found);
    tile = next;
    w0_slot ^= 1;
  }
  report(item, waiting, found);
}

// Waits for all groups of copies but the last n, or a few more than that.
__device__ __forceinline__ void wait_copies_but(u32 n) {
  if (n >= 8) wait_copies<8>();
  else if (n >= 6) wait_copies<6>();
  else if (n >= 4) wait_copies<4>();
  else if (n >= 2) wait_copies<2>();
  else wait_copies<1>();
}

// Split factors of more than one stage: 64 columns at a time, with sums of their own for the small products, so that each
// of the factors is read once. All left factors of a tile have a place, where the next tile's come as soon as they are used.
__device__ __forceinline__ void merge_deep_rank(const Params& p) {
  extern __shared__ __align__(16) uint4 shared[];
  const Item item = find_item(p, 2);
  const u32 steps = item.steps, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
  float* norms = (float*)shared;
  u32* next_tile = (u32*)(norms + TILE_COLUMNS);
  uint4* right_place = shared + HEAD_PLACES;
  // Places are as large as the launch's highest rank needs.
  const u32 widest = p.right_bytes / (2 * 16 * STEP_PLACES);
  uint4* w0 = right_place + p.right_bytes / 16 + warp * (W0_PLACES + 2 * widest * 32 + 2);
  uint4* left = w0 + W0_PLACES;
  u32* waiting = (u32*)(left + 2 * widest * 32);
  load_columns(item, norms, right_place, steps * 2 * STEP_PLACES);
  const uint4* right = right_place + lane;
  commit_copies();
  if (threadIdx.x == 0) *next_tile = item.first_tile + (blockDim.x >> 5);

  const u32 stages = ceil_div(steps, STAGE_STEPS);
  auto load_left = [&](u32 tile, u32 stage) {
    if (tile < item.last_tile) {
      u32 n = min((u32)STAGE_STEPS, steps - stage * STAGE_STEPS) * 32;
#pragma unroll
      for (u32 part = 0; part < 2; ++part) {
        u32 at = (part * steps + stage * STAGE_STEPS) * 32;
        const uint4* from = item.left + (size_t)tile * 2 * steps * 32 + at;
        for (u32 i = lane; i < n; i += 32) copy_16_async(left + at + i, from + i, true);
      }
    }
    commit_copies();
  };
  u32 tile = item.first_tile + warp;
  for (u32 stage = 0; stage < stages; ++stage) load_left(tile, stage);
  if (tile < item.last_tile) load_w0(item, tile, w0);
  commit_copies();
  wait_copies_but(stages + 1);
  __syncthreads();  // `right` and the norms are there

  // Small products first: they are summed apart.
  auto multiply_stage = [&](u32 stage, u32 first_pair, float (&great)[PAIRS][4], float (&small)[PAIRS][4]) {
    u32 end = min(steps, (stage + 1) * STAGE_STEPS);
    for (u32 step = stage * STAGE_STEPS; step < end; ++step) {
      const uint4 high = left[step * 32 + lane], low = left[(steps + step) * 32 + lane];
      const uint4* b = right + step * 2 * STEP_PLACES + first_pair * 32;
#pragma unroll
      for (int pair = 0; pair < PAIRS / 2; ++pair) {
        uint4 b_high = b[pair * 32];
        mma_16x8x16(great[2 * pair], high, b_high.x, b_high.y);
        mma_16x8x16(great[2 * pair + 1], high, b_high.z, b_high.w);
        mma_16x8x16(small[2 * pair], low, b_high.x, b_high.y);
        mma_16x8x16(small[2 * pair + 1], low, b_high.z, b_high.w);
      }
      multiply(small, high, b + STEP_PLACES);
    }
  };
  Found found;
  while (tile < item.last_tile) {
    u32 next = fetch_tile(next_tile);
    float2 factors[2];
    load_factors(item, tile, g, factors);
    u32 doubts[2] = {0, 0};
    float great[PAIRS][4], small[PAIRS][4];
    auto add = [&]() {
#pragma unroll
      for (int f = 0; f < PAIRS; ++f)
#pragma unroll
        for (int c = 0; c < 4; ++c) great[f][c] += small[f][c];
    };
    clear(great), clear(small);
    for (u32 stage = 0; stage < stages; ++stage) {
      wait_copies_but(stages - stage);  // behind it: the later stages and W0
      __syncwarp();
      multiply_stage(stage, 0, great, small);
    }
    add();
    wait_copies<0>();  // W0
    __syncwarp();
    round_columns<false, 0, 2>(item, tile, great, factors, norms, w0, doubts, found);
    clear(great), clear(small);
    for (u32 stage = 0; stage < stages; ++stage) {
      multiply_stage(stage, PAIRS / 2, great, small);
      __syncwarp();
      load_left(next, stage);
    }
    add();
    round_columns<false, 2, 2>(item, tile, great, factors, norms, w0, doubts, found);
    settle(item, tile, doubts, waiting, found);
    __syncwarp();
    if (next < item.last_tile) load_w0(item, next, w0);
    commit_copies();
    tile = next;
  }
  report(item, waiting, found);
}

extern "C" __global__ void __launch_bounds__(512) merge_split(const __grid_constant__ Params p) {
  merge<true, false>(p);
}

extern "C" __global__ void __launch_bounds__(512) merge_deep(const __grid_constant__ Params p) {
  merge_deep_rank(p);
}

extern "C" __global__ void __launch_bounds__(512) merge_whole(const __grid_constant__ Params p) {
  merge<false, false>(p);
}

extern "C" __global__ void __launch_bounds__(512) merge_general(const __grid_constant__ Params p) {
  merge<true, true>(p);
}

// DoRA: row factors of one term, c = magnitude / |W0 + scale * left * right|. Eight threads a row, each with every
// eighth column, in f64 and in the order of operations of the CPU.
struct DoraParams {
  const u16* w0;
  const float* left;       // [rows, stride], this term's ranks
  const float* right;      // [rank, columns]
  const float* magnitude;  // [rows]
  double* row_scale;       // c * scale, [rows]
  double* gain;            // [rows]
  u64* zero_norm;          // smallest row of norm 0
  double scale;
  u32 rows;
  u32 columns;
  u32 stride;
  u32 rank;
  u32 first;               // whether this is the matrix's first such term
  u32 padding;
};

extern "C" __global__ void __launch_bounds__(256) dora_rows(const __grid_constant__ DoraParams p) {
  u32 row = (blockIdx.x * 256 + threadIdx.x) / 8, part = threadIdx.x % 8;
  bool inside = row < p.rows;
  double sum = 0;
  if (inside) {
    const float* left = p.left + (size_t)row * p.stride;
    for (u32 column = part; column < p.columns; column += 8) {
      double delta = 0;
      for (u32 k = 0; k < p.rank; ++k)
        delta = __fma_rn((double)left[k], (double)p.right[(size_t)k * p.columns + column], delta);
      double base = __uint_as_float((u32)p.w0[(size_t)row * p.columns + column] << 16);
      double value = __dadd_rn(base, __dmul_rn(p.scale, delta));
      sum = __dadd_rn(sum, __dmul_rn(value, value));
    }
  }
  double total = 0;
  for (int i = 0; i < 8; ++i) total = __dadd_rn(total, __shfl_sync(0xffffffffu, sum, i, 8));
  if (!inside || part != 0) return;
  double norm = __dsqrt_rn(total);
  if (norm == 0) {
    atomicMin(p.zero_norm, (u64)row);
    return;
  }
  double factor = __ddiv_rn((double)p.magnitude[row], norm);
  p.row_scale[row] = __dmul_rn(factor, p.scale);
  p.gain[row] = p.first ? factor : __dadd_rn(p.gain[row], __dadd_rn(factor, -1.0));
}
