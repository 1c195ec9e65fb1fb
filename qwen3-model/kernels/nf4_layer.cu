// The matrix products of a decoder layer between two attentions with weights in 4 bits, and what lies between them, in one
// launch for up to 64 rows:
//
//   mixed ─ O ─▶ residual += ─▶ post-attention norm ─ gate+up ─▶ silu·mul ─ down ─▶ residual += ─▶
//   next layer's input norm ─ QKV ─▶ qkv
//
// or any one of these products alone. There is a block per multiprocessor with an equal share of the rows of every
// matrix; eight or sixteen warps, each with a ring of boxes of weights that is kept full across the stages and before the launch
// may read activations; another warp that brings activations once they are there.
//
//   y[t, n] = sum over b of absmax[n, b] * sum over k in block b of value[nibble (n, k)] * x[t, k]
//
// packed u8 [N, K / 2], absmax f32 [K / 64, N], x bf16 [rows, K]; K a multiple of 64, N of 16.
//
// Decoding is what costs: memory brings 33 weights per cycle and multiprocessor. A byte, two weights, is one look-up of a
// pair of bf16 numbers in shared memory, where every lane has a copy of the table in a bank of its own. A block's scale is
// applied to its sum, not to its weights. The values of the table are those of the map times one factor, chosen by the host so
// that they are rounded as little as possible; the scale carries the factor's inverse. So products here are nearer to
// map * absmax than with weights rounded to bf16, but are not those of weights rounded to bf16.
//
//   box     up to MAX_BOX_ROWS rows by 128 columns: packed [rows][64 bytes], then absmax [2][rows]
//   tile    8 rows of a box; two of them are the rows of an mma, whose columns are 8 tokens
//   lane    (g, q) decodes 16 neighbours, columns 16 q … of each block, of row 4 g0 + 2 g2 + g1 of a tile, an order in which
//           no two lanes meet in a bank; token g is read at the same columns, so the order within a block is free
//
// The order of every sum depends on the matrix's shape, the number of blocks and whether there are more than 8, 16 or 32 rows.
#include "hopper.cuh"
#include "unmerged.cuh"

#ifndef COLUMNS
#define COLUMNS 8 // rows of the batch, rounded up: 8, 16, 32 or 64
#endif
#ifndef MATRIX_WARPS
#define MATRIX_WARPS 8
#endif
#ifndef LOW_RANK
#define LOW_RANK 1 // whether a launch may have adapters beside the weights
#endif
#define WARPS MATRIX_WARPS // that multiply
#ifndef MAX_TILES
#define MAX_TILES (COLUMNS < 64 ? 5 : 3) // 5 or 3
#endif
#define MAX_BOX_ROWS (8 * MAX_TILES)
#define SLOT_BYTES ((MAX_BOX_ROWS * 72 + 511) / 512 * 512)
#ifndef DEPTH
#define DEPTH (COLUMNS == 16 ? 5 : COLUMNS == 32 ? 4 : 6) // boxes per ring
#endif
// Boxes of a warp that are under way when a launch begins: more bring no bandwidth, and attention, which still runs, waits
// behind them.
#ifndef FILL
#define FILL 2
#endif
#define TOKEN_TILES (COLUMNS / 8)
#define TOKENS (COLUMNS < 16 ? COLUMNS : 16) // whose sums meet at once
// Activations come in slots of X_BOXES times 128 columns. Where a row of a box of activations is padding it is left out, and there
// are as many more boxes in a slot. The ring holds a multiple of the boxes that lie between two of a warp's own, at most as many as
// there are warps along K: so what was in the same place before was the warp's own too, and waiting for a parity cannot mistake one
// round for the next but one.
#define X_BOXES (COLUMNS <= 16 ? 32 / COLUMNS : 1)
#define X_SLOT_BYTES (X_BOXES * COLUMNS * 256)
#ifndef X_RING
#define X_RING (COLUMNS == 8 ? 32 : COLUMNS == 64 ? 4 : 8) // in boxes
#endif
#define X_SLOTS (X_RING / X_BOXES)
#define SUM_STRIDE (MAX_BOX_ROWS + 4)
#define MAX_STAGES 4
#define AT_ONCE 3 // results per lane and turn of the epilogue
#define MAX_BLOCKS 160 // multiprocessors

