// Product with a matrix in 4 bits for the row counts of decoding: weights are read once, decoded in registers.
//
//   y[t, n] = sum over k of x[t, k] * w[n, k]         t in 0 .. m <= 8 TILES
//   w[n, k] = bf16( map[nibble of (n, k)] * absmax[k / 64, n] )
//
// packed u8 [n, k / 2], absmax f32 [k / 64, n], x bf16 [m, k], y bf16 or f32 [m, n]; n % 16 == 0, k % 64 == 0.
//
//   tile            16 rows of w; a block takes every gridDim.x-th, its warps share the columns
//   unit            4 blocks of 64 columns; a warp takes every (warps)-th. Lane (g, q) decodes block q of rows g and g + 8
//
// The order of the columns within a unit is free as long as w and x agree. Step s of mma.m16n8k16 takes columns 4 s … 4 s + 3
// of all four blocks: what a lane holds of w it has decoded itself. A byte of two weights is looked up: see nf4_pairs.cuh.
// x goes through shared memory into the order of the fragments, [column / 8 in block][token][block][8 columns]: once for all
// tiles if it fits (`resident`), else anew for every unit.
//
// Weights are fetched one unit ahead, across tiles, and the first ones before the wait for the predecessor: they do not depend
// on it. Sums of the warps are added in the order of the warps, so that the result is the same in every run and for a row the
// same whatever the other rows and the grid are.
#include "nf4_pairs.cuh"

#ifndef TILES
#define TILES 1 // tiles of eight tokens
#endif
#define MAX_WARPS (TILES <= 2 ? 16 : TILES == 8 ? 8 : 10)
// Columns / 8 of each block that are in shared memory at once.
#define DEPTH (TILES == 1 ? 8 : 16 / TILES)
// 16 bytes more than the row of fragments: writers of neighbouring columns meet other banks.
#define FRAGMENT_BYTES 528
#define PAIRS_BYTES (256 * PAIR_COPIES * 8)
#define STAGE_BYTES (TILES * DEPTH * FRAGMENT_BYTES)

struct Nf4MatmulParams {
    const unsigned char* packed;
    const float* absmax;
    const u16* x;
    void* y;
    u32 n;
    u32 k;
    u32 m;
    u32 y_is_f32;
    u32 resident; // shared memory holds a stage per unit, else one per warp
    u32 unused;
    float map[16];
};

// One lane's 64 weights of two rows, still in 4 bits.
struct Held {
    uint4 words[2][2];
    float absmax[2];
};

__device__ __forceinline__ Held hold(const Nf4MatmulParams& p, u32 row, u32 block) {
    Held held;
    const bool valid = block < p.k / 64 && row < p.n;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u64 at = (u64)(row + 8 * r) * (p.k / 64) + block;
        const uint4* words = reinterpret_cast<const uint4*>(p.packed + at * 32);
        held.words[r][0] = valid ? __ldcs(words) : make_uint4(0, 0, 0, 0);
        held.words[r][1] = valid ? __ldcs(words + 1) : make_uint4(0, 0, 0, 0);
        held.absmax[r] = valid ? __ldcs(p.absmax + (u64)block * p.n + row + 8 * r) : 0.f;
    }
    return held;
}

__device__ __forceinline__ u32 word(const uint4& four, int i) {
    switch (i & 3) {
    case 0: return four.x;
    case 1: return four.y;
    case 2: return four.z;
    default: return four.w;
    }
}

// Brings columns of x into the order of the fragments: `DEPTH` times 8 of each block of a unit, from `part` times that on.
// All blocks read the same x: each begins elsewhere, so that they do not all ask for the same line at once. Through registers:
// asynchronous copies took twice as long.
__device__ __forceinline__ void fetch(const Nf4MatmulParams& p, unsigned char* to, u32 unit, int part, u32 lane) {
    const u32 blocks = p.k / 64;
#pragma unroll 4
    for (int i = 0; i < TILES * DEPTH; ++i) {
        const u32 piece = (i + blockIdx.x) % (TILES * DEPTH) * 32 + lane;
        const u32 token = piece / (4 * DEPTH), of = piece / DEPTH % 4, at = piece % DEPTH;
        const u32 block = 4 * unit + of;
        if (token < p.m) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (block < blocks)
                x = *reinterpret_cast<const uint4*>(p.x + (u64)token * p.k + block * 64 + (part * DEPTH + at) * 8);
            *reinterpret_cast<uint4*>(to + (token / 8 * DEPTH + at) * FRAGMENT_BYTES + token % 8 * 64 + of * 16) = x;
        }
    }
}

