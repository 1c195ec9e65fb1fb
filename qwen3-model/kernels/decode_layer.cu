// The matrix products of a decoder layer between two attentions, and what lies between them, in one
// launch, for few rows:
//
//   mixed ─ O ─▶ residual += ─▶ post-attention norm ─ gate+up ─▶ silu·mul ─ down ─▶ residual += ─▶
//   next layer's input norm ─ QKV ─▶ qkv          (after the last layer: final norm ─ head ─▶ logits)
//
// Why one launch: reading the weights once is the floor of a decode step, and weights do not depend on
// activations. A kernel per matrix leaves memory idle at each boundary for about 5 us: the last sums,
// the end of the grid, the start of the next, the first loads. Here the copies into shared memory go on
// over the boundaries between the stages, since only activations wait there, and over the boundary to
// the launch before: the rings are filled before the wait for the predecessor.
//
// Who does what. There is one block per multiprocessor, and each owns an equal share of the rows of
// every matrix, so no sum crosses blocks. Eight warps multiply. Each has a ring of its own in shared
// memory, which its first lane keeps full with boxes of up to 48 rows by 64 columns; no warp
// waits for another before the sums of a stage meet. A ninth warp brings the activations, in chunks of
// 64 columns, through a ring that all share, once every block has finished the stage before.
//
//        K: boxes dealt in turn
//      ┌────┬────┬────┬────┬─
//  row │ w0 │ w4 │ w0 │ w4 │ …   group 0     4 groups of rows, 2 warps each, as for gate+up
//      │ w1 │ w5 │ w1 │ w5 │ …   group 1
//      │ w2 │ w6 │ w2 │ w6 │ …   group 2
//      │ w3 │ w7 │ w3 │ w7 │ …   group 3
//      └────┴────┴────┴────┴─
//
// RMSNorm divides a row by one number. The product is taken over bf16(residual · norm weight), and its
// result is scaled: that number needs all blocks' columns, and so is ready only when the stage begins.
//
// The order of every sum depends on the matrix's shape and the number of blocks, not on the number of
// rows: a row's result does not depend on what else is in the batch.
//
// Code size matters: each stage runs once per launch, so instructions are fetched cold. One loop serves
// all stages.
#include "hopper.cuh"

#ifndef COLUMNS
#define COLUMNS 8 // rows of the batch, rounded up: 8 or 16
#endif
#define WARPS 8 // that multiply
#define ROW_TILES 3
#define MAX_BOX_ROWS (ROW_TILES * 16)
#define SLOT_BYTES (MAX_BOX_ROWS * 128)
#ifndef DEPTH
#define DEPTH 3 // slots per ring
#endif
// Activations come in groups of X_GROUP chunks, 8 KiB together: their latency, not their bytes, is what counts.
#define X_GROUP (64 / COLUMNS)
#define X_BYTES (COLUMNS * 128)
#define X_SLOT_BYTES (X_GROUP * X_BYTES)
// The ring holds a multiple of 8 chunks, the most that lie between two of a warp's own boxes. So the chunk before in the
// same place was the warp's own too, and waiting for a parity cannot mistake one round for the next but one.
#ifndef X_SLOTS
#define X_SLOTS (COLUMNS == 8 ? 8 : 4)
#endif
#define X_CHUNKS (X_SLOTS * X_GROUP)
#define SUM_STRIDE (MAX_BOX_ROWS + 4) // no two lanes of a store meet a bank
#define MAX_STAGES 4
#define AT_ONCE 3 // results per lane and turn of the epilogue
#define MAX_BLOCKS 160 // multiprocessors

#define RINGS (X_SLOTS * X_SLOT_BYTES)
#define SUMS (RINGS + WARPS * DEPTH * SLOT_BYTES)
#define BARRIERS (SUMS + WARPS * COLUMNS * SUM_STRIDE * 4)
#define W_FULL (2 * X_SLOTS)
#define SHARED_BYTES (BARRIERS + (W_FULL + WARPS * DEPTH) * 8)

