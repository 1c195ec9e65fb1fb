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

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
