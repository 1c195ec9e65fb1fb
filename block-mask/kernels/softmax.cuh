// Online softmax in base 2: scores are multiplied by log2(e) once, and every exponential is one instruction.
//
// A row that has seen nothing has maximum -inf and sum 0. Differences are taken against `finite_maximum`, so that
// (-inf) - (-inf) never occurs and such a row stays 0 / 0 -> output 0, log-sum-exp -inf.
//
// Products are `product` or `fmaf` throughout, see there.
#pragma once
#include "bf16.cuh"

__device__ __forceinline__ float finite_maximum(float maximum) { return maximum == NEG_INFINITY ? 0.f : maximum; }

__device__ __forceinline__ float inverse_sum(float sum) { return sum > 0.f ? 1.f / sum : 0.f; }

// Natural logarithm of the sum of exponentials, from a base-2 maximum and the sum relative to it.
__device__ __forceinline__ float log_sum_exp(float maximum, float sum) {
  return sum > 0.f ? product(maximum + __log2f(sum), LN_2) : NEG_INFINITY;
}
