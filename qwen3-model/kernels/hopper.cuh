// The instructions of a persistent kernel on Hopper and later: barriers in shared memory, the tensor
// memory accelerator, signals between blocks, and the matrix instructions.
#pragma once
#include "common.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_many(u32 at, u32 count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(at), "r"(parity) : "memory");
}
__device__ __forceinline__ bool barrier_reached(u32 at, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n" : "=r"(done) : "r"(at), "r"(parity) : "memory");
    return done != 0;
}
__device__ __forceinline__ void fetch_map(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_box3(u32 to, const void* map, u32 x, u32 y, u32 z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}
// Of what is read once, as weights are: it shall not drive activations and sums out of the L2 cache.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// The same box of what is read once.
__device__ __forceinline__ void copy_box3_once(u32 to, const void* map, u32 x, u32 y, u32 z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], "
        "[%5], %6;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(evict_first()) : "memory");
}
// Bytes that lie side by side, a multiple of 16, likewise.
__device__ __forceinline__ void copy_bytes_once(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(evict_first()) : "memory");
}
// Orders accesses of the threads before it, to global or to shared memory, with those of the copy engine after it. Without the
// name of a memory it would be a fence of the whole device besides, which waits for all copies of the multiprocessor.
__device__ __forceinline__ void fence_copy_engine() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void fence_copy_engine_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Makes what this thread wrote, or saw other threads of its block write before a barrier, visible to whoever sees the count.
__device__ __forceinline__ void signal(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
// Until the counter has reached `target`, counted with overflow.
__device__ __forceinline__ void wait_for(const u32* counter, u32 target) {
    u32 seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    while ((int)(seen - target) < 0);
}
// Reads what other blocks of the same launch wrote: past the L1 cache.
__device__ __forceinline__ float load_fresh(const float* p) {
    float value;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(p) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_fresh(const u32* p) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
// Words of 8 bytes that say themselves whether they are there: a value, and above it the number of the use for which it was
// written. They need no order among each other, and so no fence: whoever needs one asks for it until it bears the number.
__device__ __forceinline__ u64 word_of(u32 value, u32 use) { return (u64)use << 32 | value; }
__device__ __forceinline__ void store_word(u64* p, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(word) : "memory");
}
__device__ __forceinline__ void store_words(u64* p, u64 a, u64 b) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ void load_words(const u64* p, u64& a, u64& b) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
__device__ __forceinline__ u64 load_word(const u64* p) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(p) : "memory");
    return word;
}
// Such words of 4 bytes: a value of 16 bits and 16 bits of the number, never 0. What a word bore before is of the layer before.
__device__ __forceinline__ u32 tag_of(u32 use) { return use + 1 & 0xffff; }
__device__ __forceinline__ void store_word(u32* p, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
}
__device__ __forceinline__ void store_pair(u32* p, u32 a, u32 b) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void load_pair(const u32* p, u32& a, u32& b) {
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(p) : "memory");
}
__device__ __forceinline__ bool is_of(u64 word, u32 use) { return (u32)(word >> 32) == use; }

// Of memory that never changes, where it is written: the compiler does not put it off until the value is needed.
__device__ __forceinline__ float2 load_now(const float* p) {
    float2 v;
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
    return v;
}

__device__ __forceinline__ uint4 load_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared(u32 at, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

// Transposes a matrix of 8 by 8 values of 16 bits, a pair a lane.
__device__ __forceinline__ u32 transpose(u32 pair) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
    return r;
}
// 2^x with an error of 2 ulp; of -inf exactly 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ void load_matrix4(u32 at, u32 (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a[0], a[1], a[2], a[3], b0, b1); }
