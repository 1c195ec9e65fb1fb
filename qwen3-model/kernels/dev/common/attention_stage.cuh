// The matrix warps' part of attention: each warp takes whole units (a batch row, a range of its context) of this block's
// K/V head, with all query heads of the group at once. Scores and outputs are kept transposed (tokens or dimensions as the
// mma's 16 rows, query heads as its 8 columns), so that K and V are the A operand straight from the ring.
//
// A unit begins with the raw q (and, where it holds the end of the context, the newest token's raw k and v) that the QKV
// stage left in f32: norm over the head, RoPE, rounding to bf16. The newest token's score starts the softmax, and its K and V
// go to the cache for the steps to come. The tiles hold older tokens only, so the copy engine may fetch them before this
// step's K and V exist.
#pragma once
// Needs the variant's shared.cuh before it.

struct Softmax { float top[2], sum[2]; float out[8][4]; };   // per lane: heads 2t, 2t+1; out[d][..]: dimensions 16d+g, 16d+g+8

__device__ __forceinline__ float over_tokens_max(float v) {
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
__device__ __forceinline__ float over_tokens_sum(float v) {
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// Norm and RoPE of one head of 128 values, spread over the four lanes of equal g: a lane holds dimensions
// 16k + 2t + {0, 1, 8, 9} for k = 0..7 (an mma operand's layout), so that d and d + 64 meet in one lane. Result: bf16 pairs.
__device__ __forceinline__ void norm_rope(u32 (&out)[8][2], const float* raw, const bf16* weight, const float2* rope, float epsilon, int t) {
  float2 v[8][2]; float squares = 0;
#pragma unroll
  for (int k = 0; k < 8; k++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const uint2 u = load_fresh2(raw + k * 16 + j * 8 + t * 2);
      v[k][j] = make_float2(__uint_as_float(u.x), __uint_as_float(u.y));
      squares += v[k][j].x * v[k][j].x + v[k][j].y * v[k][j].y;
    }
  squares += __shfl_xor_sync(~0u, squares, 1); squares += __shfl_xor_sync(~0u, squares, 2);
  const float f = rsqrtf(squares / HEAD_DIM + epsilon);
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int d = k * 16 + j * 8 + t * 2;
      const u32 wa = *reinterpret_cast<const u32*>(weight + d), wb = *reinterpret_cast<const u32*>(weight + d + 64);
      const float4 cs = *reinterpret_cast<const float4*>(rope + d);
      const float ax = v[k][j].x * f * low_float(wa), ay = v[k][j].y * f * high_float(wa), bx = v[k + 4][j].x * f * low_float(wb), by = v[k + 4][j].y * f * high_float(wb);
      out[k][j] = pack_bf16(ax * cs.x - bx * cs.y, ay * cs.z - by * cs.w);
      out[k + 4][j] = pack_bf16(bx * cs.x + ax * cs.y, by * cs.z + ay * cs.w);
    }
}

__device__ __forceinline__ void attend_newest(const Parameters& p, Softmax& s, const u32 (&q)[8][2], const float* raw, int layer, int kv_head, u64 cache_at, int position, int lane) {
  const int g = lane >> 2, t = lane & 3;
  u32 k[8][2]; norm_rope(k, raw + (Q_HEADS + kv_head) * HEAD_DIM, k_norm(p, layer), p.rope + (u64)position * 64, p.epsilon, t);
  float score = 0;
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < 2; j++) score += low_float(q[i][j]) * low_float(k[i][j]) + high_float(q[i][j]) * high_float(k[i][j]);
  score += __shfl_xor_sync(~0u, score, 1); score += __shfl_xor_sync(~0u, score, 2);
  s.top[0] = __shfl_sync(~0u, score, t * 8); s.top[1] = __shfl_sync(~0u, score, t * 8 + 4);   // heads 2t and 2t+1
  s.sum[0] = s.sum[1] = g == 0 ? 1.f : 0.f;      // sums stay spread over the lanes of a head until the end
  if (g == 0) {
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) *reinterpret_cast<u32*>(p.k_cache + cache_at + i * 16 + j * 8 + t * 2) = k[i][j];
  }
  const float* v = raw + (Q_HEADS + KV_HEADS + kv_head) * HEAD_DIM;
#pragma unroll
  for (int d = 0; d < 8; d++) {
    const u32 pair = pack_bf16(load_fresh(v + d * 16 + g), load_fresh(v + d * 16 + g + 8));
    s.out[d][0] = s.out[d][1] = low_float(pair); s.out[d][2] = s.out[d][3] = high_float(pair);
    if (t == 0) { p.v_cache[cache_at + d * 16 + g].bits = (u16)pair; p.v_cache[cache_at + d * 16 + g + 8].bits = (u16)(pair >> 16); }
  }
}

