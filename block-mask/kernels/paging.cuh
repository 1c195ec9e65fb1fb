// Where a token's key and value lie.
//
//   cache of a layer  [kv_heads, n_pages * page_size, HEAD_DIM]
//   page table        [n_slots, max_pages], -1 = no page; row 0 is all 0
//
// A granule is 16 consecutive tokens: it never crosses a page (16 divides every page size), so one look-up serves it.
#pragma once
#include "bf16.cuh"

constexpr int GRANULE = 16;

struct Paging {
  const int* table;
  i64 head_stride;  // elements between KV heads: n_pages * page_size * HEAD_DIM
  int max_pages;
  int page_shift;   // log2(page_size)
};

__device__ __forceinline__ int page_of(const Paging& p, int slot, int token) {
  return __ldg(p.table + (i64)slot * p.max_pages + (token >> p.page_shift));
}

// Element offset of `token`, which lies in `page`, from the start of the layer's K or V.
__device__ __forceinline__ i64 token_offset(const Paging& p, int kv_head, int page, int token) {
  i64 physical = ((i64)page << p.page_shift) | (i64)(token & ((1 << p.page_shift) - 1));
  return (i64)kv_head * p.head_stride + physical * HEAD_DIM;
}
