// Sampling, second part: one block per row joins its chunks, cuts at top_k and top_p, draws the token, and
// moves the decode state on.
//
//   token, logprob = token's logit - log sum exp, sampled_logprob = the same among the candidates
//
// Thresholds are found without sorting. The bins that `sample_weigh` filled tell in which bin of distances the
// boundary lies; `locate` narrows a range of keys down to one, nine bits a round, by the sums of 512 sub-ranges.
// It looks for the distance where the k-th candidate lies, for the distance where weights reach top_p, and for
// the id where the running sum of weights passes the random number:
//
//   keys      low ├────┼────┼────┼────┼────┼────┼────┼────┤ low + 2^bits        512 sub-ranges
//   running       before ──────────▶ target reached here ┘: the next round's range
//
// Where few enough candidates lie before the boundary's bin ends, they are collected in shared memory first, and
// rounds read those. Else a round reads the row again, except for chunks whose best is beyond the boundary.
//
// The sampled token becomes the slot's last token, its count in the slot's states grows, and so does the row's
// position, so that the next replay of a captured step needs nothing from the host. Rows of slot 0 (padding)
// leave all state alone.
#include "sampling.cuh"

#define CHOOSE_THREADS 1024
#define CHOOSE_WARPS (CHOOSE_THREADS / 32)
#define ROUND_BITS 9
#define ROUND_BINS (1 << ROUND_BITS)
#define LIST 5120
#define CHUNKS_AT_ONCE (CHOOSE_THREADS / CHUNK_THREADS)

// Where candidates are read from.
struct Source {
    float limit; // their greatest distance
    u32 first_chunk;
    u32 end_chunk;
    u32 listed; // so many in shared memory, or 0 to read chunks
};

struct Shared {
    // What all threads read and none changes.
    SampleRow row;
    Adjust adjust;
    RawRow raw;
    Best best; // of the logits after penalties
    u32 index; // of the new token
    // What rounds pass on.
    u64 bins[ROUND_BINS];
    u64 warp_sums[CHOOSE_WARPS];
    u64 before;
    u64 upto;
    u32 bin;
    u32 n_listed;
    Source source;
    u32 keys[LIST];
    u32 ids[LIST];
};

// Calls `f(key, id)` for every candidate of the chunks, and `done(chunk)` where a warp has had its part of one.
template <class F, class D>
__device__ __forceinline__ void each_of_chunks(const SampleParams& p, const Shared& shared, F f, D done) {
    const float* in = p.logits + (u64)blockIdx.x * p.vocab;
    const float* chunk_best = p.adjusted_max + (u64)blockIdx.x * p.n_chunks;
    const float best = shared.best.value, scale = shared.row.scale, limit = shared.source.limit;
    const u32 end = shared.source.end_chunk;
    for (u32 chunk = shared.source.first_chunk + threadIdx.x / CHUNK_THREADS; chunk < end; chunk += CHUNKS_AT_ONCE) {
        if (!(distance(best, chunk_best[chunk], scale) <= limit)) continue;
        const u32 start = chunk * SAMPLE_CHUNK + threadIdx.x % CHUNK_THREADS * 4;
        // Two vectors at a time: more would not fit the registers of 1,024 threads.
#pragma unroll 1
        for (u32 first = start; first < start + SAMPLE_CHUNK; first += 2 * CHUNK_THREADS * 4) {
            float x[2][4];
#pragma unroll
            for (int v = 0; v < 2; ++v) load_four(in, p.vocab, first + v * CHUNK_THREADS * 4, x[v]);
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                const u32 i = first + v * CHUNK_THREADS * 4;
                adjust_four(shared.adjust, p.vocab, i, x[v]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float u = distance(best, x[v][j], scale);
                    if (u <= limit) f(__float_as_uint(u), i + j);
                }
            }
        }
        done(chunk);
    }
}

// Calls `f(key, id)` for every candidate of the source.
template <class F>
__device__ __forceinline__ void each(const SampleParams& p, const Shared& shared, F f) {
    const u32 listed = shared.source.listed;
    if (listed) {
        for (u32 i = threadIdx.x; i < listed; i += CHOOSE_THREADS) f(shared.keys[i], shared.ids[i]);
    } else {
        each_of_chunks(p, shared, f, [](u32) {});
    }
}

