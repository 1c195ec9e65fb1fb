// First product of adapters that are not merged: h[t, part, r] = sum over k of A[r, k] * x[t, k].
//
// x bf16 [m, k], h f32 [m, parts, max_rank], k % 8 == 0. Rows without a policy, and ranks that a policy does not have, are not
// written.
//
//   block    16 ranks of one part, 32 rows of x        its warps share the columns, sums are added in their order
//   lane     (g, q) loads 8 columns of ranks g and g + 8 and of rows g, g + 8, … : the order of the columns is free
//
// Rows of several policies may share a block: each policy takes its turn, with the other rows zero.
#include "unmerged.cuh"

#define WARPS 8
#define ROW_TILES 4

struct UnmergedDownParams {
    Unmerged u;
    const u16* x;
    float* h;
    u32 k;
    u32 max_rank;
};

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
        bool mine = false;
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) mine |= policy[tile] == (int)turn;
        if (!__any_sync(FULL_WARP, mine)) continue;
        const UnmergedEntry entry = p.u.entries[turn * p.u.parts + part];
        if (rank >= entry.rank) continue;
        const u16* a = entry.a + (u64)(rank + g) * p.k;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        for (u32 k = warp * 32 + q * 8; k < (p.k + 31) / 32 * 32; k += WARPS * 32) {
            const bool valid = k < p.k;
            const uint4 low = valid ? *reinterpret_cast<const uint4*>(a + k) : zero;
            const uint4 high = valid ? *reinterpret_cast<const uint4*>(a + 8 * (u64)p.k + k) : zero;
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                uint4 x = zero;
                if (valid && policy[tile] == (int)turn)
                    x = *reinterpret_cast<const uint4*>(p.x + (u64)(first + tile * 8 + g) * p.k + k);
                unmerged_mma(acc[tile], make_uint2(low.x, low.y), make_uint2(high.x, high.y), x.x, x.y);
                unmerged_mma(acc[tile], make_uint2(low.z, low.w), make_uint2(high.z, high.w), x.z, x.w);
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
