// Shared by every kernel of this crate: bf16 arithmetic without external headers (NVRTC's wheel
// ships none), reductions whose order never depends on timing, and the two instructions of
// programmatic dependent launch.
//
// bf16 values travel as raw 16-bit words. A pair is one 32-bit word with the lower index in the
// lower half, which is how two neighbours in memory look to a little-endian 32-bit load.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL_WARP 0xffffffffu

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float bf16_to_float(u16 value) {
    return __uint_as_float((u32)value << 16);
}

// Round to nearest even; NaN stays NaN.
__device__ __forceinline__ u16 float_to_bf16(float value) {
    u16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

// x / (1 + exp(-x)). exp(-x) overflows to infinity for x < -88: x / infinity is then -0, as it should be.
__device__ __forceinline__ float silu_precise(float x) { return x / (1.f + expf(-x)); }
// The same in fewer instructions, less exact.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// A kernel launched with programmatic dependent launch starts while its predecessor still runs.
// Nothing written by earlier kernels may be read, and nothing they read may be written, before
// pdl_wait(). Both are no-ops for an ordinary launch and on devices before compute capability 9.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Butterfly sums: every lane ends with the same bits.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

// Sum over a block of WARPS warps. `scratch` holds WARPS floats and may be reused after the next
// barrier only. Every thread ends with the same bits.
template <int WARPS>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += scratch[warp];
    return total;
}

// A candidate for the largest value. The lower index wins a tie, so the order in which candidates
// meet does not matter. NaN never wins.
struct Best {
    float value;
    u32 index;
};
__device__ __forceinline__ Best better(Best a, Best b) {
    bool take_b = b.value > a.value || (b.value == a.value && b.index < a.index);
    return take_b ? b : a;
}
__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        Best other;
        other.value = __shfl_xor_sync(FULL_WARP, best.value, offset);
        other.index = __shfl_xor_sync(FULL_WARP, best.index, offset);
        best = better(best, other);
    }
    return best;
}

// The best of a block of WARPS warps, which every thread gets. `bests` holds one for each warp and may be reused after the next
// barrier only.
template <int WARPS>
__device__ __forceinline__ Best block_best(Best best, Best* bests) {
    best = warp_best(best);
    if ((threadIdx.x & 31) == 0) bests[threadIdx.x >> 5] = best;
    __syncthreads();
    best = bests[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) best = better(best, bests[warp]);
    return best;
}

// d += a · b, bf16 in, f32 sums: 16 rows of a, 8 columns of b, 16 deep. Lane (g = lane / 4, t = lane % 4) has of a columns 2 t of
// rows g and g + 8, then columns 2 t + 8 of both.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
