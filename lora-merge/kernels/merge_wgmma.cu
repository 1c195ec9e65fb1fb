// The merge of merge.cu for higher ranks on Hopper (compute capability 9.0): products of warpgroups.
//
//   A warpgroup takes 64 rows x 128 columns at a time. Both factors lie in shared memory in panels of 64 ranks, as the tensor
//   cores read them: `right` for all rows of the block's item, 64 rows of `left` at a time. A warp's sums are those of
//   merge.cu's fragments, so that rounding, doubts and the order of columns are the same, and with them the bits.
//
//   of the tile       left ──▶ products ──────────▶ round, store, settle
//   of the one behind                    left ──▶                       W0 ──▶
//
// Each tile's factors come while the one before is rounded, its W0 during its products; other warpgroups fill what waits.
//
// Elements that f64 must decide would hold up a warp, and with it the three others of its products: they go to a list, which
// `settle_doubts` works off afterwards. Only when it is full are they computed here.

#include "merge_tile.cuh"

#define MOST_GROUPS 3

// Descriptor of an operand: rows of 128 bytes, swizzled, groups of 8 rows 1,024 bytes apart.
__device__ __forceinline__ u64 operand(const void* shared) {
  u64 start = ((u32)__cvta_generic_to_shared(shared) & 0x3ffff) >> 4;
  return start | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void group_sync(u32 group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
// The registers are not used before the products are there.
__device__ __forceinline__ void wait_products(float (&d)[FRAGMENTS][4]) {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int n = 0; n < FRAGMENTS; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
}

#define SUMS(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
// 64 x 128 sums += a b, 16 ranks.
__device__ __forceinline__ void multiply_group(float (&d)[FRAGMENTS][4], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
      "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, 1, 1, 1, 0, 0;"
      : SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5), SUMS(6), SUMS(7), SUMS(8), SUMS(9), SUMS(10), SUMS(11), SUMS(12),
        SUMS(13), SUMS(14), SUMS(15)
      : "l"(a), "l"(b)
      : "memory");
}
#undef SUMS

template <bool SPLIT>
__device__ __forceinline__ void merge_groups(const Params& p) {
  constexpr u32 PARTS = SPLIT ? 2 : 1;
  extern __shared__ __align__(1024) uint4 shared[];
  Item item = find_item(p, PARTS);
  const u32 steps = item.steps, panels = item.matrix->panels, groups = blockDim.x / 128;
  const u32 group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x & 31, g = lane >> 2;
  // Places are as large as the launch's highest rank needs. Panels begin at multiples of 1,024 bytes.
  uint4* right = shared;
  uint4* left = shared + p.right_bytes / 16 + group * (p.right_bytes / 32);
  uint4* w0 = shared + p.right_bytes / 16 + groups * (p.right_bytes / 32) + (group * 4 + warp) * W0_PLACES;
  float* norms = (float*)(shared + p.right_bytes / 16 + groups * (p.right_bytes / 32 + 4 * W0_PLACES));
  u32* gathered = (u32*)(norms + TILE_COLUMNS) + (threadIdx.x / 32) * GATHERED;
  const u32 column_tile = item.column0 / TILE_COLUMNS;
  item.right = item.matrix->right + (size_t)column_tile * PARTS * panels * COLUMN_PLACES;

  auto load_left = [&](u32 tile) {
    if (tile < item.last_tile) {
      const u32 places = PARTS * panels * GROUP_PLACES;
      const uint4* from = item.left + (size_t)(tile / 4) * places;
      for (u32 i = threadIdx.x % 128; i < places; i += 128) copy_16_async(left + i, from + i, true);
    }
    commit_copies();
  };
  auto load_base = [&](u32 tile) {
    if (tile < item.last_tile) load_w0(item, tile + warp, w0);
    commit_copies();
  };

  u32 tile = item.first_tile + group * 4;
  load_columns(item, norms, right, PARTS * panels * COLUMN_PLACES);
  load_left(tile);
  load_base(tile);
  wait_copies<1>();
  fence_async_proxy();
  __syncthreads();  // `right` and the norms are there

  const u64 a_high = operand(left), a_low = a_high + panels * GROUP_PLACES;
  const u64 b_high = operand(right), b_low = b_high + panels * COLUMN_PLACES;
  auto a_step = [](u32 step) { return step / PANEL_STEPS * GROUP_PLACES + step % PANEL_STEPS * 2; };
  auto b_step = [](u32 step) { return step / PANEL_STEPS * COLUMN_PLACES + step % PANEL_STEPS * 2; };

  Found found;
  while (tile < item.last_tile) {
    const u32 next = tile + groups * 4, mine = tile + warp;
    float2 factors[2];
    load_factors(item, mine, g, factors);
    wait_copies<1>();  // `left`
    fence_async_proxy();
    group_sync(group);
    float sums[FRAGMENTS][4];
    clear(sums);
    fence_products();
    if (SPLIT)
#pragma unroll 1
      for (u32 step = 0; step < steps; ++step) {
        multiply_group(sums, a_low + a_step(step), b_high + b_step(step));
        multiply_group(sums, a_high + a_step(step), b_low + b_step(step));
      }
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step)
      multiply_group(sums, a_high + a_step(step), b_high + b_step(step));
    wait_products(sums);
    group_sync(group);  // nobody reads `left` any more
    load_left(next);
    wait_copies<1>();  // W0
    __syncwarp();
    u32 doubts[2] = {0, 0};
    round_columns<false, 0, 4>(item, mine, sums, factors, norms, w0, doubts, found);
    gather(item, mine, doubts, gathered, p.doubts, found);
    __syncwarp();
    load_base(next);
    tile = next;
  }
  if (found.waiting) hand_over(item, gathered, p.doubts, found);
  report(item, gathered, found);
}

extern "C" __global__ void __launch_bounds__(128 * MOST_GROUPS, 1) merge_wgmma_split(const __grid_constant__ Params p) {
  merge_groups<true>(p);
}

extern "C" __global__ void __launch_bounds__(128 * MOST_GROUPS, 1) merge_wgmma_whole(const __grid_constant__ Params p) {
  merge_groups<false>(p);
}

// The listed elements, four lanes each.
extern "C" __global__ void __launch_bounds__(256, 3) settle_doubts(const __grid_constant__ Params p) {
  const u32 n = min(p.doubts->count, p.doubts->capacity), t = threadIdx.x & 3;
  // All lanes of a warp go on for as long as one of them has an element.
  for (u32 first = blockIdx.x * 64 + (threadIdx.x >> 5) * 8; first < n; first += gridDim.x * 64) {
    const u32 at = first + ((threadIdx.x & 31) >> 2);
    const u64 entry = p.doubts->entries[min(at, n - 1)];
    const u32 index = (u32)(entry >> 50), row = (u32)(entry >> 25) & 0x1ffffff, column = (u32)entry & 0x1ffffff;
    const Matrix* m = &p.matrices[index];
    const u64 place = (u64)row * m->columns + column;
    const u16 old = __ldg(m->w0 + place);
    u16 value = exact(m, row, column, bits_to_float((u32)old << 16));
    if (at < n && t == 0) {
      Report* report = &p.reports[index];
      if (!is_finite(value)) value = not_finite(m, report, row, column, value);
      if (value != old && report->differs == 0) report->differs = 1;
      m->out[place] = value;
    }
  }
}
