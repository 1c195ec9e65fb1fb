// The mask and score functions of a specialisation. Their text is printed by the host into MODS_SOURCE's place
// ("mods_source.cuh"), which defines
//   HAS_MASK_MOD and  bool  mask_mod(const Mods& m, int b, int h, int q, int kv)
//   HAS_SCORE_MOD and float score_mod(const Mods& m, float score, int b, int h, int q, int kv)
// b: row of the batch, h: query head, q and kv: logical positions.
#pragma once
#include "bf16.cuh"

#define MAX_MOD_BUFFERS 8

// Buffers that the functions captured, in the order in which the host numbered them.
struct Mods {
  const void* buffers[MAX_MOD_BUFFERS];
  int lengths[MAX_MOD_BUFFERS];
};

#include "mods_source.cuh"

#ifndef HAS_MASK_MOD
#define HAS_MASK_MOD 0
__device__ __forceinline__ bool mask_mod(const Mods&, int, int, int, int) { return true; }
#endif
#ifndef HAS_SCORE_MOD
#define HAS_SCORE_MOD 0
__device__ __forceinline__ float score_mod(const Mods&, float score, int, int, int, int) { return score; }
#endif
