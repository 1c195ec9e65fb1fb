// First product of adapters that are not merged: h[t, part, r] = sum over k of A[r, k] * x[t, k].
//
// x bf16 [m, k], h f32 [m, parts, max_rank], k % 8 == 0. Rows without a policy, and ranks that a policy does not have, are not
// written.
//
//   block    16 ranks of one part, 16 rows of x        its warps share the columns, sums are added in their order
//   lane     (g, q) loads 8 columns of ranks g and g + 8 and of rows g and g + 8 : the order of the columns is free
//
// There are few blocks, so that what counts is how long a warp waits: it asks for AT_ONCE pieces of everything at once.
// Rows of several policies may share a block: each policy takes its turn, with the other rows zero.
#include "unmerged.cuh"

#define WARPS 16
#define ROW_TILES 2
#define AT_ONCE 4

struct UnmergedDownParams {
    Unmerged u;
    const u16* x;
    float* h;
    u32 k;
    u32 max_rank;
};

// Sixteen bytes, or zeros.
__device__ __forceinline__ uint4 load_if(bool valid, const u16* p) {
    uint4 v;
    asm volatile(
        "{\n"
        ".reg .pred valid;\n"
        "setp.ne.u32 valid, %4, 0;\n"
        "mov.u32 %0, 0;\n"
        "mov.u32 %1, 0;\n"
        "mov.u32 %2, 0;\n"
        "mov.u32 %3, 0;\n"
        "@valid ld.global.v4.u32 {%0, %1, %2, %3}, [%5];\n"
        "}\n"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "r"((u32)valid), "l"(p));
    return v;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) unmerged_down(const __grid_constant__ UnmergedDownParams p) {
    __shared__ float sums[WARPS][ROW_TILES * 8][17];
    pdl_release();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 g = lane / 4, q = lane % 4;
    const u32 rank_tiles = p.max_rank / 16;
    const u32 part = blockIdx.x / rank_tiles, rank = blockIdx.x % rank_tiles * 16;
    const u32 first = blockIdx.y * ROW_TILES * 8;
    pdl_wait();
    int policy[ROW_TILES];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) policy[tile] = policy_of(p.u, first + tile * 8 + g);
    float acc[ROW_TILES][4] = {};
    for (u32 turn = 0; turn < p.u.policies; ++turn) {
        if (!anyone_has(policy, turn)) continue;
        const UnmergedEntry entry = p.u.entries[turn * p.u.parts + part];
        if (rank >= entry.rank) continue;
        const u16* a = entry.a + (u64)(rank + g) * p.k;
        for (u32 from = warp * 32; from < p.k; from += WARPS * 32 * AT_ONCE) {
            uint4 low[AT_ONCE], high[AT_ONCE], x[AT_ONCE][ROW_TILES];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const u32 k = from + i * WARPS * 32 + q * 8;
                const bool valid = k < p.k;
                low[i] = load_if(valid, a + k);
                high[i] = load_if(valid, a + 8 * (u64)p.k + k);
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; ++tile)
                    x[i][tile] = load_if(valid && policy[tile] == (int)turn, p.x + (u64)(first + tile * 8 + g) * p.k + k);
            }
            __syncwarp(); // no load is put off until after a product
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i)
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; ++tile) {
                    mma(acc[tile], low[i].x, high[i].x, low[i].y, high[i].y, x[i][tile].x, x[i][tile].y);
                    mma(acc[tile], low[i].z, high[i].z, low[i].w, high[i].w, x[i][tile].z, x[i][tile].w);
                }
        }
    }
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[warp][tile * 8 + 2 * q + i % 2][g + i / 2 * 8] = acc[tile][i];
    __syncthreads();
    for (u32 at = threadIdx.x; at < ROW_TILES * 8 * 16; at += WARPS * 32) {
        const u32 row = first + at / 16;
        const int turn = policy_of(p.u, row);
        if (turn < 0 || rank >= p.u.entries[turn * p.u.parts + part].rank) continue;
        float sum = 0.f;
#pragma unroll
        for (int from = 0; from < WARPS; ++from) sum += sums[from][at / 16][at % 16];
        p.h[((u64)row * p.u.parts + part) * p.max_rank + rank + at % 16] = sum;
    }
}
