// decode_together: grid and blocks as decode_attention's, dynamic shared memory as listed at TogetherShared. Runs after a
// decode_plan with `together`. See decode_together.cuh.
#include "decode_together.cuh"

extern "C" __global__ void __launch_bounds__(DECODE_THREADS, BLOCKS_PER_SM) decode_together(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  // Launched before the kernel ahead has ended: nothing of it may be read before this wait.
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  decode_together_stage(p, shared, blockIdx.x, gridDim.x);
}
