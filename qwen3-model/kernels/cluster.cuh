// Blocks of a cluster, compute capability 9.0: copies that arrive at several of them, and stores into each other's shared memory.
#pragma once
#include "wide_common.cuh"

__device__ __forceinline__ u32 block_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 at_block(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ void barrier_arrive_at(u32 there) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
// Stores to another block, which counts the bytes.
__device__ __forceinline__ void send(u32 there, const float (&v)[4], u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(there), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait_cluster(u32 at, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(at), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_rows(u32 to, const void* map, u32 k, u32 row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
// To the same place in all blocks of `mask`, whose barriers count.
__device__ __forceinline__ void copy_rows_to(u32 mask, u32 to, const void* map, u32 k, u32 row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5, %6;"
        ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier), "h"((u16)mask), "l"(policy) : "memory");
}
