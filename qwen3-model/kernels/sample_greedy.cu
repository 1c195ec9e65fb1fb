// The largest logit of each row and its log-probability, in two kernels, and the state of the next
// decode step.
//
//   logits f32 [rows, stride], the first `vocab` of each row count
//   token[row]   = the lowest index among the largest logits
//   logprob[row] = logits[row, token] - log sum_i exp(logits[row, i])
//
// `greedy_partial` reduces CHUNK logits per block to (largest, its index, sum of exp against it);
// `greedy_finish` joins a row's chunks with one warp. Chunks have a fixed size, so the order of the
// sum depends on the vocabulary alone. A row with a NaN, or without a finite logit, has a NaN
// log-probability and a valid token: the host reports it.
//
// `greedy_finish` also moves the decode state on: the sampled token becomes the slot's last token,
// and the row's position and length grow by one, so that the next replay of a captured step needs
// nothing from the host. Rows of slot 0 (padding) leave all state alone.
#include "common.cuh"

#define SAMPLE_THREADS 256
#define CHUNK 4096
#define VECTORS (CHUNK / 4 / SAMPLE_THREADS)
#define FINISH_WARPS 4
#define NEGATIVE_INFINITY (-__int_as_float(0x7f800000))

struct GreedyPartialParams {
    const float* logits;
    float* chunk_max;  // [rows, n_chunks]
    u32* chunk_index;  // [rows, n_chunks]
    float* chunk_sum;  // [rows, n_chunks]
    u64 stride; // a multiple of 4
    u32 rows;
    u32 vocab;
    u32 n_chunks; // ceil(vocab / CHUNK)
    u32 unused;
};

struct GreedyFinishParams {
    const float* chunk_max;
    const u32* chunk_index;
    const float* chunk_sum;
    const int* slots;    // [rows]
    u32* last_token;     // [n_slots]
    int* positions;      // [rows] raised by one, or null
    int* lengths;        // [rows] raised by one, or null
    u32* out_tokens;     // [rows]
    float* out_logprobs; // [rows]
    u32 rows;
    u32 n_chunks;
    u32 n_slots;
    u32 unused;
};

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    greedy_partial(const GreedyPartialParams p) {
    __shared__ float scratch[SAMPLE_THREADS / 32];
    __shared__ Best bests[SAMPLE_THREADS / 32];
    pdl_release();
    pdl_wait();
    const u32 row = blockIdx.y;
    const u32 first = blockIdx.x * CHUNK;

    const float* in = p.logits + (u64)row * p.stride;
    float x[VECTORS * 4];
    Best best;
    best.value = NEGATIVE_INFINITY;
    best.index = first;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const u32 i = first + (v * SAMPLE_THREADS + threadIdx.x) * 4;
        if (i + 3 < p.vocab) {
            const float4 four = *reinterpret_cast<const float4*>(in + i);
            x[4 * v] = four.x;
            x[4 * v + 1] = four.y;
            x[4 * v + 2] = four.z;
            x[4 * v + 3] = four.w;
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                x[4 * v + j] = i + j < p.vocab ? in[i + j] : NEGATIVE_INFINITY;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            // Strictly larger: a thread meets its indices in rising order.
            if (x[4 * v + j] > best.value) {
                best.value = x[4 * v + j];
                best.index = i + j;
            }
    }
    best = warp_best(best);
    if ((threadIdx.x & 31) == 0) bests[threadIdx.x >> 5] = best;
    __syncthreads();
    best = bests[0];
#pragma unroll
    for (int warp = 1; warp < SAMPLE_THREADS / 32; ++warp) best = better(best, bests[warp]);

    // Without a finite logit the reference is 0, so that -inf adds 0 and NaN stays NaN.
    const float reference = best.value == NEGATIVE_INFINITY ? 0.f : best.value;
    float sum = 0.f;
#pragma unroll
    for (int v = 0; v < VECTORS * 4; ++v) sum += expf(x[v] - reference);
    sum = block_sum<SAMPLE_THREADS / 32>(sum, scratch);
    if (threadIdx.x == 0) {
        const u64 at = (u64)row * p.n_chunks + blockIdx.x;
        p.chunk_max[at] = best.value;
        p.chunk_index[at] = best.index;
        p.chunk_sum[at] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(FINISH_WARPS * 32)
    greedy_finish(const GreedyFinishParams p) {
    pdl_release();
    pdl_wait();
    const u32 row = blockIdx.x * FINISH_WARPS + (threadIdx.x >> 5);
    if (row >= p.rows) return;
    const u32 lane = threadIdx.x & 31;
    const u64 base = (u64)row * p.n_chunks;
    Best best;
    best.value = NEGATIVE_INFINITY;
    best.index = 0xffffffffu;
    for (u32 chunk = lane; chunk < p.n_chunks; chunk += 32) {
        Best other;
        other.value = p.chunk_max[base + chunk];
        other.index = p.chunk_index[base + chunk];
        best = better(best, other);
    }
    best = warp_best(best);
    const float reference = best.value == NEGATIVE_INFINITY ? 0.f : best.value;
    float sum = 0.f;
    for (u32 chunk = lane; chunk < p.n_chunks; chunk += 32)
        sum += p.chunk_sum[base + chunk] * expf(p.chunk_max[base + chunk] - reference);
    sum = warp_sum(sum);
    if (lane != 0) return;

    const float logprob = (best.value - reference) - logf(sum);
    p.out_tokens[row] = best.index;
    p.out_logprobs[row] = logprob;
    const u32 slot = (u32)p.slots[row];
    if (slot == 0 || slot >= p.n_slots) return;
    p.last_token[slot] = best.index;
    if (p.positions) p.positions[row] += 1;
    if (p.lengths) p.lengths[row] += 1;
}
