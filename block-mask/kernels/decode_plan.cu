// decode_plan: one block of 256 threads. See decode_plan.cuh.
#include "decode_plan.cuh"

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) decode_plan(const DecodePlanParams p) {
  __shared__ int shared[PLAN_WORDS];
  decode_plan_stage(p, shared);
  // Attention may read the list before it has waited for the kernels ahead of it (decode_attention_stage): it lies in the second-level cache
  // when this kernel ends, and no later kernel begins before.
  __threadfence();
}
