// QKV of a decode step of 33 to 256 rows with what follows it: norm and rotation of query and key heads, and the write of keys and
// values into the paged cache. What arrives where, and what a row without a page does: see qkv_rope_write.cu. The product is rounded
// to bf16 before that, and everything after it is in the order of that kernel, but for the sums of squares by which rows are scaled:
// these are added up part by part.
//
// The batch is the 64-row operand of the tensor cores, and a head of 128 columns the other: the 128 sums of a row lie in four
// neighbouring lanes, elements 64 apart in the same one. So a head's norm takes two exchanges between lanes, and rotation none.
//
//   column   0 1   2 3   4 5   6 7 | 8 9  ...  62 63 | 64 65  ...
//   lane      0     1     2     3  |  0   ...    3   |   0   ...
//
// The two blocks of a cluster have a head, each with half of the batch: each fetches half of the head's weights for both. Nothing else
// is exchanged, and a sum is in the order of K whatever the batch.
//
// A warp copies weights and does not wait for the kernel before; another copies activations and does wait. Two more find where rows
// go, by what they are rotated, and by what they are scaled if the norm before has left them unscaled.
#pragma once
#define HEAD_DIM 128
#include "rope_write.cuh"
#include "cluster_rings.cuh"

struct QkvProductParams {
    alignas(64) char w_map[128]; // [heads · 128, K], boxes {64, 64}
    alignas(64) char x_map[128]; // [rows, K], boxes {64, COLUMNS}
    QkvRopeWriteLaunch rows;     // `qkv` is not read
    u32 chunks;                  // K / 64
    u32 unused[9];
};

// COLUMNS: batch rows of a block.
template <int COLUMNS, int W_SLOTS, int X_SLOTS>
struct QkvProductMemory {
    static constexpr int SCRIBES = 64;
    using Rings = BatchRings<COLUMNS, HEAD_DIM, W_SLOTS, X_SLOTS, 0>;
    static constexpr int THREADS = Rings::CONSUMER_WARPS * 32 + 64 + SCRIBES;
    static constexpr int PREPARED = Rings::END;
    static constexpr int NORM = PREPARED + 16;          // f32 [HEAD_DIM]
    static constexpr int PLACES = NORM + HEAD_DIM * 4;  // u64 [COLUMNS]: 0 is nowhere
    static constexpr int ANGLES = PLACES + COLUMNS * 8; // u32 [COLUMNS]: row of cos_sin
    static constexpr int SCALES = ANGLES + COLUMNS * 4; // f32 [COLUMNS]
    static constexpr int BYTES = SCALES + COLUMNS * 4;
};

// A lane's cosines and sines of a row: columns 8 n + 2 t and the next.
struct QuadAngles {
    float2 cos[HEAD_DIM / 16], sin[HEAD_DIM / 16];
};
__device__ __forceinline__ void load_angles(const float* angles, u32 t, QuadAngles& a) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n) {
        a.cos[n] = load_now(angles + n * 8 + t * 2);
        a.sin[n] = load_now(angles + HEAD_DIM / 2 + n * 8 + t * 2);
    }
}

// Norm and rotation of a row's head by the four lanes that have it, in the order of sums of `norm_and_rotate`, where lane 4 n + t has
// what is in v[n] of lane t here.
__device__ __forceinline__ void norm_and_rotate_quad(float (&v)[HEAD_DIM / 8][2], const float* norm, const QuadAngles& angles, float eps, u32 t) {
    constexpr int HALF = HEAD_DIM / 16;
    float squares[HALF];
#pragma unroll
    for (int n = 0; n < HALF; ++n) {
        squares[n] = 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) squares[n] = fmaf(v[HALF + n][i], v[HALF + n][i], fmaf(v[n][i], v[n][i], squares[n]));
    }
#pragma unroll
    for (int step = HALF / 2; step > 0; step >>= 1)
