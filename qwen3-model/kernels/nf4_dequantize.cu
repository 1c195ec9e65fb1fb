// Rows of a matrix in 4 bits to bf16, with the bits that bitsandbytes gives.
//
//   out[n, k] = bf16( map[nibble of (n, k)] * absmax[k / 64, n] )
//
// packed u8 [rows, 32 blocks], absmax f32 [blocks, stride], out bf16 [rows, 64 blocks]; packed and absmax begin at the first row.
// A thread takes eight weights at a time, so that neighbours read and write neighbours. Blocks stay for as long as there is work,
// since each makes the table of nf4_pairs.cuh.
#include "nf4_pairs.cuh"

#define DEQUANTIZE_THREADS 256
#define AT_ONCE 4

struct Nf4DequantizeParams {
    const u32* packed;
    const float* absmax;
    u16* out;
    u32 rows;
    u32 blocks; // of a row
    u32 stride; // rows of the whole matrix
    u32 unused;
    float map[16];
};

extern "C" __global__ void __launch_bounds__(DEQUANTIZE_THREADS)
    nf4_dequantize(const __grid_constant__ Nf4DequantizeParams p) {
    __shared__ float2 table[256 * PAIR_COPIES];
    pdl_release();
    for (u32 at = threadIdx.x; at < 256 * PAIR_COPIES; at += DEQUANTIZE_THREADS) table[at] = two_values(p.map, at / PAIR_COPIES);
    __syncthreads();
    const unsigned char* pairs = reinterpret_cast<const unsigned char*>(table + threadIdx.x % PAIR_COPIES);
    pdl_wait();
    const u64 n_words = (u64)p.rows * p.blocks * 8;
    const u64 step = (u64)gridDim.x * DEQUANTIZE_THREADS * AT_ONCE;
    for (u64 first = (u64)blockIdx.x * DEQUANTIZE_THREADS * AT_ONCE + threadIdx.x; first < n_words; first += step) {
        u32 words[AT_ONCE];
        float absmax[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const u64 at = first + i * DEQUANTIZE_THREADS;
            const u32 block = (u32)(at / 8); // fewer than 2^32 blocks: a matrix has fewer than 2^38 elements
            const bool valid = at < n_words;
            words[i] = valid ? __ldcs(p.packed + at) : 0;
            absmax[i] = valid ? p.absmax[(u64)(block % p.blocks) * p.stride + block / p.blocks] : 0.f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const u64 at = first + i * DEQUANTIZE_THREADS;
            if (at < n_words) reinterpret_cast<uint4*>(p.out)[at] = eight_weights(pairs, words[i], absmax[i]);
        }
    }
}
