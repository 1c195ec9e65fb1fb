// What the sampling kernels share: the definition in src/sampling/mod.rs, in the same arithmetic. Every
// floating-point operation that decides a token is written so that it rounds as on the CPU; sums are of
// integers, so that their order does not matter.
#pragma once
#include "common.cuh"

#define SAMPLE_CHUNK 4096
// Threads of a whole block that read a chunk together, each four vectors of four.
#define CHUNK_THREADS (SAMPLE_CHUNK / 16)
#define NEGATIVE_INFINITY (-__int_as_float(0x7f800000))
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

// Weights: 2^44 for the most likely token.
#define WEIGHT_BITS 44

// Bins of distances in powers of two: bin 0 ends at 2^-4, then come 32 per octave. The last holds all from 16
// on, most of a vocabulary: boundaries are rarely there, and threads add it up without atomics.
#define BIN_SHIFT 18
#define BIN_BASE (0x3d800000u >> BIN_SHIFT)
#define FAR_KEY 0x41800000u
#define FAR_BIN ((FAR_KEY >> BIN_SHIFT) - BIN_BASE + 1)
#define N_BINS (FAR_BIN + 1)

// Flags of a row.
#define ROW_DRAWS 1u     // temperature above 0
#define ROW_CUTS 2u      // top_k or top_p
#define ROW_PENALISES 4u // any penalty
#define ROW_COUNTS 8u    // keeps token states

// Bits of a token state: times that the id occurs in the completion, and
#define STATE_PROMPT 0x8000u
#define STATE_STOP 0x4000u
#define STATE_COUNT 0x3fffu

struct SampleRow {
    float scale; // log2(e) / temperature
    float limit; // greatest distance of a candidate
    float top_p;
    u32 top_k;
    float repetition;         // factor of negative logits
    float inverse_repetition; // factor of positive ones
    float presence;
    float frequency;
    u32 flags;
    u32 seed_low;
    u32 seed_high;
    u32 completion;
    u32 prompt_len;
    u32 min_new_tokens;
    u32 top_logprobs;
    u32 position; // of the input token, for rows without positions on the device
};

// Operands of all sampling kernels.
struct SampleParams {
    const float* logits;          // [rows, vocab]
    const SampleRow* sample_rows; // [rows]
    const int* slots;             // [rows]
    u16* states;                  // [n_slots, vocab]
    int* positions;               // [rows] of the input tokens, raised by one; or null
    u32* last_token;              // [n_slots]
    float* chunk_max;             // [rows, n_chunks], of logits
    u32* chunk_index;             // [rows, n_chunks]
    float* chunk_sum;             // [rows, n_chunks]
    float* adjusted_max;          // [rows, n_chunks], of logits after penalties
    u32* adjusted_index;          // [rows, n_chunks]
    u64* chunk_weight;            // [rows, n_chunks]
    u64* bin_weight;              // [rows, N_BINS]
    u32* bin_count;               // [rows, N_BINS]
    u32* out_tokens;              // [rows]
    float* out_logprobs;          // [rows]
    float* out_sampled_logprobs;  // [rows]
    u32* out_top;                 // [rows, 2, max_top]: ids, then bits of log-probabilities
    u32 rows;
    u32 vocab; // a multiple of 4
    u32 n_chunks;
    u32 n_slots;
    u32 max_top;
    u32 unused;
};

// Token number of the completion that the row samples.
__device__ __forceinline__ u32 new_token_index(const SampleParams& p, const SampleRow& r, u32 row) {
    const u32 position = p.positions ? (u32)p.positions[row] : r.position;
    return position + 1 - r.prompt_len;
}

// How to get from logits to adjusted logits.
struct Adjust {
    const u16* states; // [vocab] of the row's slot, or null if logits stay as they are
    float repetition;
    float inverse_repetition;
    float presence;
    float frequency;
    bool may_stop;
};

__device__ __forceinline__ Adjust adjustment(const SampleParams& p, const SampleRow& r, u32 row) {
    Adjust a;
    const u32 slot = (u32)p.slots[row];
    a.may_stop = new_token_index(p, r, row) >= r.min_new_tokens;
    const bool adjusts = ((r.flags & ROW_PENALISES) || !a.may_stop) && slot < p.n_slots;
    a.states = adjusts ? p.states + (u64)slot * p.vocab : nullptr;
    a.repetition = r.repetition;
    a.inverse_repetition = r.inverse_repetition;
    a.presence = r.presence;
    a.frequency = r.frequency;
    return a;
}

__device__ __forceinline__ float adjusted(const Adjust& a, float x, u32 state) {
    if ((state & STATE_STOP) && !a.may_stop) return NEGATIVE_INFINITY;
    if (state & ~STATE_STOP) x = __fmul_rn(x, x > 0.f ? a.inverse_repetition : a.repetition);
    const u32 count = state & STATE_COUNT;
    if (count) {
        x = __fsub_rn(x, __fmul_rn(a.frequency, (float)count));
        x = __fsub_rn(x, a.presence);
    }
    return x;
}