#define TO_RESIDUAL 0 // O and down
#define TO_GATED 1    // gate+up
#define TO_BF16 2     // QKV
#define TO_F32 3      // head

struct Stage {
    alignas(64) char w_map[128]; // [N, K] as {64, N, K / 64}, boxes {64, box_rows, 1}
    alignas(64) char x_map[128]; // [rows, K] as {64, rows, K / 64}, boxes {64, COLUMNS, X_GROUP}
    void* out;                // gated bf16, qkv bf16 or logits f32: [rows, units]; the residual f32
    const float* norm;        // TO_RESIDUAL: weight of the norm that follows, f32 [units]
    u16* normed;              // TO_RESIDUAL: bf16 [rows, units], residual · norm, not yet scaled
    float* squares_out;       // TO_RESIDUAL: f32 [COLUMNS, blocks], sums of squares of the residual
    const float* squares_in;  // scales the product; null: none
    u32 kind;
    u32 units;    // N; for TO_GATED N / 2
    u32 chunks;   // K / 64
    u32 groups;   // of rows, 1, 2, 4 or 8; half of them the up rows for TO_GATED
    u32 box_rows; // at most 48
    u32 row_tiles; // of 16 rows that cover a box
    u32 passes;
    float columns; // of the rows normed: what squares_in is divided by
};

struct DecodeLayerParams {
    Stage stages[MAX_STAGES];
    u32* counters; // [MAX_STAGES], 0 at the start: blocks that finished each stage
    u32* clear;    // [clear_len], counters of launches before and after this one: set to 0
    u32 clear_len;
    u32 n_stages;
    u32 rows;
    float eps;
};

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
__device__ __forceinline__ u32 share(u32 units, u32 block) { return (u32)((u64)block * units / gridDim.x); }
__device__ __forceinline__ void matrix_warps_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}

// The boxes of one warp, in the order in which it multiplies them, over all stages. What the next copy needs stands in
// registers: parameters indexed by the stage are slow to read.
struct Boxes {
    const char* map;
    u32 stage, passes_left, pass_rows, row; // stage: of the box that comes next
    u32 box, first_box, n_boxes, step, bytes;

    // Goes to `stage` or to the first one after it where the warp has a box.
    __device__ __forceinline__ void enter(const DecodeLayerParams& p, u32 warp) {
        for (; stage < p.n_stages; ++stage) {
            const Stage& s = p.stages[stage];
            const u32 half = s.kind == TO_GATED ? s.groups / 2 : s.groups, group = warp % s.groups;
            map = s.w_map;
            bytes = s.box_rows * 128;
            n_boxes = s.chunks;
            step = WARPS / s.groups;
            first_box = box = warp / s.groups;
            pass_rows = half * s.box_rows;
            passes_left = s.passes;
            row = share(s.units, blockIdx.x) + (group % half) * s.box_rows + (group >= half ? s.units : 0);
            if (box < n_boxes) return;
        }
    }
    __device__ __forceinline__ bool done(u32 n_stages) const { return stage >= n_stages; }
    __device__ __forceinline__ void advance(const DecodeLayerParams& p, u32 warp) {
        box += step;
        if (box < n_boxes) return;
        box = first_box;
        row += pass_rows;
        if (--passes_left > 0) return;
        ++stage;
        enter(p, warp);
    }
    __device__ __forceinline__ void copy(u32 slot, u32 full) const {
        barrier_expect(full, bytes);
        copy_box3(slot, map, 0, row, box, full);
    }
};

// Operands of the products: 16 columns of a chunk, or with eight rows of x 32 of them from an even step on.
__device__ __forceinline__ void load_x(u32 x, int step, u32 lane, u32 (&b)[COLUMNS / 8][4]) {
#if COLUMNS == 8
    load_matrix4(x + (lane & 7) * 128 + (((step * 2 + (lane >> 3)) ^ (lane & 7)) << 4), b[0]);
#else
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; ++n) {
        const u32 row = n * 16 + (lane >> 4) * 8 + (lane & 7), piece = step * 2 + ((lane >> 3) & 1);
        load_matrix4(x + row * 128 + ((piece ^ (lane & 7)) << 4), b[n]);
    }
