// What the merge kernels read, and the kernel that prepares it: splits the factors and bounds the errors. See merge.cu.

#include "merge_primitives.cuh"

#define TILE_ROWS 16
#define TILE_COLUMNS 128
#define FRAGMENTS 16
#define STEP 16       // ranks of one step of a tensor core
#define STAGE_STEPS 2 // steps of a stage of copies
#define FULL 0xffffffffu

// A low-rank term: its place among the stacked ranks (a multiple of 16), and its scaling, alone or per row.
struct Term {
  double scale;
  const double* row_scale;
  const void* left;   // [rows, rank], f32 or bf16
  const void* right;  // [rank, columns], f32 or bf16
  float unit;         // a power of two that brings `right` into f16's range
  u32 bf16;           // bit 0: left is bf16, bit 1: right is
  u32 first;
  u32 rank;
};

// One matrix. What `prepare` writes: left [row tile][part][step][lane], right [column tile][step][part][pair of
// fragments][lane], both padded with zeros; rows [row]: {factor, bound}; norms [column]; transposed [column][rank].
struct Matrix {
  const u16* w0;
  u16* out;
  const Term* terms;
  const double* gain;
  uint4* left;
  uint4* right;
  float2* row_factors;
  float* column_norms;
  float* transposed;
  u32 rows;
  u32 columns;
  u32 rank;  // of all terms, each padded to a multiple of 16
  u32 n_terms;
  u32 parts;
  u32 first_item;
  u32 rows_per_item;  // a multiple of TILE_ROWS
  u32 first_warp;     // of `prepare`
};

struct Report {
  u64 not_finite;  // 2^64 - 1 - smallest index of an element that is not finite; 0 if there is none
  u64 recomputed;
  u64 differs;     // whether an element differs from W0
};

struct Params {
  const Matrix* matrices;
  Report* reports;
  u32 n_matrices;
  u32 n_warps;        // of `prepare`
  u32 right_bytes;    // room for `right` in shared memory
  u32 padding;
};

__device__ __forceinline__ u32 ceil_div(u32 x, u32 y) { return (x + y - 1) / y; }

// The factor at an index, widened to f32.
__device__ __forceinline__ float factor_at(const void* factors, bool bf16, size_t index) {
  return bf16 ? bits_to_float((u32)((const u16*)factors)[index] << 16) : ((const float*)factors)[index];
}

// The term that a stacked rank belongs to.
__device__ __forceinline__ const Term& term_of(const Matrix& m, u32 rank) {
  u32 i = 0;
  while (i + 1 < m.n_terms && m.terms[i + 1].first <= rank) ++i;
  return m.terms[i];
}

// Splits two values into f16 parts.
__device__ __forceinline__ void split(float x, float y, u32& high, u32& low) {
  high = pack_f16(x, y);
  float2 back = unpack_f16(high);
  low = pack_f16(x - back.x, y - back.y);
}

// The power of two that brings a positive normal value into [2^12, 2^13).
__device__ __forceinline__ float unit_for(float value) {
  u32 exponent = __float_as_uint(value) >> 23;
  return bits_to_float((127 + 12 + 127 - exponent) << 23);
}

// One side's part of the bound on a sum's error, in units of 1e-6: of the norm and of the squares of the norms of the first
// 1, 2, .. steps, summed. The bound is the product of both sides'.
//   once, relative to |left| |right|: what the split and the rounding of scaled factors leave, and the truncations of the
//     small products' additions;
//   each step, relative to |left| |right| of the steps so far: truncations, 2^-20 of the sum, which is three times what a
//     tensor core loses when all terms have one sign. The sum of these products is at most the product of the roots of the
//     sums of squares, and a x y + b u v is at most the product of the roots of a x^2 + b u^2 and a y^2 + b v^2.
__device__ __forceinline__ float error_norm(bool whole, float square, float squares, float small) {
  float once = (whole ? 0.1f : 0.9f) + 0.96f;
  return sqrtf(once * square + 0.96f * squares) * 1.001f + 1.5f * small;
}

