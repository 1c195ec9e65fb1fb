// A matrix product of a decode step of 17 to 96 rows, with what lies between it and its neighbours:
//
//   KIND          out                                        also
//   TO_RESIDUAL   residual f32 [rows, N] += product          normed = bf16(residual · norm weight), sums of squares
//   TO_GATED      bf16 [rows, N / 2] = silu(gate) · up
//   TO_BF16       bf16 [rows, N]
//   TO_F32        f32 [rows, N]
//   TO_HEADS      bf16 [rows, N]: queries                 keys and values into the cache, normed and rotated: see
//                                                         qkv_rope_write.cu
//
// RMSNorm divides a row by one number. A product over `normed` is scaled by it afterwards, so that the kernel before need
// not know whole rows: it leaves sums of squares of 64 columns each.
//
// Weights are the 64-row operand of the tensor cores, the batch is the other. A block multiplies tiles of 128 rows of the
// weight by the whole batch; two warpgroups take 64 rows each. One warp copies weights into a ring and does not wait for the
// kernel before: the ring is full when that one ends. Another copies activations and does wait. A third adds up what scales
// the rows, and tells other blocks how far this one is: fences take too long for the warps that multiply.
//
// Every block must read as many bytes as every other. Tiles that fill whole rounds of the grid are dealt out whole; the
// rest is one list of (tile, chunk of 64 columns), cut into equal shares:
//
//   tile 0               tile 1               tile 2
//   ├────┬────┬────┬─────┼───┬────┬────┬──────┼──┬────┬────┤
//    b0   b1   b2   b3        b4   b5   b6        b7   b8        b3 has a part of tile 0 and one of tile 1
//
// The blocks of a tile exchange their sums through `partial`; each then adds up some of the tile's batch rows, in the order
// of the blocks. The order of every sum depends on the matrix's shape, the grid and COLUMNS alone: a row's bits do not
// depend on the other rows.
//
// A tile of gate and up has 8 rows of each in turn, so that a thread holds both of an element. A tile of queries, keys and
// values is a head.
#pragma once
#define HEAD_DIM 128
#include "rope_write.cuh"
#include "wide_common.cuh"

#define TO_RESIDUAL 0
#define TO_GATED 1
#define TO_BF16 2
#define TO_F32 3
#define TO_HEADS 4

#define WIDE_CONSUMERS 256 // threads that multiply; after them a warp for weights, one for activations, one for the exchange
#define WIDE_THREADS (WIDE_CONSUMERS + 96)
#define W_SLOT_BYTES 16384
#define HEAD_PITCH (HEAD_DIM + 8) // so that batch rows lie in different banks
#define SQUARES_AT_ONCE 10 // loads that are asked for together

// Adds to a counter whose top bit turns when the last has arrived. Returns what it was.
__device__ __forceinline__ u32 arrive_at(u32* counter, u32 add) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(add) : "memory");
    return before;
}
__device__ __forceinline__ void wait_until_turned(const u32* counter, u32 before) {
    u32 now;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    while (((now ^ before) & 0x80000000u) == 0);
}

struct WideParams {
    alignas(64) char w_map[128]; // [N, K] as {K, 8, 2, N / 16}: boxes {64, 8, 2, 8}
    alignas(64) char x_map[128]; // [rows, K], boxes {64, COLUMNS}
    void* out;
    const float* norm;       // TO_RESIDUAL: weight of the norm that follows, f32 [units]
    u16* normed;             // TO_RESIDUAL: bf16 [rows, units], residual · norm, not yet scaled
    float* squares_out;      // TO_RESIDUAL: f32 [units / 64, COLUMNS]
    const float* squares_in; // f32 [K / 64, COLUMNS], scales the product; null: none
    float4* partial;         // [blocks, 2, 2, COLUMNS / 8, 128]
    u32* arrived;            // [split_tiles], the top bit turns when all blocks of a tile have come
    u32 rows;
    u32 units;          // columns of out
    u32 chunks;         // K / 64
    u32 tiles;          // of 128 rows of the weight
    u32 split_tiles;    // the first so many are cut into shares
    u32 split_units;    // split_tiles · chunks
    u32 split_blocks;   // that take a share
    float inverse_k;
    float eps;
    u32 unused[3];
};

