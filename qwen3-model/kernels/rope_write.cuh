// Where the heads of a batch row come from and go to, and by what they are rotated: see qkv_rope_write.cu.
#pragma once
#include "rope.cuh"

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

struct QkvRopeWriteLaunch {
    QkvRopeWriteParams heads;
    const float* squares; // f32 [parts, columns], of batch rows before the product; null: the product is scaled already
    u32 parts;
    u32 columns;
    float inverse_k;
    float eps;
};

// The row of cos_sin for a batch row's position.
__device__ __forceinline__ u32 angle_of(const QkvRopeWriteParams& p, u32 row) {
    const u32 position = (u32)p.positions[row];
    return position < p.n_positions ? position : p.n_positions - 1;
}
// The norm's weights and the angles of a query or key head.
__device__ __forceinline__ Rotation rotation_of(const QkvRopeWriteParams& p, u32 head, u32 row, u32 lane) {
    const u32 angle = angle_of(p, row);
    return load_rotation(head < p.q_heads ? p.q_norm : p.k_norm, p.cos_sin + (u64)angle * HEAD_DIM, lane);
}

// Null: nowhere.
__device__ __forceinline__ u16* place_of(const QkvRopeWriteParams& p, u32 head, u32 row) {
    if (head < p.q_heads) return p.q + (u64)row * p.q_row_stride + (u64)head * HEAD_DIM;
    const u32 position = (u32)p.positions[row], slot = (u32)p.slots[row];
    const u32 logical_page = position / p.page_size;
    if (slot >= p.n_slots || logical_page >= p.max_pages) return nullptr;
    const int page = p.page_table[(u64)slot * p.max_pages + logical_page];
    if (page < 0) return nullptr;
    const u64 token = (u64)page * p.page_size + position % p.page_size;
    if (token >= p.tokens_per_head) return nullptr;
    const bool is_v = head >= p.q_heads + p.kv_heads;
    const u32 kv_head = head - p.q_heads - (is_v ? p.kv_heads : 0);
    return (is_v ? p.v_cache : p.k_cache) + ((u64)kv_head * p.tokens_per_head + token) * HEAD_DIM;
}
