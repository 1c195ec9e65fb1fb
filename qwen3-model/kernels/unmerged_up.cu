// Second product of adapters that are not merged, added in place:
//
//   y[t, n] = gain[n] * y[t, n] + sum over r of B[n, r] * h[t, part of n, r] + bias[n]
//
// h f32 [m, parts, max_rank] of unmerged_down, y bf16 or f32 [m, n]. Parts begin at multiples of 16 columns of y.
//
//   warp     16 columns of y, 32 rows                 ranks in steps of 32: a lane's 8 of each row are neighbours
//
// h is taken as the sum of two bf16 numbers, which keeps 16 bits of it; all sums are in f32, and y is rounded once.
#include "unmerged.cuh"

#define WARPS 8
#define ROW_TILES 4

struct UnmergedUpParams {
    Unmerged u;
    const float* h;
    void* y;
    u32 n;
    u32 max_rank;
    u32 y_is_f32;
    u32 unused;
    u32 ends[4]; // where each part ends among the columns of y
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) unmerged_up(const __grid_constant__ UnmergedUpParams p) {
    pdl_release();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 g = lane / 4, q = lane % 4;
    const u32 column = (blockIdx.x * WARPS + warp) * 16;
    const u32 first = blockIdx.y * ROW_TILES * 8;
    if (column >= p.n) return;
    u32 part = 0, begin = 0;
    while (part + 1 < p.u.parts && column >= p.ends[part]) begin = p.ends[part++];
    pdl_wait();
    int policy[ROW_TILES];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) policy[tile] = policy_of(p.u, first + tile * 8 + g);
    float acc[ROW_TILES][4] = {};
    for (u32 turn = 0; turn < p.u.policies; ++turn) {
        if (!anyone_has(policy, turn)) continue;
        const UnmergedEntry entry = p.u.entries[turn * p.u.parts + part];
        for (u32 r = q * 8; r < entry.rank; r += 32) {
            const u16* b = entry.b + (u64)(column - begin + g) * entry.rank + r;
            const uint4 low = *reinterpret_cast<const uint4*>(b);
            const uint4 high = *reinterpret_cast<const uint4*>(b + 8 * (u64)entry.rank);
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                float4 h0 = make_float4(0.f, 0.f, 0.f, 0.f), h1 = h0;
                if (policy[tile] == (int)turn) {
                    const u64 row = first + tile * 8 + g;
                    const float* h = p.h + (row * p.u.parts + part) * p.max_rank + r;
                    h0 = *reinterpret_cast<const float4*>(h);
                    h1 = *reinterpret_cast<const float4*>(h + 4);
                }
                const uint4 x = make_uint4(pack_bf16(h0.x, h0.y), pack_bf16(h0.z, h0.w), pack_bf16(h1.x, h1.y),
                                           pack_bf16(h1.z, h1.w));
                mma(acc[tile], low.x, high.x, low.y, high.y, x.x, x.y);
                mma(acc[tile], low.z, high.z, low.w, high.w, x.z, x.w);
                mma(acc[tile], low.x, high.x, low.y, high.y, rest_of(h0.x, h0.y, x.x), rest_of(h0.z, h0.w, x.y));
                mma(acc[tile], low.z, high.z, low.w, high.w, rest_of(h1.x, h1.y, x.z), rest_of(h1.z, h1.w, x.w));
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 row = first + tile * 8 + 2 * q + i;
            const int turn = policy_of(p.u, row);
            if (turn < 0) continue;
            const UnmergedEntry entry = p.u.entries[turn * p.u.parts + part];
            if (entry.rank == 0 && !entry.gain && !entry.bias) continue;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32 at = column - begin + g + 8 * j;
                const u64 to = (u64)row * p.n + column + g + 8 * j;
                float y = p.y_is_f32 ? static_cast<float*>(p.y)[to] : bf16_to_float(static_cast<u16*>(p.y)[to]);
                if (entry.gain) y *= entry.gain[at];
                y += acc[tile][i + 2 * j];
                if (entry.bias) y += entry.bias[at];
                if (p.y_is_f32)
                    static_cast<float*>(p.y)[to] = y;
                else
                    static_cast<u16*>(p.y)[to] = float_to_bf16(y);
            }
        }
}
