// Matrix products of a warpgroup (four warps), compute capability 9.0 alone. They run behind the threads' other work and
// read both operands from shared memory, k contiguous, in panels of 64 columns: rows of 128 bytes, the 16-byte pieces of
// row r exchanged by (piece ^ r & 7), as the copy engine writes them with a swizzle of 128 bytes. A panel begins at a
// multiple of 1,024 bytes.
//
//   d (64 x 8 TILES, f32)   lane (g = lane / 4, t = lane % 4) of warp w holds in d[n][0..1] row 16 w + g, columns
//                           8 n + 2 t and the next, and in d[n][2..3] row 16 w + g + 8
//
// The registers of d must not be touched between a product and the `wait_products` that covers it.
#pragma once
#include "common.cuh"

// Of rows in groups of 8, which are 1,024 bytes apart. A step of 16 along k adds 2.
__device__ __forceinline__ u64 operand(u32 shared_address) {
    return (u64)((shared_address & 0x3ffff) >> 4) | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `PENDING` of the most recent groups are still running.
template <int PENDING>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of these registers across.
template <int TILES>
__device__ __forceinline__ void pin_registers(float (&d)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
}

// d = a · b^T, or d += a · b^T, 16 deep: `multiply(d, a, b, accumulate)`, for the number of tiles that a kernel is compiled for.
#include "wgmma_product.cuh"
