// The token states of one slot, from the host: all of them 0 but the given ones.
//
//   entries u32 [n_entries, 2]: id, state
#include "sampling.cuh"

#define STATES_THREADS 1024

struct TokenStatesParams {
    u16* states;        // [n_slots, vocab]
    const u32* entries; // [n_entries, 2]
    u32 slot;
    u32 n_slots;
    u32 vocab; // a multiple of 4
    u32 n_entries;
    u32 clear; // 0 adds to what is there
    u32 unused;
};

extern "C" __global__ void __launch_bounds__(STATES_THREADS) token_states(const TokenStatesParams p) {
    pdl_release();
    pdl_wait();
    if (p.slot >= p.n_slots) return;
    u16* states = p.states + (u64)p.slot * p.vocab;
    if (p.clear)
        for (u32 i = threadIdx.x * 4; i < p.vocab; i += STATES_THREADS * 4)
            *reinterpret_cast<uint2*>(states + i) = make_uint2(0, 0);
    __syncthreads();
    for (u32 i = threadIdx.x; i < p.n_entries; i += STATES_THREADS) {
        const u32 id = p.entries[2 * i];
        if (id < p.vocab) states[id] = (u16)p.entries[2 * i + 1];
    }
}