// One tile of 32 tokens, of which the first `valid` count. K at `tile`, V 8 KiB behind it; halves of 64 dimensions.
__device__ __forceinline__ void attend_tile(Softmax& s, const u32 (&q)[8][2], u32 tile, int valid, float scale, int lane) {
  const u32 vt = tile + KV_TILE * 256;
  if (valid < KV_TILE) {                          // rows past the end may hold anything, NaN too: 0 · NaN would spread
    const int row = lane;
    if (row >= valid) {
#pragma unroll
      for (int i = 0; i < 16; i++) asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(vt + (i >> 3) * KV_TILE * 128 + row * 128 + (i & 7) * 16), "r"(0u) : "memory");
    }
    __syncwarp();
  }
  float score[2][4] = {};
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int k = 0; k < 8; k++) {
      u32 a[4]; load_matrix4(tile + (k >> 2) * KV_TILE * 128 + swizzled(m * 16 + (lane & 15), (k & 3) * 2 + (lane >> 4)), a);
      mma(score[m], a, q[k][0], q[k][1]);
    }
  const int g = lane >> 2;
  if (valid < KV_TILE) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      if (m * 16 + g >= valid) score[m][0] = score[m][1] = -INFINITY;
      if (m * 16 + g + 8 >= valid) score[m][2] = score[m][3] = -INFINITY;
    }
  }
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float top = fmaxf(s.top[h], over_tokens_max(fmaxf(fmaxf(score[0][h], score[0][h + 2]), fmaxf(score[1][h], score[1][h + 2]))));
    factor[h] = exp2_fast((s.top[h] - top) * scale);
    s.top[h] = top;
    float sum = 0;
#pragma unroll
    for (int m = 0; m < 2; m++) {
      score[m][h] = exp2_fast((score[m][h] - top) * scale); score[m][h + 2] = exp2_fast((score[m][h + 2] - top) * scale);
      sum += score[m][h] + score[m][h + 2];
    }
    s.sum[h] = s.sum[h] * factor[h] + sum;
  }
  u32 b[2][2];
#pragma unroll
  for (int m = 0; m < 2; m++) { b[m][0] = transpose8x8(pack_bf16(score[m][0], score[m][1])); b[m][1] = transpose8x8(pack_bf16(score[m][2], score[m][3])); }
#pragma unroll
  for (int d = 0; d < 8; d++) {
    s.out[d][0] *= factor[0]; s.out[d][1] *= factor[1]; s.out[d][2] *= factor[0]; s.out[d][3] *= factor[1];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 a[4]; load_matrix4_transposed(vt + (d >> 2) * KV_TILE * 128 + swizzled(m * 16 + ((lane >> 4) << 3) + (lane & 7), (d & 3) * 2 + ((lane >> 3) & 1)), a);
      mma(s.out[d], a, b[m][0], b[m][1]);
    }
  }
}

// The outputs of several splits of one (row, K/V head), weighted together in the order of the splits, 32 splits at a time.
__device__ __forceinline__ void combine_splits(const Parameters& p, bf16* out, u64 first, int splits, int lane) {
  float top[GROUP], sum[GROUP]; float4 o[GROUP];
#pragma unroll
  for (int h = 0; h < GROUP; h++) { top[h] = -INFINITY; sum[h] = 0; o[h] = make_float4(0, 0, 0, 0); }
  for (int begin = 0; begin < splits; begin += 32) {
    const int here = min(32, splits - begin);
    float weight[GROUP];                          // of split begin + lane
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
      uint2 stat = make_uint2(0xff800000u, 0);
      if (lane < here) stat = load_fresh2(p.partial_stat + ((first + begin + lane) * GROUP + h) * 2);
      float t = __uint_as_float(stat.x);
#pragma unroll
      for (int x = 16; x; x >>= 1) t = fmaxf(t, __shfl_xor_sync(~0u, t, x));
      const float m = fmaxf(top[h], t), old = top[h] == -INFINITY ? 0.f : exp2_fast((top[h] - m) * p.attention_scale);
      weight[h] = lane < here ? exp2_fast((__uint_as_float(stat.x) - m) * p.attention_scale) : 0.f;
      float s = weight[h] * __uint_as_float(stat.y);
#pragma unroll
      for (int x = 16; x; x >>= 1) s += __shfl_xor_sync(~0u, s, x);
      sum[h] = sum[h] * old + s; o[h].x *= old; o[h].y *= old; o[h].z *= old; o[h].w *= old; top[h] = m;
    }
#pragma unroll 4
    for (int i = 0; i < here; i++)
#pragma unroll
      for (int h = 0; h < GROUP; h++) {
        const float4 v = load_fresh4(p.partial_out + ((first + begin + i) * GROUP + h) * HEAD_DIM + lane * 4);
        const float f = __shfl_sync(~0u, weight[h], i);
        o[h].x += f * v.x; o[h].y += f * v.y; o[h].z += f * v.z; o[h].w += f * v.w;
      }
  }
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    const float r = 1.f / sum[h];
    *reinterpret_cast<uint2*>(out + h * HEAD_DIM + lane * 4) = make_uint2(pack_bf16(o[h].x * r, o[h].y * r), pack_bf16(o[h].z * r, o[h].w * r));
  }
}

