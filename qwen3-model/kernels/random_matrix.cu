// A random matrix for models without a file: the same elements that `random.rs` draws on the CPU.
//
//   chunk = i / 65536, four = i % 65536 / 4, part = i % 4
//   bits  = mix(mix(stream ^ mix(chunk)) + (four + 1) * GOLDEN)           SplitMix64
//   out[i] = quantiles[bits >> (16 * part) & 0xffff]                      bf16
//
// The quantiles are those of the normal distribution, rounded to bf16 by the host.
#include "common.cuh"

#define RANDOM_THREADS 256
#define RANDOM_CHUNK 65536
#define GOLDEN 0x9e3779b97f4a7c15ull

struct RandomMatrixParams {
    u16* out;             // bf16 [n]
    const u16* quantiles; // bf16 [65536]
    u64 n;
    u64 stream;
};

__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

extern "C" __global__ void __launch_bounds__(RANDOM_THREADS)
    random_matrix(const RandomMatrixParams p) {
    pdl_wait();
    const u64 fours = (p.n + 3) / 4;
    for (u64 group = (u64)blockIdx.x * RANDOM_THREADS + threadIdx.x; group < fours;
         group += (u64)gridDim.x * RANDOM_THREADS) {
        const u64 first = group * 4;
        const u64 chunk = first / RANDOM_CHUNK;
        const u64 four = first % RANDOM_CHUNK / 4;
        u64 bits = mix(mix(p.stream ^ mix(chunk)) + (four + 1) * GOLDEN);
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            if (first + part < p.n) p.out[first + part] = p.quantiles[bits & 0xffff];
            bits >>= 16;
        }
    }
}
