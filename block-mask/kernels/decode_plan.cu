// decode_plan: one block of 256 threads. See decode_plan.cuh.
#include "decode_plan.cuh"

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) decode_plan(const DecodePlanParams p) {
  __shared__ int shared[PLAN_WORDS];
  decode_plan_stage(p, shared);
}