template <int COLUMNS, int W_SLOTS, int X_SLOTS>
struct WideMemory {
    static constexpr int X_SLOT_BYTES = COLUMNS * 128;
    static constexpr int X = W_SLOTS * W_SLOT_BYTES;
    static constexpr int SCALES = X + X_SLOTS * X_SLOT_BYTES;
    static constexpr int W_FULL = SCALES + COLUMNS * 4;
    static constexpr int W_EMPTY = W_FULL + W_SLOTS * 8;
    static constexpr int X_FULL = W_EMPTY + W_SLOTS * 8;
    static constexpr int X_EMPTY = X_FULL + X_SLOTS * 8;
    static constexpr int SCALED = X_EMPTY + X_SLOTS * 8;
    static constexpr int BYTES = SCALED + 8;
};

// The parts of tiles that a block multiplies, in order: its share of the split tiles, then whole ones.
struct WideWork {
    u32 unit, end, whole; // the next unit of the share and its end; the next whole tile
    u32 tile, chunk, n;

    __device__ __forceinline__ WideWork(const WideParams& p) {
        const u32 block = blockIdx.x;
        unit = end = 0;
        if (block < p.split_blocks) {
            unit = block * p.split_units / p.split_blocks;
            end = (block + 1) * p.split_units / p.split_blocks;
        }
        whole = p.split_tiles + block;
    }
    __device__ __forceinline__ bool next(const WideParams& p) {
        if (unit < end) {
            tile = unit / p.chunks;
            chunk = unit - tile * p.chunks;
            n = min(p.chunks - chunk, end - unit);
            unit += n;
            return true;
        }
        if (whole >= p.tiles) return false;
        tile = whole;
        chunk = 0;
        n = p.chunks;
        whole += gridDim.x;
        return true;
    }
};
// The block whose share has the unit.
__device__ __forceinline__ u32 block_of(const WideParams& p, u32 unit) {
    return ((unit + 1) * p.split_blocks + p.split_units - 1) / p.split_units - 1;
}

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(WIDE_CONSUMERS) : "memory"); }
// Between the threads that multiply and the warp of the exchange: 2 and 3 when a part is stored, 4 when a tile is whole.
__device__ __forceinline__ void exchange_sync(u32 barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(WIDE_CONSUMERS + 32) : "memory");
}
__device__ __forceinline__ void exchange_arrive(u32 barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(WIDE_CONSUMERS + 32) : "memory");
}

// What the epilogue needs besides a product: asked for before the product's parts are there.
struct WideBeside {
    float residual[4], norm[2];
};

template <int KIND, int COLUMNS>
__device__ __forceinline__ void load_beside(const WideParams& p, u32 feature, u32 token, WideBeside& b) {
    if constexpr (KIND == TO_RESIDUAL) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 f = feature + 8 * h;
            b.norm[h] = f < p.units ? __ldg(p.norm + f) : 0.f;
#pragma unroll
            for (int e = 0; e < 2; ++e)
                b.residual[h * 2 + e] =
                    f < p.units && token + e < p.rows ? __ldcg((const float*)p.out + (u64)(token + e) * p.units + f) : 0.f;
        }
    }
}

// Two features (8 apart; or gate and up of one) by two tokens.
template <int KIND, int COLUMNS>
__device__ __forceinline__ void finish(const WideParams& p, u32 feature, u32 token, const float (&v)[4], const WideBeside& b,
                                       const float* scales, float (&squares)[2]) {
    squares[0] = squares[1] = 0.f;
    if constexpr (KIND == TO_RESIDUAL) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const u32 f = feature + 8 * h;
                if (f >= p.units || token + e >= p.rows) continue;
                const u64 at = (u64)(token + e) * p.units + f;
                const float sum = v[h * 2 + e] + b.residual[h * 2 + e];
                reinterpret_cast<float*>(p.out)[at] = sum;
                p.normed[at] = float_to_bf16(sum * b.norm[h]);
                squares[e] += sum * sum;
            }
    } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (token + e >= p.rows) continue;
            const float scale = scales[token + e];
            const u64 at = (u64)(token + e) * p.units + feature;
            if constexpr (KIND == TO_GATED) {
                if (feature < p.units) reinterpret_cast<u16*>(p.out)[at] = float_to_bf16(silu(v[e] * scale) * (v[2 + e] * scale));
            } else {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (feature + 8 * h >= p.units) continue;
                    if constexpr (KIND == TO_BF16) reinterpret_cast<u16*>(p.out)[at + 8 * h] = float_to_bf16(v[h * 2 + e] * scale);
                    else reinterpret_cast<float*>(p.out)[at + 8 * h] = v[h * 2 + e] * scale;
                }
            }
        }
    }
}

