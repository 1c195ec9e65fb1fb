// The rings of weights and activations of a block whose cluster shares what it fetches, for products with the batch as the 64-row
// operand of the tensor cores. Two blocks may have the same tile of the weight, each with its own batch rows: each fetches half of it
// for both, and a slot is fetched anew when the warps of both are done with it.
#pragma once
#include "cluster.cuh"

// By one thread: chunks of 64 columns from `first` on, of the rows from `row` on that this block fetches, the part `part` of a slot, for
// the blocks of `mask`. At most W_FLYING of its own slots are on their way at once: more make everything else wait behind them.
template <class Rings, int BLOCKS, int W_FLYING>
__device__ __forceinline__ void copy_weight_chunks(u32 base, const void* map, u32 first, u32 n_chunks, u32 row, u32 part, u32 mask) {
    static_assert(BLOCKS <= 2 && W_FLYING <= Rings::W_SLOTS, "halves, and slots that have landed in order");
    const u64 policy = evict_first();
    u32 slot = 0, parity = 1, landed = 0, landed_parity = 0;
    for (u32 i = 0; i < n_chunks; ++i) {
        if (i >= W_FLYING) {
            barrier_wait(base + Rings::W_FULL + landed * 8, landed_parity);
            if (++landed == Rings::W_SLOTS) landed = 0, landed_parity ^= 1;
        }
        const u32 to = base + slot * Rings::W_SLOT, full = base + Rings::W_FULL + slot * 8;
        barrier_wait(base + Rings::W_EMPTY + slot * 8, parity);
        barrier_expect(full, Rings::W_SLOT);
        if constexpr (BLOCKS == 1) copy_rows(to, map, (first + i) * 64, row, full, policy);
        else copy_rows_to(mask, to + part * (Rings::W_SLOT / BLOCKS), map, (first + i) * 64, row, full, policy);
        if (++slot == Rings::W_SLOTS) slot = 0, parity ^= 1;
    }
}

// Likewise, all of a slot for this block.
template <class Rings>
__device__ __forceinline__ void copy_activation_chunks(u32 base, const void* map, u32 first, u32 n_chunks, u32 row) {
    u32 slot = 0, parity = 1;
    for (u32 i = 0; i < n_chunks; ++i) {
        const u32 to = base + Rings::X + slot * Rings::X_SLOT, full = base + Rings::X_FULL + slot * 8;
        barrier_wait(base + Rings::X_EMPTY + slot * 8, parity);
        barrier_expect(full, Rings::X_SLOT);
        copy_activations(to, map, (first + i) * 64, row, full);
        if (++slot == Rings::X_SLOTS) slot = 0, parity ^= 1;
    }
}

// By the warps that multiply: sums over all chunks, whose last products are still on their way. `other_empty`: the barriers of
// free slots in the other block that shares weights.
template <class Rings, int BLOCKS>
__device__ __forceinline__ void multiply_chunks(float (&acc)[Rings::TILES][4], u32 base, u32 group, u32 lane, u32 n_chunks, u32 other_empty) {
    u32 w_slot = 0, w_parity = 0, x_slot = 0, x_parity = 0, w_before = 0, x_before = 0;
#pragma unroll 1
    for (u32 i = 0; i < n_chunks; ++i) {
        barrier_wait(base + Rings::W_FULL + w_slot * 8, w_parity);
        barrier_wait(base + Rings::X_FULL + x_slot * 8, x_parity);
        const u64 a = operand(base + Rings::X + x_slot * Rings::X_SLOT + group * 8192);
        const u64 b = operand(base + w_slot * Rings::W_SLOT);
        fence_products();
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply(acc, a + k * 2, b + k * 2, i > 0 || k > 0);
        commit_products();
        if (i > 0) {
            wait_products<1>();
            if (lane == 0) {
                barrier_arrive_many(base + Rings::W_EMPTY + w_before, 1);
                if constexpr (BLOCKS == 2) barrier_arrive_at(other_empty + w_before);
                barrier_arrive_many(base + Rings::X_EMPTY + x_before, 1);
            }
        }
        w_before = w_slot * 8, x_before = x_slot * 8;
        if (++w_slot == Rings::W_SLOTS) w_slot = 0, w_parity ^= 1;
        if (++x_slot == Rings::X_SLOTS) x_slot = 0, x_parity ^= 1;
    }
}
