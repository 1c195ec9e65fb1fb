// Sampling, third part: the most likely tokens of rows that ask for them, with their log-probabilities.
//
//   out_top[row, 0, i], out_top[row, 1, i] = id and log-probability (bits) of the i-th greatest logit,
//                                            of equals the lowest id first
//
// The n-th greatest of the chunks' maxima is no greater than the n-th greatest logit. Logits from there on are
// collected in shared memory, usually few, and each counts how many come before it. If they are too many, the
// row is read once for every place. Places without a token get the id 0xffffffff.
#include "sampling.cuh"

#define TOP_THREADS 1024
#define TOP_WARPS (TOP_THREADS / 32)
#define LIST 1024
#define CHUNKS_AT_ONCE (TOP_THREADS / CHUNK_THREADS)

extern "C" __global__ void __launch_bounds__(TOP_THREADS, 1) sample_top(const SampleParams p) {
    __shared__ float values[LIST];
    __shared__ u32 ids[LIST];
    __shared__ Best bests[TOP_WARPS];
    __shared__ RawRow raw;
    __shared__ float floor_value;
    __shared__ u32 n_listed;
    pdl_release();
    pdl_wait();
    const u32 row = blockIdx.x;
    const u32 wanted = min(p.sample_rows[row].top_logprobs, p.max_top);
    if (wanted == 0) return;
    u32* out_ids = p.out_top + (u64)row * 2 * p.max_top;
    u32* out_logprobs = out_ids + p.max_top;
    const float* in = p.logits + (u64)row * p.vocab;
    const float* maxima = p.chunk_max + (u64)row * p.n_chunks;
    if (threadIdx.x < 32) {
        const RawRow joined = join_raw(p, row);
        if (threadIdx.x == 0) {
            raw = joined;
            floor_value = NEGATIVE_INFINITY;
            n_listed = 0;
        }
    }
    __syncthreads();
    for (u32 chunk = threadIdx.x; chunk < p.n_chunks; chunk += TOP_THREADS) {
        const float mine = maxima[chunk];
        u32 place = 0;
        for (u32 other = 0; other < p.n_chunks; ++other) {
            const float value = maxima[other];
            place += value > mine || (value == mine && other < chunk);
        }
        if (place == wanted - 1) floor_value = mine;
    }
    if (threadIdx.x < p.max_top) {
        out_ids[threadIdx.x] = 0xffffffffu;
        out_logprobs[threadIdx.x] = __float_as_uint(NOT_A_NUMBER);
    }
    __syncthreads();
    const float least = floor_value;
    for (u32 chunk = threadIdx.x / CHUNK_THREADS; chunk < p.n_chunks; chunk += CHUNKS_AT_ONCE) {
        if (maxima[chunk] < least) continue;
        const u32 first = chunk * SAMPLE_CHUNK + threadIdx.x % CHUNK_THREADS * 4;
        float x[4][4];
#pragma unroll
        for (int v = 0; v < 4; ++v) load_four(in, p.vocab, first + v * CHUNK_THREADS * 4, x[v]);
#pragma unroll
        for (int v = 0; v < 4; ++v)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 i = first + v * CHUNK_THREADS * 4 + j;
                if (!(x[v][j] >= least) || i >= p.vocab) continue;
                const u32 place = atomicAdd(&n_listed, 1u);
                if (place < LIST) {
                    values[place] = x[v][j];
                    ids[place] = i;
                }
            }
    }
    __syncthreads();
    const u32 n = n_listed;
    if (n <= LIST) {
        for (u32 i = threadIdx.x; i < n; i += TOP_THREADS) {
            const float value = values[i];
            const u32 id = ids[i];
            u32 place = 0;
            for (u32 other = 0; other < n; ++other)
                place += values[other] > value || (values[other] == value && ids[other] < id);
            if (place < wanted) {
                out_ids[place] = id;
                out_logprobs[place] = __float_as_uint((value - raw.reference) - raw.log_sum);
            }
        }
        return;
    }
    Best last;
    last.value = -NEGATIVE_INFINITY;
    last.index = 0;
    for (u32 place = 0; place < wanted; ++place) {
        Best best;
        best.value = NEGATIVE_INFINITY;
        best.index = 0xffffffffu;
        for (u32 i = threadIdx.x; i < p.vocab; i += TOP_THREADS) {
            Best other;
            other.value = in[i];
            other.index = i;
            const bool is_after = place == 0 || other.value < last.value ||
                                  (other.value == last.value && other.index > last.index);
            if (is_after) best = better(best, other);
        }
        best = block_best<TOP_WARPS>(best, bests);
        __syncthreads();
        if (best.index == 0xffffffffu) return;
        if (threadIdx.x == 0) {
            out_ids[place] = best.index;
            out_logprobs[place] = __float_as_uint((best.value - raw.reference) - raw.log_sum);
        }
        last = best;
    }
}