__device__ __forceinline__ void finish_unit(const Parameters& p, const Softmax& s, const Unit& u, int lane) {
  const int kv_head = u.kv_head;
  const int head = (lane & 3) * 2, g = lane >> 2;
  const float sum[2] = {over_tokens_sum(s.sum[0]), over_tokens_sum(s.sum[1])};
  bf16* out = p.attention + (u64)u.row * ATTENTION + kv_head * GROUP * HEAD_DIM;
  if (u.splits == 1) {
    const float r[2] = {1.f / sum[0], 1.f / sum[1]};
#pragma unroll
    for (int d = 0; d < 8; d++) {
      const u32 lo = transpose8x8(pack_bf16(s.out[d][0] * r[0], s.out[d][1] * r[1])), hi = transpose8x8(pack_bf16(s.out[d][2] * r[0], s.out[d][3] * r[1]));
      if (g < GROUP) {                            // now the lane holds head g, dimensions 16d + 2t, + 1 (and + 8)
        u32* o = reinterpret_cast<u32*>(out + g * HEAD_DIM + d * 16 + head);
        o[0] = lo; o[4] = hi;
      }
    }
    return;
  }
  const u64 first = ((u64)u.row * KV_HEADS + kv_head) * p.max_splits, at = first + u.split;
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (head + h < GROUP) {
      float* o = p.partial_out + (at * GROUP + head + h) * HEAD_DIM;
#pragma unroll
      for (int d = 0; d < 8; d++) { o[d * 16 + g] = s.out[d][h]; o[d * 16 + g + 8] = s.out[d][h + 2]; }
      if (g == 0) { float* stat = p.partial_stat + (at * GROUP + head + h) * 2; stat[0] = s.top[h]; stat[1] = sum[h]; }
    }
  __syncwarp();
  u32 last = 0;
  if (lane == 0) {
    __threadfence();
    last = (atomicAdd(p.counters + UNIT_DONE + u.row * KV_HEADS + kv_head, 1) + 1) % u.splits == 0;
    __threadfence();
  }
  if (__shfl_sync(~0u, last, 0)) combine_splits(p, out, first, u.splits, lane);
}

__device__ void attention_stage(const Parameters& p, const Shared& sh, WPlace& w, int layer, u32 target, int n_units, int warp, int lane) {
  if (warp == 0 && lane == 0) wait_for(p.counters + QKV_DONE, target);
  named_barrier(2, MATRIX_WARPS * 32);
  const int g = lane >> 2, t = lane & 3;
  for (int wave = 0; wave < n_units; wave += MATRIX_WARPS) {
    const bool mine = wave + warp < n_units;
    u32 packed = 0; if (mine) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(packed) : "r"(sh.units + (wave + warp) * 4));
    const Unit u(packed);
    const int length = mine ? p.positions[u.row] : 0;
    Softmax s; u32 q[8][2];
    if (mine) {
      const float* raw = p.qkv + (u64)u.row * QKV;
      norm_rope(q, raw + (u.kv_head * GROUP + (g < GROUP ? g : 0)) * HEAD_DIM, q_norm(p, layer), p.rope + (u64)length * 64, p.epsilon, t);
      if (g >= GROUP) {
#pragma unroll
        for (int k = 0; k < 8; k++) q[k][0] = q[k][1] = 0;
      }
      if (u.split == u.splits - 1) {
        attend_newest(p, s, q, raw, layer, u.kv_head, (u64)layer * p.cache_layer_stride + ((u64)u.kv_head * p.cache_positions + physical(p, p.slots[u.row], length)) * HEAD_DIM, length, lane);
      } else {
        s.top[0] = s.top[1] = -INFINITY; s.sum[0] = s.sum[1] = 0;
#pragma unroll
        for (int d = 0; d < 8; d++) s.out[d][0] = s.out[d][1] = s.out[d][2] = s.out[d][3] = 0;
      }
    }
    // The ring holds the wave's tiles round by round: the first tile of each unit, then the second of each, and so on.
    for (int round = 0; round < p.split_tiles; round++) {
      bool any = false;
      for (int i = 0; i < MATRIX_WARPS && wave + i < n_units; i++) {
        u32 other; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(other) : "r"(sh.units + (wave + i) * 4));
        const Unit v(other);
        if (round >= unit_tiles(v, p.positions[v.row], p.split_tiles)) continue;
        any = true;
        barrier_wait(sh.w_full(w.slot), w.parity);
        if (i == warp) {
          const int start = (u.split * p.split_tiles + round) * KV_TILE, valid = min(KV_TILE, length - start);
          attend_tile(s, q, sh.w + w.slot * W_SLOT, valid, p.attention_scale, lane);
          if (valid < KV_TILE) fence_async_shared();
        }
        // Every warp passes every slot, so that none can be a whole round of the ring ahead of or behind another.
        __syncwarp();
        if (lane == 0) barrier_arrive(sh.w_empty(w.slot));
        w.advance();
      }
      if (!any) break;
    }
    if (mine) finish_unit(p, s, u, lane);
  }
  named_barrier(2, MATRIX_WARPS * 32);
  if (warp == 0 && lane == 0) { __threadfence(); signal(p.counters + ATTENTION_DONE); }
}
