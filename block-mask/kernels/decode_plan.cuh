// The work list of decode attention, made on the device once per step and read by every layer.
//
//   row  slot  length           items (row, split)
//    0    3     300   ────▶   (0, tokens 0..128) (0, 128..256) (0, 256..300)
//    1    1      40   ────▶   (1, 0..40)
//    2    0       -   ────▶   (2, empty): writes zeros, reads nothing
//
// A row is cut into splits of `min_split << class` tokens with the smallest class that needs at most `max_splits`: the
// cut depends on the row's own length and `min_split` only, so a row's sum has the same order beside any other rows.
// Long items come first, which evens out the blocks that take them in turn: classes from the longest on, of each class the
// whole splits, then the rests of rows in REST_BINS bins.
#pragma once
#include "bf16.cuh"

struct DecodeItem {
  int row, slot;
  int start, end;     // tokens of this split, start a multiple of 16
  int split, splits;  // which of how many splits of the row
  int first;          // tokens before it are outside the window
  int position;       // logical position of the query: length - 1
};

struct DecodePlanParams {
  const int* slots;    // [rows]
  const int* lengths;  // [rows], tokens visible to the row minus `length_offset`
  DecodeItem* items;   // [rows * max_splits]
  int* n_items;        // [1]
  int rows, n_slots;
  int max_length;      // max_pages * page_size
  int length_offset;   // 1 when `lengths` holds the position of the row's newest token
  int min_split;       // a multiple of 16
  int max_splits, n_classes;
  int window;          // 0 = none; else a query at p sees p - window < kv
};

constexpr int PLAN_THREADS = 256;
constexpr int REST_BINS = 4;

struct DecodeRow {
  int slot, length, first, start, split_class, splits;
};

__device__ __forceinline__ DecodeRow decode_row(const DecodePlanParams& p, int row) {
  DecodeRow r;
  r.slot = p.slots[row];
  r.length = p.lengths[row] + p.length_offset;
  if (r.slot <= 0 || r.slot >= p.n_slots || r.length < 0) {  // a padded row
    r.slot = 0;
    r.length = 0;
  }
  if (r.length > p.max_length) r.length = p.max_length;
  r.first = p.window > 0 && r.length > p.window ? r.length - p.window : 0;
  r.start = r.first & ~15;
  r.split_class = 0;
  int n = r.length - r.start, split = p.min_split;
  while (r.split_class + 1 < p.n_classes && (n + split - 1) / split > p.max_splits) {
    split *= 2;
    r.split_class++;
  }
  r.splits = n > 0 ? (n + split - 1) / split : 1;
  if (r.splits > p.max_splits) r.splits = p.max_splits;  // cannot happen with the host's n_classes
  return r;
}

// One block of PLAN_THREADS threads.
__device__ __forceinline__ void decode_plan_stage(const DecodePlanParams& p, int* shared /* PLAN_THREADS / 32 + 1 */) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int base = 0;
  // Read once; rows past the first PLAN_THREADS are read in every pass.
  DecodeRow first_row;
  if (thread < p.rows) first_row = decode_row(p, thread);
  for (int pass = 0; pass < p.n_classes * (1 + REST_BINS); pass++) {
    const int c = p.n_classes - 1 - pass / (1 + REST_BINS), bin = pass % (1 + REST_BINS);  // bin 0: whole splits
    const int split = p.min_split << c;
    for (int row0 = 0; row0 < p.rows; row0 += PLAN_THREADS) {
      const int row = row0 + thread;
      DecodeRow r;
      int n = 0, from = 0;  // items of this pass: splits from .. from + n of the row
      if (row < p.rows) {
        r = row0 == 0 ? first_row : decode_row(p, row);
        if (r.split_class == c) {
          const int tokens = r.length - r.start, whole = tokens / split;
          const int rest_bin = REST_BINS - tokens % split * REST_BINS / split;
          if (bin == 0) n = whole < r.splits ? whole : r.splits;
          else if (bin == rest_bin && whole < r.splits) n = 1, from = whole;
        }
      }
      int sum = n;  // inclusive over the warp
      for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += other;
      }
      if (lane == 31) shared[warp] = sum;
      __syncthreads();
      int before = base, total = 0;
      for (int w = 0; w < PLAN_THREADS / 32; w++) {
        if (w < warp) before += shared[w];
        total += shared[w];
      }
      for (int i = 0; i < n; i++) {
        const int s = from + i;
        DecodeItem item;
        item.row = row;
        item.slot = r.slot;
        item.start = r.start + s * split;
        item.end = item.start + split < r.length ? item.start + split : r.length;
        item.split = s;
        item.splits = r.splits;
        item.first = r.first;
        item.position = r.length - 1;
        p.items[before + sum - n + i] = item;
      }
      base += total;
      __syncthreads();
    }
  }
  if (thread == 0) *p.n_items = base;
}
