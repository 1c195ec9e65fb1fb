// Parts of rows that different blocks have summed up, and how they become one.
//
//   split row            each block stores its part and counts itself; the one that came last adds all up        decode_merge_splits
//   row of dealt tokens  blocks leave their parts, and the one that has the row's last tokens adds them to its own      decode_gather
//   shared prefix        the parts of several rows' prefix, added to each row's own                            decode_join_shared
//
// Included by decode_attention.cuh.
#pragma once

__device__ __forceinline__ void store_output(const DecodeParams& p, int row, int head, int column, float4 sum, float inverse) {
  uint2 packed;
  packed.x = pack_bf16(sum.x * inverse, sum.y * inverse);
  packed.y = pack_bf16(sum.z * inverse, sum.w * inverse);
  *reinterpret_cast<uint2*>(p.out + ((i64)row * p.heads + head) * HEAD_DIM + column) = packed;
}

// sum += x * weight
__device__ __forceinline__ void add_weighted(float4& sum, const float4& x, float weight) {
  sum.x = fmaf(x.x, weight, sum.x), sum.y = fmaf(x.y, weight, sum.y);
  sum.z = fmaf(x.z, weight, sum.z), sum.w = fmaf(x.w, weight, sum.w);
}

// Adds the splits of (row, KV head) in their order and writes the output. The parts come from the second-level cache:
// those of MERGE_SPLITS splits are asked for together, so that a row costs one wait for memory for every so many.
constexpr int MERGE_SPLITS = 16;

__device__ __forceinline__ void decode_merge_splits(const DecodeParams& p, const PendingRow& row, int thread, int threads) {
  const i64 base = ((i64)row.row * p.kv_heads + row.head) * p.max_splits * p.group;
  constexpr int VECTORS = HEAD_DIM / 4;
  for (int u = thread; u < p.group * VECTORS; u += threads) {
    const int in_group = u / VECTORS, column = u % VECTORS * 4;
    const float2* softmax = p.partial_sums + base + in_group;
    const float* sums = p.partial + (base + in_group) * HEAD_DIM + column;
    float maximum = NEG_INFINITY, total = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int first = 0; first < row.splits; first += MERGE_SPLITS) {
      float2 part[MERGE_SPLITS];
      float4 x[MERGE_SPLITS];
#pragma unroll
      for (int i = 0; i < MERGE_SPLITS; i++) {
        const int s = first + i;
        part[i] = make_float2(NEG_INFINITY, 0.f);
        x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (s < row.splits) {
          part[i] = load_coherent(softmax + s * p.group);
          x[i] = load_coherent(reinterpret_cast<const float4*>(sums + (i64)s * p.group * HEAD_DIM));
        }
      }
      float larger = maximum;
#pragma unroll
      for (int i = 0; i < MERGE_SPLITS; i++) larger = fmaxf(larger, part[i].x);
      const float relative_to = finite_maximum(larger), rescale = exp2_approx(maximum - relative_to);
      maximum = larger;
      total *= rescale;
      sum.x *= rescale, sum.y *= rescale, sum.z *= rescale, sum.w *= rescale;
#pragma unroll
      for (int i = 0; i < MERGE_SPLITS; i++) {
        const float weight = exp2_approx(part[i].x - relative_to);
        total = fmaf(part[i].y, weight, total);
        add_weighted(sum, x[i], weight);
      }
    }
    const int h = row.head * p.group + in_group;
    store_output(p, row.row, h, column, sum, inverse_sum(total));
    if (p.lse && column == 0) p.lse[(i64)row.row * p.heads + h] = log_sum_exp(maximum, total);
  }
}

__device__ __forceinline__ u32* shared_count(const DecodeParams& p, const RowShare& share, int head) {
  return p.shared_arrived + ((i64)share.piece * p.kv_heads + head) * 2;
}

// Until all parts of a shared prefix are there; an acquiring fence must follow. By one thread.
__device__ __forceinline__ void wait_for_shared(const DecodeParams& p, const RowShare& share, int head) {
  const u32* count = shared_count(p, share, head);
  while (load_relaxed(count) < (u32)share.parts) {
  }
}

// A row needs the count no more. The last one makes it ready for the next launch.
__device__ __forceinline__ void leave_shared(const DecodeParams& p, const RowShare& share, int head) {
  u32* count = shared_count(p, share, head);
  if (arrive_release(count + 1) == (u32)share.rows - 1) count[0] = 0, count[1] = 0;
}

// Where block `block` leaves its part of a row for a head, column by column; its maximum and sum follow.
__device__ __forceinline__ float* exchange_part(const DecodeParams& p, int block, int in_group) {
  return p.exchange + ((i64)block * p.group + in_group) * (HEAD_DIM + 4);
}

__device__ __forceinline__ uint4 words_of(float4 x) {
  return make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
}

// Puts the parts of a row that the blocks before this one have left before its own, which is the last. Waits for them: a block
// leaves its part before it waits for others'.
constexpr int GATHER_PARTS = 2;