// 1 / root mean square of each batch row, from the sums that the kernel before left, by one warp: a quarter of the sums of
// four batch rows a lane, so that the order does not depend on COLUMNS.
template <int COLUMNS>
__device__ __forceinline__ void find_scales(const WideParams& s, float* scales, u32 lane) {
#pragma unroll 1
    for (u32 quad = lane / 4; quad < COLUMNS / 4; quad += 8) {
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        if (s.squares_in)
#pragma unroll 1
            for (u32 i = lane % 4; i < s.chunks; i += 4 * SQUARES_AT_ONCE) {
                float4 x[SQUARES_AT_ONCE];
#pragma unroll
                for (u32 q = 0; q < SQUARES_AT_ONCE; ++q) {
                    x[q] = make_float4(0.f, 0.f, 0.f, 0.f);
                    const u32 slot = i + q * 4;
                    if (slot < s.chunks) x[q] = __ldcg(reinterpret_cast<const float4*>(s.squares_in + slot * COLUMNS) + quad);
                }
#pragma unroll
                for (u32 q = 0; q < SQUARES_AT_ONCE; ++q) sum.x += x[q].x, sum.y += x[q].y, sum.z += x[q].z, sum.w += x[q].w;
            }
#pragma unroll
        for (u32 offset = 1; offset < 4; offset <<= 1) {
            sum.x += __shfl_xor_sync(FULL_WARP, sum.x, offset);
            sum.y += __shfl_xor_sync(FULL_WARP, sum.y, offset);
            sum.z += __shfl_xor_sync(FULL_WARP, sum.z, offset);
            sum.w += __shfl_xor_sync(FULL_WARP, sum.w, offset);
        }
        const auto scale = [&](float x) { return s.squares_in ? 1.f / sqrtf(x * s.inverse_k + s.eps) : 1.f; };
        // Rows beyond the batch get what nobody reads.
        if (lane % 4 == 0)
            reinterpret_cast<float4*>(scales)[quad] = make_float4(scale(sum.x), scale(sum.y), scale(sum.z), scale(sum.w));
    }
}

// A head of a batch row, by one warp: what it is rotated by, and where it goes; null: nowhere.
struct WideHead {
    Rotation rotation;
    u16* out;
};
__device__ __forceinline__ WideHead find_head(const QkvRopeWriteParams& p, u32 head, u32 row, u32 lane) {
    WideHead found = {};
    if (row >= p.rows) return found;
    if (head < p.q_heads + p.kv_heads) found.rotation = rotation_of(p, head, row, lane);
    found.out = place_of(p, head, row);
    return found;
}

