// Gate and up of a decode step: bf16 [rows, N / 2] = silu(gate) · up, for 65 to 256 batch rows.
//
// Other than in wide_product.cuh the batch is the 64-row operand of the tensor cores, 64 rows a warpgroup, and weights are
// the other one, which may have any multiple of 8 rows: there is a height of tiles with which each block has one tile, or
// as many as every other. So nothing is cut, and no sums are exchanged. One warp copies weights into a ring and does not wait
// for the kernel before; another copies activations and does wait.
//
// Every sum is added up along K in the order of the chunks, by one accumulator: another product of that order has the same bits.
// Where these are wanted gate and up are rounded to bf16 before the unit, which then is that of silu_mul.cu (GATED_APART), or the
// product leaves as it is (PLAIN).
//
// A tile has 4 rows of gate and 4 of up in turn: two threads that are two lanes apart hold both of an element.
#pragma once
#include "wide_common.cuh"

struct GateUpParams {
    alignas(64) char w_map[128]; // [2, units, K] as {K, 4, 2, units / 4}, plain [units, K] as {K, 4, 2, units / 8}: boxes {64, 4, 2, TILE / 8}
    alignas(64) char x_map[128]; // [rows, K], boxes {64, COLUMNS}
    u16* out;                    // [rows, units]
    const float* squares_in;     // f32 [parts, COLUMNS], scales the product; null: none
    u32 rows;
    u32 units; // a multiple of 4
    u32 chunks;
    u32 tiles;
    float inverse_k;
    float eps;
    u32 parts; // sums of squares of a row
    u32 unused[5];
};

// What becomes of a tile's sums, by OF_OUTPUT.
#define GATED 0
#define GATED_APART 1
#define PLAIN 2 // out bf16 [rows, units], the product itself; a tile's rows of the weight in their order

#if OF_OUTPUT == PLAIN
// A thread has two neighbouring columns of every eight, of rows `top` and top + 8.
template <int TILE>
__device__ __forceinline__ void store_plain(const GateUpParams& p, const float (&acc)[TILE / 8][4], u32 tile, u32 top, u32 lane) {
    const bool odd = (lane & 1) != 0;
    const u32 first = tile * TILE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 row = top + 8 * half;
        const bool real = row < p.rows;
        u16* out = p.out + (u64)row * p.units + first;
        const auto pair = [&](int n) { return pack_bf16(acc[n][2 * half], acc[n][2 * half + 1]); };
#pragma unroll
        for (int n = 0; n + 1 < TILE / 8; n += 2) {
            // Of two eights a lane stores four columns of one.
            const u32 here = pair(n), next = pair(n + 1), other = __shfl_xor_sync(FULL_WARP, odd ? here : next, 1);
            const u32 column = n * 8 + (odd ? 8 : 0) + (lane & 2) * 2;
            if (real && first + column < p.units)
                *reinterpret_cast<uint2*>(out + column) = odd ? make_uint2(other, next) : make_uint2(here, other);
        }
        if constexpr (TILE / 8 % 2 == 1) {
            constexpr int LAST = TILE / 8 - 1;
            const u32 column = LAST * 8 + (lane & 3) * 2;
            if (real && first + column < p.units) *reinterpret_cast<u32*>(out + column) = pair(LAST);
        }
    }
}
#endif

template <int COLUMNS, int TILE, int W_SLOTS, int X_SLOTS>
struct GateUpMemory : BatchRings<COLUMNS, TILE, W_SLOTS, X_SLOTS, 0> {
    using Rings = BatchRings<COLUMNS, TILE, W_SLOTS, X_SLOTS, 0>;
    // Warps that copy alone. Beside four groups there are no registers for them: two threads of the groups copy then.
    static constexpr int COPIERS = Rings::GROUPS == 4 ? 0 : 2;
    static constexpr int THREADS = (Rings::CONSUMER_WARPS + COPIERS) * 32;
    static constexpr int BYTES = Rings::END;
};