#define TABLE_BYTES (256 * 128)
#define X_RINGS TABLE_BYTES
#define RINGS (X_RINGS + X_SLOTS * X_SLOT_BYTES)
#define SUMS (RINGS + WARPS * DEPTH * SLOT_BYTES)
#define BARRIERS (SUMS + WARPS * TOKENS * SUM_STRIDE * 4)
#define W_FULL (2 * X_SLOTS)
#define SHARED_BYTES (BARRIERS + (W_FULL + WARPS * DEPTH) * 8)
#define THREADS ((WARPS + 1) * 32)

#define TO_RESIDUAL 0 // O and down
#define TO_GATED 1    // gate+up
#define TO_BF16 2     // QKV
#define TO_F32 3

struct Stage {
    alignas(64) char w_map[128];     // u8 [N, K / 2], boxes {64, box_rows, 1}
    alignas(64) char scale_map[128]; // f32 [K / 64, N], boxes {box_rows, 2, 1}
    alignas(64) char x_map[128];     // bf16 [rows, K] as {64, rows, K / 64}, boxes {64, X_SLOT_BYTES / 256 / x_boxes, 2 x_boxes}
    void* out;                // gated bf16, qkv bf16 or a product f32: [rows, units]; the residual f32
    const float* norm;        // TO_RESIDUAL: weight of the norm that follows, f32 [units]
    u16* normed;              // TO_RESIDUAL: bf16 [rows, units], residual · norm, not yet scaled
    float* squares_out;       // TO_RESIDUAL: f32 [rows, blocks], sums of squares of the residual
    const float* squares_in;  // scales the product; null: none
    u32 kind;
    u32 units;    // N; for TO_GATED N / 2
    u32 boxes;    // ceil(K / 128)
    u32 groups;   // of rows, 1, 2, 4 or 8; half of them the up rows for TO_GATED
    u32 box_rows; // a multiple of 8
    u32 passes;
    float columns; // K: what squares_in is divided by
    u32 unused;
};

// Adapters beside the weights of a launch's only stage: y[t, n] += sum over r of B[n, r] * h[t, part of n, r].
struct LowRank {
    Unmerged u;      // no policies: nothing is added
    const float* h;  // f32 [rows, parts, max_rank] of unmerged_down
    u32 ends[4];     // where each part ends among the rows of the matrix
    u32 max_rank;
    u32 unused;
};

struct Nf4LayerParams {
    Stage stages[MAX_STAGES];
    u32* counters; // [MAX_STAGES], 0 at the start: blocks that finished each stage
    u32* clear;    // [clear_len], counters of launches before and after this one: set to 0
    u32 clear_len;
    u32 n_stages;
    u32 rows;
    float eps;
    float scale; // of all sums
    u32 x_boxes; // of a slot, a power of two: X_BOXES, or more of fewer than 8 rows
    u32 unused[6];
    u16 values[16]; // bf16, of the nibbles
    LowRank low_rank;
};