// Adds up a split tile's sums for some of its batch rows. `shared`: the rings, where they are no longer in use; not read and
// not written for TO_GATED.
template <int KIND, int COLUMNS>
__device__ __forceinline__ void add_up(const WideParams& p, const QkvRopeWriteParams* qkv, u32 tile, const float* scales,
                                       unsigned char* shared) {
    constexpr int TILES = COLUMNS / 8;
    const u32 half = threadIdx.x >> 7, in_half = threadIdx.x & 127, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3;
    const u32 in_tile = KIND == TO_GATED ? half * 32 + (warp & 3) * 8 + (lane >> 2) : half * 64 + (warp & 3) * 16 + (lane >> 2);
    const u32 feature = tile * (KIND == TO_GATED ? 64 : 128) + in_tile;
    const u32 unit = tile * p.chunks, first = block_of(p, unit), last = block_of(p, unit + p.chunks - 1);
    const u32 sharers = last - first + 1, mine = blockIdx.x - first;
    const u32 adders = sharers - ((last + 1) * p.split_units / p.split_blocks > unit + p.chunks ? 1 : 0);
    // A share that began before the tile has its part of the tile second.
    constexpr u32 PART = 2 * TILES * 128;
    const u32 second = first * p.split_units / p.split_blocks < unit ? PART : 0;
    const float4* from = p.partial + first * 2 * PART + half * TILES * 128 + in_half;
    // Latencies are what counts: everything that fits the registers is asked for at once.
    constexpr u32 EIGHTS = KIND == TO_BF16 || KIND == TO_HEADS ? 4 : 2, AT_ONCE = KIND == TO_BF16 || KIND == TO_HEADS ? 4 : 8;
    float* sums = reinterpret_cast<float*>(shared) + half * 4 * COLUMNS;
    bool waited = false;
#pragma unroll 1
    for (u32 n = mine; n < TILES; n += adders * EIGHTS) {
        WideBeside beside[EIGHTS];
#pragma unroll
        for (u32 e = 0; e < EIGHTS; ++e)
            if (n + e * adders < TILES) load_beside<KIND, COLUMNS>(p, feature, (n + e * adders) * 8 + t * 2, beside[e]);
        WideHead heads[KIND == TO_HEADS ? EIGHTS : 1];
        if constexpr (KIND == TO_HEADS)
#pragma unroll
            for (u32 e = 0; e < EIGHTS; ++e)
                heads[e] = find_head(*qkv, tile, n + e * adders < TILES ? (n + e * adders) * 8 + warp : p.rows, lane);
        if (!waited) exchange_sync(4);
        waited = true;
        float v[EIGHTS][4] = {};
#pragma unroll 1
        for (u32 s = 0; s < sharers; s += AT_ONCE) {
            float4 x[EIGHTS][AT_ONCE];
#pragma unroll
            for (u32 q = 0; q < AT_ONCE; ++q)
#pragma unroll
                for (u32 e = 0; e < EIGHTS; ++e) {
                    x[e][q] = make_float4(0.f, 0.f, 0.f, 0.f);
                    if (s + q < sharers && n + e * adders < TILES)
                        x[e][q] = __ldcg(from + (n + e * adders) * 128 + (s + q) * 2 * PART + (s + q == 0 ? second : 0));
                }
#pragma unroll
            for (u32 q = 0; q < AT_ONCE; ++q)
#pragma unroll
                for (u32 e = 0; e < EIGHTS; ++e)
                    v[e][0] += x[e][q].x, v[e][1] += x[e][q].y, v[e][2] += x[e][q].z, v[e][3] += x[e][q].w;
        }
#pragma unroll
        for (u32 e = 0; e < EIGHTS; ++e) {
            const u32 row = (n + e * adders) * 8 + t * 2;
            if (n + e * adders >= TILES) break;
            float squares[2];
            if constexpr (KIND == TO_HEADS) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i)
                    reinterpret_cast<u16*>(shared)[(e * 8 + t * 2 + (i & 1)) * HEAD_PITCH + in_tile + (i >> 1) * 8] =
                        float_to_bf16(v[e][i] * scales[row + (i & 1)]);
            } else finish<KIND, COLUMNS>(p, feature, row, v[e], beside[e], scales, squares);
            if constexpr (KIND == TO_RESIDUAL) {
                // Sums of 16 features each meet in shared memory.
#pragma unroll
                for (int b = 0; b < 2; ++b) {
#pragma unroll
                    for (int offset = 4; offset < 32; offset <<= 1) squares[b] += __shfl_xor_sync(FULL_WARP, squares[b], offset);
                    if (lane < 4) sums[(warp & 3) * COLUMNS + row + b] = squares[b];
                }
            }
        }
        if constexpr (KIND == TO_HEADS) {
            consumers_sync();
#pragma unroll
            for (u32 e = 0; e < EIGHTS; ++e) {
                if (n + e * adders >= TILES) break;
                const u32* from = reinterpret_cast<const u32*>(reinterpret_cast<u16*>(shared) + (e * 8 + warp) * HEAD_PITCH) + lane;
                const u32 low = from[0], high = from[HEAD_DIM / 4];
                float a[PAIRS] = {bf16_low(low), bf16_high(low)}, b[PAIRS] = {bf16_low(high), bf16_high(high)};
                if (tile < qkv->q_heads + qkv->kv_heads) norm_and_rotate(a, b, heads[e].rotation, qkv->eps);
                if (heads[e].out) {
                    *reinterpret_cast<u32*>(heads[e].out + lane * PAIRS) = pack_bf16(a[0], a[1]);
                    *reinterpret_cast<u32*>(heads[e].out + HEAD_DIM / 2 + lane * PAIRS) = pack_bf16(b[0], b[1]);
                }
            }
            if (n + adders * EIGHTS < TILES) consumers_sync();
        }
    }
    if (!waited) exchange_sync(4);
    if constexpr (KIND == TO_RESIDUAL) {
        consumers_sync();
        for (u32 token = in_half; token < p.rows; token += 128)
            if (token / 8 % adders == mine && tile * 128 + half * 64 < p.units)
                p.squares_out[(tile * 2 + half) * COLUMNS + token] =
                    sums[token] + sums[COLUMNS + token] + sums[2 * COLUMNS + token] + sums[3 * COLUMNS + token];
    }
}

