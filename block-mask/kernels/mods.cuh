// The mask and score functions of a specialisation, printed by the host (`block_mask::codegen`) as "mods_source.cuh":
//
//   struct Captures                                                   the buffers that the functions captured
//   bool  mask_mod(int b, int h, int q, int kv, const Captures& c)
//   float score_mod(float score, int b, int h, int q, int kv, const Captures& c)
//
// b: row of the batch, h: query head, q and kv: logical positions. HAS_MASK_MOD and HAS_SCORE_MOD say which of the two
// the kernel applies; without either the text is not included at all.
#pragma once
#include "bf16.cuh"

#ifndef HAS_MASK_MOD
#define HAS_MASK_MOD 0
#endif
#ifndef HAS_SCORE_MOD
#define HAS_SCORE_MOD 0
#endif

#if HAS_MASK_MOD || HAS_SCORE_MOD
#include "mods_source.cuh"
#else
struct Captures {
  int unused;
};
#endif
