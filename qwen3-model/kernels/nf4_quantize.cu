// A bf16 matrix to 4 bits, as bitsandbytes quantises on a CPU, without double quantisation.
//
//   absmax[b, n] = max |w| over the 64 weights of block b of row n
//   nibble       = nibbles[ number of bounds below w * (1 / absmax) ]
//
// in bf16 [rows, 64 blocks], packed u8 [rows, 32 blocks], absmax f32 [blocks, stride]. A warp per block, two weights per
// lane.
#include "common.cuh"

#define QUANTIZE_WARPS 8

struct Nf4QuantizeParams {
    const u16* in;
    unsigned char* packed;
    float* absmax;
    u64 n_blocks; // of all rows
    u32 blocks;   // of a row
    u32 stride;
    float bounds[15]; // sorted
    u32 unused;
    unsigned char nibbles[16]; // of the intervals between the bounds
};

__device__ __forceinline__ u32 nibble_of(const Nf4QuantizeParams& p, float scaled) {
    u32 below = 0;
#pragma unroll
    for (int i = 0; i < 15; ++i) below += scaled > p.bounds[i];
    return p.nibbles[below];
}

extern "C" __global__ void __launch_bounds__(QUANTIZE_WARPS * 32)
    nf4_quantize(const __grid_constant__ Nf4QuantizeParams p) {
    pdl_release();
    pdl_wait();
    const u64 block = (u64)blockIdx.x * QUANTIZE_WARPS + threadIdx.x / 32;
    if (block >= p.n_blocks) return;
    const u32 lane = threadIdx.x % 32;
    const u32 pair = reinterpret_cast<const u32*>(p.in)[block * 32 + lane];
    const float low = bf16_low(pair), high = bf16_high(pair);
    float absmax = fmaxf(fabsf(low), fabsf(high));
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        absmax = fmaxf(absmax, __shfl_xor_sync(FULL_WARP, absmax, offset));
    const float factor = __frcp_rn(fmaxf(absmax, 1e-38f));
    const float a = fminf(fmaxf(__fmul_rn(low, factor), -1.f), 1.f);
    const float b = fminf(fmaxf(__fmul_rn(high, factor), -1.f), 1.f);
    p.packed[block * 32 + lane] = nibble_of(p, a) << 4 | nibble_of(p, b);
    if (lane == 0) p.absmax[block % p.blocks * p.stride + block / p.blocks] = absmax;
}
