// Tensor-core instructions of sm_80 and newer: one warp, operands in registers.
//
// Fragment layouts, with g = lane / 4 and t = lane % 4:
//   A (16 x 16): a0 = (g, 2t..2t+1)  a1 = (g+8, 2t..)  a2 = (g, 2t+8..)  a3 = (g+8, 2t+8..)
//   B (16 x 8):  b0 = (2t..2t+1, g)  b1 = (2t+8.., g)
//   C (16 x 8):  c0, c1 = (g, 2t..2t+1)  c2, c3 = (g+8, 2t..)
#pragma once
#include "bf16.cuh"

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit values; lane i gives the shared address of row i % 8 of matrix i / 8.
// Matrix j arrives in r[j]: row lane / 4, columns 2 (lane % 4) and the next.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

// The same with each matrix transposed on the way.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit values held by the warp, one pair a lane.
__device__ __forceinline__ u32 transpose_matrix(u32 pair) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