// Where a block's rows begin: at a multiple of 4, since the copy engine reads their scales in pieces of 16 bytes.
__device__ __forceinline__ u32 share(u32 units, u32 block) { return (u32)((u64)block * (units / 4) / gridDim.x) * 4; }
__device__ __forceinline__ void matrix_warps_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}
__device__ __forceinline__ uint4 shared_load4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ uint2 shared_load2(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ float shared_load1(u32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
// The first product of a block's sum: nothing to add to.
__device__ __forceinline__ void mma_first(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
// As `mma`, but the compiler may order products.
__device__ __forceinline__ void mma_next(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The boxes of one warp, in the order in which it multiplies them, over all stages.
struct Boxes {
    const char* map;
    const char* scales;
    u32 stage, passes_left, pass_rows, row; // stage: of the box that comes next
    u32 box, first_box, n_boxes, step, box_rows;

    // Goes to `stage` or to the first one after it where the warp has a box.
    __device__ __forceinline__ void enter(const Nf4LayerParams& p, u32 warp) {
        for (; stage < p.n_stages; ++stage) {
            const Stage& s = p.stages[stage];
            const u32 half = s.kind == TO_GATED ? s.groups / 2 : s.groups, group = warp % s.groups;
            map = s.w_map;
            scales = s.scale_map;
            box_rows = s.box_rows;
            n_boxes = s.boxes;
            step = WARPS / s.groups;
            first_box = box = warp / s.groups;
            pass_rows = half * s.box_rows;
            passes_left = s.passes;
            row = share(s.units, blockIdx.x) + (group % half) * s.box_rows + (group >= half ? s.units : 0);
            if (box < n_boxes) return;
        }
    }
    __device__ __forceinline__ bool done(u32 n_stages) const { return stage >= n_stages; }
    __device__ __forceinline__ void advance(const Nf4LayerParams& p, u32 warp) {
        box += step;
        if (box < n_boxes) return;
        box = first_box;
        row += pass_rows;
        if (--passes_left > 0) return;
        ++stage;
        enter(p, warp);
    }
    __device__ __forceinline__ void copy(u32 slot, u32 full) const {
        barrier_expect(full, box_rows * 72);
        copy_box3_once(slot, map, box * 64, row, 0, full);
        copy_box3_once(slot + box_rows * 64, scales, row, box * 2, 0, full);
    }
};

// What a warp needs to read its operands.
struct Lane {
    u32 base, table;  // the table, and the offset of its copy of the pairs
    u32 row;          // of a tile
    u32 w, scale;     // offsets within a box: first block's 16 weights of a row, the row's scale
    u32 x, piece;     // the same of the activations: first token, and the number of its 16 bytes
};

// Two weights, from byte `i` of a word.
__device__ __forceinline__ u32 pair_of(const Lane& lane, u32 word, int i) {
    const u32 at = ((i == 0 ? word << 7 : word >> (8 * i - 7)) & 0x7f80) | lane.table;
    u32 pair;
    asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(lane.base + at));
    return pair;
}

// One box of `tiles` tiles, two of which are the rows of a product.
template <int N_TILES>
__device__ __forceinline__ void multiply(float (&acc)[MAX_TILES][TOKEN_TILES][2], const Lane& lane, u32 x, u32 x_bytes, u32 w) {
    constexpr int PAIRS = (N_TILES + 1) / 2, AT_A_TIME = COLUMNS == 16 ? 2 : 1;
#pragma unroll AT_A_TIME
    for (u32 block = 0; block < 2; ++block) {
        const u32 words_at = w + (lane.w ^ (block * 32)), scales_at = w + N_TILES * 512 + lane.scale + block * (N_TILES * 32);
        u32 a[2 * PAIRS][8];
        float scale[N_TILES];
#pragma unroll
        for (int r = 0; r < 2 * PAIRS; ++r) {
            if (r == N_TILES) {
#pragma unroll
                for (int i = 0; i < 8; ++i) a[r][i] = 0;
                continue;
            }
            const uint2 words = shared_load2(words_at + r * 512);
            scale[r] = shared_load1(scales_at + r * 32);
#pragma unroll
            for (int i = 0; i < 8; ++i) a[r][i] = pair_of(lane, i < 4 ? words.x : words.y, i & 3);
        }
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t) {
            // The place of 16 bytes is exchanged by the row's number in the ring; of more tokens than there are anything is read.
            const u32 row = x + block * (x_bytes / 2) + t * 1024 + lane.x, at = row + ((lane.piece ^ (row >> 7 & 7)) << 4);
            const uint4 first = shared_load4(at), second = shared_load4(at ^ 16);
            const u32 b[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
            // One step of all tiles before the next: a product waits long for the one before it in the same sum.
            float part[PAIRS][4];
#pragma unroll
            for (int r = 0; r < PAIRS; ++r) mma_first(part[r], a[2 * r][0], a[2 * r + 1][0], a[2 * r][1], a[2 * r + 1][1], b[0], b[1]);
#pragma unroll
            for (int s = 1; s < 4; ++s)
#pragma unroll
                for (int r = 0; r < PAIRS; ++r)
                    mma_next(part[r], a[2 * r][2 * s], a[2 * r + 1][2 * s], a[2 * r][2 * s + 1], a[2 * r + 1][2 * s + 1], b[2 * s], b[2 * s + 1]);
#pragma unroll
            for (int r = 0; r < N_TILES; ++r) {
                acc[r][t][0] = fmaf(part[r / 2][r % 2 * 2], scale[r], acc[r][t][0]);
                acc[r][t][1] = fmaf(part[r / 2][r % 2 * 2 + 1], scale[r], acc[r][t][1]);
            }
        }
    }
}

// Adds to the sums of a warp's box what the policies of the rows add; `row` is the box's first row of the matrix, `n` the
// matrix's rows. Warps that share rows take policies in turn. h is taken as the sum of two bf16 numbers, which keeps 16 bits.
__device__ __forceinline__ void add_low_rank(float (&acc)[MAX_TILES][TOKEN_TILES][2], const LowRank& low, u32 n_tiles, u32 row,
                                             u32 n, u32 way, u32 ways, u32 lane, u32 mine, float inverse) {
    const u32 g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; ++t) {
        const u32 token = t * 8 + g;
        const int policy = policy_of(low.u, token);
        for (u32 turn = way; turn < low.u.policies; turn += ways) {
            if (!__any_sync(FULL_WARP, policy == (int)turn)) continue;
            u32 begin = 0;
            for (u32 part = 0; part < low.u.parts; begin = low.ends[part++]) {
                const u32 end = low.ends[part];
                if (end <= row || begin >= row + n_tiles * 8) continue;
                const UnmergedEntry entry = low.u.entries[turn * low.u.parts + part];
                for (u32 r = q * 8; r < entry.rank; r += 32) {
                    float4 first = make_float4(0.f, 0.f, 0.f, 0.f), second = first;
                    if (policy == (int)turn) {
                        const float* from = low.h + ((u64)token * low.u.parts + part) * low.max_rank + r;
                        first = *reinterpret_cast<const float4*>(from), second = *reinterpret_cast<const float4*>(from + 4);
                    }
                    const float v[8] = {first.x * inverse,  first.y * inverse,  first.z * inverse,  first.w * inverse,
                                        second.x * inverse, second.y * inverse, second.z * inverse, second.w * inverse};
                    u32 high[4], rest[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        high[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
                        rest[i] = rest_of(v[2 * i], v[2 * i + 1], high[i]);
                    }
#pragma unroll
                    for (int i = 0; i < MAX_TILES; i += 2) {
                        uint4 b[2];
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const u32 at = row + (i + h) * 8 + mine;
                            b[h] = make_uint4(0, 0, 0, 0);
                            if ((u32)(i + h) < n_tiles && at >= begin && at < end && at < n)
                                b[h] = *reinterpret_cast<const uint4*>(entry.b + (u64)(at - begin) * entry.rank + r);
                        }
                        float sum[4] = {acc[i][t][0], acc[i][t][1], 0.f, 0.f};
                        if (i + 1 < MAX_TILES) sum[2] = acc[i + 1][t][0], sum[3] = acc[i + 1][t][1];
                        mma_next(sum, b[0].x, b[1].x, b[0].y, b[1].y, high[0], high[1]);
                        mma_next(sum, b[0].z, b[1].z, b[0].w, b[1].w, high[2], high[3]);
                        mma_next(sum, b[0].x, b[1].x, b[0].y, b[1].y, rest[0], rest[1]);
                        mma_next(sum, b[0].z, b[1].z, b[0].w, b[1].w, rest[2], rest[3]);
                        acc[i][t][0] = sum[0], acc[i][t][1] = sum[1];
                        if (i + 1 < MAX_TILES) acc[i + 1][t][0] = sum[2], acc[i + 1][t][1] = sum[3];
                    }
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    nf4_layer(const __grid_constant__ Nf4LayerParams p) {
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
            fetch_map(p.stages[0].scale_map);
            for (u32 i = 0; i < DEPTH; ++i) barrier_init(full + i * 8, 1);
            barrier_init_done();
        }
        next.stage = 0;
        next.enter(p, warp);
        // The even element of a byte is its high nibble.
        for (u32 byte = warp; byte < 256; byte += WARPS)
            reinterpret_cast<u32*>(shared)[byte * 32 + lane] = p.values[byte >> 4] | (u32)p.values[byte & 15] << 16;
        for (u32 i = 0; i < DEPTH && !next.done(p.n_stages); ++i) {
            if (i >= FILL) barrier_wait(full + (i - FILL) * 8, 0);
            if (lane == 0) next.copy(ring + i * SLOT_BYTES, full + i * 8);
            next.advance(p, warp);
        }
    } else if (warp == WARPS && lane == 0) {
        for (u32 i = 0; i < p.n_stages; ++i) fetch_map(p.stages[i].x_map);
        for (u32 i = 0; i < X_SLOTS; ++i) {
            barrier_init(x_full + i * 8, 1);
            barrier_init(x_empty + i * 8, WARPS * p.x_boxes);
        }
        barrier_init_done();
    }
    __syncthreads();

    if (warp == WARPS) { // activations
        pdl_wait();
        if (lane != 0) return;
        if (blockIdx.x == 0)
            for (u32 i = 0; i < p.clear_len; ++i) p.clear[i] = 0;
        // Each box's columns are read by one warp of each group, which counts for as many as do not.
        u32 at = 0, parity = 1; // the first round finds every place free
        for (u32 stage = 0; stage < p.n_stages; ++stage) {
            const Stage& s = p.stages[stage];
            if (stage > 0) {
                wait_for(p.counters + stage - 1, gridDim.x);
                fence_copy_engine(); // what other blocks stored is read by the copy engine
            }
            for (u32 pass = 0; pass < s.passes; ++pass)
                for (u32 box = 0; box < s.boxes; box += p.x_boxes) {
                    barrier_wait(x_empty + at * 8, parity);
                    barrier_expect(x_full + at * 8, X_SLOT_BYTES);
                    copy_box3(base + X_RINGS + at * X_SLOT_BYTES, s.x_map, 0, 0, box * 2, x_full + at * 8);
                    // Nobody reads past the end.
                    if (box + p.x_boxes > s.boxes) barrier_arrive_many(x_empty + at * 8, WARPS * (box + p.x_boxes - s.boxes));
                    if (++at == X_SLOTS) at = 0, parity ^= 1;
                }
        }
        return;
    }

    const u32 n_stages = p.n_stages;
    u32 slot = 0, parity = 0; // of the ring
    u32 x_before = 0;         // boxes of all passes before
    const u32 x_boxes = COLUMNS == 8 ? p.x_boxes : X_BOXES, x_shift = 31 - __clz(x_boxes), x_bytes = X_SLOT_BYTES >> x_shift;
    Lane mine;
    {
        const u32 g = lane >> 2, q = lane & 3;
        const u32 row = (g & 1) | (g & 2) << 1 | (g & 4) >> 1;
        mine.base = base;
        mine.table = lane * 4;
        mine.row = row;
        mine.w = row * 64 + (((q >> 1) ^ (row >> 1 & 3)) << 4) + (q & 1) * 8;
        mine.scale = row * 4;
        mine.x = g * 128;
        mine.piece = 2 * q;
    }
#pragma unroll 1
    for (u32 stage = 0; stage < n_stages; ++stage) {
        const Stage& s = p.stages[stage];
        const u32 kind = s.kind, boxes = s.boxes, n_tiles = s.box_rows / 8;
        const u32 way = warp / s.groups, ways = WARPS / s.groups;
        const u32 half = s.kind == TO_GATED ? s.groups / 2 : s.groups;
        const u32 way_stride = s.groups * TOKENS * SUM_STRIDE, up_offset = half * TOKENS * SUM_STRIDE;
        const u32 box_inverse = 0xffffffffu / s.box_rows + 1; // its high product is the quotient of small numbers
        const u32 first = share(s.units, blockIdx.x), count = share(s.units, blockIdx.x + 1) - first;

        // What the epilogue needs besides the product, asked for now so that it is there by then. The first
        // activations have come only after the stage before was complete everywhere.
        barrier_wait(x_full + (x_before >> x_shift) % X_SLOTS * 8, (x_before >> x_shift) / X_SLOTS & 1);
        if (stage == 0) pdl_wait();
#if COLUMNS <= 16
#define EARLY_ROWS ((COLUMNS + WARPS - 1) / WARPS)
        float squares_of[EARLY_ROWS][MAX_BLOCKS / 32], residual_of[EARLY_ROWS], norm_of = 0.f;
#pragma unroll
        for (u32 j = 0; j < EARLY_ROWS; ++j) {
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
#endif

#pragma unroll 1
        for (u32 pass = 0; pass < s.passes; ++pass) {
            float acc[MAX_TILES][TOKEN_TILES][2];
#pragma unroll
            for (int r = 0; r < MAX_TILES; ++r)
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) acc[r][t][e] = 0.f;

#pragma unroll 1
            for (u32 box = way; box < boxes; box += ways) {
                barrier_wait(full + slot * 8, parity);
                const u32 x_box = x_before + box, x_slot = x_box >> x_shift, x_at = x_slot % X_SLOTS;
                barrier_wait(x_full + x_at * 8, x_slot / X_SLOTS & 1);
                const u32 x = base + X_RINGS + x_at * X_SLOT_BYTES + (x_box & (x_boxes - 1)) * x_bytes, w = ring + slot * SLOT_BYTES;
                switch (n_tiles) {
                case 1: multiply<1>(acc, mine, x, x_bytes, w); break;
                case 2: multiply<2>(acc, mine, x, x_bytes, w); break;
#if MAX_TILES == 3
                default: multiply<3>(acc, mine, x, x_bytes, w); break;
#else
                case 3: multiply<3>(acc, mine, x, x_bytes, w); break;
                case 4: multiply<4>(acc, mine, x, x_bytes, w); break;
                default: multiply<5>(acc, mine, x, x_bytes, w); break;
#endif
                }
                __syncwarp();
                if (lane == 0) barrier_arrive_many(x_empty + x_at * 8, ways);
                if (!next.done(n_stages)) {
                    if (lane == 0) next.copy(ring + slot * SLOT_BYTES, full + slot * 8);
                    next.advance(p, warp);
                }
                if (++slot == DEPTH) slot = 0, parity ^= 1;
            }
            x_before += (boxes + x_boxes - 1) >> x_shift << x_shift;

            const u32 pass_rows = half * s.box_rows, before = pass * pass_rows;
            if (LOW_RANK && p.low_rank.u.policies > 0)
                add_low_rank(acc, p.low_rank, n_tiles, first + before + warp % s.groups * s.box_rows, s.units, way, ways, lane,
                             mine.row, 1.f / p.scale);
            const u32 here = count > before ? min(count - before, pass_rows) : 0;
            // The warps' sums meet in shared memory, of 16 tokens at a time: [warp][token][row of the box].
#pragma unroll 1
            for (u32 turn = 0; turn * 16 < p.rows; ++turn) {
                if (turn > 0) matrix_warps_sync();
                float* to = sums + warp * TOKENS * SUM_STRIDE + (lane & 3) * 2 * SUM_STRIDE + mine.row;
#pragma unroll
                for (int r = 0; r < MAX_TILES; ++r)
#pragma unroll
                    for (int t = 0; t < TOKEN_TILES; ++t)
                        if (t / 2 == turn) {
                            to[(t & 1) * 8 * SUM_STRIDE + r * 8] = acc[r][t][0];
                            to[((t & 1) * 8 + 1) * SUM_STRIDE + r * 8] = acc[r][t][1];
                        }
                matrix_warps_sync();
#pragma unroll 1
                for (u32 j = 0; j < (TOKENS + WARPS - 1) / WARPS; ++j) {
                    const u32 token = j * WARPS + warp, row = turn * 16 + token;
                    if (token >= TOKENS || row >= p.rows) break;
                    float factor = p.scale, residual_here = 0.f;
                    if (s.squares_in) {
                        float sum = 0.f;
#if COLUMNS <= 16
#pragma unroll
                        for (u32 k = 0; k < EARLY_ROWS; ++k)
#pragma unroll
                            for (u32 i = 0; i < MAX_BLOCKS / 32; ++i)
                                if (k == j) sum += squares_of[k][i];
#else
#pragma unroll
                        for (u32 i = 0; i < MAX_BLOCKS / 32; ++i) {
                            const u32 block = i * 32 + lane;
                            if (block < gridDim.x) sum += load_fresh(s.squares_in + row * gridDim.x + block);
                        }
#endif
                        factor *= 1.f / sqrtf(warp_sum(sum) / s.columns + p.eps);
                    }
#if COLUMNS <= 16
#pragma unroll
                    for (u32 k = 0; k < EARLY_ROWS; ++k)
                        if (k == j) residual_here = residual_of[k];
#endif
                    float squares = 0.f;
#pragma unroll 1
                    for (u32 i = lane; i < here; i += 32 * AT_ONCE) {
                        // All loads before the first store, so that their latencies overlap.
                        float value[AT_ONCE], up[AT_ONCE];
                        const float* from[AT_ONCE];
#pragma unroll
                        for (u32 q = 0; q < AT_ONCE; ++q) {
                            const u32 unit = min(i + q * 32, here - 1), in_group = __umulhi(unit, box_inverse);
                            from[q] = sums + (in_group * TOKENS + token) * SUM_STRIDE + (unit - in_group * s.box_rows);
                            value[q] = up[q] = 0.f;
                        }
#pragma unroll 4
                        for (u32 k = 0; k < ways; ++k)
#pragma unroll
                            for (u32 q = 0; q < AT_ONCE; ++q) value[q] += from[q][k * way_stride];
                        if (kind == TO_GATED)
#pragma unroll 4
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
                                float old, norm;
#if COLUMNS <= 16
                                const bool early = unit < 32 && pass == 0;
                                old = early ? residual_here : residual[at];
                                norm = early ? norm_of : s.norm[column];
#else
                                old = residual[at], norm = s.norm[column];
#endif
                                const float sum = v + old;
                                residual[at] = sum;
                                s.normed[at] = float_to_bf16(sum * norm);
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
            }
            matrix_warps_sync();
        }
        if (stage + 1 < n_stages && threadIdx.x == 0) {
            signal(p.counters + stage);
        }
    }
}
