// The epilogue warps: add the parts of the sums in a fixed order and do what follows a product. A warp takes batch rows warp,
// warp + 4, …; its lanes the block's columns. RMSNorm's factor is one number per batch row: the product is taken over
// x * weight, and its result is scaled.
#pragma once
#include "shared.cuh"

struct Epilogue {
  const Parameters& p; const Shared& sh; const int block, warp, lane; SumPlace sums; int events = 0;

  template <class D> __device__ __forceinline__ float sum(int row, int column) const {
    float v = 0;
#pragma unroll
    for (int s = 0; s < D::k; s++) { float a; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(a) : "r"(sh.sums + sums.slot * SUMS_BYTES + ((s * BATCH + row) * D::stride + column) * 4)); v += a; }
    return v;
  }
  __device__ void mark() { if (p.trace && blockIdx.x == 0 && warp == 0 && lane == 0) p.trace[events] = clock64(); events++; }
  __device__ void open_chunk() { barrier_wait(sh.sums_full(sums.slot), sums.parity); }
  __device__ void close_chunk() { __syncwarp(); if (lane == 0) barrier_arrive(sh.sums_free(sums.slot)); sums.advance(); }
  __device__ void publish(Counter which) {
    named_barrier(1, EPILOGUE_WARPS * 32);
    if (warp == 0 && lane == 0) { __threadfence(); signal(p.counters + which); }
    mark();
  }
  __device__ __forceinline__ float warp_sum(float v) const {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
  }
  // 1 / root mean square of every batch row of the residual stream, from the blocks' sums in a fixed order.
  __device__ void norm_factors(Counter which, u32 target, int squares) {
    if (warp == 0 && lane == 0) wait_for(p.counters + which, target);
    named_barrier(1, EPILOGUE_WARPS * 32);
    mark();
#pragma unroll 4
    for (int row = warp; row < BATCH; row += EPILOGUE_WARPS) {
      float v = 0;
#pragma unroll
      for (int i = 0; i < up(BLOCKS, 32); i++) { const int b = i * 32 + lane; if (b < BLOCKS) v += load_fresh(p.squares + (squares * BATCH + row) * BLOCKS + b); }
      v = warp_sum(v);
      if (lane == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(sh.factors + row * 4), "f"(rsqrtf(v / HIDDEN + p.epsilon)) : "memory");
    }
    __syncwarp();
  }
  __device__ __forceinline__ float factor(int row) const { float f; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(f) : "r"(sh.factors + row * 4)); return f; }
  // Sets the residual stream at (batch row, this lane's column) and writes x * weight for the next product.
  __device__ __forceinline__ void update(int which, int row, int column, bool in, float v, float weight, bf16* out, bool first) {
    const u32 at = sh.residual + (row * HIDDEN_ROWS + lane) * 4;
    if (in) {
      if (!first) { float o; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(o) : "r"(at)); v += o; }
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
      out[(u64)row * HIDDEN + column].bits = (u16)pack_bf16(v * weight, 0);
    }
    const float s = warp_sum(in ? v * v : 0.f);
    if (lane == 0) p.squares[(which * BATCH + row) * BLOCKS + block] = s;
  }
  __device__ void embed() {
    const int column = first_row(HIDDEN, block) + lane; const bool in = column < first_row(HIDDEN, block + 1);
    const float weight = in ? to_float(input_norm(p, 0)[column]) : 0.f;
#pragma unroll 4
    for (int row = warp; row < BATCH; row += EPILOGUE_WARPS)
      update(0, row, column, in, in ? to_float(p.embedding[(u64)(u32)(row < p.n_rows ? p.tokens[row] : 0) * HIDDEN + column]) : 0.f, weight, p.x_in, true);
    publish(HIDDEN_DONE);
  }
  __device__ void qkv(u32 target) {
    norm_factors(HIDDEN_DONE, target, 0);
    const int first = first_row(QKV, block), n = first_row(QKV, block + 1) - first;
    open_chunk();
#pragma unroll 2
    for (int row = warp; row < BATCH; row += EPILOGUE_WARPS) {
      const float f = factor(row);
      for (int c = lane; c < n; c += 32) p.qkv[(u64)row * QKV + first + c] = sum<QkvDivision>(row, c) * f;
    }
    close_chunk();
    publish(QKV_DONE);
  }
  // After O (which = 1) and down (which = 0).
  __device__ void hidden(int which, const bf16* weights, bf16* out, Counter done) {
    const int column = first_row(HIDDEN, block) + lane; const bool in = column < first_row(HIDDEN, block + 1);
    const float weight = in ? to_float(weights[column]) : 0.f;      // read before the sums arrive
    open_chunk();
    mark();
#pragma unroll 2
    for (int row = warp; row < BATCH; row += EPILOGUE_WARPS) update(which, row, column, in, in ? sum<HiddenDivision>(row, lane) : 0.f, weight, out, false);
    close_chunk();
    publish(done);
  }
  __device__ void inter(u32 target) {
    norm_factors(O_DONE, target, 1);
    const int first = first_row(INTERMEDIATE, block), n = first_row(INTERMEDIATE, block + 1) - first;
    open_chunk();
#pragma unroll 2
    for (int row = warp; row < BATCH; row += EPILOGUE_WARPS) {
      const float f = factor(row);
      for (int c = lane; c < n; c += 32) {
        const float g = sum<GateDivision>(row, c) * f, u = sum<GateDivision>(row, UP_ROW + c) * f;
        p.inter[(u64)row * INTERMEDIATE + first + c].bits = (u16)pack_bf16(g / (1.f + exp2_fast(g * -LOG2E)) * u, 0);
      }
    }
    close_chunk();
    publish(INTER_DONE);
  }
  // Logits are never stored: the greatest, where it stands, and the sum of exponentials, per batch row.
  __device__ void head(u32* flag) {
    norm_factors(HIDDEN_DONE, BLOCKS * (p.n_layers + 1), 0);
    constexpr int N = BATCH / EPILOGUE_WARPS;
    const int first = first_row(VOCABULARY, block), n = first_row(VOCABULARY, block + 1) - first;
    float top[N], total[N]; int index[N];
#pragma unroll
    for (int i = 0; i < N; i++) { top[i] = -INFINITY; total[i] = 0; index[i] = 0x7fffffff; }
    for (int c = 0; c < HEAD_CHUNKS; c++) {
      open_chunk();
#pragma unroll
      for (int i = 0; i < N; i++) {
        const int row = i * EPILOGUE_WARPS + warp; const float f = factor(row);
#pragma unroll
        for (int j = 0; j < up(HEAD_ROWS, 32); j++) {
          const int column = j * 32 + lane, at = c * HEAD_ROWS + column;
          if (column >= HEAD_ROWS || at >= n) continue;
          const float l = sum<HeadDivision>(row, column) * f;
          if (l > top[i]) { total[i] = (top[i] == -INFINITY ? 0.f : total[i] * exp2_fast((top[i] - l) * LOG2E)) + 1.f; top[i] = l; index[i] = first + at; }
          else total[i] += exp2_fast((l - top[i]) * LOG2E);
        }
      }
      close_chunk();
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int row = i * EPILOGUE_WARPS + warp;
#pragma unroll
      for (int o = 16; o; o >>= 1) merge(top[i], total[i], index[i], __shfl_xor_sync(~0u, top[i], o), __shfl_xor_sync(~0u, total[i], o), __shfl_xor_sync(~0u, index[i], o));
      if (lane == 0) p.head_part[block * BATCH + row] = make_float4(top[i], __int_as_float(index[i]), total[i], 0);
      if (p.residual_out && lane < first_row(HIDDEN, block + 1) - first_row(HIDDEN, block)) {
        float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(sh.residual + (row * HIDDEN_ROWS + lane) * 4));
        p.residual_out[(u64)row * HIDDEN + first_row(HIDDEN, block) + lane] = v;
      }
    }
    // The block that arrives last puts the parts together and advances the sequences.
    named_barrier(1, EPILOGUE_WARPS * 32);
    if (warp == 0 && lane == 0) { __threadfence(); *flag = atomicAdd(p.counters + STEP_DONE, 1) == BLOCKS - 1; __threadfence(); }
    named_barrier(1, EPILOGUE_WARPS * 32);
    mark();
    if (!*flag) return;
    for (int row = warp; row < p.n_rows; row += EPILOGUE_WARPS) {
      float m = -INFINITY, s = 0; int x = 0x7fffffff;
      for (int b = lane; b < BLOCKS; b += 32) { const float4 v = load_fresh4(reinterpret_cast<const float*>(p.head_part + b * BATCH + row)); merge(m, s, x, v.x, v.z, __float_as_int(v.y)); }
#pragma unroll
      for (int o = 16; o; o >>= 1) merge(m, s, x, __shfl_xor_sync(~0u, m, o), __shfl_xor_sync(~0u, s, o), __shfl_xor_sync(~0u, x, o));
      if (lane == 0) { p.sampled[row] = x; p.tokens[row] = x; p.logprobs[row] = -logf(s); p.positions[row] += 1; }
    }
  }
  // (maximum, sum of exponentials below it, where) of two parts; ties go to the lower index.
  __device__ static __forceinline__ void merge(float& m, float& s, int& x, float m2, float s2, int x2) {
    const float n = fmaxf(m, m2);
    s = (m == -INFINITY ? 0.f : s * exp2_fast((m - n) * LOG2E)) + (m2 == -INFINITY ? 0.f : s2 * exp2_fast((m2 - n) * LOG2E));
    if (m2 > m || (m2 == m && x2 < x)) x = x2;
    m = n;
  }
  __device__ void run(u32* flag) {
    embed();
    for (int layer = 0; layer < p.n_layers; layer++) {
      const u32 target = BLOCKS * (layer + 1);
      qkv(target);
      hidden(1, post_norm(p, layer), p.x_post, O_DONE);
      inter(target);
      hidden(0, input_norm(p, layer + 1), p.x_in, HIDDEN_DONE);   // after the last layer: the final norm, which stands next
    }
    head(flag);
  }
};
