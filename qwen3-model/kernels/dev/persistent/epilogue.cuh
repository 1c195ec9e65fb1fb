// The epilogue warps: add the partial sums of the cluster's blocks in a fixed order and do what follows a product. A block
// finishes the batch rows `row % 8 == rank`, with all columns of its cluster's chunk, so that norms over a head and RoPE are
// local. RMSNorm's factor is one number per row: the product is taken over x * weight, and its result is scaled.
#pragma once
#include "shared.cuh"

struct Epilogue {
  const Parameters& p; const Shared& sh; const int cluster, clusters, rank, warp, lane; const Share own; SumPlace sums;
  static constexpr int N = (ROWS_PER_RANK + EPILOGUE_WARPS - 1) / EPILOGUE_WARPS;   // batch rows per warp: warp, warp + 4
  float factor[N];                                // their norm factors, for the stage at hand
  __device__ __forceinline__ static bool exists(int local) { return ROWS_PER_RANK % EPILOGUE_WARPS == 0 || local < ROWS_PER_RANK; }

  __device__ __forceinline__ float4 sum4(int local, int column) const {
    float4 v = {0, 0, 0, 0};
#pragma unroll
    for (int s = 0; s < RANKS; s++) {
      float4 a; asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(a.x), "=f"(a.y), "=f"(a.z), "=f"(a.w) : "r"(sh.sums + sums.slot * SUMS_BYTES + ((s * ROWS_PER_RANK + local) * SUM_STRIDE + column) * 4));
      v.x += a.x; v.y += a.y; v.z += a.z; v.w += a.w;
    }
    return v;
  }
  // `tiles`: 8-row tiles per matrix warp of the stage, for the bytes that a chunk brings.
  __device__ void expect(int buffer, int tiles) {
#if ASYNC_SUMS
    if (warp == 0 && lane == 0) barrier_expect(sh.sums_full(buffer), RANKS * ROWS_PER_RANK * tiles * ROW_GROUPS * UNIT * 4);
#endif
  }
  __device__ void open_chunk(int tiles) {
#if NO_SEND
    return;
#endif
    expect(sums.slot, tiles); barrier_wait_cluster(sh.sums_full(sums.slot), sums.parity);
  }
  // This warp has read its part: every block may send into this buffer again.
  __device__ void close_chunk() {
#if NO_SEND
    return;
#endif
    __syncwarp(); if (lane < RANKS) barrier_arrive_cluster(cluster_address(sh.sums_free(sums.slot), lane)); sums.advance(); }
  int events = 0;
  __device__ void mark() { if (p.trace && blockIdx.x == 0 && warp == 0 && lane == 0) p.trace[events] = clock64(); events++; }
  __device__ void publish(Counter which) {
    named_barrier(1, EPILOGUE_WARPS * 32);
    if (warp == 0 && lane == 0) { __threadfence(); signal(p.counters + which); }
    mark();
  }
  __device__ void await_all(Counter which, u32 target) { if (warp == 0 && lane == 0) wait_for(p.counters + which, target); named_barrier(1, EPILOGUE_WARPS * 32); }
  __device__ __forceinline__ float warp_sum(float v) const {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
  }
  // 1 / root mean square of row `row` of the residual stream, from the clusters' sums in a fixed tree.
  __device__ float norm_factor(int which, int row) const {
    const float v = warp_sum(lane < clusters ? load_fresh(p.squares + (which * MAX_CLUSTERS + lane) * BATCH + row) : 0.f);
    return rsqrtf(v / HIDDEN + p.epsilon);
  }
  __device__ void norm_factors(Counter which, u32 target, int squares) {
    await_all(which, target);
    mark();
#pragma unroll
    for (int i = 0; i < N; i++) { const int local = i * EPILOGUE_WARPS + warp; factor[i] = exists(local) ? norm_factor(squares, local * RANKS + rank) : 0.f; }
  }
  // Adds v to the residual stream at (local row, column in the cluster) and writes x * weight for the next product.
  __device__ __forceinline__ float update(int local, int column, float4 v, uint2 w, bf16* out, bool first) {
    const u32 at = sh.residual + (local * RESIDUAL_STRIDE + column) * 4;
    if (!first) { float4 o; asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(o.x), "=f"(o.y), "=f"(o.z), "=f"(o.w) : "r"(at)); v.x += o.x; v.y += o.y; v.z += o.z; v.w += o.w; }
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
    const int c = own.first * UNIT + column, row = local * RANKS + rank;
    *reinterpret_cast<uint2*>(out + (u64)row * HIDDEN + c) = make_uint2(pack_bf16(v.x * low_float(w.x), v.y * high_float(w.x)), pack_bf16(v.z * low_float(w.y), v.w * high_float(w.y)));
    return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  __device__ void write_squares(int which, int local, float v) { v = warp_sum(v); if (lane == 0) p.squares[(which * MAX_CLUSTERS + cluster) * BATCH + local * RANKS + rank] = v; }

  __device__ void embed() {
    for (int local = warp; local < ROWS_PER_RANK; local += EPILOGUE_WARPS) {
      const int row = local * RANKS + rank; float squares = 0;
      const bf16* e = p.embedding + (u64)(u32)(row < p.n_rows ? p.tokens[row] : 0) * HIDDEN + own.first * UNIT;
      for (int c = lane * 4; c < (own.last - own.first) * UNIT; c += 128) {
        const uint2 v = *reinterpret_cast<const uint2*>(e + c);
        squares += update(local, c, make_float4(low_float(v.x), high_float(v.x), low_float(v.y), high_float(v.y)), *reinterpret_cast<const uint2*>(input_norm(p, 0) + own.first * UNIT + c), p.x_in, true);
      }
      write_squares(0, local, squares);
    }
    publish(HIDDEN_DONE);
  }
  __device__ void qkv(u32 target) {
    const Share part = share(QKV / UNIT, cluster, clusters); const int chunks = chunk_count(part, QKV_MOST);
    norm_factors(HIDDEN_DONE, target, 0);
    for (int i = 0; i < chunks; i++) {
      const Share rows = chunk(part, i, chunks); const int width = (rows.last - rows.first) * UNIT;
      open_chunk(QKV_ROWS);
      float4 v[N][2];
#pragma unroll
      for (int r = 0; r < N; r++)
#pragma unroll
        for (int j = 0; j < 2; j++) { const int c = lane * 4 + j * 128; if (exists(r * EPILOGUE_WARPS + warp) && c < width) v[r][j] = sum4(r * EPILOGUE_WARPS + warp, c); }
      close_chunk();
#pragma unroll
      for (int r = 0; r < N; r++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int c = lane * 4 + j * 128, local = r * EPILOGUE_WARPS + warp; const float f = factor[r];
          if (exists(local) && c < width) *reinterpret_cast<float4*>(p.qkv + (u64)(local * RANKS + rank) * QKV + rows.first * UNIT + c) = make_float4(v[r][j].x * f, v[r][j].y * f, v[r][j].z * f, v[r][j].w * f);
        }
    }
    publish(QKV_DONE);
  }
  // After O (which = 1) and down (which = 0).
  __device__ void hidden(int which, const bf16* weight, bf16* out, Counter done) {
    const int width = (own.last - own.first) * UNIT;
    uint2 w[2];                                   // read before the sums arrive
#pragma unroll
    for (int j = 0; j < 2; j++) if (lane * 4 + j * 128 < width) w[j] = *reinterpret_cast<const uint2*>(weight + own.first * UNIT + lane * 4 + j * 128);
    open_chunk(TILE_ROWS);
    mark();
    float4 v[N][2];
#pragma unroll
    for (int r = 0; r < N; r++)
#pragma unroll
      for (int j = 0; j < 2; j++) { const int c = lane * 4 + j * 128; if (exists(r * EPILOGUE_WARPS + warp) && c < width) v[r][j] = sum4(r * EPILOGUE_WARPS + warp, c); }
    close_chunk();
#pragma unroll
    for (int r = 0; r < N; r++) {
      const int local = r * EPILOGUE_WARPS + warp; float squares = 0;
      if (exists(local)) {
#pragma unroll
        for (int j = 0; j < 2; j++) { const int c = lane * 4 + j * 128; if (c < width) squares += update(local, c, v[r][j], w[j], out, false); }
        write_squares(which, local, squares);
      }
    }
    publish(done);
  }
  __device__ void inter(u32 target) {
    const Share part = share(INTERMEDIATE / UNIT, cluster, clusters); const int chunks = chunk_count(part, GATE_UNITS);
    norm_factors(O_DONE, target, 1);
    for (int i = 0; i < chunks; i++) {
      const Share rows = chunk(part, i, chunks); const bool in = lane * 4 < (rows.last - rows.first) * UNIT;
      open_chunk(TILE_ROWS);
      float4 gate[N], up[N];
#pragma unroll
      for (int r = 0; r < N; r++) if (exists(r * EPILOGUE_WARPS + warp) && in) { gate[r] = sum4(r * EPILOGUE_WARPS + warp, lane * 4); up[r] = sum4(r * EPILOGUE_WARPS + warp, UP_ROW + lane * 4); }
      close_chunk();
#pragma unroll
      for (int r = 0; r < N; r++) {
        const int local = r * EPILOGUE_WARPS + warp; const float f = factor[r];
        if (exists(local) && in) {
          float o[4]; const float gs[4] = {gate[r].x, gate[r].y, gate[r].z, gate[r].w}, us[4] = {up[r].x, up[r].y, up[r].z, up[r].w};
#pragma unroll
          for (int j = 0; j < 4; j++) { const float a = gs[j] * f; o[j] = a / (1.f + exp2_fast(a * -LOG2E)) * (us[j] * f); }
          *reinterpret_cast<uint2*>(p.inter + (u64)(local * RANKS + rank) * INTERMEDIATE + rows.first * UNIT + lane * 4) = make_uint2(pack_bf16(o[0], o[1]), pack_bf16(o[2], o[3]));
        }
      }
    }
    publish(INTER_DONE);
  }
  // Logits are never stored: the greatest, where it stands, and the sum of exponentials, per row.
  __device__ void head(u32* flag) {
    norm_factors(HIDDEN_DONE, clusters * RANKS * (p.n_layers + 1), 0);
    float top[N], sum[N]; int index[N];
#pragma unroll
    for (int i = 0; i < N; i++) { top[i] = -INFINITY; sum[i] = 0; index[i] = 0x7fffffff; }
    for (int c = cluster; c < VOCABULARY_CHUNKS; c += clusters) {
      open_chunk(TILE_ROWS);
      float4 v[N][2];
#pragma unroll
      for (int r = 0; r < N; r++)
#pragma unroll
        for (int j = 0; j < 2; j++) { const int col = lane * 4 + j * 128; if (exists(r * EPILOGUE_WARPS + warp) && col < MAX_ROWS) v[r][j] = sum4(r * EPILOGUE_WARPS + warp, col); }
      close_chunk();
#pragma unroll
      for (int r = 0; r < N; r++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int col = lane * 4 + j * 128, token = c * MAX_ROWS + col; const float f = factor[r];
          if (!exists(r * EPILOGUE_WARPS + warp) || col >= MAX_ROWS || token >= VOCABULARY) continue;
          const float l[4] = {v[r][j].x * f, v[r][j].y * f, v[r][j].z * f, v[r][j].w * f};
          float m = top[r];
#pragma unroll
          for (int i = 0; i < 4; i++) if (l[i] > m) { m = l[i]; index[r] = token + i; }
          float s = top[r] == -INFINITY ? 0.f : sum[r] * exp2_fast((top[r] - m) * LOG2E);
#pragma unroll
          for (int i = 0; i < 4; i++) s += exp2_fast((l[i] - m) * LOG2E);
          sum[r] = s; top[r] = m;
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int local = i * EPILOGUE_WARPS + warp;
      if (local < ROWS_PER_RANK) {
#pragma unroll
        for (int o = 16; o; o >>= 1) {
          const float t = __shfl_xor_sync(~0u, top[i], o), s = __shfl_xor_sync(~0u, sum[i], o); const int x = __shfl_xor_sync(~0u, index[i], o);
          const float m = fmaxf(top[i], t);
          sum[i] = (top[i] == -INFINITY ? 0 : sum[i] * exp2_fast((top[i] - m) * LOG2E)) + (t == -INFINITY ? 0 : s * exp2_fast((t - m) * LOG2E));
          if (t > top[i] || (t == top[i] && x < index[i])) index[i] = x;
          top[i] = m;
        }
        if (lane == 0) p.head_part[cluster * BATCH + local * RANKS + rank] = make_float4(top[i], __int_as_float(index[i]), sum[i], 0);
      }
    }
    if (p.residual_out)
      for (int local = warp; local < ROWS_PER_RANK; local += EPILOGUE_WARPS)
        for (int c = lane; c < (own.last - own.first) * UNIT; c += 32) {
          float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(sh.residual + (local * RESIDUAL_STRIDE + c) * 4));
          p.residual_out[(u64)(local * RANKS + rank) * HIDDEN + own.first * UNIT + c] = v;
        }
    // The block that arrives last puts the clusters' parts together and advances the sequences.
    named_barrier(1, EPILOGUE_WARPS * 32);
    if (warp == 0 && lane == 0) { __threadfence(); *flag = atomicAdd(p.counters + STEP_DONE, 1) == clusters * RANKS - 1; __threadfence(); }
    named_barrier(1, EPILOGUE_WARPS * 32);
    if (!*flag) return;
    const int row = warp * 32 + lane;
    if (row < p.n_rows) {
      float m = -INFINITY, s = 0; int x = 0x7fffffff;
      for (int c = 0; c < clusters; c++) {
        const float4 v = load_fresh4(reinterpret_cast<const float*>(p.head_part + c * BATCH + row)); const int vx = __float_as_int(v.y);
        const float n = fmaxf(m, v.x);
        s = (m == -INFINITY ? 0 : s * exp2_fast((m - n) * LOG2E)) + (v.x == -INFINITY ? 0 : v.z * exp2_fast((v.x - n) * LOG2E));
        if (v.x > m || (v.x == m && vx < x)) x = vx;
        m = n;
      }
      p.sampled[row] = x; p.tokens[row] = x; p.logprobs[row] = -logf(s); p.positions[row] += 1;
    }
  }
  __device__ void run(u32* flag) {
    embed();
    for (int layer = 0; layer < p.n_layers; layer++) {
      const u32 target = clusters * RANKS * (layer + 1);
      qkv(target);
      hidden(1, post_norm(p, layer), p.x_post, O_DONE);
      inter(target);
      hidden(0, input_norm(p, layer + 1), p.x_in, HIDDEN_DONE);   // after the last layer: the final norm, which stands next
    }
    head(flag);
  }
};
