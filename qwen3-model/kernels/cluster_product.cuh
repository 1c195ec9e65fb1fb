// A matrix product of a decode step of 33 to 256 rows whose inner dimension is shared by the blocks of a cluster, with what lies
// between it and its neighbours: residual f32 [rows, N] += product, normed = bf16(residual · norm weight), sums of squares.
//
// As in gate_up.cuh the batch is the 64-row operand of the tensor cores and weights are the other one. A cluster has one tile of
// TILE rows of the weight; each of its SPLITS blocks multiplies a share of the chunks of 64 columns, all of which have the same
// length but for one chunk. Beyond 128 rows two blocks have the same share, each with half of the batch: each fetches half of the
// weights for both.
//
//             columns of the tile     ├── share of block 0 ──┼── of block 1 ──┼── of block 2 ──┼── of block 3 ──┤
//   block 0   chunks of its own               keeps               sends            sends            sends
//   block 1                                   sends               keeps            sends            sends
//
// Sums go from registers straight into the shared memory of the block that adds up a share, in the order of the blocks: a
// thread there has the same elements of the tile as the thread that sends. No fence, no counter, no memory of the device.
#pragma once
#include "cluster_rings.cuh"

struct ClusterParams {
    alignas(64) char w_map[128]; // [N, K], boxes {64, TILE / HALVES}
    alignas(64) char x_map[128]; // [rows, K], boxes {64, COLUMNS}
    float* residual;             // [rows, units]
    const float* norm;           // weight of the norm that follows, f32 [units]
    u16* normed;                 // bf16 [rows, units], not yet scaled
    float* squares;              // f32 [tiles · SPLITS, HALVES · COLUMNS]
    u32 rows;
    u32 units;  // N
    u32 chunks; // K / 64
    u32 unused;
};

// COLUMNS: batch rows of a block; HALVES: blocks that share the weights of a tile.
template <int COLUMNS, int TILE, int SPLITS, int HALVES, int W_SLOTS, int X_SLOTS>
struct ClusterMemory {
    static constexpr int TILES = TILE / 8;
    static constexpr int SHARE = (TILES + SPLITS - 1) / SPLITS; // tiles of 8 columns that a block adds up
    static constexpr int CONSUMERS = (COLUMNS + 63) / 64 * 128;
    static constexpr int THREADS = CONSUMERS + 64; // a warp that copies weights, one that copies activations
    // Sums of the other blocks take the rings' place.
    using Rings = BatchRings<COLUMNS, TILE, W_SLOTS, X_SLOTS, (SPLITS - 1) * SHARE * CONSUMERS * 16>;
    static constexpr int SUMMED = Rings::END;
    static constexpr int BYTES = SUMMED + 8;
};

