// q/k RMSNorm, rotary embedding and the write into the paged KV cache, in one pass over the output
// of the fused QKV product.
//
//   qkv  bf16 [rows, q_heads + 2 * kv_heads, HEAD_DIM]     heads in the order q, k, v
//   q    bf16 [rows, q_heads, HEAD_DIM]                    normalised and rotated; rows q_row_stride
//                                                          elements apart, so that it may lie in qkv
//   k, v bf16 [kv_heads, n_pages * page_size, HEAD_DIM]    one layer's cache
//   place(row) = page_table[slots[row], positions[row] / page_size] * page_size
//              + positions[row] % page_size
//
// Rows that a norm has left unscaled are scaled first, by the sums of squares that belong to them.
//
// One warp per (row, head); see rope.cuh for which lane holds what.
//
// A row whose page is not mapped (-1), or whose position lies past the table, writes nothing: that
// is a row which ran one step past its end. A padded row has slot 0, whose row of the page table is
// all 0, and position 0: it can reach page 0 alone.
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#include "rope_write.cuh"

#define ROPE_WARPS 8

struct QkvRopeWriteLaunch {
    QkvRopeWriteParams heads;
    const float* squares; // f32 [chunks, columns], of batch rows before the product; null: the product is scaled already
    u32 chunks;
    u32 columns;
    float inverse_k;
    float eps;
};

// 1 / root mean square of a batch row, by one warp.
__device__ __forceinline__ float row_scale(const QkvRopeWriteLaunch& p, u32 row, u32 lane) {
    constexpr u32 AT_ONCE = 2;
    float sum = 0.f;
    for (u32 i = lane; i < p.chunks; i += 32 * AT_ONCE) {
        float x[AT_ONCE];
#pragma unroll
        for (u32 q = 0; q < AT_ONCE; ++q) x[q] = i + q * 32 < p.chunks ? p.squares[(u64)(i + q * 32) * p.columns + row] : 0.f;
#pragma unroll
        for (u32 q = 0; q < AT_ONCE; ++q) sum += x[q];
    }
    return 1.f / sqrtf(warp_sum(sum) * p.inverse_k + p.eps);
}
__device__ __forceinline__ void load_part(const u16* from, float (&out)[PAIRS]) {
#if PAIRS == 2
    const u32 bits = *reinterpret_cast<const u32*>(from);
    out[0] = bf16_low(bits);
    out[1] = bf16_high(bits);
#else
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) out[i] = bf16_to_float(from[i]);
#endif
}
__device__ __forceinline__ void store_part(u16* to, const float (&in)[PAIRS]) {
#if PAIRS == 2
    *reinterpret_cast<u32*>(to) = pack_bf16(in[0], in[1]);
#else
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) to[i] = float_to_bf16(in[i]);
#endif
}

extern "C" __global__ void __launch_bounds__(ROPE_WARPS * 32)
    qkv_rope_write(const QkvRopeWriteLaunch launch) {
    const QkvRopeWriteParams& p = launch.heads;
    pdl_release();
    pdl_wait();
    const u32 heads = p.q_heads + 2 * p.kv_heads;
    const u32 head = blockIdx.y * ROPE_WARPS + (threadIdx.x >> 5);
    const u32 row = blockIdx.x;
    if (head >= heads) return;
    const u32 lane = threadIdx.x & 31;
    const u32 low = lane * PAIRS;
    const u32 high = HEAD_DIM / 2 + lane * PAIRS;

    const u16* in = p.qkv + ((u64)row * heads + head) * HEAD_DIM;
    float a[PAIRS], b[PAIRS];
    load_part(in + low, a);
    load_part(in + high, b);
    // All loads are asked for before the first is waited for.
    const bool rotated = head < p.q_heads + p.kv_heads;
    Rotation rotation = {};
    if (rotated) rotation = rotation_of(p, head, row, lane);
    u16* out = place_of(p, head, row);
    if (launch.squares) {
        const float scale = row_scale(launch, row, lane);
#pragma unroll
        for (u32 i = 0; i < PAIRS; ++i) a[i] *= scale, b[i] *= scale;
    }
    if (rotated) norm_and_rotate(a, b, rotation, p.eps);
    if (!out) return;
    store_part(out + low, a);
    store_part(out + high, b);
}
