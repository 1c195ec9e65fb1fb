// The shape of the model and of the launch, all known at compile time, and the kernel's one parameter.
//
// The grid is as many clusters of 8 blocks as the device holds at once (15 on an H200: 120 of its 132 multiprocessors, which
// is enough to fill the memory system). Each cluster owns an equal share of the output rows of every matrix, in units of
// 8 rows; the blocks of a cluster (rank r) split the sum over k in eight: block r always multiplies the r-th eighth of the
// activations' columns, and the eight partial products meet through distributed shared memory, in a fixed order. So no
// block reads more than an eighth of an activation, and no sum crosses global memory.
#pragma once
#include "../common/ptx.cuh"
#ifndef ASYNC_SUMS
#define ASYNC_SUMS 1   // partial sums travel by st.async (else by plain stores and a release)
#endif
#ifndef HIDDEN
#error "HIDDEN, Q_HEADS, KV_HEADS, INTERMEDIATE, VOCABULARY and BATCH must be defined"
#endif
constexpr int RANKS = 8, MAX_CLUSTERS = 32, HEAD_DIM = 128;
constexpr int GROUP = Q_HEADS / KV_HEADS;                      // query heads that share one K/V head
constexpr int ATTENTION = Q_HEADS * HEAD_DIM;                  // columns of attention's output
constexpr int QKV = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM;       // rows of the fused Q, K, V matrix
constexpr int K_TILE = 64;                                     // columns of a tile: 128 bytes, the swizzle's width
constexpr int HIDDEN_TILES = HIDDEN / RANKS / K_TILE, ATTENTION_TILES = ATTENTION / RANKS / K_TILE, INTER_TILES = INTERMEDIATE / RANKS / K_TILE;
constexpr int UNIT = 8;                                        // rows of an mma tile: the grain of the division of rows
constexpr int TILE_UNITS = 22, MAX_ROWS = TILE_UNITS * UNIT;   // the widest tile: 176 rows
constexpr int GATE_UNITS = TILE_UNITS / 2, UP_ROW = GATE_UNITS * UNIT;   // a gate+up tile: gate rows, then up rows from UP_ROW on
constexpr int VOCABULARY_CHUNKS = (VOCABULARY + MAX_ROWS - 1) / MAX_ROWS;
static_assert(HIDDEN % (RANKS * K_TILE) == 0 && ATTENTION % (RANKS * K_TILE) == 0 && INTERMEDIATE % (RANKS * K_TILE) == 0, "whole tiles");
static_assert(Q_HEADS % KV_HEADS == 0 && GROUP <= 8 && VOCABULARY % 4 == 0, "query heads are the 8 columns of an mma");

// The share of cluster c of n in `units`: [first, last). Every matrix is divided by this one function, so that a cluster
// owns the same columns of the residual stream after O and after down.
struct Share { int first, last; };
__device__ __forceinline__ Share share(int units, int c, int n) { return {units * c / n, units * (c + 1) / n}; }
// A share is worked off in equal chunks of at most `most` units.
__device__ __forceinline__ int chunk_count(Share s, int most) { return (s.last - s.first + most - 1) / most; }
__device__ __forceinline__ Share chunk(Share s, int i, int n) { const int u = s.last - s.first; return {s.first + u * i / n, s.first + u * (i + 1) / n}; }
constexpr int QKV_MOST = 20;                                   // units of a chunk of QKV rows

static_assert(BATCH == 16 || BATCH == 32 || BATCH == 64, "rows of the activation tile");

constexpr int ROWS_PER_RANK = BATCH / RANKS;                   // batch rows whose results a block finishes: row % 8 == rank
// The eight matrix warps divide a tile into ROW_GROUPS groups of weight rows and BATCH_PARTS parts of the batch.
constexpr int BATCH_PARTS = BATCH == 16 ? 1 : 2, ROW_GROUPS = 8 / BATCH_PARTS, M_TILES = BATCH / 16 / BATCH_PARTS;
constexpr int TILE_ROWS = (TILE_UNITS + ROW_GROUPS - 1) / ROW_GROUPS;      // 8-row tiles per warp of the widest tile
constexpr int QKV_ROWS = (QKV_MOST + ROW_GROUPS - 1) / ROW_GROUPS;         // … and of a QKV tile
constexpr int SUM_STRIDE = 192;                                // columns of the partial sums
static_assert(ROW_GROUPS * TILE_ROWS * UNIT <= SUM_STRIDE, "sums hold a tile");
constexpr float LOG2E = 1.4426950408889634f;
constexpr int MATRIX_WARPS = 8, EPILOGUE_WARPS = 4, THREADS = 512;
constexpr int KV_TILE = 32;                                    // tokens of a K/V tile

