// A matrix in 4 bits to bf16, with the bits that bitsandbytes gives.
//
//   out[i] = bf16( map[nibble i] * absmax[i / 64] )          i in 0 .. 64 n_blocks
//
// packed u8 [32 n_blocks], absmax f32 [n_blocks], out bf16 [64 n_blocks]. Half a block of 64 per thread.
#include "four_bit.cuh"

#define DEQUANTIZE_THREADS 256

struct Nf4DequantizeParams {
    const unsigned char* packed;
    const float* absmax;
    u16* out;
    u64 n_halves;
    float map[16];
};

extern "C" __global__ void __launch_bounds__(DEQUANTIZE_THREADS)
    nf4_dequantize(const __grid_constant__ Nf4DequantizeParams p) {
    pdl_release();
    pdl_wait();
    const u64 half = (u64)blockIdx.x * DEQUANTIZE_THREADS + threadIdx.x;
    if (half >= p.n_halves) return;
    const uint4 words = __ldcs(reinterpret_cast<const uint4*>(p.packed) + half);
    const BlockTable table = block_table(p.map, p.absmax[half / 2]);
    uint4* out = reinterpret_cast<uint4*>(p.out) + half * 4;
    out[0] = eight_weights(table, words.x);
    out[1] = eight_weights(table, words.y);
    out[2] = eight_weights(table, words.z);
    out[3] = eight_weights(table, words.w);
}
