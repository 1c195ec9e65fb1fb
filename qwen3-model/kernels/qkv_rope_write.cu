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
    const float* squares; // f32 [parts, columns], of batch rows before the product; null: the product is scaled already
    u32 parts;
    u32 columns;
    float inverse_k;
    float eps;
};

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

extern "C" __global__ void __launch_bounds__(ROPE_WARPS * 32, 6)
    qkv_rope_write(const QkvRopeWriteLaunch launch) {
    const QkvRopeWriteParams& p = launch.heads;
    __shared__ float sums[ROPE_WARPS];
    pdl_release();
    pdl_wait();
    const u32 heads = p.q_heads + 2 * p.kv_heads;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 head = blockIdx.y * ROPE_WARPS + warp;
    const u32 row = blockIdx.x;
    const u32 low = lane * PAIRS;
    const u32 high = HEAD_DIM / 2 + lane * PAIRS;

    // The sums of a row lie far apart, a line for each: every warp of the block loads some, before anything is waited for.
    const u32 part = lane * ROPE_WARPS + warp;
    float squares = 0.f;
    if (launch.squares && part < launch.parts) squares = launch.squares[(u64)part * launch.columns + row];
    float a[PAIRS] = {}, b[PAIRS] = {};
    Rotation rotation = {};
    u16* out = nullptr;
    const bool rotated = head < p.q_heads + p.kv_heads;
    if (head < heads) {
        const u16* in = p.qkv + ((u64)row * heads + head) * HEAD_DIM;
        load_part(in + low, a);
        load_part(in + high, b);
        if (rotated) rotation = rotation_of(p, head, row, lane);
        out = place_of(p, head, row);
    }
    if (launch.squares) {
        for (u32 i = part + ROPE_WARPS * 32; i < launch.parts; i += ROPE_WARPS * 32)
            squares += launch.squares[(u64)i * launch.columns + row];
        const float scale = 1.f / sqrtf(block_sum<ROPE_WARPS>(squares, sums) * launch.inverse_k + launch.eps);
#pragma unroll
        for (u32 i = 0; i < PAIRS; ++i) a[i] *= scale, b[i] *= scale;
    }
    if (rotated) norm_and_rotate(a, b, rotation, p.eps);
    if (!out) return;
    store_part(out + low, a);
    store_part(out + high, b);
}
