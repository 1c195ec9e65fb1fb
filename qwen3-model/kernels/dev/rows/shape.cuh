// The shape of the model and of the launch, all known at compile time, and the kernel's one parameter.
//
// The grid is one block per multiprocessor. Every block owns an equal share of the rows of every matrix (BLOCK_ROWS_…, the
// last row of a share may be the next block's first: then both load it and one ignores it), reads whole rows, and so needs
// no other block to finish a sum; within the block, warps split k and meet in shared memory in a fixed order. The price is
// that every block reads the whole activation from L2, which is small next to the weights up to a batch of 16 or so.
#pragma once
#include "../common/ptx.cuh"
#ifndef HIDDEN
#error "HIDDEN, Q_HEADS, KV_HEADS, INTERMEDIATE, VOCABULARY and BATCH must be defined"
#endif
#ifndef BLOCKS
#error "BLOCKS: the number of blocks in the grid"
#endif
constexpr int HEAD_DIM = 128, GROUP = Q_HEADS / KV_HEADS;      // query heads that share one K/V head
constexpr int ATTENTION = Q_HEADS * HEAD_DIM;                  // columns of attention's output
constexpr int QKV = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM;       // rows of the fused Q, K, V matrix
constexpr int K_TILE = 64;                                     // columns of a tile: 128 bytes, the swizzle's width
__host__ __device__ constexpr int up(int n, int d) { return (n + d - 1) / d; }
// Rows of each matrix that a block loads.
constexpr int QKV_ROWS = up(QKV, BLOCKS), HIDDEN_ROWS = up(HIDDEN, BLOCKS), GATE_ROWS = up(INTERMEDIATE, BLOCKS), HEAD_SHARE = up(VOCABULARY, BLOCKS);
constexpr int UP_ROW = up(GATE_ROWS, 8) * 8;                   // where the up rows begin in a gate+up tile
constexpr int HEAD_CHUNKS = up(HEAD_SHARE, UP_ROW + GATE_ROWS), HEAD_ROWS = up(HEAD_SHARE, HEAD_CHUNKS);
// The first row of block b's share of n rows.
__device__ __forceinline__ int first_row(int n, int b) { return (int)((long long)n * b / BLOCKS); }
constexpr int W_SLOT = 24 * 1024;
// Tiles of 64 columns that one slot of the weight ring holds: as many as fit and divide the matrix's columns.
__host__ __device__ constexpr int slot_tiles(int rows, int columns, int most) { int t = 1; for (int i = 2; i <= most; i++) if ((columns / K_TILE) % i == 0 && i * rows * 128 <= W_SLOT) t = i; return t; }
constexpr int QKV_TILES = slot_tiles(QKV_ROWS, HIDDEN, 4), O_TILES = slot_tiles(HIDDEN_ROWS, ATTENTION, 8), DOWN_TILES = slot_tiles(HIDDEN_ROWS, INTERMEDIATE, 8);
static_assert((UP_ROW + GATE_ROWS) * 128 <= W_SLOT && HEAD_ROWS * 128 <= W_SLOT && HIDDEN_ROWS <= 32, "a tile fits a slot");
static_assert(O_TILES == DOWN_TILES && HEAD_ROWS <= UP_ROW + GATE_ROWS, "stages that share code");
static_assert(Q_HEADS % KV_HEADS == 0 && GROUP <= 8 && HIDDEN % 512 == 0 && ATTENTION % 512 == 0 && INTERMEDIATE % 512 == 0, "whole tiles");