#pragma unroll
        for (int n = 0; n < step; ++n) squares[n] += squares[n + step];
    float sum = squares[0];
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    const float scale = head_scale(sum, eps);
#pragma unroll
    for (int n = 0; n < HALF; ++n) {
        const float2 low = *reinterpret_cast<const float2*>(norm + n * 8 + t * 2);
        const float2 high = *reinterpret_cast<const float2*>(norm + HEAD_DIM / 2 + n * 8 + t * 2);
        rotate(v[n][0], v[HALF + n][0], scale, low.x, high.x, angles.cos[n].x, angles.sin[n].x);
        rotate(v[n][1], v[HALF + n][1], scale, low.y, high.y, angles.cos[n].y, angles.sin[n].y);
    }
}

// What becomes of a row of the product. By all lanes of a warp, of which four have one row.
__device__ __forceinline__ void finish_row(float (&v)[HEAD_DIM / 8][2], float scale, bool rotates, const float* norm, const QuadAngles& angles,
                                           float eps, u16* out, u32 lane) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) v[n][i] = __fmul_rn(bf16_to_float(float_to_bf16(v[n][i])), scale);
    if (rotates) norm_and_rotate_quad(v, norm, angles, eps, lane & 3);
    const bool odd = (lane & 1) != 0;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 2) {
        // Of two eights an even lane stores four columns of the first, the odd lane beside it four of the next.
        const u32 here = pack_bf16(v[n][0], v[n][1]), next = pack_bf16(v[n + 1][0], v[n + 1][1]);
        const u32 other = __shfl_xor_sync(FULL_WARP, odd ? here : next, 1);
        const uint2 four = odd ? make_uint2(other, next) : make_uint2(here, other);
        if (out) *reinterpret_cast<uint2*>(out + n * 8 + (odd ? 8 : 0) + (lane & 2) * 2) = four;
    }
}

// By the warps that neither copy nor multiply: of each row that this block finishes where it goes, its angles and its scale.
template <class Memory, int COLUMNS>
__device__ __forceinline__ void prepare_rows(const QkvRopeWriteLaunch& p, unsigned char* shared, u32 head, u32 first_row, u32 thread) {
    pdl_wait();
    if (head < p.heads.q_heads + p.heads.kv_heads) {
        const float* norm = head < p.heads.q_heads ? p.heads.q_norm : p.heads.k_norm;
        for (u32 i = thread; i < HEAD_DIM; i += Memory::SCRIBES) reinterpret_cast<float*>(shared + Memory::NORM)[i] = norm[i];
    }
    for (u32 at = thread; at < COLUMNS; at += Memory::SCRIBES) {
        const u32 row = first_row + at;
        u16* place = nullptr;
        u32 angle = 0;
        float scale = 1.f;
        if (row < p.heads.rows) {
            if (head < p.heads.q_heads + 2 * p.heads.kv_heads) place = place_of(p.heads, head, row);
            angle = angle_of(p.heads, row);
            if (p.squares) {
                // Many loads at once: one after the other, 120 of them took longer than the whole product.
                constexpr u32 AT_ONCE = 20;
                float sum = 0.f;
                for (u32 first = 0; first < p.parts; first += AT_ONCE) {
                    float some[AT_ONCE];
#pragma unroll
                    for (u32 j = 0; j < AT_ONCE; ++j) some[j] = first + j < p.parts ? __ldcg(p.squares + (u64)(first + j) * p.columns + row) : 0.f;
#pragma unroll
                    for (u32 j = 0; j < AT_ONCE; ++j) sum += some[j];
                }
                scale = 1.f / sqrtf(sum * p.inverse_k + p.eps);
            }
        }
        reinterpret_cast<u64*>(shared + Memory::PLACES)[at] = (u64)place;
        reinterpret_cast<u32*>(shared + Memory::ANGLES)[at] = angle;
        reinterpret_cast<float*>(shared + Memory::SCALES)[at] = scale;
    }
}

