#pragma once
// A tile of a merge: its copies, its rounding, and the elements that f64 decides. See merge.cu.

#include "merge_prepare.cuh"

// The bf16 nearest to a double: truncated to f32 with a sticky last bit, then rounded once.
__device__ __forceinline__ u16 bf16_from_double(double value) {
  float truncated = __double2float_rz(value);
  u32 bits = __float_as_uint(truncated);
  if ((double)truncated != value) bits |= 1u;
  if ((bits & 0x7f800000u) == 0x7f800000u) return (u16)(bits >> 16) | ((bits & 0x7fffffu) ? 0x40u : 0u);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ __forceinline__ bool is_finite(u16 value) { return (value & 0x7f80u) != 0x7f80u; }

// This lane's quarter of a term's products, each fourth one, loaded some at a time so that they arrive together.
template <bool BF16>
__device__ __forceinline__ double quarter_sum(const void* left, size_t left_at, const float* right, u32 rank) {
  constexpr u32 AT_ONCE = 16;
  double sum = 0;
  for (u32 first = threadIdx.x & 3; first < rank; first += 4 * AT_ONCE) {
    float l[AT_ONCE], r[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; ++i) {
      u32 k = first + 4 * i;
      bool inside = k < rank;
      l[i] = inside ? factor_at(left, BF16, left_at + k) : 0.f;
      r[i] = inside ? right[k] : 0.f;
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; ++i)
      if (first + 4 * i < rank) sum = __fma_rn((double)l[i], (double)r[i], sum);
  }
  return sum;
}

// Reports an element that is not finite. A row that no gain and no term touches stays as it is, be W0 finite or not and whatever
// `right` holds: then W0 is given instead.
__device__ __noinline__ u16 not_finite(const Matrix* m, Report* report, u32 row, u32 column, u16 value) {
  bool touched = m->gain != nullptr;
#pragma unroll 1
  for (u32 i = 0; i < m->n_terms && !touched; ++i) {
    const Term& term = m->terms[i];
    const double scale = term.row_scale ? term.row_scale[row] : term.scale;
#pragma unroll 1
    for (u32 k = 0; k < term.rank && !touched; ++k)
      touched = __dmul_rn(scale, (double)factor_at(term.left, term.bf16 & 1, (size_t)row * term.rank + k)) != 0;
  }
  const u64 index = (u64)row * m->columns + column;
  if (!touched) return m->w0[index];
  atomicMax(&report->not_finite, ~index);
  return value;
}

// One element in f64 by four lanes, each with every fourth product of a term. Products of two floats are exact in f64,
// so fused or not makes no difference; the other operations are kept apart, in the CPU's order.
__device__ __noinline__ u16 exact(const Matrix* m, u32 row, u32 column, float w0) {
  const u32 lanes = 0xfu << (threadIdx.x & 28);  // others may have another matrix
  double value = w0;
  if (m->gain) value = __dmul_rn(m->gain[row], value);
  const float* right = m->transposed + (size_t)column * m->rank;
  for (u32 i = 0; i < m->n_terms; ++i) {
    const Term& term = m->terms[i];
    const float* right_at = right + term.first;
    double sum = term.bf16 & 1 ? quarter_sum<true>(term.left, (size_t)row * term.rank, right_at, term.rank)
                               : quarter_sum<false>(term.left, (size_t)row * term.rank, right_at, term.rank);
    sum = __dadd_rn(sum, __shfl_xor_sync(lanes, sum, 1));
    sum = __dadd_rn(sum, __shfl_xor_sync(lanes, sum, 2));
    double scaled = __dmul_rn(term.row_scale ? term.row_scale[row] : term.scale, sum);
    if (scaled != 0) value = __dadd_rn(value, scaled);  // -0 stays -0
  }
  return bf16_from_double(value);
}

#define W0_PLACES (TILE_ROWS * TILE_COLUMNS / 8)  // of 16 bytes
#define HEAD_PLACES (TILE_COLUMNS / 4 + 1)        // norms, the next tile's number
#define PAIRS (FRAGMENTS / 2)
#define STEP_PLACES (PAIRS * 32)                  // of one part of `right`

// Place of 16 bytes (8 columns) of a row of W0 in shared memory: neighbouring rows are in other banks.
__device__ __forceinline__ u32 w0_place(u32 row, u32 eighth) { return row * 16 + (eighth ^ ((row & 1) << 2)); }

// What a block works on: 128 columns of one matrix, some tiles of rows.
struct Item {
  const Matrix* matrix;
  Report* report;
  const u16* w0;
  u16* out;
  const uint4* left;
  const uint4* right;  // of these columns
  const float2* row_factors;
  const double* gain;
  u32 rows, columns, steps, column0, first_tile, last_tile, index;
};

__device__ __forceinline__ Item find_item(const Params& p, u32 parts) {
  u32 lower = 0, upper = p.n_matrices;
  while (upper - lower > 1) {
    u32 middle = (lower + upper) / 2;
    if (p.matrices[middle].first_item <= blockIdx.x) lower = middle; else upper = middle;
  }
  const Matrix& m = p.matrices[lower];
  u32 index = blockIdx.x - m.first_item, column_tiles = ceil_div(m.columns, TILE_COLUMNS);
  u32 tiles = m.rows_per_item / TILE_ROWS, steps = m.rank / STEP, column_tile = index % column_tiles;
  Item item;
  item.matrix = &m, item.report = &p.reports[lower], item.index = lower;
  item.w0 = m.w0, item.out = m.out, item.left = m.left, item.row_factors = m.row_factors, item.gain = m.gain;
  item.right = m.right + (size_t)column_tile * steps * parts * STEP_PLACES;
  item.rows = m.rows, item.columns = m.columns, item.steps = steps, item.column0 = column_tile * TILE_COLUMNS;
  item.first_tile = index / column_tiles * tiles;
  item.last_tile = min(ceil_div(m.rows, TILE_ROWS), item.first_tile + tiles);
  return item;
}

// Queues the copies of the norms and, if `right` is given, of all its steps.
__device__ __forceinline__ void load_columns(const Item& item, float* norms, uint4* right, u32 right_places) {
  for (u32 i = threadIdx.x; i < TILE_COLUMNS / 4; i += blockDim.x)
    copy_16_async(norms + 4 * i, item.matrix->column_norms + item.column0 + 4 * i, true);
  if (right)
    for (u32 i = threadIdx.x; i < right_places; i += blockDim.x) copy_16_async(right + i, item.right + i, true);
}

// Factors and bounds of the rows that a lane has in a tile.
__device__ __forceinline__ void load_factors(const Item& item, u32 tile, u32 g, float2 (&factors)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) factors[half] = item.row_factors[tile * TILE_ROWS + half * 8 + g];
}