__device__ __forceinline__ void decode_gather(const DecodeParams& p, int parts, int block, int in_group, int column, float& maximum,
                                              float& total, float4& sum) {
  float before = NEG_INFINITY, before_total = 0.f;
  float4 before_sum = make_float4(0.f, 0.f, 0.f, 0.f);
  const auto add = [&](float its, float its_total, float4 x) {
    const float larger = fmaxf(before, its), relative_to = finite_maximum(larger);
    const float rescale = exp2_approx(before - relative_to), weight = exp2_approx(its - relative_to);
    before = larger;
    before_total = fmaf(its_total, weight, product(before_total, rescale));
    before_sum.x *= rescale, before_sum.y *= rescale, before_sum.z *= rescale, before_sum.w *= rescale;
    add_weighted(before_sum, x, weight);
  };
  for (int first = 0; first < parts; first += GATHER_PARTS) {
    uint4 x[GATHER_PARTS], softmax[GATHER_PARTS];
    const float* from[GATHER_PARTS];
#pragma unroll
    for (int i = 0; i < GATHER_PARTS; i++) {
      from[i] = exchange_part(p, block - (parts - first - i) * p.kv_heads, in_group);
      if (first + i < parts) x[i] = load_words(from[i] + column), softmax[i] = load_words(from[i] + HEAD_DIM);
    }
#pragma unroll
    for (int i = 0; i < GATHER_PARTS; i++) {
      if (first + i >= parts) break;
      while (absent(x[i])) x[i] = load_words(from[i] + column);
      while (absent(softmax[i])) softmax[i] = load_words(from[i] + HEAD_DIM);
      add(__uint_as_float(softmax[i].x), __uint_as_float(softmax[i].y),
          make_float4(__uint_as_float(x[i].x), __uint_as_float(x[i].y), __uint_as_float(x[i].z), __uint_as_float(x[i].w)));
    }
  }
  add(maximum, total, sum);
  maximum = before, total = before_total, sum = before_sum;
}

// After all threads have gathered: ready for the next launch.
__device__ __forceinline__ void decode_clear_parts(const DecodeParams& p, int parts, int block, int thread) {
  constexpr int VECTORS = HEAD_DIM / 4 + 1;
  const uint4 none = make_uint4(ABSENT, ABSENT, ABSENT, ABSENT);
  for (int u = thread; u < parts * p.group * VECTORS; u += DECODE_THREADS) {
    const int part = u / (p.group * VECTORS), in_group = u / VECTORS % p.group;
    store_words(exchange_part(p, block - (parts - part) * p.kv_heads, in_group) + u % VECTORS * 4, none);
  }
}

// Says in `flag`, after the next barrier, whether this block's split was the last of the pending row to arrive. If the row
// shares a prefix the block then waits for its parts: shared items come first in every block, so that they are there or under
// way, and wait for nothing.
__device__ __forceinline__ void decode_settle_arrival(const DecodeParams& p, const PendingRow& row, u32* flag, int thread) {
  if (thread != 0 || row.splits <= 1) return;
  const bool last = row.arrived_before == (u32)(row.splits - row.share.parts) - 1;
  if (last) {
    p.arrived[(i64)row.row * p.kv_heads + row.head] = 0;  // ready for the next launch
    if (row.share.parts > 0) {
      wait_for_shared(p, row.share, row.head);
      leave_shared(p, row.share, row.head);
    }
    fence_acquire();  // the other blocks' parts are seen after the barrier
  }
  *flag = last;
}

// Puts the parts of a row's shared prefix before its own sum, in the order and with the roundings of decode_merge_splits.
__device__ __forceinline__ void decode_join_shared(const DecodeParams& p, int row, int head, int in_group, int column, int parts,
                                                   float& maximum, float& total, float4& sum) {
  const i64 base = ((i64)row * p.kv_heads + head) * p.max_splits * p.group + in_group;
  float2 part[SHARED_SPLITS];
  float4 x[SHARED_SPLITS];
#pragma unroll
  for (int i = 0; i < SHARED_SPLITS; i++) {
    part[i] = make_float2(NEG_INFINITY, 0.f);
    x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (i < parts) {
      part[i] = load_coherent(p.partial_sums + base + i * p.group);
      x[i] = load_coherent(reinterpret_cast<const float4*>(p.partial + (base + (i64)i * p.group) * HEAD_DIM + column));
    }
  }
  float larger = maximum;
#pragma unroll
  for (int i = 0; i < SHARED_SPLITS; i++) larger = fmaxf(larger, part[i].x);
  const float relative_to = finite_maximum(larger), own = exp2_approx(maximum - relative_to);
  const float own_total = total;
  const float4 own_sum = sum;
  total = 0.f;
  sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < SHARED_SPLITS; i++) {
    const float weight = exp2_approx(part[i].x - relative_to);
    total = fmaf(part[i].y, weight, total);
    add_weighted(sum, x[i], weight);
  }
  total = fmaf(own_total, own, total);
  add_weighted(sum, own_sum, own);
  maximum = larger;
}
