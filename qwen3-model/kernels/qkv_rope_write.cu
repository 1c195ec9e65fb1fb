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
// One warp per (row, head); see rope.cuh for which lane holds what.
//
// A row whose page is not mapped (-1), or whose position lies past the table, writes nothing: that
// is a row which ran one step past its end. A padded row has slot 0, whose row of the page table is
// all 0, and position 0: it can reach page 0 alone.
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#include "rope.cuh"

#define ROPE_WARPS 8

struct QkvRopeWriteParams {
    const u16* qkv;
    const float* q_norm;   // f32 [HEAD_DIM]
    const float* k_norm;   // f32 [HEAD_DIM]
    const float* cos_sin;  // f32 [n_positions, HEAD_DIM]: HEAD_DIM / 2 cosines, then as many sines
    const int* positions;  // [rows]
    const int* slots;      // [rows]
    const int* page_table; // [n_slots, max_pages]
    u16* q;
    u16* k_cache;
    u16* v_cache;
    u64 q_row_stride;
    u64 tokens_per_head; // n_pages * page_size
    u32 rows;
    u32 q_heads;
    u32 kv_heads;
    u32 page_size;
    u32 n_slots;
    u32 max_pages;
    u32 n_positions;
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

extern "C" __global__ void __launch_bounds__(ROPE_WARPS * 32)
    qkv_rope_write(const QkvRopeWriteParams p) {
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

    const u32 position = (u32)p.positions[row];
    const bool is_q = head < p.q_heads;
    const bool is_v = head >= p.q_heads + p.kv_heads;

    if (!is_v) {
        const u32 angle = position < p.n_positions ? position : p.n_positions - 1;
        norm_and_rotate(a, b, load_rotation(is_q ? p.q_norm : p.k_norm, p.cos_sin + (u64)angle * HEAD_DIM, lane), p.eps);
    }

    if (is_q) {
        u16* out = p.q + (u64)row * p.q_row_stride + (u64)head * HEAD_DIM;
        store_part(out + low, a);
        store_part(out + high, b);
        return;
    }
    const u32 slot = (u32)p.slots[row];
    const u32 logical_page = position / p.page_size;
    if (slot >= p.n_slots || logical_page >= p.max_pages) return;
    const int page = p.page_table[(u64)slot * p.max_pages + logical_page];
    if (page < 0) return;
    const u64 token = (u64)page * p.page_size + position % p.page_size;
    if (token >= p.tokens_per_head) return;
    const u32 kv_head = is_v ? head - p.q_heads - p.kv_heads : head - p.q_heads;
    u16* out = (is_v ? p.v_cache : p.k_cache) + ((u64)kv_head * p.tokens_per_head + token) * HEAD_DIM;
    store_part(out + low, a);
    store_part(out + high, b);
}