// Four neighbours of a row; those at or past `vocab` are -inf. `i` is a multiple of 4.
__device__ __forceinline__ void load_four(const float* in, u32 vocab, u32 i, float x[4]) {
    if (i < vocab) {
        const float4 four = *reinterpret_cast<const float4*>(in + i);
        x[0] = four.x;
        x[1] = four.y;
        x[2] = four.z;
        x[3] = four.w;
    } else {
        x[0] = x[1] = x[2] = x[3] = NEGATIVE_INFINITY;
    }
}

__device__ __forceinline__ void adjust_four(const Adjust& a, u32 vocab, u32 i, float x[4]) {
    if (!a.states || i >= vocab) return;
    const uint2 four = *reinterpret_cast<const uint2*>(a.states + i);
    x[0] = adjusted(a, x[0], four.x & 0xffffu);
    x[1] = adjusted(a, x[1], four.x >> 16);
    x[2] = adjusted(a, x[2], four.y & 0xffffu);
    x[3] = adjusted(a, x[3], four.y >> 16);
}

// Distance from the best in powers of two; candidates have one up to the row's limit, which NaN has not.
__device__ __forceinline__ float distance(float best, float y, float scale) {
    return __fmul_rn(__fsub_rn(best, y), scale);
}

// floor(2^44 * 2^-distance) for distances from 0 to 44.
__device__ __forceinline__ u64 weight_of(float distance) {
    const u32 n = (u32)__fadd_rn(distance, 0.5f);
    const float f = __fsub_rn(distance, (float)n);
    float power = 0.00015353362f;
    power = __fadd_rn(__fmul_rn(power, f), -0.0013398875f);
    power = __fadd_rn(__fmul_rn(power, f), 0.009618437f);
    power = __fadd_rn(__fmul_rn(power, f), -0.055503324f);
    power = __fadd_rn(__fmul_rn(power, f), 0.24022648f);
    power = __fadd_rn(__fmul_rn(power, f), -0.6931472f);
    power = __fadd_rn(__fmul_rn(power, f), 1.f);
    // 24 bits, exact: `power` lies between 1/2 and 2.
    const u32 digits = (u32)__fmul_rn(power, 16777216.f);
    return ((u64)digits << (WEIGHT_BITS - 24)) >> n;
}

// Distances are not negative, so that their bits sort like them.
__device__ __forceinline__ u32 bin_of(u32 key) {
    const u32 step = key >> BIN_SHIFT;
    return step < BIN_BASE ? 0 : min(step - BIN_BASE + 1, FAR_BIN);
}

// Philox4x32-10, the first 64 bits of the block of counter [index, completion, 0, 0].
__device__ __forceinline__ u64 uniform_bits(u32 seed_low, u32 seed_high, u32 completion, u32 index) {
    u32 c0 = index, c1 = completion, c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(0xd2511f53u, c0), low0 = 0xd2511f53u * c0;
        const u32 high1 = __umulhi(0xcd9e8d57u, c2), low1 = 0xcd9e8d57u * c2;
        c0 = high1 ^ c1 ^ seed_low;
        c1 = low1;
        c2 = high0 ^ c3 ^ seed_high;
        c3 = low0;
        seed_low += 0x9e3779b9u;
        seed_high += 0xbb67ae85u;
    }
    return (u64)c0 | (u64)c1 << 32;
}

// Greatest of n values, for one warp.
__device__ __forceinline__ float warp_greatest(const float* values, u32 n) {
    float best = NEGATIVE_INFINITY;
    for (u32 i = threadIdx.x & 31; i < n; i += 32) best = fmaxf(best, values[i]);
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, offset));
    return best;
}

__device__ __forceinline__ u64 warp_sum_u64(u64 value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

// The raw row, joined from its chunks by one warp: the best logit, and what log-probabilities subtract.
struct RawRow {
    Best best;
    float reference; // the best logit, or 0 if there is none above -inf
    float log_sum;   // log sum exp(logit - reference)
};
__device__ __forceinline__ RawRow join_raw(const SampleParams& p, u32 row) {
    const u32 lane = threadIdx.x & 31;
    const u64 base = (u64)row * p.n_chunks;
    RawRow raw;
    raw.best.value = NEGATIVE_INFINITY;
    raw.best.index = 0xffffffffu;
    for (u32 chunk = lane; chunk < p.n_chunks; chunk += 32) {
        Best other;
        other.value = p.chunk_max[base + chunk];
        other.index = p.chunk_index[base + chunk];
        raw.best = better(raw.best, other);
    }
    raw.best = warp_best(raw.best);
    raw.reference = raw.best.value == NEGATIVE_INFINITY ? 0.f : raw.best.value;
    float sum = 0.f;
    for (u32 chunk = lane; chunk < p.n_chunks; chunk += 32)
        sum += p.chunk_sum[base + chunk] * expf(p.chunk_max[base + chunk] - raw.reference);
    raw.log_sum = logf(warp_sum(sum));
    return raw;
}
