// A step of a single row: how a stage's results reach the next one.
//
// Counters and their fences, and copies that begin behind them, take longer than the products of a row. A row's results are so
// few that each block can ask for all of them by itself, as words that say themselves whether they are there. So no block
// waits for a fence, and the rings need not stay quiet for one.
#pragma once
#include "hopper.cuh"

// Where the input of a single row lies, a chunk every 128 bytes, beside the sums of products.
#define X_WORDS (WARPS * COLUMNS * SUM_STRIDE * 4)
#define MAX_CHUNKS ((X_REGION - X_WORDS) / 128)
static_assert(X_WORDS % 1024 == 0, "pieces lie exchanged by the chunk's number");

// The row's input of a stage into shared memory, in the order in which products read it: a warp takes chunks `warp`,
// `warp + 8`, ... `tag` is what the words bear; `plain` has the input of the launch's first stage.
#define INPUTS_AT_ONCE 8 // chunks: more make the code longer, and it is fetched cold
__device__ __forceinline__ void take_input(u32 base, const u32* words, const u16* plain, u32 tag, u32 chunks, u32 warp, u32 lane) {
    bool first_there = plain != nullptr;
#pragma unroll 1
    for (u32 first = warp; first < chunks; first += WARPS * INPUTS_AT_ONCE) {
        u32 pair[INPUTS_AT_ONCE];
        if (plain) {
#pragma unroll
            for (u32 i = 0; i < INPUTS_AT_ONCE; ++i) {
                const u32 chunk = first + i * WARPS;
                if (chunk < chunks) pair[i] = reinterpret_cast<const u32*>(plain)[chunk * 32 + lane];
            }
        } else {
            u32 low[INPUTS_AT_ONCE], high[INPUTS_AT_ONCE];
            // One chunk first: asking for all of them again and again would hold up the weights.
            while (!first_there) {
                load_pair(words + first * 64 + lane * 2, low[0], high[0]);
                first_there = __all_sync(FULL_WARP, low[0] >> 16 == tag && high[0] >> 16 == tag);
            }
#pragma unroll
            for (u32 i = 0; i < INPUTS_AT_ONCE; ++i) {
                const u32 chunk = first + i * WARPS;
                low[i] = high[i] = tag << 16;
                if (chunk < chunks) load_pair(words + chunk * 64 + lane * 2, low[i], high[i]);
            }
            bool there;
            do {
                there = true;
#pragma unroll
                for (u32 i = 0; i < INPUTS_AT_ONCE; ++i)
                    if (low[i] >> 16 != tag || high[i] >> 16 != tag) {
                        there = false;
                        load_pair(words + (first + i * WARPS) * 64 + lane * 2, low[i], high[i]);
                    }
            } while (!__all_sync(FULL_WARP, there));
#pragma unroll
            for (u32 i = 0; i < INPUTS_AT_ONCE; ++i) pair[i] = __byte_perm(low[i], high[i], 0x5410);
        }
#pragma unroll
        for (u32 i = 0; i < INPUTS_AT_ONCE; ++i) {
            const u32 chunk = first + i * WARPS;
            if (chunk < chunks) store_shared(base + X_WORDS + chunk * 128 + ((lane >> 2 ^ chunk & 7) << 4) + (lane & 3) * 4, pair[i]);
        }
    }
}