// Queues the copy of a tile of W0; zeros where there is none.
__device__ __forceinline__ void load_w0(const Item& item, u32 tile, uint4* place) {
  u32 lane = threadIdx.x & 31, eighth = lane & 15, column = item.column0 + eighth * 8;
#pragma unroll
  for (u32 i = 0; i < TILE_ROWS / 2; ++i) {
    u32 local = 2 * i + (lane >> 4), row = tile * TILE_ROWS + local;
    bool inside = row < item.rows && column < item.columns;
    copy_16_async(place + w0_place(local, eighth), item.w0 + (inside ? (size_t)row * item.columns + column : 0), inside);
  }
}

// The tile behind, from the block's counter.
__device__ __forceinline__ u32 fetch_tile(u32* next_tile) {
  u32 next = 0;
  if ((threadIdx.x & 31) == 0) next = atomicAdd(next_tile, 1u);
  return __shfl_sync(FULL, next, 0);
}

template <int N>
__device__ __forceinline__ void clear(float (&sums)[N][4]) {
#pragma unroll
  for (int f = 0; f < N; ++f)
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[f][c] = 0.f;
}

// One step: left (already at this lane) times a part of right.
template <int N>
__device__ __forceinline__ void multiply(float (&sums)[N][4], const uint4& left, const uint4* right) {
#pragma unroll
  for (int pair = 0; pair < N / 2; ++pair) {
    uint4 b = right[pair * 32];
    mma_16x8x16(sums[2 * pair], left, b.x, b.y);
    mma_16x8x16(sums[2 * pair + 1], left, b.z, b.w);
  }
}