template <int COLUMNS, int TILE, int SPLITS, int HALVES, int W_SLOTS, int X_SLOTS, int W_FLYING>
__device__ __forceinline__ void cluster_product(const ClusterParams& p, unsigned char* shared) {
    using Memory = ClusterMemory<COLUMNS, TILE, SPLITS, HALVES, W_SLOTS, X_SLOTS>;
    using Rings = typename Memory::Rings;
    constexpr u32 CONSUMER_WARPS = Rings::CONSUMER_WARPS;
    constexpr int TILES = Memory::TILES, SHARE = Memory::SHARE;
    static_assert(TILE % (8 * HALVES) == 0, "boxes are of whole groups of 8 rows");
    const u32 base = shared_address(shared);
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 rank = block_in_cluster(), half = rank % HALVES, split = rank / HALVES;
    const u32 tile = blockIdx.x / (SPLITS * HALVES);
    pdl_release();

    if (threadIdx.x == 0) {
        fetch_map(p.w_map);
        fetch_map(p.x_map);
        init_rings<Rings, HALVES>(base);
        barrier_init(base + Memory::SUMMED, 1);
        barrier_init_done();
        const int mine = min(SHARE, max(0, TILES - (int)split * SHARE));
        barrier_expect(base + Memory::SUMMED, (SPLITS - 1) * mine * Memory::CONSUMERS * 16);
    }
    __syncthreads();
    // Nothing is sent to a block whose barriers do not count yet: sums, and with two halves weights from the start on. Of those only
    // the warp that sends would have to wait here, but racecheck lets no thread past a wait before all have come to it.
    cluster_arrive();
    if (HALVES == 2) cluster_wait();

    const u32 first = p.chunks * split / SPLITS, n_chunks = p.chunks * (split + 1) / SPLITS - first;
    if (warp == CONSUMER_WARPS) {
        if (lane == 0) {
            const u32 row = tile * TILE + (HALVES == 2 ? half * (TILE / 2) : 0);
            copy_weight_chunks<Rings, HALVES, W_FLYING>(base, p.w_map, first, n_chunks, row, half, 3u << (split * 2));
        }
        __syncwarp();
        if (HALVES == 1) cluster_wait();
        cluster_arrive();
        cluster_wait();
    } else if (warp > CONSUMER_WARPS) {
        pdl_wait();
        if (lane == 0) copy_activation_chunks<Rings>(base, p.x_map, first, n_chunks, half * COLUMNS);
        __syncwarp();
        if (HALVES == 1) cluster_wait();
        cluster_arrive();
        cluster_wait();
    } else {
        const u32 group = warp >> 2, t = lane & 3, in_block = group * 64 + (warp & 3) * 16 + (lane >> 2);
        const u32 other_empty = HALVES == 2 ? at_block(base + Rings::W_EMPTY, rank ^ 1) : 0;
        float acc[TILES][4];
        pdl_wait();

        // A thread has two rows 8 apart and two columns in each tile of 8. Of two tiles it stores four columns of one. What it adds
        // to is asked for before the products.
        constexpr int STORES = (SHARE + 1) / 2;
        const bool odd = (lane & 1) != 0;
        const u32 rows[2] = {half * COLUMNS + in_block, half * COLUMNS + in_block + 8};
        const u32 stride = HALVES * COLUMNS, share = split * SHARE;
        const auto tile_of = [&](int q) { return share + 2 * q + (odd ? 1 : 0); };
        const auto column_of = [&](int q) { return tile * TILE + tile_of(q) * 8 + (t >> 1) * 4; };
        const auto exists = [&](int q) { return 2 * q + (odd ? 1 : 0) < SHARE && tile_of(q) < TILES && column_of(q) < p.units; };
        const auto has_row = [&](int h) { return in_block + h * 8 < COLUMNS && rows[h] < p.rows; };
        float4 residual[STORES][2], norm[STORES];
#pragma unroll
        for (int q = 0; q < STORES; ++q) {
            norm[q] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (exists(q)) norm[q] = __ldg(reinterpret_cast<const float4*>(p.norm + column_of(q)));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                residual[q][h] = make_float4(0.f, 0.f, 0.f, 0.f);
                if (exists(q) && has_row(h)) residual[q][h] = __ldcg(reinterpret_cast<const float4*>(p.residual + (u64)rows[h] * p.units + column_of(q)));
            }
        }
        multiply_chunks<Rings, HALVES>(acc, base, group, lane, n_chunks, other_empty);
        wait_products<0>();
        pin_registers(acc);
        // More blocks than chunks.
        if (n_chunks == 0)
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[n][i] = 0.f;
        // The rings of all blocks are free when all have come.
        __syncwarp();
        if (HALVES == 1) cluster_wait();
        cluster_arrive();

        cluster_wait();

        // [SPLITS - 1, SHARE, CONSUMERS]: the other blocks in order.
        float sums[2 * STORES][4];
#pragma unroll
        for (int l = 0; l < 2 * STORES; ++l)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[l][i] = 0.f;
        constexpr u32 PITCH = Memory::CONSUMERS * 16;
#pragma unroll
        for (int q = 0; q < SPLITS; ++q) {
            const u32 to = q * HALVES + half, slot = split < q ? split : split - 1;
            const u32 there = at_block(base + slot * SHARE * PITCH + threadIdx.x * 16, to), barrier = at_block(base + Memory::SUMMED, to);
#pragma unroll
            for (int l = 0; l < SHARE; ++l) {
                if (q * SHARE + l >= TILES) continue;
                float(&x)[4] = acc[q * SHARE + l];
                if (q != split) send(there + l * PITCH, x, barrier);
                else sums[l][0] = x[0], sums[l][1] = x[1], sums[l][2] = x[2], sums[l][3] = x[3];
            }
        }
        if (SPLITS > 1) barrier_wait_cluster(base + Memory::SUMMED, 0);
#pragma unroll
        for (int l = 0; l < SHARE; ++l) {
            float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int q = 0; q < SPLITS; ++q) {
                float4 x = make_float4(sums[l][0], sums[l][1], sums[l][2], sums[l][3]);
                if (q != split) x = *reinterpret_cast<const float4*>(shared + ((q < split ? q : q - 1) * SHARE + l) * PITCH + threadIdx.x * 16);
                v.x += x.x, v.y += x.y, v.z += x.z, v.w += x.w;
            }
            sums[l][0] = v.x, sums[l][1] = v.y, sums[l][2] = v.z, sums[l][3] = v.w;
        }

        float squares[2] = {0.f, 0.f};
#pragma unroll
        for (int q = 0; q < STORES; ++q)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 here = make_float2(sums[2 * q][h * 2], sums[2 * q][h * 2 + 1]), next = make_float2(sums[2 * q + 1][h * 2], sums[2 * q + 1][h * 2 + 1]);
                float2 other;
                other.x = __shfl_xor_sync(FULL_WARP, odd ? here.x : next.x, 1);
                other.y = __shfl_xor_sync(FULL_WARP, odd ? here.y : next.y, 1);
                if (!exists(q) || !has_row(h)) continue;
                const u64 at = (u64)rows[h] * p.units + column_of(q);
                float4 x = residual[q][h];
                x.x += odd ? other.x : here.x, x.y += odd ? other.y : here.y, x.z += odd ? next.x : other.x, x.w += odd ? next.y : other.y;
                *reinterpret_cast<float4*>(p.residual + at) = x;
                *reinterpret_cast<uint2*>(p.normed + at) = make_uint2(pack_bf16(x.x * norm[q].x, x.y * norm[q].y), pack_bf16(x.z * norm[q].z, x.w * norm[q].w));
                squares[h] += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
            }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            squares[h] += __shfl_xor_sync(FULL_WARP, squares[h], 1);
            squares[h] += __shfl_xor_sync(FULL_WARP, squares[h], 2);
            if (t == 0 && in_block + h * 8 < COLUMNS) p.squares[(u64)(tile * SPLITS + split) * stride + rows[h]] = squares[h];
        }
    }
}
