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
// A warp has one or some heads of a row; see rope.cuh for which lane holds what.
//
// A row whose page is not mapped (-1), or whose position lies past the table, writes nothing: that
// is a row which ran one step past its end. A padded row has slot 0, whose row of the page table is
// all 0, and position 0: it can reach page 0 alone.
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#include "rope_write.cuh"

#define ROPE_WARPS 8

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

// HEADS heads a warp, ROPE_WARPS apart.
template <int HEADS>
__device__ __forceinline__ void write_heads(const QkvRopeWriteLaunch& launch) {
    const QkvRopeWriteParams& p = launch.heads;
    __shared__ float sums[ROPE_WARPS];
    pdl_release();
    pdl_wait();
    const u32 heads = p.q_heads + 2 * p.kv_heads;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 first = blockIdx.y * (ROPE_WARPS * HEADS) + warp;
    const u32 row = blockIdx.x;
    const u32 low = lane * PAIRS;
    const u32 high = HEAD_DIM / 2 + lane * PAIRS;

    // The sums of a row lie far apart, a line for each: every warp of the block loads some, before anything is waited for.
    const u32 part = lane * ROPE_WARPS + warp;
    float squares = 0.f;
    if (launch.squares && part < launch.parts) squares = launch.squares[(u64)part * launch.columns + row];
    float a[HEADS][PAIRS] = {}, b[HEADS][PAIRS] = {};
    Rotation rotations[HEADS] = {};
    u16* outs[HEADS] = {};
#pragma unroll
    for (u32 i = 0; i < HEADS; ++i) {
        const u32 head = first + i * ROPE_WARPS;
        if (head >= heads) continue;
        const u16* in = p.qkv + ((u64)row * heads + head) * HEAD_DIM;
        load_part(in + low, a[i]);
        load_part(in + high, b[i]);
        if (head < p.q_heads + p.kv_heads) rotations[i] = rotation_of(p, head, row, lane);
        outs[i] = place_of(p, head, row);
    }
    float scale = 1.f;
    if (launch.squares) {
        for (u32 i = part + ROPE_WARPS * 32; i < launch.parts; i += ROPE_WARPS * 32)
            squares += launch.squares[(u64)i * launch.columns + row];
        scale = 1.f / sqrtf(block_sum<ROPE_WARPS>(squares, sums) * launch.inverse_k + launch.eps);
    }
#pragma unroll
    for (u32 i = 0; i < HEADS; ++i) {
        if (launch.squares)
#pragma unroll
            for (u32 j = 0; j < PAIRS; ++j) a[i][j] *= scale, b[i][j] *= scale;
        if (first + i * ROPE_WARPS < p.q_heads + p.kv_heads) norm_and_rotate(a[i], b[i], rotations[i], p.eps);
        if (!outs[i]) continue;
        store_part(outs[i] + low, a[i]);
        store_part(outs[i] + high, b[i]);
    }
}

extern "C" __global__ void __launch_bounds__(ROPE_WARPS * 32, 6) qkv_rope_write(const QkvRopeWriteLaunch launch) {
    write_heads<1>(launch);
}
// Of more rows than fit a device at once the launch above leaves a second round, and what comes next waits for its start.
// On 12.0 four blocks a multiprocessor would leave too few registers.
#define BLOCKS_OF_THREE (__CUDA_ARCH__ >= 1200 ? 3 : 4)
extern "C" __global__ void __launch_bounds__(ROPE_WARPS * 32, BLOCKS_OF_THREE) qkv_rope_write_three(const QkvRopeWriteLaunch launch) {
    write_heads<3>(launch);
}
