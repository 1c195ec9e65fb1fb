// What the products of decode steps of many rows share: how weights and activations come into shared memory.
#pragma once
#include "hopper.cuh"
#include "wgmma.cuh"

// The box of 64 columns from `k`, 8 groups of 2 · 8 rows from `group`.
__device__ __forceinline__ void copy_weights(u32 to, const void* map, u32 k, u32 group, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;"
        ::"r"(to), "l"(map), "r"(k), "r"(0), "r"(group), "r"(barrier), "l"(policy) : "memory");
}
// The box of 64 columns from `k`, batch rows from `row` on: to this block alone, of what is read again.
__device__ __forceinline__ void copy_activations(u32 to, const void* map, u32 k, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

// The rings of a block for products with the batch as the 64-row operand of the tensor cores, 64 rows a warpgroup. A slot has 64
// columns, a barrier that it is full, and one that it is free. COLUMNS: batch rows of a block. SUMS: bytes that take the rings'
// place when products are done.
template <int COLUMNS, int TILE, int W_SLOTS_, int X_SLOTS_, int SUMS>
struct BatchRings {
    static constexpr int W_SLOTS = W_SLOTS_, X_SLOTS = X_SLOTS_, TILES = TILE / 8;
    static constexpr int GROUPS = (COLUMNS + 63) / 64;
    static constexpr int CONSUMER_WARPS = GROUPS * 4;
    static constexpr int W_SLOT = TILE * 128;
    static constexpr int X_SLOT = COLUMNS * 128;
    static constexpr int X = W_SLOTS * W_SLOT;
    // The last group may read past the last slot: what it multiplies there belongs to no row.
    static constexpr int RINGS = X + X_SLOTS * X_SLOT + (GROUPS * 64 - COLUMNS) * 128;
    static constexpr int W_FULL = RINGS > SUMS ? RINGS : SUMS;
    static constexpr int W_EMPTY = W_FULL + W_SLOTS * 8;
    static constexpr int X_FULL = W_EMPTY + W_SLOTS * 8;
    static constexpr int X_EMPTY = X_FULL + X_SLOTS * 8;
    static constexpr int END = X_EMPTY + X_SLOTS * 8;
};

// By one thread. BLOCKS: those that share weights.
template <class Rings, int BLOCKS>
__device__ __forceinline__ void init_rings(u32 base) {
    for (u32 i = 0; i < Rings::W_SLOTS; ++i) {
        barrier_init(base + Rings::W_FULL + i * 8, 1);
        barrier_init(base + Rings::W_EMPTY + i * 8, Rings::CONSUMER_WARPS * BLOCKS);
    }
    for (u32 i = 0; i < Rings::X_SLOTS; ++i) {
        barrier_init(base + Rings::X_FULL + i * 8, 1);
        barrier_init(base + Rings::X_EMPTY + i * 8, Rings::CONSUMER_WARPS);
    }
}
