// RMSNorm of one head and its rotary embedding, by one warp. A lane holds PAIRS neighbouring elements of the lower half of
// the head and the PAIRS elements HEAD_DIM / 2 further on, which is the pairing of the rotation:
//
//   lane        0        1                31        0             31
//   element  [0 .. P) [P .. 2P)  ..  [31P .. 32P) | [32P ..  ..  64P)      P = HEAD_DIM / 64
//             `-------- lower half ---------'       `- upper half -'
//
// Every rounding is spelt out: keys have the same bits whichever kernel writes them.
#pragma once
#include "common.cuh"

#define PAIRS (HEAD_DIM / 64)

// What a head is rotated by, and the norm's weights.
struct Rotation {
    float low[PAIRS], high[PAIRS], cos[PAIRS], sin[PAIRS];
};

// `angles`: HEAD_DIM / 2 cosines of the position, then as many sines.
__device__ __forceinline__ Rotation load_rotation(const float* norm, const float* angles, u32 lane) {
    Rotation r;
#pragma unroll
    for (u32 i = 0; i < PAIRS; ++i) {
        r.low[i] = norm[lane * PAIRS + i];
        r.high[i] = norm[HEAD_DIM / 2 + lane * PAIRS + i];
        r.cos[i] = angles[lane * PAIRS + i];
        r.sin[i] = angles[HEAD_DIM / 2 + lane * PAIRS + i];
    }
    return r;
}

// 1 / root mean square of a head from its sum of squares.
__device__ __forceinline__ float head_scale(float squares, float eps) { return 1.f / sqrtf(squares / (float)HEAD_DIM + eps); }
// Two elements HEAD_DIM / 2 apart, scaled by the norm and by its weights, then rotated.
__device__ __forceinline__ void rotate(float& a, float& b, float scale, float low, float high, float cos, float sin) {
    const float x = __fmul_rn(__fmul_rn(a, scale), low);
    const float y = __fmul_rn(__fmul_rn(b, scale), high);
    a = fmaf(x, cos, -__fmul_rn(y, sin));
    b = fmaf(y, cos, __fmul_rn(x, sin));
}

__device__ __forceinline__ void norm_and_rotate(float (&a)[PAIRS], float (&b)[PAIRS], const Rotation& r, float eps) {
    float squares = 0.f;
#pragma unroll
    for (u32 i = 0; i < PAIRS; ++i) squares = fmaf(b[i], b[i], fmaf(a[i], a[i], squares));
    const float scale = head_scale(warp_sum(squares), eps);
#pragma unroll
    for (u32 i = 0; i < PAIRS; ++i) rotate(a[i], b[i], scale, r.low[i], r.high[i], r.cos[i], r.sin[i]);
}
