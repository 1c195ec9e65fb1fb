// Whole-page operations on the cache.
//
//   cache  [heads, n_pages * page_size, head_dim] of 16-bit elements, heads = layers * 2 * kv_heads: K and V of every
//          layer lie one after the other, so one launch serves all of them
//   a page of one head is one contiguous run of 16-byte words
typedef unsigned int u32;
typedef unsigned long long u64;

#define MAX_COPIES 64

struct PageMove {
  u32 src, dst, words;  // 16-byte words from the page's start
};

struct CopyParams {
  uint4* cache;
  u64 head_words;  // of all pages of a head
  u32 page_words, n_copies;
  PageMove copies[MAX_COPIES];
};

// Grid (copies, heads). No page is both read and written in one launch: the host sees to that.
extern "C" __global__ void __launch_bounds__(256) copy_pages(const __grid_constant__ CopyParams p) {
  if (blockIdx.x >= p.n_copies) return;
  const PageMove move = p.copies[blockIdx.x];
  uint4* head = p.cache + blockIdx.y * p.head_words;
  const uint4* from = head + (u64)move.src * p.page_words;
  uint4* to = head + (u64)move.dst * p.page_words;
  for (u32 i = threadIdx.x; i < move.words; i += blockDim.x) to[i] = from[i];
}

struct ChecksumParams {
  const u64* cache;
  u64* sum;          // [1], 0 at the start
  u64 head_words;    // 8-byte words of all pages of a head
  u64 first, words;  // the part of each head to look at
};

// Grid (any, heads). The sum of a hash of (place, word): the same in whatever order the threads come.
extern "C" __global__ void __launch_bounds__(256) checksum_pages(const __grid_constant__ ChecksumParams p) {
  u64 sum = 0;
  const u64 head = blockIdx.y * p.head_words + p.first;
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < p.words; i += (u64)gridDim.x * blockDim.x) {
    u64 x = p.cache[head + i] + (head + i + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    sum += x ^ (x >> 31);
  }
  for (int d = 16; d; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d);
  if ((threadIdx.x & 31) == 0) atomicAdd(p.sum, sum);
}