#endif
}
// Rows past the box are other boxes' and give sums that nobody reads.
__device__ __forceinline__ void load_w(u32 w, int step, u32 lane, u32 row_tiles, u32 (&a)[ROW_TILES][4]) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        const u32 at = w + (r * 16 + (lane & 15)) * 128;
        if (r < row_tiles) load_matrix4(at + (((step * 2 + (lane >> 4)) ^ ((at >> 7) & 7)) << 4), a[r]);
    }
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1)
    decode_layer(const __grid_constant__ DecodeLayerParams p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared);
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 x_full = base + BARRIERS, x_empty = x_full + X_SLOTS * 8;
    const u32 ring = base + RINGS + warp * DEPTH * SLOT_BYTES;
    const u32 full = base + BARRIERS + (W_FULL + warp * DEPTH) * 8;
    float* sums = reinterpret_cast<float*>(shared + SUMS);
    pdl_release();

    Boxes next; // to be copied
    if (warp < WARPS) {
        if (lane == 0) {
            fetch_map(p.stages[0].w_map);
            for (u32 i = 0; i < DEPTH; ++i) barrier_init(full + i * 8, 1);
            barrier_init_done();
        }
        next.stage = 0;
        next.enter(p, warp);
        for (u32 i = 0; i < DEPTH && !next.done(p.n_stages); ++i) {
            if (lane == 0) next.copy(ring + i * SLOT_BYTES, full + i * 8);
            next.advance(p, warp);
        }
    } else if (lane == 0) {
        for (u32 i = 0; i < p.n_stages; ++i) fetch_map(p.stages[i].x_map);
        for (u32 i = 0; i < X_SLOTS; ++i) {
            barrier_init(x_full + i * 8, 1);
            barrier_init(x_empty + i * 8, WARPS * X_GROUP);
        }
        barrier_init_done();
    }
    __syncthreads();

    if (warp == WARPS) { // activations
        pdl_wait();
        if (lane != 0) return;
        if (blockIdx.x == 0)
            for (u32 i = 0; i < p.clear_len; ++i) p.clear[i] = 0;
        // Each chunk is read by one warp of each group, which counts for as many as do not.
        u32 at = 0, parity = 1; // the first round finds every place free
        for (u32 stage = 0; stage < p.n_stages; ++stage) {
            const Stage& s = p.stages[stage];
            if (stage > 0) {
                wait_for(p.counters + stage - 1, gridDim.x);
                fence_copy_engine(); // what other blocks stored is read by the copy engine
            }
            for (u32 pass = 0; pass < s.passes; ++pass)
                for (u32 chunk = 0; chunk < s.chunks; chunk += X_GROUP) {
                    barrier_wait(x_empty + at * 8, parity);
                    barrier_expect(x_full + at * 8, X_SLOT_BYTES);
                    copy_box3(base + at * X_SLOT_BYTES, s.x_map, 0, 0, chunk, x_full + at * 8);
                    // Nobody reads chunks past the end.
                    if (chunk + X_GROUP > s.chunks) barrier_arrive_many(x_empty + at * 8, WARPS * (chunk + X_GROUP - s.chunks));
                    if (++at == X_SLOTS) at = 0, parity ^= 1;
                }
        }
        return;
    }

    const u32 n_stages = p.n_stages;
    u32 slot = 0, parity = 0; // of the ring
    u32 x_before = 0;         // chunks of all passes before