// A thread that copies chunk after chunk of a block's tiles into a ring.
template <int SLOTS, int SLOT>
struct GateUpCopier {
    u32 ring, full, empty, tile, chunk, slot, parity;
    __device__ __forceinline__ GateUpCopier(u32 ring, u32 full, u32 empty) : ring(ring), full(full), empty(empty), tile(blockIdx.x), chunk(0), slot(0), parity(1) {}
    // `copy(to, chunk, tile, barrier)`; waits until the slot is free.
    template <class Copy>
    __device__ __forceinline__ void next(u32 chunks, Copy copy) {
        barrier_wait(empty + slot * 8, parity);
        barrier_expect(full + slot * 8, SLOT);
        copy(ring + slot * SLOT, chunk, tile, full + slot * 8);
        if (++chunk == chunks) chunk = 0, tile += gridDim.x;
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

template <int COLUMNS, int TILE, int W_SLOTS, int X_SLOTS, int W_FLYING>
__device__ __forceinline__ void gate_up(const GateUpParams& p, unsigned char* shared) {
    using Memory = GateUpMemory<COLUMNS, TILE, W_SLOTS, X_SLOTS>;
    constexpr u32 CONSUMER_WARPS = Memory::CONSUMER_WARPS;
    constexpr bool APART = Memory::COPIERS > 0;
    const u32 base = shared_address(shared);
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    pdl_release();

    if (threadIdx.x == 0) {
        fetch_map(p.w_map);
        fetch_map(p.x_map);
        init_rings<Memory, 1>(base);
        barrier_init_done();
    }
    __syncthreads();

    GateUpCopier<W_SLOTS, Memory::W_SLOT> w_copier(base, base + Memory::W_FULL, base + Memory::W_EMPTY);
    GateUpCopier<X_SLOTS, Memory::X_SLOT> x_copier(base + Memory::X, base + Memory::X_FULL, base + Memory::X_EMPTY);
    const u64 policy = evict_first();
    const auto copy_w = [&](u32 to, u32 chunk, u32 tile, u32 full) { copy_weights(to, p.w_map, chunk * 64, tile * (TILE / 8), full, policy); };
    const auto copy_x = [&](u32 to, u32 chunk, u32, u32 full) { copy_activations(to, p.x_map, chunk * 64, 0, full); };
    if (APART && warp == CONSUMER_WARPS) {
        u32 issued = 0, landed = 0, landed_parity = 0;
        while (lane == 0 && w_copier.tile < p.tiles) {
            if (issued++ >= W_FLYING) {
                barrier_wait(base + Memory::W_FULL + landed * 8, landed_parity);
                if (++landed == W_SLOTS) landed = 0, landed_parity ^= 1;
            }
            w_copier.next(p.chunks, copy_w);
        }
    } else if (APART && warp > CONSUMER_WARPS) {
        pdl_wait();
        while (lane == 0 && x_copier.tile < p.tiles) x_copier.next(p.chunks, copy_x);
    } else {
        const bool copies_w = !APART && threadIdx.x == 0, copies_x = !APART && threadIdx.x == 128;
        if (copies_w)
            for (u32 i = 0; i < W_SLOTS && w_copier.tile < p.tiles; ++i) w_copier.next(p.chunks, copy_w);
        pdl_wait();
        if (copies_x)
            for (u32 i = 0; i < X_SLOTS && x_copier.tile < p.tiles; ++i) x_copier.next(p.chunks, copy_x);

        // Lanes 0 and 1 of four end with products of one row, lanes 2 and 3 with those of the row 8 further on. 1 / its root
        // mean square from the sums that the kernel before left, half of them a lane.
        const bool upper = (lane & 2) != 0;
        const u32 group = warp >> 2, row = group * 64 + (warp & 3) * 16 + (lane >> 2) + (upper ? 8 : 0);
        float scale = 1.f;
        if (p.squares_in) {
            float sum = 0.f;
            if (row < p.rows)
#pragma unroll 20
                for (u32 i = lane & 1; i < p.parts; i += 2) sum += __ldcg(p.squares_in + i * COLUMNS + row);
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            scale = 1.f / sqrtf(sum * p.inverse_k + p.eps);
        }

        u32 w_slot = 0, w_parity = 0, x_slot = 0, x_parity = 0;
        float acc[TILE / 8][4];
        for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            u32 w_before = 0, x_before = 0;
#pragma unroll 1
            for (u32 i = 0; i < p.chunks; ++i) {
                barrier_wait(base + Memory::W_FULL + w_slot * 8, w_parity);
                barrier_wait(base + Memory::X_FULL + x_slot * 8, x_parity);
                const u64 a = operand(base + Memory::X + x_slot * Memory::X_SLOT + group * 8192);
                const u64 b = operand(base + w_slot * Memory::W_SLOT);
                fence_products();
#pragma unroll
                for (int k = 0; k < 4; ++k) multiply(acc, a + k * 2, b + k * 2, i > 0 || k > 0);
                commit_products();
                if (i > 0) {
                    wait_products<1>();
                    if (lane == 0) barrier_arrive_many(w_before, 1), barrier_arrive_many(x_before, 1);
                    if (copies_w && w_copier.tile < p.tiles) w_copier.next(p.chunks, copy_w);
                    if (copies_x && x_copier.tile < p.tiles) x_copier.next(p.chunks, copy_x);
                }
                w_before = base + Memory::W_EMPTY + w_slot * 8, x_before = base + Memory::X_EMPTY + x_slot * 8;
                if (++w_slot == W_SLOTS) w_slot = 0, w_parity ^= 1;
                if (++x_slot == X_SLOTS) x_slot = 0, x_parity ^= 1;
            }
            wait_products<0>();
            pin_registers(acc);
            if (lane == 0) barrier_arrive_many(w_before, 1), barrier_arrive_many(x_before, 1);
            if (copies_w && w_copier.tile < p.tiles) w_copier.next(p.chunks, copy_w);
            if (copies_x && x_copier.tile < p.tiles) x_copier.next(p.chunks, copy_x);

#if OF_OUTPUT == PLAIN
            store_plain<TILE>(p, acc, tile, group * 64 + (warp & 3) * 16 + (lane >> 2), lane);
#else
            // One of two lanes has the gates of this row, the other the ups. Each ends with two units of every four.
            const auto result = [&](int n) {
                const float x0 = __shfl_xor_sync(FULL_WARP, upper ? acc[n][0] : acc[n][2], 2);
                const float x1 = __shfl_xor_sync(FULL_WARP, upper ? acc[n][1] : acc[n][3], 2);
                const float g0 = upper ? x0 : acc[n][0], g1 = upper ? x1 : acc[n][1];
                const float u0 = upper ? acc[n][2] : x0, u1 = upper ? acc[n][3] : x1;
#if OF_OUTPUT == GATED_APART
                const auto rounded = [](float x) { return bf16_to_float(float_to_bf16(x)); };
                return pack_bf16(silu_precise(rounded(g0)) * rounded(u0), silu_precise(rounded(g1)) * rounded(u1));
#else
                return pack_bf16(silu(g0 * scale) * (u0 * scale), silu(g1 * scale) * (u1 * scale));
#endif
            };
            const bool odd = (lane & 1) != 0;
            const u32 first = tile * (TILE / 2);
            u16* out = p.out + (u64)row * p.units + first;
#pragma unroll
            for (int n = 0; n + 1 < TILE / 8; n += 2) {
                // Of two fours a lane stores one.
                const u32 here = result(n), next = result(n + 1), other = __shfl_xor_sync(FULL_WARP, odd ? here : next, 1);
                const u32 unit = n * 4 + (odd ? 4 : 0);
                if (row < p.rows && first + unit < p.units)
                    *reinterpret_cast<uint2*>(out + unit) = odd ? make_uint2(other, next) : make_uint2(here, other);
            }
            if constexpr (TILE / 8 % 2 == 1) {
                constexpr u32 LAST = TILE / 2 - 4;
                const u32 here = result(TILE / 8 - 1);
                if (row < p.rows && first + LAST < p.units) *reinterpret_cast<u32*>(out + LAST + (odd ? 2 : 0)) = here;
            }
#endif
        }
    }
}
