// prefill_attention: grid (tiles, KV heads), THREADS threads, PREFILL_SHARED_BYTES of dynamic shared memory.
// See prefill_causal.cuh and prefill_attention.cuh.
#include "prefill_causal.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) prefill_attention(const __grid_constant__ PrefillParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const PrefillTile t = p.tiles[blockIdx.x];
  const int kv_head = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  QueryTile tile;
  tile.q_offset = (i64)t.q_start * p.q_token_stride + (i64)kv_head * p.group * HEAD_DIM;
  tile.q_stride = p.q_token_stride;
  tile.out_offset = (i64)t.q_start * p.out_token_stride + (i64)kv_head * p.group * HEAD_DIM;
  tile.out_stride = p.out_token_stride;
  tile.group = p.group;
  tile.first_row = t.first_row;
  const int left = t.q_len * p.group - t.first_row;
  tile.rows = left < BLOCK_M ? left : BLOCK_M;
  tile.position = t.position;
  tile.head = kv_head * p.group;
  const LaneRows rows = lane_rows(tile, warp, lane);
  const FullBlocks full = full_blocks(p, t, tile);
  CausalSource source{p, rows, t.slot, t.chunk};
  source.first_block = t.first_block;
  source.count = t.blocks;
  source.full_from = full.from;
  source.full_to = full.to;
  source.last = full.longest;
  source.lane = lane;
  const i64 head_offset = (i64)kv_head * p.paging.head_stride;
  prefill_tile(p.q, p.k + head_offset, p.v + head_offset, p.out, p.lse, (i64)t.q_start * p.heads + kv_head * p.group, p.heads, p.scale,
               tile, source, shared);
}
