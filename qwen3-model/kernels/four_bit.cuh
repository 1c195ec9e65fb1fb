// Weights in 4 bits, decoded in registers to the bits that bitsandbytes gives: bf16(map[nibble] * absmax).
//
// All 64 weights of a block have one scale, so sixteen values are all that they can be. A thread makes the table of these
// once per block and then looks four weights up at a time by byte permutes:
//
//   entries of the table     bf16 0 … 15, as low bytes in four registers and high bytes in four more
//   nibble = 8 a + b         permute the lower and the upper eight entries by b, then pick by a
//
// Nibbles of a 32-bit word, from the lowest: e1 e0 e3 e2 e5 e4 e7 e6, since the even element is the high one of a byte.
#pragma once
#include "common.cuh"

// The sixteen values of one block.
struct BlockTable {
    u32 low[4];  // low bytes of entries 4 i … 4 i + 3
    u32 high[4]; // high bytes
};

__device__ __forceinline__ BlockTable block_table(const float* map, float absmax) {
    BlockTable table;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 a = pack_bf16(__fmul_rn(map[4 * i], absmax), __fmul_rn(map[4 * i + 1], absmax));
        const u32 b = pack_bf16(__fmul_rn(map[4 * i + 2], absmax), __fmul_rn(map[4 * i + 3], absmax));
        table.low[i] = __byte_perm(a, b, 0x6420);
        table.high[i] = __byte_perm(a, b, 0x7531);
    }
    return table;
}

// Four weights, as (e0, e1) and (e2, e3), from the lower half of `nibbles` and `picks`.
__device__ __forceinline__ uint2 four_weights(const BlockTable& table, u32 nibbles, u32 picks) {
    const u32 low = __byte_perm(__byte_perm(table.low[0], table.low[1], nibbles),
                                __byte_perm(table.low[2], table.low[3], nibbles), picks);
    const u32 high = __byte_perm(__byte_perm(table.high[0], table.high[1], nibbles),
                                 __byte_perm(table.high[2], table.high[3], nibbles), picks);
    return make_uint2(__byte_perm(low, high, 0x4051), __byte_perm(low, high, 0x6273));
}

// Eight weights of a word: pairs (e0, e1), (e2, e3), (e4, e5), (e6, e7).
__device__ __forceinline__ uint4 eight_weights(const BlockTable& table, u32 word) {
    const u32 nibbles = word & 0x77777777u;
    const u32 picks = (word >> 1 & 0x44444444u) | 0x32103210u;
    const uint2 first = four_weights(table, nibbles, picks);
    const uint2 second = four_weights(table, nibbles >> 16, picks >> 16);
    return make_uint4(first.x, first.y, second.x, second.y);
}
