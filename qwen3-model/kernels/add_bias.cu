// Adds a bias to every row of a product, in place:  out[row, i] += bias[i].
//
// Only adapters with a bias need it. out bf16 or f32 [rows, columns], bias f32 [columns]; four elements per thread.
#include "common.cuh"

#define BIAS_THREADS 256

struct AddBiasParams {
    void* out;
    const float* bias;
    u32 columns; // a multiple of 4
    u32 unused;
};

// Launched without overlap: it neither starts before the product has ended nor lets the next kernel start early.
extern "C" __global__ void __launch_bounds__(BIAS_THREADS) add_bias_bf16(const AddBiasParams p) {
    const u32 i = (blockIdx.y * BIAS_THREADS + threadIdx.x) * 4;
    if (i >= p.columns) return;
    uint2* out = reinterpret_cast<uint2*>(static_cast<u16*>(p.out) + u64(blockIdx.x) * p.columns + i);
    const float4 bias = *reinterpret_cast<const float4*>(p.bias + i);
    const uint2 x = *out;
    *out = make_uint2(pack_bf16(bf16_low(x.x) + bias.x, bf16_high(x.x) + bias.y),
                      pack_bf16(bf16_low(x.y) + bias.z, bf16_high(x.y) + bias.w));
}

extern "C" __global__ void __launch_bounds__(BIAS_THREADS) add_bias_f32(const AddBiasParams p) {
    const u32 i = (blockIdx.y * BIAS_THREADS + threadIdx.x) * 4;
    if (i >= p.columns) return;
    float4* out = reinterpret_cast<float4*>(static_cast<float*>(p.out) + u64(blockIdx.x) * p.columns + i);
    const float4 bias = *reinterpret_cast<const float4*>(p.bias + i);
    const float4 x = *out;
    *out = make_float4(x.x + bias.x, x.y + bias.y, x.z + bias.z, x.w + bias.w);
}
