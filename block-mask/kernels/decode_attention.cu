// decode_attention: grid = any number of blocks of WARPS * 32 threads (the device's multiprocessors times the blocks that
// fit), dynamic shared memory as listed at RING_BYTES. Runs after decode_plan. See decode_attention.cuh.
#include "decode_attention.cuh"

extern "C" __global__ void __launch_bounds__(DECODE_THREADS, BLOCKS_PER_SM) decode_attention(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  decode_attention_stage(p, shared, blockIdx.x, gridDim.x, 1);
}
