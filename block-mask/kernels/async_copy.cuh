// Copies from global to shared memory that run behind the arithmetic, loads past the first-level cache, and barriers.
#pragma once
#include "bf16.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes; with `read` false nothing is read and zeros are written.
__device__ __forceinline__ void copy_16_async(u32 shared, const void* global, bool read) {
  int bytes = read ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of this thread's most recent groups are still running.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Barrier `id` (1..15; 0 is __syncthreads) among `threads` threads, so that some warps of a block can form a stage.
__device__ __forceinline__ void stage_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Adds 1 to a counter and returns what it was. What this thread wrote, or saw another thread of its block write before a
// barrier, is visible to whoever reads the larger count and then fences.
__device__ __forceinline__ u32 arrive_release(u32* count) {
  u32 before;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}

// The count as it is now; what was released before it is seen after a fence.
__device__ __forceinline__ u32 load_relaxed(const u32* count) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
}

__device__ __forceinline__ void fence_acquire() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Loads that see what other blocks of this launch wrote before a fence (the first-level cache is not coherent).
__device__ __forceinline__ float4 load_coherent(const float4* p) { return __ldcg(p); }
__device__ __forceinline__ float2 load_coherent(const float2* p) { return __ldcg(p); }
