// Sampling, first part: what each chunk of a row of logits contributes.
//
//   logits f32 [rows, vocab]
//
// `sample_partial` reduces CHUNK logits per block to (largest, its index, sum of exp against it), and to the
// largest after penalties. `sample_weigh` then gives every candidate its integer weight: the sum of each chunk,
// and for rows with top_k or top_p the count and the sum of weights of each bin of distances. Rows at
// temperature 0 need no weights. `sample_choose` (sample_choose.cu) joins them.
//
// Chunks have a fixed size, so the order of the sum of exp depends on the vocabulary alone. A row with a NaN,
// or without a finite logit, has a NaN log-probability and a valid token: the host reports it.
#include "sampling.cuh"

#define SAMPLE_THREADS 256
#define VECTORS (SAMPLE_CHUNK / 4 / SAMPLE_THREADS)
#define WARPS (SAMPLE_THREADS / 32)

// Strictly larger: a thread meets its indices in rising order.
__device__ __forceinline__ void take_four(Best& best, const float x[4], u32 i) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (x[j] > best.value) {
            best.value = x[j];
            best.index = i + j;
        }
}

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_partial(const SampleParams p) {
    __shared__ float scratch[WARPS];
    __shared__ Best bests[WARPS];
    __shared__ Best adjusted_bests[WARPS];
    pdl_release();
    pdl_wait();
    const u32 row = blockIdx.y;
    const u32 first = blockIdx.x * SAMPLE_CHUNK;
    const SampleRow r = p.sample_rows[row];

    const float* in = p.logits + (u64)row * p.vocab;
    float x[VECTORS][4];
    Best best;
    best.value = NEGATIVE_INFINITY;
    best.index = first;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const u32 i = first + (v * SAMPLE_THREADS + threadIdx.x) * 4;
        load_four(in, p.vocab, i, x[v]);
        take_four(best, x[v], i);
    }
    best = block_best<WARPS>(best, bests);

    // Without a finite logit the reference is 0, so that -inf adds 0 and NaN stays NaN.
    const float reference = best.value == NEGATIVE_INFINITY ? 0.f : best.value;
    float sum = 0.f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += expf(x[v][j] - reference);
    sum = block_sum<WARPS>(sum, scratch);

    Best after = best;
    const Adjust adjust = adjustment(p, r, row);
    if (adjust.states) {
        after.value = NEGATIVE_INFINITY;
        after.index = first;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const u32 i = first + (v * SAMPLE_THREADS + threadIdx.x) * 4;
            adjust_four(adjust, p.vocab, i, x[v]);
            take_four(after, x[v], i);
        }
        after = block_best<WARPS>(after, adjusted_bests);
    }
    if (threadIdx.x == 0) {
        const u64 at = (u64)row * p.n_chunks + blockIdx.x;
        p.chunk_max[at] = best.value;
        p.chunk_index[at] = best.index;
        p.chunk_sum[at] = sum;
        p.adjusted_max[at] = after.value;
        p.adjusted_index[at] = after.index;
    }
    if (blockIdx.x == 0 && (r.flags & ROW_CUTS))
        for (u32 bin = threadIdx.x; bin < N_BINS; bin += SAMPLE_THREADS) {
            p.bin_count[(u64)row * N_BINS + bin] = 0;
            p.bin_weight[(u64)row * N_BINS + bin] = 0;
        }
}

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_weigh(const SampleParams p) {
    __shared__ u32 counts[N_BINS];
    // Sums of the lowest 16 bits of weights, of the next 16, and of the rest: they stay below 2^32 in a chunk.
    __shared__ u32 parts[3][N_BINS];
    __shared__ u64 sums[WARPS];
    __shared__ u64 far_sums[WARPS];
    __shared__ u32 far_counts[WARPS];
    pdl_release();
    pdl_wait();
    const u32 row = blockIdx.y;
    const u32 first = blockIdx.x * SAMPLE_CHUNK;
    const SampleRow r = p.sample_rows[row];
    if (!(r.flags & ROW_DRAWS)) return;
    const bool cuts = r.flags & ROW_CUTS;
    if (cuts) {
        for (u32 bin = threadIdx.x; bin < N_BINS; bin += SAMPLE_THREADS) {
            counts[bin] = 0;
            parts[0][bin] = parts[1][bin] = parts[2][bin] = 0;
        }
        __syncthreads();
    }
    const float best = warp_greatest(p.adjusted_max + (u64)row * p.n_chunks, p.n_chunks);
    const Adjust adjust = adjustment(p, r, row);
    const float* in = p.logits + (u64)row * p.vocab;
    u64 sum = 0, far = 0;
    u32 n_far = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const u32 i = first + (v * SAMPLE_THREADS + threadIdx.x) * 4;
        float x[4];
        load_four(in, p.vocab, i, x);
        adjust_four(adjust, p.vocab, i, x);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float u = distance(best, x[j], r.scale);
            if (u <= r.limit) {
                const u64 weight = weight_of(u);
                sum += weight;
                const u32 key = __float_as_uint(u);
                if (key >= FAR_KEY) {
                    far += weight;
                    ++n_far;
                } else if (cuts) {
                    const u32 bin = bin_of(key);
                    const u32 low = (u32)weight;
                    const u32 high = (u32)(weight >> 32);
                    atomicAdd(&counts[bin], 1u);
                    atomicAdd(&parts[0][bin], low & 0xffffu);
                    atomicAdd(&parts[1][bin], low >> 16);
                    if (high) atomicAdd(&parts[2][bin], high);
                }
            }
        }
    }
    sum = warp_sum_u64(sum);
    far = warp_sum_u64(far);
    n_far = (u32)warp_sum_u64(n_far);
    if ((threadIdx.x & 31) == 0) {
        sums[threadIdx.x >> 5] = sum;
        far_sums[threadIdx.x >> 5] = far;
        far_counts[threadIdx.x >> 5] = n_far;
    }
    __syncthreads();
    u32* bin_count = p.bin_count + (u64)row * N_BINS;
    u64* bin_weight = p.bin_weight + (u64)row * N_BINS;
    if (threadIdx.x == 0) {
        sum = far = n_far = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            sum += sums[warp];
            far += far_sums[warp];
            n_far += far_counts[warp];
        }
        p.chunk_weight[(u64)row * p.n_chunks + blockIdx.x] = sum;
        if (cuts && n_far) {
            atomicAdd(&bin_count[FAR_BIN], n_far);
            atomicAdd(&bin_weight[FAR_BIN], far);
        }
    }
    if (cuts)
        for (u32 bin = threadIdx.x; bin < FAR_BIN; bin += SAMPLE_THREADS)
            if (counts[bin]) {
                const u64 weight = parts[0][bin] + ((u64)parts[1][bin] << 16) + ((u64)parts[2][bin] << 32);
                atomicAdd(&bin_count[bin], counts[bin]);
                atomicAdd(&bin_weight[bin], weight);
            }
}
