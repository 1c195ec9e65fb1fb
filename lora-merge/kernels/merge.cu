// LoRA merge: out = round_bf16(gain * W0 + sum_i t_i * left_i * right_i), for all matrices of a refresh in one launch.
//
// WHY THIS FORM
//   A refresh moves 4 bytes per weight (W0 in, merged out): 14.5 GB for Qwen3-4B, 3.4 ms on an H200. The arithmetic
//   is 2 * rank operations per weight. In plain f32 that is 3.5 ms at rank 32, but 14 ms at rank 128, so it runs on
//   the tensor cores, in bf16 with f32 operands split in two (x = hi + mid + rest, |rest| <= 2^-18 |x|): the products
//   hi*mid, mid*hi and hi*hi are summed, which leaves 3 * 2^-18. Small products go first, while the sum is small.
//   Operands that are bf16 already (a bf16 adapter with a power of two as scaling) need hi*hi alone, exactly.
//
// WHY IT IS STILL EXACT
//   Each element carries a bound on its error: (what the split leaves + what the tensor core's truncating additions
//   lose) * |left row| * |right column|. Where all values within the bound round to the same bf16, that is the
//   correctly rounded result. The others are marked in shared memory and computed again in f64, spread evenly over the
//   block, with the operations of the CPU's merge in the same order: both give the same bits.
//
// ONE ITEM = ONE BLOCK: 128 columns of one matrix, up to 512 rows, in tiles of 64 rows.
//
//              right [rank, 128]  f32, in shared memory for the whole item
//            +------------------+
//   left     |  warp 0 | warp 1 |   4 warps, 32 x 64 each: 2 x 8 fragments of 16 x 8
//   [64,rank]|  -------+------- |   fragments are split while they are read
//            |  warp 2 | warp 3 |
//            +------------------+
//
// Column of fragment j (0..7), index n (0..7):  32 * (j / 4) + 4 * n + j % 4.  So a thread reads the right factors of
// four fragments with one 16-byte load, and holds 8 neighbouring columns of W0 and of the output: 16 bytes.
//
// W0 is read once, before the products, so that its latency hides behind them. Nothing is subtracted, and the former
// content of `out` is never read.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE_ROWS 64
#define TILE_COLUMNS 128
#define THREADS 128
#define RIGHT_STRIDE (TILE_COLUMNS + 4)
#define WORDS (TILE_ROWS * TILE_COLUMNS / 32)

// A low-rank term: its place among the stacked ranks (a multiple of 16), and its scaling, alone or per row.
struct Term {
  double scale;
  const double* row_scale;
  u32 first;
  u32 rank;
};

// One matrix. left [rows, rank], right [rank, columns], both f32, stacked terms each padded with zeros to 16.
struct Matrix {
  const u16* w0;
  u16* out;
  const float* left;
  const float* right;
  const Term* terms;
  const double* gain;
  u32 rows;
  u32 columns;
  u32 rank;
  u32 n_terms;
  u32 first_item;
  u32 padding;
};

struct Report {
  u64 not_finite;  // smallest index of an element that is not finite
  u64 recomputed;
  u64 differs;     // whether an element differs from W0
};

