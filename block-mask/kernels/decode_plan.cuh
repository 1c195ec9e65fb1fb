// The work list of decode attention, made on the device once per step and read by every layer.
//
//   row  slot  length           items (row, split)
//    0    3     300   ────▶   (0, tokens 0..128) (0, 128..256) (0, 256..300)
//    1    1      40   ────▶   (1, 0..40)
//    2    0       -   ────▶   (2, empty): writes zeros, reads nothing
//
// A row is cut into splits of `min_split << class` tokens with the smallest class that needs at most `max_splits`: the
// cut depends on the row's own length and `min_split` only, so a row's sum has the same order beside any other rows.
// Rows whose page tables start with the same pages may share them: siblings of a group, or requests with one system prompt.
// They must be neighbours. Their common prefix becomes shared items, cut into at most SHARED_SPLITS parts, as many as give
// every block one, and the row's own splits start behind it:
//
//   row  slot  length           shared items (rows, part)          items (row, split)
//    0    3     300   ────┐
//    1    4     290   ────┴▶   (0..2, tokens 0..128), (0..2, 128..256)   (0, 256..300, 2 of 3)  (1, 256..290, 2 of 3)
//
// With `together` every row is made of shared items, of up to `shared_rows` neighbours with one slot: the tokens of a prompt,
// or a single row. Cuts lie where the rows' own items would have them.
//
// In a step of many rows of which none share, where such a list would give some blocks much more than others or is mostly parts of
// rows, all tokens are dealt to the blocks in equal shares instead, and rows are cut where a share ends: see plan_shares.
//
// Long items come first, which evens out the blocks that take them in turn: classes from the longest on, of each class the
// whole splits, then the rests of rows in REST_BINS bins.
#pragma once
#include "bf16.cuh"

struct DecodeItem {
  int row, slot;
  int start, end;     // tokens of this split, start a multiple of 16
  int split, splits;  // which of how many splits of the row; splits < 0: the block has no more items
  int first;          // tokens before it are outside the window
  int position;       // logical position of the query: length - 1
};

// Tokens that rows first_row .. first_row + rows see, read through the page table of `slot`: a part of their prefix, or with
// `together` one split of them all, of which a row sees what its length allows.
struct SharedItem {
  int first_row, rows, slot;
  int split;       // which part: of every row's splits the one with this number
  int start, end;  // tokens, start a multiple of 16
  int piece;       // number of the rows that share, for counting its parts
  int unused;
};

// What a row shares: the piece it belongs to, its parts and its rows; no parts for a row that shares nothing.
struct RowShare {
  int piece, parts, rows, unused;
};

__device__ __forceinline__ RowShare no_share() {
  RowShare none;
  none.piece = none.parts = none.rows = none.unused = 0;
  return none;
}

struct DecodePlanParams {
  const int* slots;     // [rows]
  const int* lengths;   // [rows], tokens visible to the row minus `length_offset`
  DecodeItem* items;    // [rows * max_splits]
  SharedItem* shared;   // [rows * SHARED_SPLITS], or [rows * max_splits] with `together`
  int* row_splits;      // [rows]
  int* row_lengths;     // [rows]
  RowShare* row_shares; // [rows]
  int* n_items;         // [2]: items, shared items; the second is -1 where tokens are dealt in equal shares
  const int* table;     // [n_slots, max_pages]; null: nothing is shared
  int max_pages, page_shift;
  int shared_rows;      // rows that a shared item takes at most
  int shared_tokens;    // a prefix has at least so many
  int together;         // 1: neighbours of one slot in shared items, nothing else
  int shared_blocks;    // blocks of the launch over KV heads: how many parts all prefixes together should have
  int rows, n_slots;
  int max_length;       // max_pages * page_size
  int length_offset;    // 1 when `lengths` holds the position of the row's newest token
  int min_split;        // a multiple of 16
  int max_splits, n_classes;  // of a row's own tokens
  int window;           // 0 = none; else a query at p sees p - window < kv
  int shares;           // blocks of the launch over KV heads, of which each may get an equal share of all tokens; 0: no shares
  int unused;
};

constexpr int PLAN_THREADS = 256;
constexpr int REST_BINS = 4;
// Steps of more rows share nothing.
constexpr int MAX_SHARING_ROWS = 1024;
// Parts of a prefix at most, and the fewest tokens of one.
constexpr int SHARED_SPLITS = 8;
constexpr int SHARED_SPLIT_TOKENS = 128;
// Sharing must save at least so many tokens' keys and values for each KV head: the parts cost stores and sums.
constexpr int SHARED_MIN_SAVED = 512;
// Shares of all tokens at most, and the fewest granules of one.
constexpr int MAX_SHARES = 1024;
constexpr int SHARE_GRANULES = 8;
// What an item costs beside its tokens, and the fewest of a part of a row, both in granules.
constexpr int ROW_COST = 2;
constexpr int SMALLEST_PART = 2;

