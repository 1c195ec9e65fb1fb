// prefill_wgmma: a grid of at most `units` blocks, ALL_THREADS threads, WGMMA_SHARED_BYTES of dynamic shared memory.
// See prefill_wgmma.cuh.
#include "prefill_wgmma.cuh"

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) prefill_wgmma(const __grid_constant__ PrefillWgmmaParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int group = threadIdx.x / GROUP_THREADS, thread = threadIdx.x % GROUP_THREADS;
  Rings rings;
  rings.k = shared_address(shared) + 2 * Q_BYTES;
  rings.v = rings.k + STAGES * KV_BYTES;
  rings.barriers = rings.v + STAGES * KV_BYTES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(rings.k_full(s), 1);
      barrier_init(rings.v_full(s), 1);
      barrier_init(rings.k_empty(s), WARPS);
      barrier_init(rings.v_empty(s), WARPS);
    }
    barrier_init(rings.tail(), 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (group == 0) {
    shrink_registers<LOADING_REGISTERS>();
    if (thread < 32) load_all_keys(p, rings, thread);
  } else {
    grow_registers<ATTENDING_REGISTERS>();
    attend(p, rings, shared, group - 1, thread);
  }
}