// What a warp has found out.
struct Found {
  u32 differs = 0, recomputed = 0;
  u32 waiting = 0;  // elements in the list of those to be computed again
};

// Adds W0 to the sums of 32 or more columns of a tile, rounds both ends of the interval, and stores. Where they differ, marks
// the element in `doubts` [half of the rows], bit 8 * (32 columns) + column.
template <bool GAINS, int FIRST, int COUNT>
__device__ __forceinline__ void round_columns(const Item& item, u32 tile, const float (&sums)[COUNT * 4][4],
                                              const float2 (&factors)[2], const float* norms, const uint4* w0,
                                              u32 (&doubts)[2], Found& found) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float gains[2] = {1.f, 1.f};
  if (GAINS && item.gain) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 row = tile * TILE_ROWS + half * 8 + g;
      if (row < item.rows) gains[half] = (float)item.gain[row];
    }
  }
#pragma unroll
  for (int h = FIRST; h < FIRST + COUNT; ++h) {
    float4 n0 = *(const float4*)(norms + h * 32 + t * 8), n1 = *(const float4*)(norms + h * 32 + t * 8 + 4);
    const float column_norm[8] = {n0.x, n0.y, n0.z, n0.w, n1.x, n1.y, n1.z, n1.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 old = w0[w0_place(half * 8 + g, h * 4 + t)];
      const u32 words[4] = {old.x, old.y, old.z, old.w};
      const float by = factors[half].x, bound = factors[half].y;
      u32 results[4], open[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        float base[2] = {bits_to_float(words[q] << 16), bits_to_float(words[q] & 0xffff0000u)};
        float low[2], high[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          // Column 2 q + c of the eight: fragment (2 q + c) % 4, element (2 q + c) / 4.
          float sum = sums[(h - FIRST) * 4 + (q & 1) * 2 + c][half * 2 + (q >> 1)];
          float error = bound * column_norm[2 * q + c];
          if (GAINS) {
            base[c] *= gains[half];
            if (item.gain) error = fmaf(2.4e-7f, fabsf(base[c]), error);
          }
          low[c] = __fmaf_rd(sum, by, __fadd_rd(base[c], -error));
          high[c] = __fmaf_ru(sum, by, __fadd_ru(base[c], error));
        }
        results[q] = pack_bf16(low[0], low[1]);
        open[q] = subtract_bf16(pack_bf16(high[0], high[1]), results[q]);
      }
      u32 row = tile * TILE_ROWS + half * 8 + g, column = item.column0 + h * 32 + t * 8;
      if (row < item.rows && column < item.columns) {
        if (open[0] | open[1] | open[2] | open[3]) {
          u32 doubt = 0;
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            u32 mask = (open[q] & 0xffffu ? 0xffffu : 0u) | (open[q] & 0xffff0000u ? 0xffff0000u : 0u);
            doubt |= (mask & 1u) << (2 * q) | (mask >> 31) << (2 * q + 1);
            results[q] = (results[q] & ~mask) | (words[q] & mask);
          }
          doubts[half] |= doubt << (8 * h);
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) found.differs |= results[q] ^ words[q];
        store_streaming((uint4*)(item.out + (size_t)row * item.columns + column),
                        make_uint4(results[0], results[1], results[2], results[3]));
      }
    }
  }
}