struct DecodeRow {
  int slot, length, first, start, split_class, splits;
  int shared;  // splits of the shared prefix: the row's own come after them
};

// A row's slot and its tokens; slot 0 and no tokens for a padded row.
__device__ __forceinline__ int2 plan_row(const DecodePlanParams& p, int row) {
  int slot = p.slots[row], length = p.lengths[row] + p.length_offset;
  if (slot <= 0 || slot >= p.n_slots || length < 0) slot = length = 0;
  return make_int2(slot, length < p.max_length ? length : p.max_length);
}

// Tokens of a part of a prefix where `enough` would give every block one.
__device__ __forceinline__ int shared_split(int prefix, int enough) {
  const int least = (prefix + SHARED_SPLITS - 1) / SHARED_SPLITS;
  int split = enough > least ? enough : least;
  if (split < SHARED_SPLIT_TOKENS) split = SHARED_SPLIT_TOKENS;
  return (split + 31) & ~31;
}

// Whole pages that `row` and the row before it have in common, by a warp.
__device__ __forceinline__ int common_pages(const DecodePlanParams& p, int row, int lane) {
  const int2 a = plan_row(p, row - 1), b = plan_row(p, row);
  const int pages = (a.y < b.y ? a.y : b.y) >> p.page_shift;
  const int *x = p.table + (i64)a.x * p.max_pages, *y = p.table + (i64)b.x * p.max_pages;
  for (int first = 0; first < pages; first += 32) {
    const int i = first + lane;
    const bool same = i < pages && x[i] == y[i] && x[i] > 0;
    const u32 other = __ballot_sync(0xffffffffu, !same);
    if (other) return first + __ffs((int)other) - 1;
  }
  return pages;
}

// Finds the rows that share, makes the shared items and leaves what each row shares in `prefix`, tokens, and row_shares.
// `common` is scratch. Both have MAX_SHARING_ROWS elements, of which those of the step's rows are set. `counts`: shared items,
// pieces, tokens of all pieces.
__device__ __forceinline__ void plan_shared(const DecodePlanParams& p, int* common, int* prefix, int* counts) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  if (thread < 3) counts[thread] = 0;
  bool any = false;
  for (int row = thread; row < p.rows; row += PLAN_THREADS) {
    prefix[row] = 0;
    p.row_shares[row] = no_share();
    bool same = false;
    if (row > 0) {
      const int2 a = plan_row(p, row - 1), b = plan_row(p, row);
      const int length = a.y < b.y ? a.y : b.y;
      if (a.x != 0 && b.x != 0 && a.x != b.x && length >= p.shared_tokens) {
        const int page = p.table[(i64)a.x * p.max_pages];
        same = page > 0 && page == p.table[(i64)b.x * p.max_pages];
      }
    }
    common[row] = same;
    any = any || same;
  }
  if (!__syncthreads_or(any)) return;
  for (int row = warp; row < p.rows; row += PLAN_THREADS / 32) {
    if (!common[row]) continue;
    const int tokens = common_pages(p, row, lane) << p.page_shift;
    __syncwarp();
    if (lane == 0) common[row] = tokens >= p.shared_tokens ? tokens : 0;
  }
  __syncthreads();
  // A row starts a group if it shares nothing with the row before it, or much less than its neighbours share. A group is
  // cut into pieces of about equal numbers of rows.
  for (int pass = 0; pass < 2; pass++) {
    for (int first = thread; first < p.rows; first += PLAN_THREADS) {
      auto starts = [&](int row) {
        const int own = 2 * common[row];
        return own == 0 || own < common[row - 1] || (row + 1 < p.rows && own < common[row + 1]);
      };
      if (!starts(first)) continue;
      int end = first + 1, tokens = p.max_length;
      for (; end < p.rows && !starts(end); end++) tokens = tokens < common[end] ? tokens : common[end];
      const int rows = end - first, pieces = (rows + p.shared_rows - 1) / p.shared_rows, piece = (rows + pieces - 1) / pieces;
      for (int row = first; row < end; row += piece) {
        const int n = end - row < piece ? end - row : piece;
        if (n < 2 || (i64)(n - 1) * tokens < SHARED_MIN_SAVED) continue;
        if (pass == 0) {
          atomicAdd(reinterpret_cast<u32*>(counts + 2), (u32)tokens);
          continue;
        }
        const int split = shared_split(tokens, (counts[2] + p.shared_blocks - 1) / p.shared_blocks);
        const int parts = (tokens + split - 1) / split;
        const int at = (int)atomicAdd(reinterpret_cast<u32*>(counts), (u32)parts);
        RowShare share;
        share.piece = (int)atomicAdd(reinterpret_cast<u32*>(counts + 1), 1u);
        share.parts = parts, share.rows = n, share.unused = 0;
        const int slot = plan_row(p, row).x;
        for (int i = 0; i < parts; i++) {
          SharedItem item;
          item.first_row = row, item.rows = n, item.slot = slot, item.split = i;
          item.start = i * split, item.end = tokens < item.start + split ? tokens : item.start + split;
          item.piece = share.piece, item.unused = 0;
          p.shared[at + i] = item;
        }
        for (int i = 0; i < n; i++) prefix[row + i] = tokens, p.row_shares[row + i] = share;
      }
    }
    __syncthreads();
  }
}