template <int KIND, int COLUMNS, int W_SLOTS, int X_SLOTS, int W_FLYING>
__device__ __forceinline__ void wide_product(const WideParams& p, const QkvRopeWriteParams* qkv, unsigned char* shared) {
    using Memory = WideMemory<COLUMNS, W_SLOTS, X_SLOTS>;
    constexpr int TILES = COLUMNS / 8;
    const u32 base = shared_address(shared);
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    pdl_release();

    if (threadIdx.x == WIDE_CONSUMERS) {
        fetch_map(p.w_map);
        for (u32 i = 0; i < W_SLOTS; ++i) {
            barrier_init(base + Memory::W_FULL + i * 8, 1);
            barrier_init(base + Memory::W_EMPTY + i * 8, WIDE_CONSUMERS / 32);
        }
        for (u32 i = 0; i < X_SLOTS; ++i) {
            barrier_init(base + Memory::X_FULL + i * 8, 1);
            barrier_init(base + Memory::X_EMPTY + i * 8, WIDE_CONSUMERS / 32);
        }
        barrier_init(base + Memory::SCALED, 32);
        barrier_init_done();
    }
    __syncthreads();

    WideWork work(p);
    if (warp == WIDE_CONSUMERS / 32) { // weights
        const u64 policy = evict_first();
        u32 slot = 0, parity = 1; // the first round finds every slot free
        u32 issued = 0, landed = 0, landed_parity = 0;
        while (lane == 0 && work.next(p)) {
            const u32 group = work.tile * 8;
            for (u32 i = 0; i < work.n; ++i) {
                // More bytes on their way than memory's latency asks for make everything else wait behind them.
                if (issued++ >= W_FLYING) {
                    barrier_wait(base + Memory::W_FULL + landed * 8, landed_parity);
                    if (++landed == W_SLOTS) landed = 0, landed_parity ^= 1;
                }
                barrier_wait(base + Memory::W_EMPTY + slot * 8, parity);
                const u32 full = base + Memory::W_FULL + slot * 8;
                barrier_expect(full, W_SLOT_BYTES);
                copy_weights(base + slot * W_SLOT_BYTES, p.w_map, (work.chunk + i) * 64, group, full, policy);
                if (++slot == W_SLOTS) slot = 0, parity ^= 1;
            }
        }
    } else if (warp == WIDE_CONSUMERS / 32 + 1) { // activations
        if (lane == 0) fetch_map(p.x_map);
        pdl_wait();
        u32 slot = 0, parity = 1;
        while (lane == 0 && work.next(p))
            for (u32 i = 0; i < work.n; ++i) {
                barrier_wait(base + Memory::X_EMPTY + slot * 8, parity);
                const u32 full = base + Memory::X_FULL + slot * 8;
                barrier_expect(full, Memory::X_SLOT_BYTES);
                copy_activations(base + Memory::X + slot * Memory::X_SLOT_BYTES, p.x_map, (work.chunk + i) * 64, 0, full);
                if (++slot == X_SLOTS) slot = 0, parity ^= 1;
            }
    } else if (warp > WIDE_CONSUMERS / 32) { // scales, and the exchange of sums
        u32* counter = nullptr;
        u32 n_split = 0, seen = 0;
        pdl_wait();
        if (KIND != TO_RESIDUAL) {
            find_scales<COLUMNS>(p, reinterpret_cast<float*>(shared + Memory::SCALES), lane);
            barrier_arrive_many(base + Memory::SCALED, 1);
        }
#pragma unroll 1
        while (work.next(p) && work.tile < p.split_tiles) {
            // The first block of a tile turns the top bit and takes back what all others add.
            const u32 unit = work.tile * p.chunks, first = block_of(p, unit), last = block_of(p, unit + p.chunks - 1);
            const u32 add = blockIdx.x == first ? 0x80000000u - (last - first) : 1;
            counter = p.arrived + work.tile;
            exchange_sync(2 + n_split);
            if (lane == 0) seen = arrive_at(counter, add);
            ++n_split;
        }
        if (n_split > 0) {
            if (lane == 0) wait_until_turned(counter, seen);
            __syncwarp();
            exchange_arrive(4);
        }
    } else {
        const u32 half = threadIdx.x >> 7, in_half = threadIdx.x & 127;
        const u32 t = lane & 3;
        // The first feature of a thread in a tile.
        const u32 in_tile = KIND == TO_GATED ? half * 32 + (warp & 3) * 8 + (lane >> 2) : half * 64 + (warp & 3) * 16 + (lane >> 2);
        const auto feature_of = [&](u32 tile) { return tile * (KIND == TO_GATED ? 64 : 128) + in_tile; };
        float* scales = reinterpret_cast<float*>(shared + Memory::SCALES);
        u32 w_slot = 0, w_parity = 0, x_slot = 0, x_parity = 0;
        float acc[TILES][4], squares[2];
        u32 n_split = 0, tile = 0;
        pdl_wait();
        while (work.next(p)) {
            // A split tile is added up amid a whole one, where nobody waits for it; of one chunk, after it.
            const u32 pause = KIND == TO_GATED && n_split > 0 && work.tile >= p.split_tiles ? (work.n + 1) / 2 : work.n;
            for (u32 begin = 0, end = pause; begin < work.n; begin = end, end = work.n) {
                u32 w_before = 0, x_before = 0;
#pragma unroll 1
                for (u32 i = begin; i < end; ++i) {
                    barrier_wait(base + Memory::W_FULL + w_slot * 8, w_parity);
                    barrier_wait(base + Memory::X_FULL + x_slot * 8, x_parity);
                    const u64 a = operand(base + w_slot * W_SLOT_BYTES + half * (W_SLOT_BYTES / 2));
                    const u64 b = operand(base + Memory::X + x_slot * Memory::X_SLOT_BYTES);
                    fence_products();
#pragma unroll
                    for (int k = 0; k < 4; ++k) multiply(acc, a + k * 2, b + k * 2, i > 0 || k > 0);
                    commit_products();
                    if (i > begin) {
                        wait_products<1>();
                        if (lane == 0) barrier_arrive_many(w_before, 1), barrier_arrive_many(x_before, 1);
                    }
                    w_before = base + Memory::W_EMPTY + w_slot * 8, x_before = base + Memory::X_EMPTY + x_slot * 8;
                    if (++w_slot == W_SLOTS) w_slot = 0, w_parity ^= 1;
                    if (++x_slot == X_SLOTS) x_slot = 0, x_parity ^= 1;
                }
                wait_products<0>();
                pin_registers(acc);
                if (lane == 0) barrier_arrive_many(w_before, 1), barrier_arrive_many(x_before, 1);
                if constexpr (KIND == TO_GATED)
                    if (end < work.n) {
                        barrier_wait(base + Memory::SCALED, 0);
                        add_up<KIND, COLUMNS>(p, qkv, tile, scales, shared);
                        n_split = 0;
                    }
            }

            if (KIND == TO_RESIDUAL || KIND == TO_HEADS || work.tile < p.split_tiles) {
                float4* to = p.partial + ((blockIdx.x * 2 + n_split) * 2 + half) * TILES * 128 + in_half;
#pragma unroll
                for (int n = 0; n < TILES; ++n) __stcg(to + n * 128, make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]));
                exchange_arrive(2 + n_split);
                tile = work.tile;
                ++n_split;
            } else {
                if (KIND != TO_RESIDUAL) barrier_wait(base + Memory::SCALED, 0);
                const u32 feature = feature_of(work.tile);
                const WideBeside none = {};
#pragma unroll
                for (int n = 0; n < TILES; ++n) finish<KIND, COLUMNS>(p, feature, n * 8 + t * 2, acc[n], none, scales, squares);
            }
        }
        if (KIND != TO_RESIDUAL) barrier_wait(base + Memory::SCALED, 0);
        // Of two split tiles a block adds up the second, of which it has the first part: the blocks after it do the other.
        if (n_split > 0) add_up<KIND, COLUMNS>(p, qkv, tile, scales, shared);
    }
}
