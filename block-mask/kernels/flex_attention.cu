// flex_attention: grid (q_blocks * tiles_per_block, heads, batch), THREADS threads, PREFILL_SHARED_BYTES of dynamic
// shared memory. See flex_attention.cuh.
#include "flex_attention.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flex_attention(const __grid_constant__ FlexParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int q_block = blockIdx.x / p.tiles_per_block, part = blockIdx.x % p.tiles_per_block;
  const int head = blockIdx.y, batch = blockIdx.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const BatchSpan span = p.spans[batch];
  QueryTile tile;
  const int first = q_block * p.block_q + part * BLOCK_M;
  int end = (q_block + 1) * p.block_q;
  end = end < span.q_len ? end : span.q_len;
  if (first >= end) return;
  tile.rows = end - first < BLOCK_M ? end - first : BLOCK_M;
  tile.first_row = first;
  tile.group = 1;
  tile.q_offset = batch * p.q_batch_stride + span.row * p.q_token_stride + head * p.q_head_stride;
  tile.q_stride = p.q_token_stride;
  tile.out_offset = tile.q_offset;
  tile.out_stride = p.q_token_stride;
  tile.position = span.position;
  tile.head = head;
  const LaneRows rows = lane_rows(tile, warp, lane);
  MaskSource source{p, rows};
  source.list = p.lists[((i64)batch * p.mask_heads + (p.mask_heads == 1 ? 0 : head)) * p.q_blocks + q_block];
  source.full_count = ((source.list.full << p.block_granules_shift) + N_GRANULES - 1) / N_GRANULES;
  source.count = source.full_count + ((source.list.partial << p.block_granules_shift) + N_GRANULES - 1) / N_GRANULES;
  source.length = span.kv_length;
  source.batch = batch;
  source.lane = lane;
  const i64 head_offset = (i64)(head / p.group) * p.head_stride;
  const i64 lse_offset = batch * p.lse_batch_stride + span.row * p.lse_token_stride + head * p.lse_head_stride;
  prefill_tile(p.q, p.k + head_offset, p.v + head_offset, p.out, p.lse, lse_offset, p.lse_token_stride, p.scale, tile, source,
               shared);
}