// The whole list with `together`. The host gives a `min_split` of which max_splits hold the longest row.
__device__ __forceinline__ void plan_together(const DecodePlanParams& p, int* n_shared) {
  if (threadIdx.x == 0) *n_shared = 0;
  __syncthreads();
  for (int first = threadIdx.x; first < p.rows; first += PLAN_THREADS) {
    const int2 of = plan_row(p, first);
    p.row_lengths[first] = of.y;
    p.row_splits[first] = of.y > 0 ? (of.y + p.min_split - 1) / p.min_split : 1;
    auto follows = [&](int2 row) { return row.x == of.x && row.y > 0; };
    if (of.y > 0 && first % p.shared_rows != 0 && follows(plan_row(p, first - 1))) continue;
    int end = first + 1, length = of.y;
    for (; length > 0 && end < p.rows && end % p.shared_rows != 0; end++) {
      const int2 row = plan_row(p, end);
      if (!follows(row)) break;
      length = length > row.y ? length : row.y;
    }
    // A padded row has one item without tokens, which writes zeros.
    const int parts = length > 0 ? (length + p.min_split - 1) / p.min_split : 1;
    const int at = (int)atomicAdd(reinterpret_cast<u32*>(n_shared), (u32)parts);
    for (int i = 0; i < parts; i++) {
      SharedItem item;
      item.first_row = first, item.rows = end - first, item.slot = of.x, item.split = i;
      item.start = i * p.min_split, item.end = length < item.start + p.min_split ? length : item.start + p.min_split;
      item.piece = item.unused = 0;
      p.shared[at + i] = item;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) p.n_items[0] = 0, p.n_items[1] = *n_shared;
}

__device__ __forceinline__ DecodeRow decode_row(const DecodePlanParams& p, int row, int prefix) {
  DecodeRow r;
  const int2 of = plan_row(p, row);
  r.slot = of.x, r.length = of.y;
  r.shared = prefix > 0 ? p.row_shares[row].parts : 0;
  r.first = p.window > 0 && r.length > p.window ? r.length - p.window : 0;
  r.start = prefix > 0 ? prefix : r.first & ~15;
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

// Where the share of a block begins: token 16 `granule` of a row's own.
struct ShareStart {
  int row, granule;
};

__device__ __forceinline__ int own_granules(const DecodeRow& r) { return (r.length - r.start + 15) / 16; }

// Deals all rows' tokens to the blocks in equal shares. All but `p` is scratch: `of` [MAX_SHARING_ROWS], the rows, those without
// tokens from the end on; `first` [MAX_SHARING_ROWS + 1], where each of the others lies on the line of all granules; `starts`
// [shares + 1]; `inside` [MAX_SHARING_ROWS], cuts inside of each; `scratch` [2 PLAN_THREADS / 32]. False, with nothing written, if the
// list that is there, of `n_items`, is as good, or cannot hold the shares, or a row would have too many splits.
//
//   rows    0            1      2                    3
//   line    ├────────────┼──────┼────────────────────┼─────────┤       a row has its granules and ROW_COST
//   shares  ├───────┼────────┼───────┼────────┼───────┼────────┤
//
// The list is dealt out in turn: item k of share j stands at j + shares k, for each KV head. A share begins with the part of its
// last row, if that goes on in the next, which the block leaves for the one that finishes the row. It ends with the row of which
// blocks before have left parts: these are there by then, and no block waits for one that waits. Rows without tokens follow.
__device__ __forceinline__ bool plan_shares(const DecodePlanParams& p, int n_items, int* of, int* first, ShareStart* starts, int* inside, int* scratch) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int line = 0, rows = 0;  // rows with tokens
  for (int row0 = 0; row0 < p.rows; row0 += PLAN_THREADS) {
    const int row = row0 + thread;
    int n = row < p.rows ? own_granules(decode_row(p, row, 0)) : 0;
    const bool real = n > 0;
    if (real) n += ROW_COST;
    const u32 all = __ballot_sync(0xffffffffu, real);
    int sum = n;
    for (int d = 1; d < 32; d *= 2) {
      int other = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) scratch[warp] = sum, scratch[PLAN_THREADS / 32 + warp] = __popc(all);
    __syncthreads();
    int begin = line + sum - n, at = rows + __popc(all & ((1u << lane) - 1));
    for (int w = 0; w < PLAN_THREADS / 32; w++) {
      const int of_warp = scratch[w], rows_of_warp = scratch[PLAN_THREADS / 32 + w];
      if (w < warp) begin += of_warp, at += rows_of_warp;
      line += of_warp, rows += rows_of_warp;
    }
    if (real) of[at] = row, first[at] = begin, inside[at] = 0;
    else if (row < p.rows) of[p.rows - 1 - (row - at)] = row;
    __syncthreads();
  }
  // The longest items lie first, so that the first block has the most. Rows in parts cost more than the same tokens in whole rows.
  int most = 0;
  for (int i = 0; i < n_items; i += p.shares) most += (p.items[i].end - p.items[i].start + 15) / 16 + ROW_COST;
  const bool uneven = (i64)most * p.shares * 20 > (i64)line * 27, in_parts = (i64)n_items * 4 >= (i64)p.rows * 5;
  if (!uneven && !in_parts) return false;
  if (thread == 0) first[rows] = line;
  __syncthreads();
  int shares = line / SHARE_GRANULES;
  shares = shares > p.shares ? p.shares : shares < 1 ? 1 : shares;
  for (int j = thread; j <= p.shares; j += PLAN_THREADS) {
    ShareStart at;
    at.row = rows, at.granule = 0;
    if (j < shares && rows > 0) {
      const int cut = (int)((i64)line * j / shares);
      int low = 0, high = rows;  // first[low] <= cut < first[high]
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first[middle] <= cut) low = middle;
        else high = middle;
      }
      const int granules = first[low + 1] - first[low] - ROW_COST, granule = cut - first[low] - ROW_COST;
      at.row = low, at.granule = granule;
      if (granule < SMALLEST_PART) at.granule = 0;
      else if (granules - granule < SMALLEST_PART) at.row = low + 1, at.granule = 0;
    }
    starts[j] = at;
  }
  __syncthreads();
  // The same cut twice is one.
  const auto is_cut = [&](int j) {
    return starts[j].granule > 0 && (starts[j].row != starts[j - 1].row || starts[j].granule != starts[j - 1].granule);
  };
  const auto items_of = [&](const ShareStart& a, const ShareStart& b) {
    return a.row == b.row ? (b.granule > a.granule ? 1 : 0) : b.row - a.row + (b.granule > 0 ? 1 : 0);
  };
  const auto empty_of = [&](int j) { return (p.rows - rows + p.shares - 1 - j) / p.shares; };
  int items = 0;
  bool fits = true;
  for (int j = thread; j < p.shares; j += PLAN_THREADS) {
    if (j > 0 && is_cut(j)) fits = atomicAdd(reinterpret_cast<u32*>(inside + starts[j].row), 1u) + 2 <= (u32)p.max_splits && fits;
    const int n = items_of(starts[j], starts[j + 1]) + empty_of(j);
    items = items > n ? items : n;
  }
  for (int d = 16; d > 0; d /= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, items, d);
    items = items > other ? items : other;
  }
  if (lane == 0) scratch[warp] = items;
  const bool all_fit = __syncthreads_and(fits);
  for (int w = 0; w < PLAN_THREADS / 32; w++) items = items > scratch[w] ? items : scratch[w];
  if (!all_fit || (i64)items * p.shares > (i64)p.rows * p.max_splits) {
    __syncthreads();  // `scratch` is free again
    return false;
  }
  for (int i = thread; i < p.rows; i += PLAN_THREADS) {
    const int row = of[i];
    p.row_splits[row] = i < rows ? inside[i] + 1 : 1;
    p.row_lengths[row] = plan_row(p, row).y;
  }
  for (int j = thread; j < p.shares; j += PLAN_THREADS) {
    const ShareStart a = starts[j], b = starts[j + 1];
    const int n = items_of(a, b);
    // The part of the row that goes on behind comes first, the part of the row that began before comes last.
    const int turned = n > 1 && b.granule > 0, begun = a.granule > 0, others = n - turned;
    for (int k = 0; k < items; k++) {
      DecodeItem item;
      item.row = item.slot = item.start = item.end = item.split = item.first = item.position = 0;
      item.splits = -1;
      if (k < n) {
        const int i = turned && k == 0 ? n - 1 : (k - turned + begun) % others, at = a.row + i;
        const DecodeRow r = decode_row(p, of[at], 0);
        const int from = i == 0 ? a.granule : 0;
        item.row = of[at];
        item.slot = r.slot;
        item.start = r.start + from * 16;
        item.end = i == b.row - a.row ? r.start + b.granule * 16 : r.length;
        if (from > 0)
          for (int c = j; c > 0 && starts[c].row == at && starts[c].granule > 0; c--) item.split += is_cut(c);
        item.splits = inside[at] + 1;
        item.first = r.first;
        item.position = r.length - 1;
      } else if (k - n < empty_of(j)) {
        item.row = of[rows + j + p.shares * (k - n)];
        item.slot = plan_row(p, item.row).x;
        item.splits = 1;
        item.position = -1;
      }
      p.items[j + p.shares * k] = item;
    }
  }
  if (thread == 0) p.n_items[0] = items * p.shares, p.n_items[1] = -1;
  return true;
}

