// One line of PTX each: what the persistent decode kernel needs of Hopper (sm_90a and newer), with no external header.
// Addresses named `s…` are 32-bit shared-memory addresses (`.shared::cta`, or `.shared::cluster` where said).
#pragma once
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
struct bf16 { u16 bits; };
struct alignas(64) TensorMap { char opaque[128]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
// Two floats to a bf16 pair, round to nearest even; `low` goes to the lower half (the lower address).
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}
__device__ __forceinline__ float exp2_fast(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

// --- mbarriers ---------------------------------------------------------------------------------------------------
__device__ __forceinline__ void barrier_init(u32 s, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(s), "r"(count) : "memory"); }
__device__ __forceinline__ void barrier_arrive(u32 s) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(s) : "memory"); }
__device__ __forceinline__ void barrier_arrive_many(u32 s, u32 n) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(s), "r"(n) : "memory"); }
__device__ __forceinline__ void barrier_expect(u32 s, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(s), "r"(bytes) : "memory"); }
__device__ __forceinline__ void barrier_wait(u32 s, u32 parity) {
  asm volatile("{\n.reg .pred p;\nWAIT%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE%=;\nbra WAIT%=;\nDONE%=:\n}" ::"r"(s), "r"(parity) : "memory");
}
// As above, but acquires what other blocks of the cluster released on this barrier.
__device__ __forceinline__ void barrier_wait_cluster(u32 s, u32 parity) {
  asm volatile("{\n.reg .pred p;\nWAIT%=:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra DONE%=;\nbra WAIT%=;\nDONE%=:\n}" ::"r"(s), "r"(parity) : "memory");
}
// The address of `s` in the block `rank` of this cluster.
__device__ __forceinline__ u32 cluster_address(u32 s, u32 rank) { u32 r; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(s), "r"(rank)); return r; }
__device__ __forceinline__ void barrier_arrive_cluster(u32 s) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(s) : "memory"); }
__device__ __forceinline__ void store_cluster(u32 s, float a, float b) { asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(s), "f"(a), "f"(b) : "memory"); }
// A store into another block's shared memory that reports its 8 bytes to that block's `barrier` when it has landed.
__device__ __forceinline__ void store_cluster_async(u32 s, float a, float b, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(s), "f"(a), "f"(b), "r"(barrier) : "memory");
}
__device__ __forceinline__ void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// --- bulk copies and the proxies ----------------------------------------------------------------------------------
__device__ __forceinline__ void copy_box(u32 s, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(s), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_box3(u32 s, const TensorMap* map, int x, int y, int z, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(s), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- device-wide counters -----------------------------------------------------------------------------------------
__device__ __forceinline__ void signal(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
__device__ __forceinline__ void wait_for(const u32* counter, u32 target) {
#if NO_SYNC
  return;
#endif
  u32 v; do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory"); } while (v < target);
}
// Loads that see what other multiprocessors wrote during this kernel (never through L1).
__device__ __forceinline__ u32 load_fresh(const void* p) { u32 v; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ float load_fresh(const float* p) { float v; asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ uint2 load_fresh2(const void* p) { uint2 v; asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ float4 load_fresh4(const float* p) { float4 v; asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory"); return v; }

// --- tensor cores -------------------------------------------------------------------------------------------------
__device__ __forceinline__ void load_matrix4(u32 s, u32* r) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(s)); }
__device__ __forceinline__ void load_matrix2(u32 s, u32* r) { asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(s)); }
__device__ __forceinline__ void load_matrix4_transposed(u32 s, u32* r) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(s)); }
__device__ __forceinline__ u32 transpose8x8(u32 a) { u32 r; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a)); return r; }
// c[16x8] += a[16x16] · b[16x8]
__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The byte offset of 16-byte piece `piece` of row `row` in a tile of 128-byte rows that the copy engine wrote with the
// 128-byte swizzle.
__device__ __forceinline__ u32 swizzled(u32 row, u32 piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