// One warp: 16 rows of `left`.
__device__ __forceinline__ void prepare_left(const Matrix& m, u32 tile, u32 lane) {
  const u32 g = lane >> 2, t = lane & 3, steps = m.rank / STEP;
  const bool whole = m.parts == 1;
  const float small = 0.125f * sqrtf((float)m.rank);  // what f16's least values leave, in units of 2^-22
  float factor[2] = {0.f, 0.f}, square[2] = {0.f, 0.f}, squares[2] = {0.f, 0.f};
  float greatest[2] = {0.f, 0.f};
  u32 strange = 0;
  // The eight values of this lane in a step: [row g or g + 8][rank 2t, 2t + 1, 2t + 8, 2t + 9].
  auto load = [&](u32 step, float (&values)[2][4]) {
    const Term& term = term_of(m, step * STEP);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 row = tile * TILE_ROWS + half * 8 + g;
      float by = 0.f;
      if (row < m.rows) {
        double scale = whole ? 1. : term.row_scale ? term.row_scale[row] : term.scale;
        by = (float)(scale / (double)term.unit);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 k = step * STEP - term.first + 2 * t + (i & 1) + (i >> 1) * 8;
        bool inside = row < m.rows && k < term.rank;
        values[half][i] = inside ? by * factor_at(term.left, term.bf16 & 1, (size_t)row * term.rank + k) : 0.f;
      }
    }
  };
  for (u32 step = 0; step < steps; ++step) {
    float values[2][4];
    load(step, values);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float size = fabsf(values[half][i]);
        if (!(size < 1e30f)) strange |= 1u << half;
        greatest[half] = fmaxf(greatest[half], size);
      }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      greatest[half] = fmaxf(greatest[half], __shfl_xor_sync(FULL, greatest[half], step));
      strange |= __shfl_xor_sync(FULL, strange, step);
    }
    // Rows that f16 cannot hold with any power of two are left to f64.
    if (greatest[half] > 1e30f || (greatest[half] != 0.f && greatest[half] < 1e-30f)) strange |= 1u << half;
    factor[half] = greatest[half] != 0.f && !(strange >> half & 1) ? unit_for(greatest[half]) : 0.f;
  }
  for (u32 step = 0; step < steps; ++step) {
    float values[2][4];
    load(step, values);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[half][i] = factor[half] != 0.f ? values[half][i] * factor[half] : 0.f;
        square[half] = fmaf(values[half][i], values[half][i], square[half]);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) squares[half] += square[half];
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) split(values[i & 1][(i >> 1) * 2], values[i & 1][(i >> 1) * 2 + 1], high[i], low[i]);
    uint4* to = m.left + ((size_t)tile * m.parts * steps + step) * 32 + lane;
    to[0] = make_uint4(high[0], high[1], high[2], high[3]);
    if (!whole) to[(size_t)steps * 32] = make_uint4(low[0], low[1], low[2], low[3]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      square[half] += __shfl_xor_sync(FULL, square[half], step);
      squares[half] += __shfl_xor_sync(FULL, squares[half], step);
    }
    u32 row = tile * TILE_ROWS + half * 8 + g;
    float by = 0.f, bound = 1e-38f;
    if (factor[half] != 0.f) {
      double scale = whole ? m.terms[0].scale : 1.;
      by = (float)(scale / (double)factor[half]);
      if (fabsf(by) > 1e-32f && fabsf(by) < 1e32f)
        bound = fmaxf(fabsf(by) * 1e-6f * error_norm(whole, square[half], squares[half], small), 1e-38f);
      else if (scale != 0.)
        strange |= 1u << half;
    }
    if (strange >> half & 1) by = 0.f, bound = 1e32f;
    if (t == 0) m.row_factors[row] = make_float2(by, bound);
  }
}

// One warp: 32 columns of `right`.
__device__ __forceinline__ void prepare_right(const Matrix& m, u32 tile, u32 part, u32 lane) {
  const u32 g = lane >> 2, t = lane & 3, steps = m.rank / STEP;
  const u32 column = tile * TILE_COLUMNS + part * 32 + g * 4;
  const bool inside = column < m.columns;
  float square[4] = {0.f, 0.f, 0.f, 0.f}, squares[4] = {0.f, 0.f, 0.f, 0.f};
  for (u32 step = 0; step < steps; ++step) {
    const Term& term = term_of(m, step * STEP);
    float values[4][4];  // [rank 2t, 2t + 1, 2t + 8, 2t + 9][column]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 k = step * STEP - term.first + 2 * t + (i & 1) + (i >> 1) * 8;
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
      if (inside && k < term.rank) {
        size_t at = (size_t)k * m.columns + column;
        if (term.bf16 & 2) {
          uint2 pairs = *(const uint2*)((const u16*)term.right + at);
          x = make_float4(bits_to_float(pairs.x << 16), bits_to_float(pairs.x & 0xffff0000u),
                          bits_to_float(pairs.y << 16), bits_to_float(pairs.y & 0xffff0000u));
        } else {
          x = *(const float4*)((const float*)term.right + at);
        }
      }
      values[i][0] = x.x, values[i][1] = x.y, values[i][2] = x.z, values[i][3] = x.w;
    }
    u32 high[4][2], low[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = values[2 * i][j], y = values[2 * i + 1][j];
        if (inside)
          *(float2*)(m.transposed + (size_t)(column + j) * m.rank + step * STEP + 2 * t + 8 * i) = make_float2(x, y);
        x *= term.unit, y *= term.unit;
        square[j] = fmaf(x, x, fmaf(y, y, square[j]));
        split(x, y, high[j][i], low[j][i]);
      }
      squares[j] += square[j];
    }
    uint4* to = m.right + ((size_t)tile * steps + step) * m.parts * (FRAGMENTS / 2 * 32) + part * 2 * 32 + lane;
    to[0] = make_uint4(high[0][0], high[0][1], high[1][0], high[1][1]);
    to[32] = make_uint4(high[2][0], high[2][1], high[3][0], high[3][1]);
    if (m.parts == 2) {
      to += FRAGMENTS / 2 * 32;
      to[0] = make_uint4(low[0][0], low[0][1], low[1][0], low[1][1]);
      to[32] = make_uint4(low[2][0], low[2][1], low[3][0], low[3][1]);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      square[j] += __shfl_xor_sync(FULL, square[j], step);
      squares[j] += __shfl_xor_sync(FULL, squares[j], step);
    }
  if (t == 0) {
    float small = 0.125f * sqrtf((float)m.rank);
    const bool whole = m.parts == 1;
    *(float4*)(m.column_norms + column) =
        make_float4(error_norm(whole, square[0], squares[0], small), error_norm(whole, square[1], squares[1], small),
                    error_norm(whole, square[2], squares[2], small), error_norm(whole, square[3], squares[3], small));
  }
}

extern "C" __global__ void __launch_bounds__(256) prepare(const __grid_constant__ Params p) {
  u32 warp = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
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
