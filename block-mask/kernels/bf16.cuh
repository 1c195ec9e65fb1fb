// Scalar types and conversions. No header of the toolkit is needed: NVRTC from PyPI ships none.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Storage of a bfloat16; arithmetic is done in f32.
struct bf16 {
  unsigned short bits;
};

// Two f32 rounded to nearest even, `lo` in the low half: the order in which a pair lies in memory.
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// 2^x with 2 ulp error; 2^-inf is exactly 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// x * y, rounded: never joined with a following addition into one rounding. The compiler decides on such a join for each
// unrolled copy of a statement anew; where it may not choose, the same numbers give the same bits in every lane and tile.
__device__ __forceinline__ float product(float x, float y) { return __fmul_rn(x, y); }

#define NEG_INFINITY __uint_as_float(0xff800000u)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
