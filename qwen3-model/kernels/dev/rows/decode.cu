// One decode step of a Qwen3 model, from token ids to the next token ids, in one persistent kernel (greedy).
//
// Why: a decode step reads every weight once; what keeps a kernel per matrix from the memory's speed is the ramp at each
// of its boundaries. Here one thread per multiprocessor streams weights and K/V through a ring without ever waiting for
// activations, and the dependencies of the rest cost less than the ring holds. See shape.cuh for the division of work.
//
// Warps of a block: 0 weights, 1 activations, 2-3 idle, 4-11 matrix products and attention, 12-15 epilogues.
// Launch: BLOCKS blocks, all resident at once (one per multiprocessor), 512 threads, SHARED_BYTES of dynamic shared memory;
// counters zeroed before.
#include "matrix_stage.cuh"
#include "../common/attention_stage.cuh"
#include "producers.cuh"
#include "epilogue.cuh"

extern "C" __global__ void __launch_bounds__(512, 1) decode_step(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ u32 flag; __shared__ int unit_count;
  const Shared sh(shared_address(memory));
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, block = blockIdx.x;
  if (threadIdx.x == 0) {
    for (int i = 0; i < W_SLOTS; i++) { barrier_init(sh.w_full(i), 1); barrier_init(sh.w_empty(i), MATRIX_WARPS); }
    for (int i = 0; i < X_SLOTS; i++) { barrier_init(sh.x_full(i), 1); barrier_init(sh.x_empty(i), MATRIX_WARPS); }
    for (int i = 0; i < SUM_BUFFERS; i++) { barrier_init(sh.sums_full(i), MATRIX_WARPS); barrier_init(sh.sums_free(i), EPILOGUE_WARPS); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    // This block's share of the attention work.
    int n = 0, unit = 0;
    for (int row = 0; row < p.n_rows; row++) {
      const int tiles = (p.positions[row] + KV_TILE - 1) / KV_TILE, splits = max(1, (tiles + p.split_tiles - 1) / p.split_tiles);
      for (int i = 0; i < splits * KV_HEADS; i++, unit++)
        if (unit % gridDim.x == blockIdx.x && n < MAX_UNITS) asm volatile("st.shared.u32 [%0], %1;" ::"r"(sh.units + 4 * n++), "r"(Unit::pack(row, i % KV_HEADS, i / KV_HEADS, splits)) : "memory");
    }
    unit_count = n;
  }
  __syncthreads();
  const int n_units = unit_count;
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
    if (warp == 0 && lane == 0) { WeightProducer w(sh); w.run(p, block, n_units); }
    if (warp == 1 && lane == 0) { ActivationProducer a(sh); a.run(p); }
  } else if (warp >= 12) {
    Epilogue e{p, sh, block, warp - 12, lane};
    e.run(&flag);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    WPlace w; XPlace x; SumPlace sums; const int m = warp - 4;
    for (int layer = 0; layer < p.n_layers; layer++) {
      matrix_stage<QkvDivision, QKV_TILES, HIDDEN / K_TILE / QKV_TILES>(sh, w, x, sums, m, lane, 1);
      attention_stage(p, sh, w, layer, BLOCKS * (layer + 1), n_units, m, lane);
      matrix_stage<HiddenDivision, O_TILES, ATTENTION / K_TILE / O_TILES>(sh, w, x, sums, m, lane, 1);
      matrix_stage<GateDivision, 1, HIDDEN / K_TILE>(sh, w, x, sums, m, lane, 1);
      matrix_stage<HiddenDivision, DOWN_TILES, INTERMEDIATE / K_TILE / DOWN_TILES>(sh, w, x, sums, m, lane, 1);
    }
    matrix_stage<HeadDivision, 1, HIDDEN / K_TILE>(sh, w, x, sums, m, lane, HEAD_CHUNKS);
  }
}
