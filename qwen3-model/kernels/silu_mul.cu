// The gated unit of the feed-forward block, on the output of the fused gate+up product.
//
//   out[row, i] = bf16( silu(gate_up[row, i]) * gate_up[row, inner + i] )      i in 0 .. inner
//   silu(x) = x / (1 + exp(-x))
//
// gate_up bf16 [rows, 2 * inner], out bf16 [rows, inner]. Eight elements (16 bytes) per thread.
#include "common.cuh"

#define SILU_THREADS 256

struct SiluMulParams {
    const u16* gate_up;
    u16* out;
    u32 rows;
    u32 inner; // a multiple of 8
};

__device__ __forceinline__ u32 silu_mul_pair(u32 gate, u32 up) {
    return pack_bf16(silu_precise(bf16_low(gate)) * bf16_low(up), silu_precise(bf16_high(gate)) * bf16_high(up));
}

extern "C" __global__ void __launch_bounds__(SILU_THREADS) silu_mul(const SiluMulParams p) {
    pdl_release();
    pdl_wait();
    const u32 i = (blockIdx.y * SILU_THREADS + threadIdx.x) * 8;
    if (i >= p.inner) return;
    const u64 row = blockIdx.x;
    const u16* in = p.gate_up + row * 2 * p.inner + i;
    const uint4 gate = *reinterpret_cast<const uint4*>(in);
    const uint4 up = *reinterpret_cast<const uint4*>(in + p.inner);
    uint4 out;
    out.x = silu_mul_pair(gate.x, up.x);
    out.y = silu_mul_pair(gate.y, up.y);
    out.z = silu_mul_pair(gate.z, up.z);
    out.w = silu_mul_pair(gate.w, up.w);
    *reinterpret_cast<uint4*>(p.out + row * p.inner + i) = out;
}
