#pragma once
// What the merge kernels read, and its preparation: splits the factors and bounds the errors. See merge.cu.

#include "merge_primitives.cuh"

#define TILE_ROWS 16
#define TILE_COLUMNS 128
#define FRAGMENTS 16
#define STEP 16       // ranks of one step of a tensor core
#define STAGE_STEPS 2 // steps of a stage of copies
#define FULL 0xffffffffu
#define LEAST_NORMAL 1.17549435e-38f  // below it f32 loses precision
#define GROUP_ROWS 64   // of a warpgroup's product
#define PANEL_STEPS 4   // steps of a panel: 64 ranks, 128 bytes a row
#define PANEL_ROW 128   // bytes
#define GROUP_PLACES (GROUP_ROWS * PANEL_ROW / 16)     // of a panel of `left`, of 16 bytes
#define COLUMN_PLACES (TILE_COLUMNS * PANEL_ROW / 16)  // of a panel of `right`

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
  u32 rows_per_item;  // a multiple of TILE_ROWS, of GROUP_ROWS for warpgroups
  u32 first_warp;     // of `prepare`
  u32 panels;         // of 64 ranks, for warpgroups; 0: fragments
  u32 padding;
};

struct Report {
  u64 not_finite;  // 2^64 - 1 - smallest index of an element that is not finite; 0 if there is none
  u64 recomputed;
  u64 differs;     // whether an element differs from W0
};

// Elements that the merge leaves to `settle_doubts`.
struct Doubts {
  u32 count;  // may exceed the capacity: those beyond were computed where they were found
  u32 capacity;
  u64 entries[1];  // matrix << 50 | row << 25 | column
};

struct Params {
  const Matrix* matrices;
  Report* reports;
  Doubts* doubts;     // null: there is no list
  u32 n_matrices;
  u32 n_warps;        // of `prepare`
  u32 right_bytes;    // room for `right` in shared memory
  u32 capacity;       // of `doubts`
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

// Where a warpgroup's operand has 16 bytes: chunk `chunk` (of two) of a step's ranks of a row. Panels of 64 ranks, a row's
// chunks swizzled by its number.
__device__ __forceinline__ uint4* panel_place(uint4* panels, u32 panel_rows, u32 step, u32 row, u32 chunk) {
  u32 piece = (step % PANEL_STEPS) * 2 + chunk;
  return panels + ((size_t)(step / PANEL_STEPS) * panel_rows + row) * (PANEL_ROW / 16) + (piece ^ (row & 7));
}

// Of four lanes with four words each, lane t gets word t of each of them.
__device__ __forceinline__ uint4 transpose(const u32 (&x)[4], u32 t) {
  const bool odd = t & 1, upper = t & 2;
  u32 give0 = odd ? x[0] : x[1], give1 = odd ? x[2] : x[3];
  u32 got0 = __shfl_xor_sync(FULL, give0, 1), got1 = __shfl_xor_sync(FULL, give1, 1);
  // Words t & 1 and 2 + (t & 1) of lanes t & ~1 and t | 1.
  u32 a0 = odd ? got0 : x[0], a1 = odd ? x[1] : got0, b0 = odd ? got1 : x[2], b1 = odd ? x[3] : got1;
  u32 c0 = __shfl_xor_sync(FULL, upper ? a0 : b0, 2), c1 = __shfl_xor_sync(FULL, upper ? a1 : b1, 2);
  return upper ? make_uint4(c0, c1, b0, b1) : make_uint4(a0, a1, c0, c1);
}

// One warp: 16 rows of `left`.
__device__ __forceinline__ void prepare_left(const Matrix& m, u32 tile, u32 lane) {
  const u32 g = lane >> 2, t = lane & 3, steps = m.rank / STEP;
  const bool whole = m.parts == 1;
  const float small = 0.125f * sqrtf((float)m.rank);  // what f16's least values leave, in units of 2^-22
  float factor[2] = {0.f, 0.f}, square[2] = {0.f, 0.f}, squares[2] = {0.f, 0.f};
  float greatest[2] = {0.f, 0.f};
  u32 strange = 0;
  // The term of the steps before `until`, and what its values of a row are multiplied by.
  const Term* term = m.terms;
  float by[2];
  u32 until = 0;
  // The eight values of this lane in a step: [row g or g + 8][rank 2t, 2t + 1, 2t + 8, 2t + 9].
  auto load = [&](u32 step, float (&values)[2][4]) {
    if (step >= until) {
      term = &term_of(m, step * STEP);
      until = (term->first + term->rank + STEP - 1) / STEP;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 row = tile * TILE_ROWS + half * 8 + g;
        by[half] = 0.f;
        if (row < m.rows) {
          double scale = whole ? 1. : term->row_scale ? term->row_scale[row] : term->scale;
          by[half] = (float)(scale / (double)term->unit);
          // NaN leaves the row to f64, as infinity does.
          if (fabsf(by[half]) < LEAST_NORMAL && scale != 0) by[half] = bits_to_float(0x7fc00000u);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 row = tile * TILE_ROWS + half * 8 + g;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 k = step * STEP - term->first + 2 * t + (i & 1) + (i >> 1) * 8;
        bool inside = row < m.rows && k < term->rank;
        values[half][i] = inside ? by[half] * factor_at(term->left, term->bf16 & 1, (size_t)row * term->rank + k) : 0.f;
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
  until = 0;
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
    if (m.panels) {
      uint4* panels = m.left + (size_t)(tile / (GROUP_ROWS / TILE_ROWS)) * m.parts * m.panels * GROUP_PLACES;
      u32 row = tile % (GROUP_ROWS / TILE_ROWS) * TILE_ROWS + (t & 1) * 8 + g;
      uint4* to = panel_place(panels, GROUP_ROWS, step, row, t >> 1);
      to[0] = transpose(high, t);
      if (!whole) to[m.panels * GROUP_PLACES] = transpose(low, t);
    } else {
      uint4* to = m.left + ((size_t)tile * m.parts * steps + step) * 32 + lane;
      to[0] = make_uint4(high[0], high[1], high[2], high[3]);
      if (!whole) to[(size_t)steps * 32] = make_uint4(low[0], low[1], low[2], low[3]);
    }
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
    if (m.gain && row < m.rows) {
      // Neither may it be too small for f32's full precision, nor too great.
      const double gain = m.gain[row];
      const float size = fabsf((float)gain);
      if (gain != 0 && !(size >= LEAST_NORMAL && size < bits_to_float(0x7f800000u))) strange |= 1u << half;
    }
    // Greater than whatever W0 holds.
    if (strange >> half & 1) by = 0.f, bound = bits_to_float(0x7f800000u);
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
    if (m.panels) {
      uint4* panels = m.right + (size_t)tile * m.parts * m.panels * COLUMN_PLACES;
      // Two columns at a time, each with two chunks. Fragment 4 * part + j, index g.
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const u32 highs[4] = {high[j][0], high[j][1], high[j + 1][0], high[j + 1][1]};
        const u32 lows[4] = {low[j][0], low[j][1], low[j + 1][0], low[j + 1][1]};
        uint4* to = panel_place(panels, TILE_COLUMNS, step, part * 32 + (j + (t >> 1)) * 8 + g, t & 1);
        to[0] = transpose(highs, t);
        if (m.parts == 2) to[m.panels * COLUMN_PLACES] = transpose(lows, t);
      }
      continue;
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