// Computes the first n of a warp's waiting elements again, four lanes each.
__device__ __forceinline__ void flush(const Item& item, u32 n, const u32* waiting, Found& found) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  __syncwarp();  // the list is written, and what was stored in their places comes before what is stored now
  u32 entry = waiting[min(g, n - 1)], row = entry >> 7, column = item.column0 + (entry & 127);
  u64 index = (u64)row * item.columns + column;
  u16 old = __ldg(item.w0 + index);
  u16 value = exact(item.matrix, row, column, bits_to_float((u32)old << 16));
  if (g < n && t == 0) {
    if (!is_finite(value)) value = not_finite(item.matrix, item.report, row, column, value);
    found.differs |= value ^ old;
    ++found.recomputed;
    item.out[index] = value;
  }
  __syncwarp();
}

// Appends the doubtful elements of a tile to the warp's list, and computes them again whenever there are eight.
__device__ __forceinline__ void settle(const Item& item, u32 tile, u32 (&doubts)[2], u32* waiting, Found& found) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (;;) {
    u32 lanes = __ballot_sync(FULL, (doubts[0] | doubts[1]) != 0);
    if (lanes == 0) break;
    u32 mine = found.waiting + __popc(lanes & ((1u << lane) - 1));
    if ((lanes >> lane & 1) && mine < 8) {
      u32 half = doubts[0] ? 0 : 1, from = half ? doubts[1] : doubts[0];
      u32 bit = __ffs(from) - 1;
      if (half) doubts[1] &= doubts[1] - 1; else doubts[0] &= doubts[0] - 1;
      waiting[mine] = (tile * TILE_ROWS + half * 8 + g) << 7 | ((bit >> 3) * 32 + t * 8 + (bit & 7));
    }
    found.waiting = min(8u, found.waiting + (u32)__popc(lanes));
    if (found.waiting == 8) {
      flush(item, 8, waiting, found);
      found.waiting = 0;
    }
  }
}

#define GATHERED 96  // elements that a warp gathers before it takes places in the launch's list

// Moves what a warp gathered to the launch's list; what finds no room there is computed here.
__device__ __forceinline__ void hand_over(const Item& item, const u32* gathered, Doubts* list, Found& found) {
  const u32 lane = threadIdx.x & 31;
  u32 first = 0;
  if (lane == 0) first = atomicAdd(&list->count, found.waiting);
  first = __shfl_sync(FULL, first, 0);
  __syncwarp();  // the entries are there
  const u32 room = first < list->capacity ? min(list->capacity - first, found.waiting) : 0;
  for (u32 i = lane; i < room; i += 32) {
    list->entries[first + i] = (u64)item.index << 50 | (u64)(gathered[i] >> 7) << 25 | (item.column0 + (gathered[i] & 127));
    ++found.recomputed;
  }
  for (u32 i = room; i < found.waiting; i += 8) flush(item, min(8u, found.waiting - i), gathered + i, found);
  __syncwarp();  // the places may be written again
  found.waiting = 0;
}

// Gathers the doubtful elements of a tile.
__device__ __forceinline__ void gather(const Item& item, u32 tile, u32 (&doubts)[2], u32* gathered, Doubts* list, Found& found) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (;;) {
    const u32 lanes = __ballot_sync(FULL, (doubts[0] | doubts[1]) != 0);
    if (lanes == 0) break;
    if (lanes >> lane & 1) {
      const u32 half = doubts[0] ? 0 : 1, from = half ? doubts[1] : doubts[0], bit = __ffs(from) - 1;
      if (half) doubts[1] &= doubts[1] - 1; else doubts[0] &= doubts[0] - 1;
      gathered[found.waiting + __popc(lanes & ((1u << lane) - 1))] =
          (tile * TILE_ROWS + half * 8 + g) << 7 | ((bit >> 3) * 32 + t * 8 + (bit & 7));
    }
    found.waiting += __popc(lanes);
    if (found.waiting > GATHERED - 32) hand_over(item, gathered, list, found);
  }
}

__device__ __forceinline__ void report(const Item& item, const u32* waiting, Found& found) {
  if (found.waiting) flush(item, found.waiting, waiting, found);
  if (__any_sync(FULL, found.differs != 0) && (threadIdx.x & 31) == 0 && item.report->differs == 0)
    item.report->differs = 1;
  if (found.recomputed) atomicAdd(&item.report->recomputed, (u64)found.recomputed);
}