// W_FLYING: slots of weights that are on their way at once.
template <int COLUMNS, int W_SLOTS, int X_SLOTS, int W_FLYING>
__device__ __forceinline__ void qkv_product(const QkvProductParams& p, unsigned char* shared) {
    using Memory = QkvProductMemory<COLUMNS, W_SLOTS, X_SLOTS>;
    using Rings = typename Memory::Rings;
    constexpr u32 CONSUMER_WARPS = Rings::CONSUMER_WARPS, TILES = HEAD_DIM / 8;
    static_assert(COLUMNS % 8 == 0, "boxes are of whole groups of 8 rows");
    const u32 base = shared_address(shared);
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // The two blocks of a head are neighbours.
    const u32 half = block_in_cluster(), head = blockIdx.x / 2;

    if (threadIdx.x == 0) {
        fetch_map(p.w_map);
        fetch_map(p.x_map);
        init_rings<Rings, 2>(base);
        barrier_init(base + Memory::PREPARED, Memory::SCRIBES);
        barrier_init_done();
    }
    __syncthreads();
    // Nothing is sent to a block whose barriers do not count yet.
    cluster_arrive();

    if (warp == CONSUMER_WARPS) {
        cluster_wait();
        if (lane == 0) {
            copy_weight_chunks<Rings, 2, W_FLYING>(base, p.w_map, 0, p.chunks, head * HEAD_DIM + half * (HEAD_DIM / 2), half, 3);
            // What attention fetches ahead must not compete with the weights.
            pdl_release();
        }
        __syncwarp();
    } else if (warp == CONSUMER_WARPS + 1) {
        cluster_wait();
        pdl_wait();
        if (lane == 0) copy_activation_chunks<Rings>(base, p.x_map, 0, p.chunks, half * COLUMNS);
        __syncwarp();
    } else if (warp > CONSUMER_WARPS) {
        prepare_rows<Memory, COLUMNS>(p.rows, shared, head, half * COLUMNS, threadIdx.x - (CONSUMER_WARPS + 2) * 32);
        barrier_arrive_many(base + Memory::PREPARED, 1);
        __syncwarp();
        cluster_wait();
    } else {
        const u32 group = warp >> 2, t = lane & 3, in_block = group * 64 + (warp & 3) * 16 + (lane >> 2);
        const bool rotates = head < p.rows.heads.q_heads + p.rows.heads.kv_heads;
        const float* norm = reinterpret_cast<const float*>(shared + Memory::NORM);
        const auto angles_at = [&](u32 at) { return p.rows.heads.cos_sin + (u64)reinterpret_cast<const u32*>(shared + Memory::ANGLES)[at] * HEAD_DIM; };
        float acc[TILES][4];
        QuadAngles angles = {};
        cluster_wait();
        pdl_wait();
        multiply_chunks<Rings, 2>(acc, base, group, lane, p.chunks, at_block(base + Rings::W_EMPTY, half ^ 1));
        barrier_wait(base + Memory::PREPARED, 0);
        // Rows that pad the last group read what belongs to another row, and go nowhere.
        const u32 rows[2] = {in_block < COLUMNS ? in_block : 0, in_block + 8 < COLUMNS ? in_block + 8 : 0};
        if (rotates) load_angles(angles_at(rows[0]), t, angles);
        wait_products<0>();
        pin_registers(acc);
        __syncwarp();
        cluster_arrive();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            QuadAngles next = {};
            if (h == 0 && rotates) load_angles(angles_at(rows[1]), t, next);
            float v[TILES][2];
#pragma unroll
            for (u32 n = 0; n < TILES; ++n) v[n][0] = acc[n][h * 2], v[n][1] = acc[n][h * 2 + 1];
            const float scale = reinterpret_cast<const float*>(shared + Memory::SCALES)[rows[h]];
            const u64 place = in_block + h * 8 < COLUMNS ? reinterpret_cast<const u64*>(shared + Memory::PLACES)[rows[h]] : 0;
            finish_row(v, scale, rotates, norm, angles, p.rows.heads.eps, reinterpret_cast<u16*>(place), lane);
            angles = next;
        }
        // What this block fetched for the other has arrived when that one is done with it.
        __syncwarp();
        cluster_wait();
    }
    if (warp >= CONSUMER_WARPS) {
        cluster_arrive();
        cluster_wait();
    }
}
