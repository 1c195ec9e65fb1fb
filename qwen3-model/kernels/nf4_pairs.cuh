// Weights in 4 bits by the byte: a byte of two weights is looked up in shared memory, as two f32 values of the map. Each multiple
// of 16 bytes of banks has a copy of the table, so that no two lanes meet in a bank.
#pragma once
#include "common.cuh"

// The table is float2 [256][PAIR_COPIES].
#define PAIR_COPIES 16

// What the table has for a byte. Its even element is the high nibble.
__device__ __forceinline__ float2 two_values(const float (&map)[16], u32 byte) { return make_float2(map[byte >> 4], map[byte & 15]); }

// Two weights, from byte `i` of a word. `pairs` is the lane's copy of the table.
__device__ __forceinline__ u32 two_weights(const unsigned char* pairs, u32 word, int i, float absmax) {
    const u32 at = (i == 0 ? word << 7 : word >> (8 * i - 7)) & 0x7f80;
    const float2 pair = *reinterpret_cast<const float2*>(pairs + at);
    return pack_bf16(__fmul_rn(pair.x, absmax), __fmul_rn(pair.y, absmax));
}

// The eight of a word.
__device__ __forceinline__ uint4 eight_weights(const unsigned char* pairs, u32 word, float absmax) {
    return make_uint4(two_weights(pairs, word, 0, absmax), two_weights(pairs, word, 1, absmax),
                      two_weights(pairs, word, 2, absmax), two_weights(pairs, word, 3, absmax));
}