// Adds the sums of the block's warps, writes a tile, and begins anew. With a stage per warp, `sums` takes the stages' place;
// else a warp comes back to the same half of the sums after the next tile's barrier only.
__device__ __forceinline__ void finish(const Nf4MatmulParams& p, float* sums, float (&acc)[TILES][4], u32 tile, u32 warp,
                                       u32 lane) {
    const u32 g = lane / 4, q = lane % 4, warps = blockDim.x / 32;
    // Other warps may still read their stages.
    if (!p.resident) __syncthreads();
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[(warp * 8 * TILES + t * 8 + 2 * q + i % 2) * 16 + g + i / 2 * 8] = acc[t][i];
            acc[t][i] = 0.f;
        }
    __syncthreads();
    for (u32 at = threadIdx.x; at < p.m * 16; at += blockDim.x) {
        float sum = 0.f;
        for (u32 from = 0; from < warps; ++from) sum += sums[from * 8 * TILES * 16 + at];
        const u64 to = (u64)(at / 16) * p.n + tile * 16 + at % 16;
        if (p.y_is_f32)
            static_cast<float*>(p.y)[to] = sum;
        else
            static_cast<u16*>(p.y)[to] = float_to_bf16(sum);
    }
    if (!p.resident) __syncthreads();
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32, 1) nf4_matmul(const __grid_constant__ Nf4MatmulParams p) {
    extern __shared__ __align__(16) unsigned char table[];
    unsigned char* shared = table + PAIRS_BYTES;
    pdl_release();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const u32 g = lane / 4, q = lane % 4;
    const u32 units = (p.k / 64 + 3) / 4, tiles = p.n / 16;
    // [2][warp][token][16 rows] behind the resident stages, or [1] in their place.
    float* sums = reinterpret_cast<float*>(shared + (p.resident ? units * STAGE_BYTES : 0));

    Held next = hold(p, blockIdx.x * 16 + g, 4 * warp + q);
    for (u32 at = threadIdx.x; at < 256 * PAIR_COPIES; at += blockDim.x)
        reinterpret_cast<float2*>(table)[at] = two_values(p.map, at / PAIR_COPIES);
    __syncthreads();
    const unsigned char* pairs = table + lane % PAIR_COPIES * 8;
    pdl_wait();
    if (p.resident) {
        // A warp reads only what it has fetched itself.
        for (u32 unit = warp; unit < units; unit += warps) fetch(p, shared + unit * STAGE_BYTES, unit, 0, lane);
        __syncwarp();
    }
    u32 tile = blockIdx.x, unit = warp, half = 0;
    float acc[TILES][4] = {};
    while (tile < tiles) {
        Held held = next;
        const bool last = unit + warps >= units;
        next = hold(p, (last ? tile + gridDim.x : tile) * 16 + g, 4 * (last ? warp : unit + warps) + q);
        const u32 at = (p.resident ? unit : warp) * STAGE_BYTES;
        // Not unrolled: the instructions of a whole unit would come too slowly.
#pragma unroll 1
        for (int four = 0; four < 2; ++four) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // Where the columns are among those in shared memory.
                const int place = DEPTH == 8 ? four * 4 + i : i % DEPTH;
                if (!p.resident && i % DEPTH == 0 && (DEPTH < 8 || four == 0)) {
                    __syncwarp();
                    fetch(p, shared + at, unit, DEPTH == 8 ? 0 : (four * 4 + i) / DEPTH, lane);
                    __syncwarp();
                }
                const uint4 a = eight_weights(pairs, word(held.words[0][0], i), held.absmax[0]);
                const uint4 b = eight_weights(pairs, word(held.words[1][0], i), held.absmax[1]);
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const uint4 x =
                        *reinterpret_cast<const uint4*>(shared + at + (t * DEPTH + place) * FRAGMENT_BYTES + lane * 16);
                    mma(acc[t], a.x, b.x, a.y, b.y, x.x, x.y);
                    mma(acc[t], a.z, b.z, a.w, b.w, x.z, x.w);
                }
            }
            held.words[0][0] = held.words[0][1];
            held.words[1][0] = held.words[1][1];
        }
        unit += warps;
        if (!last) continue;
        finish(p, sums + half * warps * 8 * TILES * 16, acc, tile, warp, lane);
        unit = warp;
        tile += gridDim.x;
        half ^= p.resident;
    }
}