#pragma unroll 1
    for (u32 stage = 0; stage < n_stages; ++stage) {
        const Stage& s = p.stages[stage];
        const u32 kind = s.kind, chunks = s.chunks, row_tiles = s.row_tiles;
        const u32 way = warp / s.groups, ways = WARPS / s.groups;
        const u32 half = s.kind == TO_GATED ? s.groups / 2 : s.groups;
        const u32 way_stride = s.groups * COLUMNS * SUM_STRIDE, up_offset = half * COLUMNS * SUM_STRIDE;
        const u32 box_inverse = 0xffffffffu / s.box_rows + 1; // its high product is the quotient of small numbers
        const u32 first = share(s.units, blockIdx.x), count = share(s.units, blockIdx.x + 1) - first;

        // What the epilogue needs besides the product, asked for now so that it is there by then. The first chunk of
        // activations has come only after the stage before was complete everywhere.
        barrier_wait(x_full + x_before / X_GROUP % X_SLOTS * 8, x_before / X_CHUNKS & 1);
        if (stage == 0) pdl_wait();
        float squares_of[COLUMNS / WARPS][MAX_BLOCKS / 32], residual_of[COLUMNS / WARPS], norm_of = 0.f;
#pragma unroll
        for (u32 j = 0; j < COLUMNS / WARPS; ++j) {
            const u32 row = j * WARPS + warp;
#pragma unroll
            for (u32 i = 0; i < MAX_BLOCKS / 32; ++i) {
                squares_of[j][i] = 0.f;
                const u32 block = i * 32 + lane;
                if (s.squares_in && row < p.rows && block < gridDim.x) squares_of[j][i] = load_fresh(s.squares_in + row * gridDim.x + block);
            }
            residual_of[j] = 0.f;
            if (s.kind == TO_RESIDUAL && lane < count && row < p.rows)
                residual_of[j] = load_fresh(reinterpret_cast<const float*>(s.out) + (u64)row * s.units + first + lane);
        }
        if (s.kind == TO_RESIDUAL && lane < count) norm_of = s.norm[first + lane];

#pragma unroll 1
        for (u32 pass = 0; pass < s.passes; ++pass) {
            float acc[ROW_TILES][COLUMNS / 8][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[r][n][e] = 0.f;

#pragma unroll 1
            for (u32 box = way; box < chunks; box += ways) {
                barrier_wait(full + slot * 8, parity);
                const u32 chunk = x_before + box, x_at = chunk / X_GROUP % X_SLOTS;
                barrier_wait(x_full + x_at * 8, chunk / X_CHUNKS & 1);
                const u32 x = base + chunk % X_CHUNKS * X_BYTES, w = ring + slot * SLOT_BYTES;
                // Loads run ahead of the products: with one box at a time there is nobody else to hide them.
                u32 a[2][ROW_TILES][4], b[2][COLUMNS / 8][4];
                load_x(x, 0, lane, b[0]);
                load_w(w, 0, lane, row_tiles, a[0]);
#pragma unroll
                for (int step = 0; step < 4; ++step) { // 16 of the 64 columns
                    if (step < 3) {
                        // Eight rows of x: 32 columns at once.
                        if (COLUMNS > 8 || step == 1) load_x(x, step + 1, lane, b[(COLUMNS > 8 ? step + 1 : 1) & 1]);
                        load_w(w, step + 1, lane, row_tiles, a[(step + 1) & 1]);
                    }
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r)
                        if (r < row_tiles) {
#if COLUMNS == 8
                            mma(acc[r][0], a[step & 1][r], b[step >> 1][0][(step & 1) * 2], b[step >> 1][0][(step & 1) * 2 + 1]);
#else
#pragma unroll
                            for (int n = 0; n < COLUMNS / 8; ++n)
                                mma(acc[r][n], a[step & 1][r], b[step & 1][n / 2][(n & 1) * 2], b[step & 1][n / 2][(n & 1) * 2 + 1]);
#endif
                        }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive_many(x_empty + x_at * 8, ways);
                if (!next.done(n_stages)) {
                    if (lane == 0) next.copy(ring + slot * SLOT_BYTES, full + slot * 8);
                    next.advance(p, warp);
                }
                if (++slot == DEPTH) slot = 0, parity ^= 1;
            }
            x_before += (s.chunks + X_GROUP - 1) / X_GROUP * X_GROUP;

            // The warps' sums meet in shared memory: [warp][batch row][row of the box].
            float* mine = sums + warp * COLUMNS * SUM_STRIDE;
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        mine[(n * 8 + (lane & 3) * 2 + (e & 1)) * SUM_STRIDE + r * 16 + (lane >> 2) + (e >> 1) * 8] = acc[r][n][e];
            matrix_warps_sync();
            const u32 pass_rows = half * s.box_rows, before = pass * pass_rows;
            const u32 here = count > before ? min(count - before, pass_rows) : 0;
#pragma unroll 1
            for (u32 j = 0; j < COLUMNS / WARPS; ++j) {
                const u32 row = j * WARPS + warp;
                if (row >= p.rows) break;
                float factor = 1.f, residual_here = 0.f;
                if (s.squares_in) {
                    float sum = 0.f;
#pragma unroll
                    for (u32 k = 0; k < COLUMNS / WARPS; ++k)
#pragma unroll
                        for (u32 i = 0; i < MAX_BLOCKS / 32; ++i)
                            if (k == j) sum += squares_of[k][i];
                    factor = 1.f / sqrtf(warp_sum(sum) / s.columns + p.eps);
                }
#pragma unroll
                for (u32 k = 0; k < COLUMNS / WARPS; ++k)
                    if (k == j) residual_here = residual_of[k];
                float squares = 0.f;
#pragma unroll 1
                for (u32 i = lane; i < here; i += 32 * AT_ONCE) {
                    // All loads before the first store, so that their latencies overlap.
                    float value[AT_ONCE], up[AT_ONCE];
                    const float* from[AT_ONCE];
#pragma unroll
                    for (u32 q = 0; q < AT_ONCE; ++q) {
                        const u32 unit = min(i + q * 32, here - 1), in_group = __umulhi(unit, box_inverse);
                        from[q] = sums + (in_group * COLUMNS + row) * SUM_STRIDE + (unit - in_group * s.box_rows);
                        value[q] = up[q] = 0.f;
                    }
                    for (u32 k = 0; k < ways; ++k)
#pragma unroll
                        for (u32 q = 0; q < AT_ONCE; ++q) value[q] += from[q][k * way_stride];
                    if (kind == TO_GATED)
                        for (u32 k = 0; k < ways; ++k)
#pragma unroll
                            for (u32 q = 0; q < AT_ONCE; ++q) up[q] += from[q][k * way_stride + up_offset];
#pragma unroll
                    for (u32 q = 0; q < AT_ONCE; ++q) {
                        const u32 unit = i + q * 32;
                        if (unit >= here) break;
                        const float v = value[q] * factor;
                        const u32 column = first + before + unit;
                        const u64 at = (u64)row * s.units + column;
                        if (kind == TO_RESIDUAL) {
                            float* residual = reinterpret_cast<float*>(s.out);
                            const bool early = unit < 32 && pass == 0;
                            const float sum = v + (early ? residual_here : residual[at]);
                            residual[at] = sum;
                            s.normed[at] = float_to_bf16(sum * (early ? norm_of : s.norm[column]));
                            squares += sum * sum;
                        } else if (kind == TO_GATED) {
                            reinterpret_cast<u16*>(s.out)[at] = float_to_bf16(silu(v) * (up[q] * factor));
                        } else if (kind == TO_BF16) {
                            reinterpret_cast<u16*>(s.out)[at] = float_to_bf16(v);
                        } else {
                            reinterpret_cast<float*>(s.out)[at] = v;
                        }
                    }
                }
                if (kind == TO_RESIDUAL) {
                    squares = warp_sum(squares);
                    if (lane == 0) s.squares_out[(u64)row * gridDim.x + blockIdx.x] = squares;
                }
            }
            matrix_warps_sync();
        }
        if (stage + 1 < p.n_stages && threadIdx.x == 0) {
            signal(p.counters + stage);
        }
    }
}
