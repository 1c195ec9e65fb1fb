// Matrix products of a warpgroup (four warps), compute capability 9.0 alone: they run behind the threads' other work and read
// their operands from shared memory.
//
//   D (64 x N, f32)   registers of lane (g = lane / 4, t = lane % 4) of warp w: d[n][0..1] = row 16 w + g, columns 8 n + 2 t
//                     and the next; d[n][2..3] = row 16 w + g + 8
//   A (64 x 16)       in registers laid out as two column tiles of D: a[0..3] = rows g, g + 8, g, g + 8 of columns 2 t, 2 t,
//                     2 t + 8, 2 t + 8; or in shared memory, k contiguous
//   B (16 x N)        in shared memory, k contiguous (rows of n) or n contiguous (rows of k)
//
// In shared memory a tile is cut into panels of 64 columns. The rows of a panel are 128 bytes, its 16-byte chunks swizzled:
// chunk c of row r lies at  r * 128 + ((c ^ (r & 7)) * 16)  from the panel, which begins at a multiple of 1,024 bytes. This is
// what the tensor memory accelerator writes with Swizzle::Bytes128.
//
// Registers of an operand must not be touched between the product and the `wait_products` that covers it.
#pragma once
#include "bf16.cuh"

constexpr int PANEL_COLUMNS = 64;
constexpr int PANEL_ROW_BYTES = 128;

__device__ __forceinline__ u32 panel_offset(int row, int chunk) {
  return (u32)(row * PANEL_ROW_BYTES + ((chunk ^ (row & 7)) << 4));
}

// Descriptor of an operand at a shared address. Groups of 8 rows are 1,024 bytes apart. `panel_bytes`: between panels, used
// where n is contiguous and has more than one.
__device__ __forceinline__ u64 operand_descriptor(u32 shared_address, u32 panel_bytes) {
  const u64 start = (shared_address & 0x3ffff) >> 4, panels = panel_bytes >> 4, groups = 1024 >> 4, swizzle_128 = 1;
  return start | panels << 16 | groups << 32 | swizzle_128 << 62;
}

// Before the first product, and after ordinary code has written registers of an operand.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `PENDING` of the most recent groups are still running.
template <int PENDING>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of these registers across.
template <int N_TILES>
__device__ __forceinline__ void pin_registers(float (&d)[N_TILES][4]) {
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[n][i])::"memory");
}

#define D_TILE(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define D_TILES_8(n) \
  D_TILE(n), D_TILE(n + 1), D_TILE(n + 2), D_TILE(n + 3), D_TILE(n + 4), D_TILE(n + 5), D_TILE(n + 6), D_TILE(n + 7)

// The same in the instruction: the first 32 registers, and the next.
#define REGISTERS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// D = A B, or D += A B; A from shared memory, B with k contiguous.
template <int N_TILES>
__device__ __forceinline__ void multiply_shared(float (&d)[N_TILES][4], u64 a, u64 b, bool accumulate) {
  static_assert(N_TILES == 8 || N_TILES == 16, "64 or 128 columns");
  if constexpr (N_TILES == 16) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{" REGISTERS_32 ", " REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0;\n"
        "}"
        : D_TILES_8(0), D_TILES_8(8)
        : "l"(a), "l"(b), "r"((int)accumulate)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{" REGISTERS_32 "}, %32, %33, p, 1, 1, 0, 0;\n"
        "}"
        : D_TILES_8(0)
        : "l"(a), "l"(b), "r"((int)accumulate)
        : "memory");
  }
}

// D = A B, or D += A B; A from registers, B with n contiguous.
template <int N_TILES>
__device__ __forceinline__ void multiply_registers(float (&d)[N_TILES][4], const u32 (&a)[4], u64 b, bool accumulate) {
  static_assert(N_TILES == 8 || N_TILES == 16, "64 or 128 columns");
  if constexpr (N_TILES == 16) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{" REGISTERS_32 ", " REGISTERS_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
        "}"
        : D_TILES_8(0), D_TILES_8(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{" REGISTERS_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"
        "}"
        : D_TILES_8(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate)
        : "memory");
  }
}

#undef D_TILE
#undef D_TILES_8
#undef REGISTERS_32
#undef REGISTERS_64

// The registers of a thread from here on; a kernel with launch bounds gives some warpgroups more and others less.
template <int COUNT>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
