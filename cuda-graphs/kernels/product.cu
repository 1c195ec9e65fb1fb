// Y[m, n] = X[m, k] · W[n, k]ᵀ (+ residual[m, n]), sums in f32: one block for a tile of 64 rows and 64 columns of Y.
//
//   X, W          bf16, row after row
//   Y             bf16 or f32, rows `stride` elements apart
//   residual      as Y, rows n elements apart; may be Y itself where stride = n
//
// Four warps of 32 x 32 each. An element's sum goes through k in order, by the tensor cores' steps of 16: it does not depend
// on the other rows or columns. Plain rather than fast: no asynchronous copies, two barriers a step.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE 64
#define STEP 32
#define THREADS 128
#define PITCH (STEP + 8) // of a row in shared memory, so that eight rows fall into different banks
#define VECTORS 2        // of eight elements that a thread brings for a step

struct ProductParams {
    const u16* x;
    const u16* w;
    void* y;
    const void* residual; // null: none
    u64 stride;
    u32 m;
    u32 n;
    u32 k;
    u32 to_f32;
};

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
// To the nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ u16 float_to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Eight elements from column `column` of row `row`; zeros beyond the matrix.
__device__ __forceinline__ uint4 load_eight(const u16* from, u32 row, u32 rows, u32 column, u32 k) {
    uint4 out = make_uint4(0, 0, 0, 0);
    if (row >= rows || column >= k) return out;
    const u16* at = from + (u64)row * k + column;
    if (k % 8 == 0) return *reinterpret_cast<const uint4*>(at);
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
        if (column + i < k) words[i / 2] |= (u32)at[i] << (16 * (i % 2));
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ u32 pair(const u16* from) { return *reinterpret_cast<const u32*>(from); }

extern "C" __global__ void __launch_bounds__(THREADS) plain_product(const __grid_constant__ ProductParams p) {
    __shared__ __align__(16) u16 xs[TILE * PITCH];
    __shared__ __align__(16) u16 ws[TILE * PITCH];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 g = lane / 4, t = lane % 4;
    const u32 row0 = blockIdx.y * TILE, column0 = blockIdx.x * TILE;
    const u32 warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
    // What a thread brings: 16 elements of one row of each.
    const u32 brings = threadIdx.x / 2, from = threadIdx.x % 2 * 16;

    float sums[2][4][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.f;

    uint4 x[VECTORS], w[VECTORS];
    const auto load = [&](u32 step) {
#pragma unroll
        for (u32 v = 0; v < VECTORS; ++v) {
            x[v] = load_eight(p.x, row0 + brings, p.m, step + from + v * 8, p.k);
            w[v] = load_eight(p.w, column0 + brings, p.n, step + from + v * 8, p.k);
        }
    };
    load(0);
    for (u32 step = 0; step < p.k; step += STEP) {
#pragma unroll
        for (u32 v = 0; v < VECTORS; ++v) {
            *reinterpret_cast<uint4*>(xs + brings * PITCH + from + v * 8) = x[v];
            *reinterpret_cast<uint4*>(ws + brings * PITCH + from + v * 8) = w[v];
        }
        __syncthreads();
        if (step + STEP < p.k) load(step + STEP);
#pragma unroll
        for (u32 k = 0; k < STEP; k += 16) {
            u32 a[2][4], b[4][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u16* at = xs + (warp_row + i * 16 + g) * PITCH + k + 2 * t;
                a[i][0] = pair(at), a[i][1] = pair(at + 8 * PITCH), a[i][2] = pair(at + 8), a[i][3] = pair(at + 8 * PITCH + 8);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u16* at = ws + (warp_column + j * 8 + g) * PITCH + k + 2 * t;
                b[j][0] = pair(at), b[j][1] = pair(at + 8);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) multiply(sums[i][j], a[i], b[j]);
        }
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 row = row0 + warp_row + i * 16 + g + (e >> 1) * 8;
                const u32 column = column0 + warp_column + j * 8 + 2 * t + (e & 1);
                if (row >= p.m || column >= p.n) continue;
                const u64 to = row * p.stride + column, beside = (u64)row * p.n + column;
                float sum = sums[i][j][e];
                if (p.to_f32) {
                    if (p.residual) sum += static_cast<const float*>(p.residual)[beside];
                    static_cast<float*>(p.y)[to] = sum;
                } else {
                    if (p.residual) sum += bf16_to_float(static_cast<const u16*>(p.residual)[beside]);
                    static_cast<u16*>(p.y)[to] = float_to_bf16(sum);
                }
            }
}