// Shared memory of a plan, in words.
constexpr int PLAN_WORDS = 2 * PLAN_THREADS / 32 + 4 + 4 * MAX_SHARING_ROWS + 4 + 2 * (MAX_SHARES + 1);

// One block of PLAN_THREADS threads.
__device__ __forceinline__ void decode_plan_stage(const DecodePlanParams& p, int* shared /* PLAN_WORDS */) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int base = 0;
  int* n_shared = shared + 2 * PLAN_THREADS / 32;
  int* prefix = n_shared + 4;
  if (p.together) {
    plan_together(p, n_shared);
    return;
  }
  const bool sharing = p.table && p.rows <= MAX_SHARING_ROWS;
  if (sharing) {
    plan_shared(p, prefix + MAX_SHARING_ROWS, prefix, n_shared);
  } else {
    for (int row = thread; row < p.rows; row += PLAN_THREADS) p.row_shares[row] = no_share();
  }
  auto row_of = [&](int row) { return decode_row(p, row, sharing ? prefix[row] : 0); };
  // Read once; rows past the first PLAN_THREADS are read in every pass.
  DecodeRow first_row;
  if (thread < p.rows) first_row = row_of(thread);
  for (int row = thread; row < p.rows; row += PLAN_THREADS) {
    const DecodeRow r = row == thread ? first_row : row_of(row);
    p.row_splits[row] = r.shared + r.splits;
    p.row_lengths[row] = r.length;
  }
  for (int pass = 0; pass < p.n_classes * (1 + REST_BINS); pass++) {
    const int c = p.n_classes - 1 - pass / (1 + REST_BINS), bin = pass % (1 + REST_BINS);  // bin 0: whole splits
    const int split = p.min_split << c;
    for (int row0 = 0; row0 < p.rows; row0 += PLAN_THREADS) {
      const int row = row0 + thread;
      DecodeRow r;
      int n = 0, from = 0;  // items of this pass: splits from .. from + n of the row
      if (row < p.rows) {
        r = row0 == 0 ? first_row : row_of(row);
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
        item.split = r.shared + s;
        item.splits = r.shared + r.splits;
        item.first = r.first;
        item.position = r.length - 1;
        p.items[before + sum - n + i] = item;
      }
      base += total;
      __syncthreads();
    }
  }
  if (p.shares > 0 && p.rows <= MAX_SHARING_ROWS && (!sharing || *n_shared == 0)) {
    int* first = prefix + 2 * MAX_SHARING_ROWS;
    ShareStart* starts = reinterpret_cast<ShareStart*>(first + MAX_SHARING_ROWS + 4);
    int* of = prefix + 3 * MAX_SHARING_ROWS + 4 + 2 * (MAX_SHARES + 1);
    if (plan_shares(p, base, of, first, starts, prefix + MAX_SHARING_ROWS, shared)) return;
  }
  if (thread == 0) p.n_items[0] = base, p.n_items[1] = sharing ? *n_shared : 0;
}
