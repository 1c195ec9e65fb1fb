// Copies from global to shared memory that run behind the arithmetic, loads past the first-level cache, and barriers.
#pragma once
#include "bf16.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes; with `read` false nothing is read and zeros are written.
__device__ __forceinline__ void copy_16_async(u32 shared, const void* global, bool read) {
  int bytes = read ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// As copy_16_async, of what is read once: the second-level cache gives it up before anything else.
__device__ __forceinline__ void copy_16_async_once(u32 shared, const void* global, bool read) {
  int bytes = read ? 16 : 0;
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global), "r"(bytes), "l"(policy) : "memory");
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

// Until the kernels ahead in the stream have ended, where this one was launched before: nothing that they write may be read, and
// nothing that they read be written, before.
__device__ __forceinline__ void wait_for_kernels_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 16 bytes of which each word says itself whether it was stored: one that was not yet is ABSENT. So who reads them needs no fence and
// no count, and who stores them waits for nothing.
constexpr u32 ABSENT = 0xffffffffu;

__device__ __forceinline__ uint4 load_words(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_words(void* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ bool absent(const uint4& v) { return v.x == ABSENT || v.y == ABSENT || v.z == ABSENT || v.w == ABSENT; }

// Loads that see what other blocks of this launch wrote before a fence (the first-level cache is not coherent).
__device__ __forceinline__ float4 load_coherent(const float4* p) { return __ldcg(p); }
__device__ __forceinline__ float2 load_coherent(const float2* p) { return __ldcg(p); }