struct Params {
  const Matrix* matrices;
  Report* reports;
  u32 n_matrices;
  u32 chunk;          // ranks that are in shared memory at a time, a multiple of 16
  u32 rows_per_item;  // a multiple of TILE_ROWS
  u32 padding;
};

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ void copy_16_async(void* shared, const void* global, bool read) {
  int bytes = read ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The bf16 nearest to a double: truncated to f32 with a sticky last bit, then rounded once.
__device__ __forceinline__ u16 bf16_from_double(double value) {
  float truncated = __double2float_rz(value);
  u32 bits = __float_as_uint(truncated);
  if ((double)truncated != value) bits |= 1u;
  if ((bits & 0x7f800000u) == 0x7f800000u) return (u16)(bits >> 16) | ((bits & 0x7fffffu) ? 0x40u : 0u);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// One element in f64. Products of two floats are exact in f64, so fused or not makes no difference; the other
// operations are kept apart, as on the CPU.
__device__ __noinline__ u16 exact(const Matrix* m, u32 row, float w0, const float* left, u32 left_step,
                                  const float* right, u32 right_step) {
  double value = w0;
  if (m->gain) value = __dmul_rn(m->gain[row], value);
  for (u32 i = 0; i < m->n_terms; ++i) {
    Term term = m->terms[i];
    double s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    const float* l = left + (size_t)term.first * left_step;
    const float* r = right + (size_t)term.first * right_step;
    u32 k = 0;
    for (; k + 4 <= term.rank; k += 4) {
      s0 = __fma_rn((double)l[(k + 0) * left_step], (double)r[(size_t)(k + 0) * right_step], s0);
      s1 = __fma_rn((double)l[(k + 1) * left_step], (double)r[(size_t)(k + 1) * right_step], s1);
      s2 = __fma_rn((double)l[(k + 2) * left_step], (double)r[(size_t)(k + 2) * right_step], s2);
      s3 = __fma_rn((double)l[(k + 3) * left_step], (double)r[(size_t)(k + 3) * right_step], s3);
    }
    if (k < term.rank) s0 = __fma_rn((double)l[k * left_step], (double)r[(size_t)k * right_step], s0);
    if (k + 1 < term.rank) s1 = __fma_rn((double)l[(k + 1) * left_step], (double)r[(size_t)(k + 1) * right_step], s1);
    if (k + 2 < term.rank) s2 = __fma_rn((double)l[(k + 2) * left_step], (double)r[(size_t)(k + 2) * right_step], s2);
    double sum = __dadd_rn(__dadd_rn(s0, s1), __dadd_rn(s2, s3));
    double scale = term.row_scale ? term.row_scale[row] : term.scale;
    double scaled = __dmul_rn(scale, sum);
    if (scaled != 0) value = __dadd_rn(value, scaled);  // -0 stays -0
  }
  return bf16_from_double(value);
}

// Scaling of the term that rank `k` belongs to.
__device__ __forceinline__ float scale_at(const Matrix& m, u32 k, u32 row) {
  u32 i = 0;
  while (i + 1 < m.n_terms && m.terms[i + 1].first <= k) ++i;
  const Term& term = m.terms[i];
  return (float)(term.row_scale ? term.row_scale[row] : term.scale);
}

// Splits a pair into bf16 parts.
__device__ __forceinline__ void split(float x, float y, u32& high, u32& middle) {
  high = pack_bf16(x, y);
  middle = pack_bf16(x - low_half(high), y - high_half(high));
}

template <bool SPLIT>
__device__ __forceinline__ void merge(const Params& p) {
  extern __shared__ __align__(16) float shared[];
  __shared__ float row_bound[TILE_ROWS];
  __shared__ float column_norm[TILE_COLUMNS];
  __shared__ u32 doubtful[WORDS];     // a bit for each element of the tile, row by row
  __shared__ u32 before[WORDS];       // how many are set in the words before
  __shared__ u32 warp_total[4];

  // The matrix of this item.
  u32 lower = 0, upper = p.n_matrices;
  while (upper - lower > 1) {
    u32 middle = (lower + upper) / 2;
    if (p.matrices[middle].first_item <= blockIdx.x) lower = middle; else upper = middle;
  }
  const Matrix m = p.matrices[lower];
  Report& report = p.reports[lower];
  const u32 item = blockIdx.x - m.first_item;
  const u32 column_tiles = (m.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
  const u32 column0 = (item % column_tiles) * TILE_COLUMNS;
  const u32 first_row = (item / column_tiles) * p.rows_per_item;
  const u32 last_row = min(m.rows, first_row + p.rows_per_item);

  const u32 chunk = min(p.chunk, m.rank);
  const bool whole = chunk == m.rank;
  // Rows of `left` lie 8 banks apart modulo 32: pairs are then read without conflicts.
  const u32 left_stride = chunk + ((chunk & 16) ? 24 : 8);
  float* right_tile = shared;
  float* left_tile = shared + (size_t)chunk * RIGHT_STRIDE;

  const u32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const u32 g = lane >> 2, t = lane & 3;
  const u32 warp_row = (warp >> 1) * 32, warp_column = (warp & 1) * 64;

  // What the split leaves of a product, then the truncations: 2^-20 of the sum per step, which is three times what a
  // tensor core loses when all terms have one sign. Scaling is rounded as well.
  const float steps = (float)(m.rank / 16) * ((SPLIT && !whole) ? 3.f : 1.f) + 2.f;
  const float per_norm = ((SPLIT ? 1.2e-5f : 0.f) + steps * 9.6e-7f) * 1.001f;

  // One scaling for all, the usual case.
  const bool uniform = m.n_terms == 1 && !m.terms[0].row_scale;
  const float uniform_scale = uniform ? (float)m.terms[0].scale : 0.f;

  auto load_right = [&](u32 k0, u32 ranks) {
    for (u32 i = tid; i < ranks * (TILE_COLUMNS / 4); i += THREADS) {
      u32 k = i / (TILE_COLUMNS / 4), c = (i % (TILE_COLUMNS / 4)) * 4;
      bool inside = column0 + c < m.columns;
      const float* from = m.right + (size_t)(k0 + k) * m.columns + (inside ? column0 + c : 0);
      copy_16_async(right_tile + k * RIGHT_STRIDE + c, from, inside);
    }
  };
  auto load_left = [&](u32 row0, u32 k0, u32 ranks) {
    u32 per_row = ranks / 4;
    for (u32 i = tid; i < TILE_ROWS * per_row; i += THREADS) {
      u32 r = i / per_row, k = (i % per_row) * 4;
      bool inside = row0 + r < m.rows;
      const float* from = m.left + (size_t)(inside ? row0 + r : 0) * m.rank + k0 + k;
      copy_16_async(left_tile + r * left_stride + k, from, inside);
    }
  };
  auto arrive = [&]() {
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
    __syncthreads();
  };
  // Adds the squares of this thread's column, and of half of a row.
  float column_square = 0.f, row_square = 0.f;
  auto add_column = [&](u32 ranks) {
    for (u32 k = 0; k < ranks; ++k) {
      float x = right_tile[k * RIGHT_STRIDE + tid];
      column_square = fmaf(x, x, column_square);
    }
  };
  auto add_row = [&](u32 row, u32 k0, u32 ranks) {
    u32 half = ranks / 2, begin = (tid & 1) * half;
    const float* line = left_tile + (tid >> 1) * left_stride + begin;
    u32 at = ~0u;
    float scale = 0.f;
    for (u32 k = 0; k < half; ++k) {
      if (((k0 + begin + k) / 8) != at) {  // halves of 16 begin at multiples of 8
        at = (k0 + begin + k) / 8;
        scale = uniform ? uniform_scale : scale_at(m, k0 + begin + k, min(row, m.rows - 1));
      }
      float x = scale * line[k];
      row_square = fmaf(x, x, row_square);
    }
  };

  if (whole) {
    load_right(0, m.rank);
    arrive();
    add_column(m.rank);
    column_norm[tid] = fmaxf(sqrtf(column_square) * 1.001f, 1e-20f);
  }
  u32 differs = 0;
  u64 recomputed = 0;

  for (u32 row0 = first_row; row0 < last_row; row0 += TILE_ROWS) {
    uint4 w[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 row = row0 + warp_row + i * 8 + g, column = column0 + warp_column + h * 32 + t * 8;
        w[i][h] = make_uint4(0, 0, 0, 0);
        if (row < m.rows && column < m.columns)
          w[i][h] = __ldg((const uint4*)(m.w0 + (size_t)row * m.columns + column));
      }
    float sums[2][8][4];
#pragma unroll
    for (int a = 0; a < 2; ++a)
#pragma unroll
      for (int b = 0; b < 8; ++b)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[a][b][c] = 0.f;
    row_square = 0.f;
    if (!whole) column_square = 0.f;

    for (u32 k0 = 0; k0 < m.rank; k0 += chunk) {
      u32 ranks = min(chunk, m.rank - k0);
      __syncthreads();  // the tiles of the previous step are no longer read
      if (!whole) load_right(k0, ranks);
      load_left(row0, k0, ranks);
      arrive();
      if (!whole) add_column(ranks);
      add_row(row0 + (tid >> 1), k0, ranks);

#pragma unroll
      for (int pass = SPLIT ? 0 : 1; pass < 2; ++pass) {
        for (u32 k = 0; k < ranks; k += 16) {
          u32 high[2][4], middle[2][4];
#pragma unroll
          for (int a = 0; a < 2; ++a)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              u32 r = warp_row + a * 16 + half * 8 + g;
              float scale = uniform ? uniform_scale : scale_at(m, k0 + k, min(row0 + r, m.rows - 1));
              const float* line = left_tile + r * left_stride + k + 2 * t;
              float2 x = *(const float2*)line, y = *(const float2*)(line + 8);
              split(scale * x.x, scale * x.y, high[a][half], middle[a][half]);
              split(scale * y.x, scale * y.y, high[a][half + 2], middle[a][half + 2]);
            }
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float* column = right_tile + (k + 2 * t) * RIGHT_STRIDE + warp_column + h * 32 + g * 4;
            float4 r0 = *(const float4*)column, r1 = *(const float4*)(column + RIGHT_STRIDE);
            float4 r8 = *(const float4*)(column + 8 * RIGHT_STRIDE), r9 = *(const float4*)(column + 9 * RIGHT_STRIDE);
            const float first[4] = {r0.x, r0.y, r0.z, r0.w}, second[4] = {r1.x, r1.y, r1.z, r1.w};
            const float third[4] = {r8.x, r8.y, r8.z, r8.w}, fourth[4] = {r9.x, r9.y, r9.z, r9.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              u32 high0, high1, middle0, middle1;
              split(first[j], second[j], high0, middle0);
              split(third[j], fourth[j], high1, middle1);
#pragma unroll
              for (int a = 0; a < 2; ++a) {
                if (pass == 0) {
                  mma_16x8x16(sums[a][h * 4 + j], middle[a], high0, high1);
                  mma_16x8x16(sums[a][h * 4 + j], high[a], middle0, middle1);
                } else {
                  mma_16x8x16(sums[a][h * 4 + j], high[a], high0, high1);
                }
              }
            }
          }
        }
      }
    }

    row_square += __shfl_xor_sync(0xffffffffu, row_square, 1);
    if ((tid & 1) == 0) row_bound[tid >> 1] = fmaxf(sqrtf(row_square) * per_norm, 1e-20f);
    if (!whole) column_norm[tid] = fmaxf(sqrtf(column_square) * 1.001f, 1e-20f);
    __syncthreads();

#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 local = warp_row + i * 8 + g, row = row0 + local;
      float gain = (m.gain && row < m.rows) ? (float)m.gain[row] : 1.f;
      float bound = row_bound[local];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 local_column = warp_column + h * 32 + t * 8, column = column0 + local_column;
        const u32 words[4] = {w[i][h].x, w[i][h].y, w[i][h].z, w[i][h].w};
        u32 results[4];
        u32 doubt = 0;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          // c = 4 * e + j: fragment j of four, element e of the pair.
          float base = (c & 1) ? high_half(words[c / 2]) : low_half(words[c / 2]);
          float sum = sums[i >> 1][h * 4 + (c & 3)][(i & 1) * 2 + (c >> 2)];
          float scaled = gain * base;
          float value = scaled + sum;
          float error = fmaf(bound, column_norm[local_column + c], m.gain ? 2.4e-7f * fabsf(scaled) : 0.f);
          u32 bits = __float_as_uint(value);
          u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
          float half = __uint_as_float(bits & 0x7f800000u) * (1.f / 256.f);
          float off = fmaxf(fabsf(value - __uint_as_float(rounded)), 0.5f * half);
          // The test of the CPU's merge: see `Strip::round` there.
          if (!(off + error < half * (1.f - 1.f / 8192.f))) doubt |= 1u << c;
          if (c & 1) results[c / 2] |= rounded; else results[c / 2] = rounded >> 16;
        }
        bool inside = row < m.rows && column < m.columns;
        ((unsigned char*)doubtful)[local * (TILE_COLUMNS / 8) + local_column / 8] = inside ? doubt : 0;
        if (inside) {
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            u32 sure = ((doubt >> (2 * q)) & 1u ? 0u : 0xffffu) | ((doubt >> (2 * q + 1)) & 1u ? 0u : 0xffff0000u);
            differs |= (results[q] ^ words[q]) & sure;
          }
          *(uint4*)(m.out + (size_t)row * m.columns + column) = make_uint4(results[0], results[1], results[2], results[3]);
        }
      }
    }
    __syncthreads();  // all bits are set, and the block's stores come before those below

    // Doubtful elements, evenly over the threads: entry e is found through the counts of the words before.
    u32 first_count = __popc(doubtful[2 * tid]), count = first_count + __popc(doubtful[2 * tid + 1]), running = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      u32 other = __shfl_up_sync(0xffffffffu, running, step);
      if (lane >= step) running += other;
    }
    if (lane == 31) warp_total[warp] = running;
    __syncthreads();
    u32 entries = 0;
    for (u32 i = 0; i < 4; ++i) {
      if (i < warp) running += warp_total[i];
      entries += warp_total[i];
    }
    before[2 * tid] = running - count;
    before[2 * tid + 1] = running - count + first_count;
    __syncthreads();
    for (u32 entry = tid; entry < entries; entry += THREADS) {
      u32 word = 0;
#pragma unroll
      for (u32 step = WORDS / 2; step > 0; step /= 2)
        if (before[word + step] <= entry) word += step;
      u32 bits = doubtful[word];
      for (u32 skip = entry - before[word]; skip > 0; --skip) bits &= bits - 1;
      u32 local = word / (TILE_COLUMNS / 32), local_column = (word % (TILE_COLUMNS / 32)) * 32 + __ffs(bits) - 1;
      u32 row = row0 + local, column = column0 + local_column;
      u16 old = m.w0[(size_t)row * m.columns + column];
      float base = __uint_as_float((u32)old << 16);
      // The factors are in shared memory if all ranks are.
      u16 value = whole ? exact(p.matrices + lower, row, base, left_tile + local * left_stride, 1,
                                right_tile + local_column, RIGHT_STRIDE)
                        : exact(p.matrices + lower, row, base, m.left + (size_t)row * m.rank, 1, m.right + column,
                                m.columns);
      if ((value & 0x7f80u) == 0x7f80u) atomicMin(&report.not_finite, (u64)row * m.columns + column);
      differs |= value ^ old;
      ++recomputed;
      m.out[(size_t)row * m.columns + column] = value;
    }
  }
  if (recomputed) atomicAdd(&report.recomputed, recomputed);
  if (__syncthreads_or(differs != 0) && tid == 0) atomicOr(&report.differs, 1ull);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) merge_split(const __grid_constant__ Params p) {
  merge<true>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) merge_bf16(const __grid_constant__ Params p) {
  merge<false>(p);
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