// Device counters, zeroed before every launch; 128 bytes apart. Every block adds 1 when its part of a stage is visible.
enum Counter { QKV_DONE = 0, ATTENTION_DONE = 32, O_DONE = 64, INTER_DONE = 96, HIDDEN_DONE = 128, STEP_DONE = 160, UNIT_DONE = 192 };
constexpr int X_TILES = 64 / BATCH;                            // activation tiles per slot of their ring: 8 KiB
static_assert(BATCH == 8 || BATCH == 16 || BATCH == 32 || BATCH == 64, "batch rows of an activation tile");
constexpr float LOG2E = 1.4426950408889634f;
constexpr int MATRIX_WARPS = 8, EPILOGUE_WARPS = 4, THREADS = 512;
constexpr int KV_TILE = 32;                                    // tokens of a K/V tile
// How the eight matrix warps divide a slot: K parts of its columns x R parts of its rows x B parts of the batch; and how many
// 16-row tiles a warp has. `stride` keeps the stores of the sums free of bank conflicts.
template <int Rows, int K, int R, int B> struct Division {
  static constexpr int rows = Rows, k = K, r = R, b = B, tiles = up(up(Rows, 16), R), columns = BATCH / 8 / B;
  static constexpr int stride = Rows % 16 == 4 || Rows % 16 == 12 ? Rows : up(Rows, 16) * 16 + 4;
  static_assert(K * R * B == 8, "eight warps");
};
using QkvDivision = Division<QKV_ROWS, BATCH == 64 ? 2 : BATCH == 8 ? 8 : 4, 1, BATCH == 64 ? 4 : BATCH == 8 ? 1 : 2>;
using HiddenDivision = Division<HIDDEN_ROWS, BATCH == 64 ? 4 : 8, 1, BATCH == 64 ? 2 : 1>;
using GateDivision = Division<UP_ROW + GATE_ROWS, BATCH == 64 ? 1 : 2, 4, BATCH == 64 ? 2 : 1>;
using HeadDivision = Division<UP_ROW + GATE_ROWS, BATCH == 64 ? 1 : 2, 4, BATCH == 64 ? 2 : 1>;
__host__ __device__ constexpr int most(int a, int b) { return a > b ? a : b; }
template <class D> __host__ __device__ constexpr int sum_bytes() { return D::k * BATCH * D::stride * 4; }
constexpr int SUMS_BYTES = up(most(most(sum_bytes<QkvDivision>(), sum_bytes<HiddenDivision>()), most(sum_bytes<GateDivision>(), sum_bytes<HeadDivision>())), 1024) * 1024;

// Tensor maps, all of three dimensions {64 columns, rows, tiles of 64 columns}. The weights of all layers stand in one
// allocation per matrix, [layers * rows, columns], so that few maps serve and the copy engine finds them in its cache.
struct Maps {
  TensorMap qkv, o, gate_up, down, head;                       // boxes {64, …_ROWS, …_TILES}; gate_up {64, GATE_ROWS, 1}; head {64, HEAD_ROWS, 1}
  TensorMap k, v;                                              // [layers * kv_heads * positions, 128], boxes {64, up to 32 tokens, 2}
  TensorMap x_in, attention, x_post, inter;                    // boxes {64, BATCH, X_TILES}
};
struct Parameters {
  Maps maps;
  const bf16* embedding;      // [vocabulary, hidden]
  const bf16* norms;          // per layer: input norm [hidden], post-attention norm [hidden], q norm [128], k norm [128]; then final norm [hidden]
  const float2* rope;         // [positions, 64] cosine, sine
  bf16 *x_in, *x_post, *attention, *inter;   // [batch, …] activations
  float* qkv;                 // [batch, QKV] before norm and RoPE
  bf16 *k_cache, *v_cache;    // layer 0
  u64 cache_layer_stride;     // elements from layer to layer
  u64 cache_positions;        // n_pages * page_size
  float* squares;             // [2][BATCH][BLOCKS] sums of squares of the residual stream by block
  float* partial_out;         // [batch, kv_heads, max_splits, GROUP, 128]
  float* partial_stat;        // [batch, kv_heads, max_splits, GROUP, 2] maximum and sum
  float4* head_part;          // [BLOCKS][BATCH] maximum, its index, sum of exponentials
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