// Sum over the block and all threads before, this one included.
__device__ __forceinline__ u64 running_sum(Shared& shared, u64 value) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const u64 other = __shfl_up_sync(FULL_WARP, value, offset);
        if (lane >= offset) value += other;
    }
    __syncthreads(); // the last use of `warp_sums` is over
    if (lane == 31) shared.warp_sums[warp] = value;
    __syncthreads();
    for (u32 i = 0; i < warp; ++i) value += shared.warp_sums[i];
    return value;
}

// Sum over the block.
__device__ __forceinline__ u64 block_total(Shared& shared, u64 value) {
    running_sum(shared, value);
    u64 total = 0;
#pragma unroll
    for (int warp = 0; warp < CHOOSE_WARPS; ++warp) total += shared.warp_sums[warp];
    return total;
}

// The thread whose range brings the running sum to `target` tells the others. `value` is this thread's sum.
__device__ __forceinline__ void find_range(Shared& shared, u64 value, u64 before, u64 target) {
    const u64 upto = before + running_sum(shared, value);
    if (upto >= target && upto - value < target) {
        shared.bin = threadIdx.x;
        shared.before = upto - value;
        shared.upto = upto;
    }
    __syncthreads();
}

struct Located {
    u32 key;
    u64 upto; // running sum, this key included
};

// What a candidate adds where; nothing if `amount` is 0.
struct Measure {
    u32 key;
    u64 amount;
};

// The smallest key of [low, low + 2^bits) at which the running sum reaches `target`; `before` is the sum below
// `low`. `measure(distance key, id)` says what each candidate adds.
template <class M>
__device__ __forceinline__ Located locate(const SampleParams& p, Shared& shared, u32 low, int bits, u64 before,
                                          u64 target, M measure) {
    for (;;) {
        const int shift = bits > ROUND_BITS ? bits - ROUND_BITS : 0;
        if (threadIdx.x < ROUND_BINS) shared.bins[threadIdx.x] = 0;
        __syncthreads();
        each(p, shared, [&](u32 key, u32 id) {
            const Measure m = measure(key, id);
            const u32 bin = (m.key - low) >> shift;
            if (m.amount && m.key >= low && bin < ROUND_BINS) atomicAdd(&shared.bins[bin], m.amount);
        });
        __syncthreads();
        find_range(shared, threadIdx.x < ROUND_BINS ? shared.bins[threadIdx.x] : 0, before, target);
        low += shared.bin << shift;
        before = shared.before;
        if (shift == 0) {
            Located found;
            found.key = low;
            found.upto = shared.upto;
            __syncthreads(); // before `shared` is written again
            return found;
        }
        bits = shift;
    }
}

// Range of keys of a bin of distances.
__device__ __forceinline__ u32 bin_low(u32 bin) { return bin ? (BIN_BASE + bin - 1) << BIN_SHIFT : 0; }
__device__ __forceinline__ int bin_bits(u32 bin) { return bin == FAR_BIN ? 24 : bin ? BIN_SHIFT : 30; }

// ceil(top_p * total), between 1 and total.
__device__ __forceinline__ u64 share(float top_p, u64 total) {
    const u64 wanted = (u64)ceil(__dmul_rn((double)top_p, __ull2double_rn(total)));
    return wanted < 1 ? 1 : wanted > total ? total : wanted;
}

struct Drawn {
    u32 token;
    u64 total; // weight of all candidates, 0 if there are none
};

