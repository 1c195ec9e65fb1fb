// Residual add and RMSNorm in one pass over a row.
//
//   source  = row_index ? row_index[row] : row
//   x       = residual[source, :] + delta[source, :]       (delta: null, bf16 or f32)
//   residual[source, :] = x                                 (only without row_index, and with delta)
//   out[row, :] = bf16( x * rsqrt(mean(x^2) + eps) * weight )
//
// One block per row; a thread keeps its VECTORS_PER_THREAD float4 in registers between the sum and
// the scaling, so each byte moves once. The order of the sum depends on `hidden` alone, never on
// the number of rows. All arithmetic is f32 and rounds once, on the way out.
//
// row_index makes this the norm before the output head: only the rows whose logits are wanted are
// normalised, straight into a dense matrix.
#include "common.cuh"

#ifndef VECTORS_PER_THREAD
#define VECTORS_PER_THREAD 3
#endif
#define NORM_THREADS 256

struct RmsNormParams {
    float* residual;      // f32 [*, hidden]
    const void* delta;    // [*, hidden], or null
    const float* weight;  // f32 [hidden]
    const int* row_index; // [rows], or null
    u16* out;             // bf16 [rows, hidden]
    u32 rows;
    u32 hidden; // a multiple of 4, at most VECTORS_PER_THREAD * 4 * NORM_THREADS
    u32 source_rows;
    u32 delta_is_f32;
    float eps;
    u32 unused;
};

extern "C" __global__ void __launch_bounds__(NORM_THREADS, 2) rms_norm(const RmsNormParams p) {
    __shared__ float scratch[NORM_THREADS / 32];
    pdl_release();
    // Weights do not depend on earlier kernels: fetch them while the predecessor ends.
    float4 w[VECTORS_PER_THREAD];
#pragma unroll
    for (int v = 0; v < VECTORS_PER_THREAD; ++v) {
        const u32 i = (v * NORM_THREADS + threadIdx.x) * 4;
        w[v] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (i < p.hidden) w[v] = *reinterpret_cast<const float4*>(p.weight + i);
    }
    pdl_wait();
    const u32 row = blockIdx.x;
    u32 source = row;
    if (p.row_index) {
        source = (u32)p.row_index[row];
        if (source >= p.source_rows) source = 0;
    }
    const u64 base = (u64)source * p.hidden;

    float4 x[VECTORS_PER_THREAD];
    float squares = 0.f;
#pragma unroll
    for (int v = 0; v < VECTORS_PER_THREAD; ++v) {
        const u32 i = (v * NORM_THREADS + threadIdx.x) * 4;
        x[v] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (i < p.hidden) {
            x[v] = *reinterpret_cast<const float4*>(p.residual + base + i);
            if (p.delta) {
                float4 d;
                if (p.delta_is_f32) {
                    d = *reinterpret_cast<const float4*>((const float*)p.delta + base + i);
                } else {
                    const uint2 bits = *reinterpret_cast<const uint2*>((const u16*)p.delta + base + i);
                    d = make_float4(bf16_low(bits.x), bf16_high(bits.x), bf16_low(bits.y),
                                    bf16_high(bits.y));
                }
                x[v].x += d.x;
                x[v].y += d.y;
                x[v].z += d.z;
                x[v].w += d.w;
                if (!p.row_index) *reinterpret_cast<float4*>(p.residual + base + i) = x[v];
            }
        }
        squares += x[v].x * x[v].x + x[v].y * x[v].y + x[v].z * x[v].z + x[v].w * x[v].w;
    }
    const float mean = block_sum<NORM_THREADS / 32>(squares, scratch) / (float)p.hidden;
    const float scale = 1.f / sqrtf(mean + p.eps);
    u16* out = p.out + (u64)row * p.hidden;
#pragma unroll
    for (int v = 0; v < VECTORS_PER_THREAD; ++v) {
        const u32 i = (v * NORM_THREADS + threadIdx.x) * 4;
        if (i < p.hidden) {
            uint2 bits;
            bits.x = pack_bf16(x[v].x * scale * w[v].x, x[v].y * scale * w[v].y);
            bits.y = pack_bf16(x[v].z * scale * w[v].z, x[v].w * scale * w[v].w);
            *reinterpret_cast<uint2*>(out + i) = bits;
        }
    }
}
