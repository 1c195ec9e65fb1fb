// Adapters beside their base weight: which policy a row belongs to, and the tables of what each policy adds.
//
//   y[t, n] = gain[n] * y[t, n] + sum over r of B[n, r] * (sum over k of A[r, k] * x[t, k]) + bias[n]
//
// A fused product is cut into parts (query, key and value rows, or gate and up); every policy has its own A, B, gain and
// bias for every part, or none. The tables are in device memory, so that a captured graph computes with whatever they hold
// at its next replay.
#pragma once
#include "common.cuh"

// One part of one policy. Null pointers: nothing of the kind. `rank` is a multiple of 32, filled up with zeros.
struct UnmergedEntry {
    const u16* a;      // bf16 [rank, k]
    const u16* b;      // bf16 [rows of the part, rank], scaled
    const float* gain; // [rows of the part]
    const float* bias; // [rows of the part]
    u32 rank;
    u32 unused;
};

struct Unmerged {
    const UnmergedEntry* entries; // [policies, parts]
    const int* slots;             // [m]
    const int* policy_of_slot;    // [n_slots], -1 for none
    u32 policies;
    u32 parts;
    u32 n_slots;
    u32 m;
};

// A row's policy, -1 for none.
__device__ __forceinline__ int policy_of(const Unmerged& u, u32 row) {
    if (row >= u.m) return -1;
    const int slot = u.slots[row];
    if ((u32)slot >= u.n_slots) return -1;
    const int policy = u.policy_of_slot[slot];
    return (u32)policy < u.policies ? policy : -1;
}

// What rounding took from a pair, as a pair itself: both together are the numbers with 16 bits.
__device__ __forceinline__ u32 rest_of(float low, float high, u32 rounded) {
    return pack_bf16(low - bf16_low(rounded), high - bf16_high(rounded));
}

// Whether any lane of the warp has a row of this policy.
template <int TILES>
__device__ __forceinline__ bool anyone_has(const int (&policy)[TILES], u32 turn) {
    bool mine = false;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) mine |= policy[tile] == (int)turn;
    return __any_sync(FULL_WARP, mine);
}
