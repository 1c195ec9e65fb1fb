#pragma once
// What the merge kernels need of the hardware beyond C++: compute capability 8.0 or higher.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ float bits_to_float(u32 bits) { return __uint_as_float(bits); }

// Two values rounded to nearest even, the first in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float2 unpack_f16(u32 pair) {
  float2 values;
  asm("{.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(pair));
  return values;
}

// x - y for two pairs of bf16: zero bits exactly where both are finite and equal.
__device__ __forceinline__ u32 subtract_bf16(u32 x, u32 y) {
  u32 difference;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(y), "r"(0xbf80bf80u), "r"(x));
  return difference;
}

// c += a * b, 16 x 8 x 16, operands f16, sums f32.
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Copies 16 bytes, or writes zeros and does not read.
__device__ __forceinline__ void copy_16_async(void* shared, const void* global, bool read) {
  int bytes = read ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of copies but the last N.
template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// For data that nobody reads again soon.
__device__ __forceinline__ void store_streaming(uint4* to, const uint4& value) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