__device__ __forceinline__ Drawn draw(const SampleParams& p, Shared& shared, u64 random) {
    const SampleRow& r = shared.row;
    Drawn drawn;
    drawn.token = 0;
    drawn.total = 0;
    u32 threshold = 0x7f800000u;
    const u32 thread = threadIdx.x;
    if (!(r.flags & ROW_CUTS)) {
        // The chunk where the running sum passes the random number, then the id in it.
        u64 mine = 0;
        for (u32 chunk = thread; chunk < p.n_chunks; chunk += CHOOSE_THREADS)
            mine += p.chunk_weight[(u64)blockIdx.x * p.n_chunks + chunk];
        const u64 total = block_total(shared, mine);
        if (total == 0) return drawn;
        drawn.total = total;
        const u64 target = __umul64hi(random, total) + 1;
        u64 before = 0;
        u32 first_chunk = 0;
        for (u32 base = 0;; base += CHOOSE_THREADS) {
            const u32 chunk = base + thread;
            const u64 weight = chunk < p.n_chunks ? p.chunk_weight[(u64)blockIdx.x * p.n_chunks + chunk] : 0;
            if (thread == 0) shared.bin = CHOOSE_THREADS;
            __syncthreads();
            find_range(shared, weight, before, target);
            const u32 bin = shared.bin;
            if (bin < CHOOSE_THREADS) {
                first_chunk = base + bin;
                before = shared.before;
                break;
            }
            before += block_total(shared, weight);
        }
        if (thread == 0) {
            shared.source.first_chunk = first_chunk;
            shared.source.end_chunk = first_chunk + 1;
        }
        __syncthreads();
        drawn.token = locate(p, shared, first_chunk * SAMPLE_CHUNK, 12, before, target, [](u32 key, u32 id) {
                          return Measure{id, weight_of(__uint_as_float(key))};
                      }).key;
        return drawn;
    }

    const u64 bins = (u64)blockIdx.x * N_BINS;
    const u64 bin_count = thread < N_BINS ? p.bin_count[bins + thread] : 0;
    const u64 bin_weight = thread < N_BINS ? p.bin_weight[bins + thread] : 0;
    u64 count = block_total(shared, bin_count);
    u64 total = block_total(shared, bin_weight);
    if (total == 0) return drawn;
    const bool cuts_k = r.top_k > 0 && r.top_k < count;
    const bool cuts_p = r.top_p < 1.f;
    // The bin of the first boundary: the others lie in front of it.
    u64 k_before = 0;
    u32 k_bin = FAR_BIN;
    u32 last_bin = FAR_BIN;
    if (cuts_k) {
        find_range(shared, bin_count, 0, r.top_k);
        k_bin = last_bin = shared.bin;
        k_before = shared.before;
        count = shared.upto;
    } else if (cuts_p) {
        find_range(shared, bin_weight, 0, share(r.top_p, total));
        last_bin = shared.bin;
        count = block_total(shared, thread <= last_bin ? bin_count : 0);
    }
    if (thread == 0) {
        if (last_bin < FAR_BIN)
            shared.source.limit = fminf(r.limit, __uint_as_float(bin_low(last_bin + 1) - 1));
        shared.n_listed = 0;
    }
    __syncthreads();
    if (count <= LIST) {
        each(p, shared, [&](u32 key, u32 id) {
            const u32 place = atomicAdd(&shared.n_listed, 1u);
            if (place < LIST) {
                shared.keys[place] = key;
                shared.ids[place] = id;
            }
        });
        __syncthreads();
        if (thread == 0) shared.source.listed = min(shared.n_listed, LIST);
        __syncthreads();
    }
    if (cuts_k) {
        threshold = locate(p, shared, bin_low(k_bin), bin_bits(k_bin), k_before, r.top_k, [](u32 key, u32) {
                        return Measure{key, 1};
                    }).key;
        u64 mine = 0;
        each(p, shared, [&](u32 key, u32) {
            if (key <= threshold) mine += weight_of(__uint_as_float(key));
        });
        total = block_total(shared, mine);
    }
    if (cuts_p) {
        const u64 wanted = share(r.top_p, total);
        // Bins from the k-th candidate's on hold too much, but `wanted` is reached before that shows.
        find_range(shared, bin_weight, 0, wanted);
        const u32 bin = shared.bin;
        const u64 before = shared.before;
        __syncthreads();
        const Located found = locate(p, shared, bin_low(bin), bin_bits(bin), before, wanted, [](u32 key, u32) {
            return Measure{key, weight_of(__uint_as_float(key))};
        });
        threshold = found.key;
        total = found.upto;
    }
    drawn.total = total;
    const u64 target = __umul64hi(random, total) + 1;
    u32 low = 0;
    u64 before = 0;
    int bits = 12;
    if (!shared.source.listed && p.n_chunks <= ROUND_BINS) {
        // The chunk first: neighbours would wait for each other at the bins of a range of ids.
        if (thread < ROUND_BINS) shared.bins[thread] = 0;
        __syncthreads();
        u64 mine = 0;
        each_of_chunks(
            p, shared,
            [&](u32 key, u32) {
                if (key <= threshold) mine += weight_of(__uint_as_float(key));
            },
            [&](u32 chunk) {
                const u64 sum = warp_sum_u64(mine);
                if ((threadIdx.x & 31) == 0) atomicAdd(&shared.bins[chunk], sum);
                mine = 0;
            });
        __syncthreads();
        find_range(shared, thread < ROUND_BINS ? shared.bins[thread] : 0, 0, target);
        const u32 chunk = shared.bin;
        before = shared.before;
        low = chunk * SAMPLE_CHUNK;
        __syncthreads();
        if (thread == 0) {
            shared.source.first_chunk = chunk;
            shared.source.end_chunk = chunk + 1;
        }
        __syncthreads();
    } else {
        while (p.vocab > 1u << bits) ++bits;
    }
    drawn.token = locate(p, shared, low, bits, before, target, [=](u32 key, u32 id) {
                      return Measure{id, key <= threshold ? weight_of(__uint_as_float(key)) : 0};
                  }).key;
    return drawn;
}

extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS)
    sample_choose(const SampleParams p) {
    __shared__ Shared shared;
    pdl_release();
    pdl_wait();
    const u32 row = blockIdx.x;
    const bool draws = p.sample_rows[row].flags & ROW_DRAWS;
    if (threadIdx.x >= 32 && !draws) return;
    if (threadIdx.x < 32) {
        const SampleRow r = p.sample_rows[row];
        const RawRow raw = join_raw(p, row);
        Best best;
        best.value = NEGATIVE_INFINITY;
        best.index = 0xffffffffu;
        for (u32 chunk = threadIdx.x; chunk < p.n_chunks; chunk += 32) {
            Best other;
            other.value = p.adjusted_max[(u64)row * p.n_chunks + chunk];
            other.index = p.adjusted_index[(u64)row * p.n_chunks + chunk];
            best = better(best, other);
        }
        best = warp_best(best);
        if (threadIdx.x == 0) {
            shared.row = r;
            shared.adjust = adjustment(p, r, row);
            shared.raw = raw;
            shared.best = best;
            shared.index = new_token_index(p, r, row);
            shared.source.limit = r.limit;
            shared.source.first_chunk = 0;
            shared.source.end_chunk = p.n_chunks;
            shared.source.listed = 0;
        }
    }
    const float* in = p.logits + (u64)row * p.vocab;
    Drawn drawn;
    if (draws) {
        __syncthreads();
        const SampleRow& r = shared.row;
        drawn = draw(p, shared, uniform_bits(r.seed_low, r.seed_high, r.completion, shared.index));
        __syncthreads(); // nobody reads states any more
    }
    if (threadIdx.x != 0) return;

    const float best = shared.best.value;
    const bool broken = !(best > NEGATIVE_INFINITY && best < -NEGATIVE_INFINITY);
    const u32 token = min(draws ? drawn.token : shared.best.index, p.vocab - 1);
    const float logit = in[token];
    const float logprob = (logit - shared.raw.reference) - shared.raw.log_sum;
    float sampled = broken ? NOT_A_NUMBER : 0.f;
    if (draws) {
        const Adjust& adjust = shared.adjust;
        const float y = adjust.states ? adjusted(adjust, logit, adjust.states[token]) : logit;
        const float u = distance(best, y, shared.row.scale);
        const float total = __ull2float_rn(drawn.total) * (1.f / (1ull << WEIGHT_BITS));
        sampled = drawn.total ? __fmul_rn(-u, 0.693147181f) - logf(total) : NOT_A_NUMBER;
    }
    p.out_tokens[row] = token;
    p.out_logprobs[row] = logprob;
    p.out_sampled_logprobs[row] = logprob == logprob ? sampled : logprob;
    const u32 slot = (u32)p.slots[row];
    if (slot == 0 || slot >= p.n_slots) return;
    p.last_token[slot] = token;
    if (p.positions) p.positions[row] += 1;
    if (shared.row.flags & ROW_COUNTS) {
        u16* state = p.states + (u64)slot * p.vocab + token;
        if ((*state & STATE_COUNT) < STATE_COUNT) *state += 1;
    }
}