// Device counters, zeroed before every launch; 128 bytes apart. Every block adds 1 when its part of a stage is visible.
enum Counter { QKV_DONE = 0, ATTENTION_DONE = 32, O_DONE = 64, INTER_DONE = 96, HIDDEN_DONE = 128, STEP_DONE = 160, UNIT_DONE = 192 };

// Tensor maps. The weights of all layers stand in one allocation per matrix, [layers * rows, columns], so that few maps serve
// and the copy engine finds them in its cache. A matrix has two: boxes of `base` units, which every chunk has at least, and of
// one unit for what a chunk has beyond them.
struct Maps {
  TensorMap qkv[2], o[2], gate_up[2], down[2], head;           // head: MAX_ROWS rows
  TensorMap k, v;                                              // [layers * kv_heads * positions, 128]: up to 32 tokens x 64 dimensions
  TensorMap x_in, attention, x_post, inter;                    // BATCH rows
};
struct Parameters {
  Maps maps;
  int qkv_base, gate_base, hidden_base;                        // units of the base boxes
  const bf16* embedding;      // [vocabulary, hidden]
  const bf16* norms;          // per layer: input norm [hidden], post-attention norm [hidden], q norm [128], k norm [128]; then final norm [hidden]
  const float2* rope;         // [positions, 64] cosine, sine
  bf16 *x_in, *x_post, *attention, *inter;   // [batch, …] activations
  float* qkv;                 // [batch, QKV] before norm and RoPE
  bf16 *k_cache, *v_cache;    // layer 0
  u64 cache_layer_stride;     // elements from layer to layer
  u64 cache_positions;        // n_pages * page_size
  float* squares;             // [2][MAX_CLUSTERS][BATCH] sums of squares of the residual stream by cluster
  float* partial_out;         // [batch, kv_heads, max_splits, GROUP, 128]
  float* partial_stat;        // [batch, kv_heads, max_splits, GROUP, 2] maximum and sum
  float4* head_part;          // [MAX_CLUSTERS][BATCH] maximum, its index, sum of exponentials
  u32* counters;
  const int* page_table;      // [slots, max_pages]
  const int* slots;           // [batch]
  int *positions, *tokens;    // [batch]; advanced by the kernel
  float* logprobs;            // [batch]
  int* sampled;               // [batch]
  float* residual_out;        // [batch, hidden] or null: the stream before the final norm, for tests
  u64* trace;                 // [events] clock of block 0 at each stage's end, or null
  int n_rows, n_layers, page_shift, max_pages, split_tiles, max_splits;
  float epsilon, attention_scale;   // 1/sqrt(head_dim) * log2(e)
};
__device__ __forceinline__ const bf16* input_norm(const Parameters& p, int layer) { return p.norms + (u64)layer * (2 * HIDDEN + 2 * HEAD_DIM); }
__device__ __forceinline__ const bf16* post_norm(const Parameters& p, int layer) { return input_norm(p, layer) + HIDDEN; }
__device__ __forceinline__ const bf16* q_norm(const Parameters& p, int layer) { return input_norm(p, layer) + 2 * HIDDEN; }
__device__ __forceinline__ const bf16* k_norm(const Parameters& p, int layer) { return q_norm(p, layer) + HEAD_DIM; }
// The physical position of `position` in the cache (rows that are padding have slot 0, whose pages are all page 0).
__device__ __forceinline__ u64 physical(const Parameters& p, int slot, int position) {
  const int page = p.page_table[(u64)slot * p.max_pages + (position >> p.page_shift)];
  return ((u64)(u32)page << p.page_shift) + (position & ((1 << p.page_shift) - 1));
}
