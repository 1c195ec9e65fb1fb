// The layers of a decode step of few rows, in one launch:
//
//   normed ─ QKV ─▶ q/k norm, rotation, cache, attention ─▶ mixed ─ O ─▶ residual += ─▶ post-attention norm ─ gate+up ─▶
//   silu·mul ─ down ─▶ residual += ─▶ next layer's input norm ─ QKV ─▶ ...      (after the last layer: final norm ─ head ─▶ logits)
//
// Why one launch: reading the weights once is the floor of a decode step, and weights do not depend on
// activations. A kernel per matrix leaves memory idle at each boundary for about 5 us: the last sums,
// the end of the grid, the start of the next, the first loads. Here the copies into shared memory go on
// over the boundaries between the stages, since only activations wait there.
//
// Who does what. There is one block per multiprocessor, and each owns an equal share of the rows of
// every matrix, so no sum crosses blocks. Eight warps multiply. Each has a ring of its own in shared
// memory, which a lane of another warp keeps full with boxes of up to 48 rows by 64 columns: see
// decode_stream.cuh; no warp waits for another before the sums of a stage meet. A ninth warp brings the activations, in chunks of
// 64 columns, through a ring that all share, once every block has finished the stage before; the activations of a single row
// go another way: see decode_single.cuh. Between QKV and O the eight warps compute attention, of keys and values that come
// through their rings, too: see decode_attention.cuh.
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
// The order of every sum depends on the matrix's shape, the number of blocks and the row's length, not on the other
// rows: a row's result does not depend on what else is in the batch.
//
// Blocks wait for each other by counters, one a stage, that only ever grow: a launch adds one per block to each. Its number,
// counted in `epoch`, says what to wait for, so that nobody need set them back. What few blocks read, the results of QKV and
// the parts of attention, goes without counters and fences: words that bear the number of the launch and layer that wrote them.
// Every word is written in each layer of a step or in none, so one from before never bears the number waited for.
//
// Memory is kept busy, not flooded. A multiprocessor needs some 40 KB on their way to stream at the full rate; more queue up,
// and whatever else crosses the chip waits behind them. Worst off is the fence that makes a stage's results visible: it waits
// until all copies of its multiprocessor have arrived. So a ring asks slowly for boxes of the stage after, for none from when
// all warps have taken the stage's last boxes until its results are out, and slowly until the next activations have come.
//
// Code size matters: instructions are fetched cold. One loop serves all stages. No __trap() here: it keeps the compiler to the
// registers that a thread has at launch.

#include "hopper.cuh"

#ifndef ROWS
#define ROWS 8 // most rows of the batch: 1, 8 or 16
#endif
#define SINGLE (ROWS == 1)
#define COLUMNS (ROWS > 8 ? 16 : 8) // of the products
#define WARPS 8 // that multiply
#define ISSUERS 3 // warps that ask for boxes, a lane for each ring: every lane in a warp makes the others' turns longer
#define ISSUER_WARP (WARPS + 1)
#define BLOCK_WARPS (ISSUER_WARP + ISSUERS)
#define ROW_TILES 3
#define MAX_BOX_ROWS (ROW_TILES * 16)
// Of each warp. 24,064 hold four boxes of QKV of Qwen3-4B on 132 multiprocessors, five of gate+up or nine of O and down.
#ifndef RING_BYTES
#define RING_BYTES (COLUMNS == 8 ? 24064 : 20608)
#endif
#define MAX_BOXES 12 // in a ring, at most 16
// Bytes of a ring on their way at once: while its warp takes boxes of a stage of which some are still to be asked for; of later
// stages meanwhile; of keys and values; after the last box of QKV, and until attention's results are out; after the last box
// of another stage, and once all warps have taken theirs, until its results are out; and until the next activations come.
#define STREAM_BYTES (ROWS == 1 ? 16800 : ROWS == 8 ? 20000 : 14400)
#define TAIL_BYTES (ROWS == 1 ? 4800 : 6200)
#define KV_BYTES 8500
#define AHEAD_BYTES 6200
#define READ_BYTES 6200
#define AFTER_BYTES (ROWS == 8 ? 9000 : 6200)
#define QUIET_BYTES (ROWS == 1 ? 6200 : 0)
#define WAIT_BYTES (ROWS == 1 ? 6200 : ROWS == 8 ? 7700 : 9000)
// Activations come in groups of X_GROUP chunks, 8 KiB together: their latency, not their bytes, is what counts.
#define X_GROUP (64 / COLUMNS)
// Of the groups that are there or on their way: four of eight rows, eight of sixteen, and more of fewer rows, so that a stage
// does not wait for each in turn. They are a multiple of 8 chunks, the most that lie between two of a warp's own boxes. So the
// chunk before in the same place was the warp's own too, and waiting for a parity cannot mistake one round for the next but one.
#ifndef X_REGION
#define X_REGION (COLUMNS == 8 ? 37888 : 65536)
#endif
#define MAX_X_SLOTS 12
static_assert(COLUMNS == 8 || (MAX_X_SLOTS % 2 == 0 && X_REGION / 8192 % 2 == 0), "a multiple of 8 chunks");
#define SUM_STRIDE (MAX_BOX_ROWS + 4) // no two lanes of a store meet a bank
#define HEAD_DIM 128
#define MAX_LAYERS 48 // what the parameters of a launch have room for
#define ROWS_OF_WARP (COLUMNS / WARPS) // in the epilogue
#define AT_ONCE (COLUMNS == 8 ? 3 : 1) // results per lane, row and turn of the epilogue
#define MAX_BLOCKS 160 // multiprocessors

#define RINGS X_REGION
#define BARRIERS (RINGS + WARPS * RING_BYTES)
#define W_FULL (2 * MAX_X_SLOTS)
#define W_EMPTY (W_FULL + WARPS * MAX_BOXES)
#define STAGE_OUT (W_EMPTY + WARPS * MAX_BOXES)
#define PASS_OUT (STAGE_OUT + 1)
#define STAGE_TAKEN (PASS_OUT + 1)
#define WORK_FOUND (BARRIERS + (STAGE_TAKEN + 1) * 8)
#define WORK (WORK_FOUND + 8) // of attention
#define SHARED_BYTES (WORK + 40)
static_assert(SHARED_BYTES <= 232448, "shared memory of a multiprocessor");
static_assert(RINGS % 128 == 0 && RING_BYTES % 128 == 0 && RING_BYTES / 128 < 256, "boxes lie at multiples of 128 bytes, counted in a byte");

// A warp's ring: boxes of any size one after the other, in the order in which they are taken. A box that does not fit before the
// end lies at the start.
__device__ __forceinline__ u32 ring_place(u32 after, u32 bytes) { return after + bytes > RING_BYTES ? 0 : after; }
// A ring's barriers: a box has come, its warp has taken it.
__device__ __forceinline__ u32 full_barrier(u32 base, u32 ring, u32 box) { return base + BARRIERS + (W_FULL + ring * MAX_BOXES + box % MAX_BOXES) * 8; }
__device__ __forceinline__ u32 empty_barrier(u32 base, u32 ring, u32 box) { return base + BARRIERS + (W_EMPTY + ring * MAX_BOXES + box % MAX_BOXES) * 8; }

// Where a warp is in its ring, and in the ring of activations.
struct Place {
    u32 at, parity;
    __device__ __forceinline__ void advance(u32 by, u32 size) {
        at += by;
        if (at >= size) at -= size, parity ^= 1;
    }
};

#if SINGLE
#include "decode_single.cuh"
#else
#define X_WORDS 0
#endif
#include "decode_attention.cuh"
static_assert(WARPS * 8 * HEAD_DIM * 4 + ATTENTION_SMALL_BYTES <= RINGS, "attention's sums lie where activations do");
static_assert(WARPS * COLUMNS * SUM_STRIDE * 4 <= X_REGION, "sums of products lie where activations do");

// Stages of a layer, and the head.
#define QKV 0
#define O 1
#define GATE_UP 2
#define DOWN 3
#define HEAD 4

// How a matrix is cut.
struct Shape {
    u32 units;    // N; for gate+up N / 2
    u32 chunks;   // K / 64
    u32 groups;   // of rows, 1, 2, 4 or 8; half of them the up rows for gate+up
    u32 box_rows; // at most 48
    u32 row_tiles; // of 16 rows that cover a box
    u32 passes;
};

struct Layer {
    alignas(64) char w_maps[4][128]; // [N, K] as {64, N, K / 64}, boxes {64, box_rows, 1}
    AttentionLayer attention;
    const float* post_norm; // f32 [hidden]: of gate+up's input
    const float* next_norm; // of the next layer's, or the head's
};

struct DecodeLayersParams {
    alignas(64) char x_maps[4][128]; // of QKV and head, O, gate+up, down: [rows, K] as {64, rows, K / 64}, boxes {64, x_rows, X_GROUP}
    alignas(64) char head_map[128];
    Shape shapes[5];
    u32 n_layers;
    u32 rows;
    u32 x_rows;        // of a box of activations: `rows` rounded up to a power of two
    u32 n_stages;      // 4 per layer, and one with the head
    u32 first_squares; // whether the first layer's input is still to be scaled
    u32 first_layer;   // of the model, in this launch
    float* residual;   // [rows, hidden]
    u16* normed[2];    // [rows, hidden]: input of QKV and head, input of gate+up
    float* squares[2]; // [COLUMNS, blocks] sums of squares of the residual, likewise
    u64* qkv;          // [rows, (group + 2) kv_heads, HEAD_DIM], words
    u16* gated;
    u32* inputs[4];       // of a single row: input of QKV and head, O, gate+up, down, words
    u64* square_words[2]; // of a single row: as `squares`, words
    float* logits;
    u32* epoch;    // launches so far
    u32* counters; // [5 * MAX_LAYERS]: blocks that finished each stage, attention being one; none for QKV
    float columns; // hidden
    float eps;
    Attention attention;
    Layer layers[MAX_LAYERS];
};
// The driver takes 32,764 bytes.
static_assert(sizeof(DecodeLayersParams) <= 32764, "too many layers");

__device__ __forceinline__ u32 share(u32 units, u32 block) { return (u32)((u64)block * units / gridDim.x); }
__device__ __forceinline__ u32 kind_of(const DecodeLayersParams& p, u32 stage) {
    return stage < 4 * p.n_layers ? stage & 3 : HEAD;
}
// The counter of a stage: attention has one between QKV and O.
__device__ __forceinline__ u32* counter_of(const DecodeLayersParams& p, u32 stage) {
    return p.counters + stage / 4 * 5 + (stage & 3) + ((stage & 3) > 0 ? 1 : 0);
}

#include "decode_stream.cuh"

// A warp's boxes of one pass, of TILES times 16 rows. All operands of a box are loaded before the first product, so that their
// latencies overlap: with one box at a time there is nobody else to hide them. Rows past the box are other boxes' and give sums
// that nobody reads.
template <int TILES>
__device__ __forceinline__ void multiply(float (&acc)[ROW_TILES][COLUMNS / 8][4], u32 base, u32 warp, u32 lane, u32 boxes,
                                         u32 box_bytes, u32 ways, u32 x_bytes, u32 x_chunks, u32& tail, Place& taken,
                                         Place& chunk) {
    const u32 ring = base + RINGS + warp * RING_BYTES + (lane & 15) * 128;
    const u32 full = base + BARRIERS + (W_FULL + warp * MAX_BOXES) * 8;
#pragma unroll 1
    for (; boxes > 0; --boxes) {
        const u32 place = ring_place(tail, box_bytes), w_barrier = full + taken.at * 8;
#if !SINGLE
        const u32 x_barrier = base + BARRIERS + chunk.at / X_GROUP * 8;
#endif
        // Pieces of 16 bytes lie exchanged by the row's number, which 16 rows further on is the same.
        const u32 w_row = ring + place, w = w_row + ((lane >> 4 ^ w_row >> 7 & 7) << 4);
        // Of a single row all columns are the same.
        const u32 x_row = base + chunk.at * x_bytes + (SINGLE ? X_WORDS : (COLUMNS == 8 ? lane & 7 : (lane >> 4) * 8 + (lane & 7)) * 128);
        const u32 x = x_row + (((COLUMNS == 8 ? lane >> 3 : lane >> 3 & 1) ^ x_row >> 7 & 7) << 4);
        u32 a[4][TILES][4], b[COLUMNS / 4][4]; // columns 16 at a time; of eight rows of x 32
        barrier_wait(w_barrier, taken.parity);
#if !SINGLE
        barrier_wait(x_barrier, chunk.parity);
#endif
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            if (COLUMNS > 8 || step % 2 == 0) load_matrix4(x ^ step * 32, b[COLUMNS == 8 ? step / 2 : step]);
#pragma unroll
            for (int r = 0; r < TILES; ++r) load_matrix4((w ^ step * 32) + r * 2048, a[step][r]);
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            if (step == 3) {
                __syncwarp();
                if (lane == 0) {
                    barrier_arrive_many(w_barrier + WARPS * MAX_BOXES * 8, 1);
#if !SINGLE
                    barrier_arrive_many(x_barrier + MAX_X_SLOTS * 8, ways);
#endif
                }
            }
#pragma unroll
            for (int r = 0; r < TILES; ++r)
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n) {
                    const u32(&of)[4] = b[COLUMNS == 8 ? step / 2 : step];
                    const int pair = COLUMNS == 8 ? step % 2 : n;
                    mma(acc[r][n], a[step][r], of[pair * 2], of[pair * 2 + 1]);
                }
        }
        tail = place + box_bytes;
        taken.advance(1, MAX_BOXES);
        if (SINGLE) chunk.at += ways;
        else chunk.advance(ways, x_chunks);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * 32, 1)
    decode_layers(const __grid_constant__ DecodeLayersParams p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared);
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 x_full = base + BARRIERS, x_empty = x_full + MAX_X_SLOTS * 8;
    const u32 x_bytes = p.x_rows * 128; // of a chunk
    const u32 x_slots = min(X_REGION / (x_bytes * X_GROUP), (u32)MAX_X_SLOTS), x_chunks = x_slots * X_GROUP;
    float* sums = reinterpret_cast<float*>(shared);
    AttentionWork* const work = reinterpret_cast<AttentionWork*>(shared + WORK);
    pdl_release();

    if (warp == ISSUER_WARP && lane < WARPS) {
        fetch_map(p.layers[0].w_maps[0]);
        for (u32 i = 0; i < MAX_BOXES; ++i) {
            barrier_init(full_barrier(base, lane, i), 1);
            barrier_init(empty_barrier(base, lane, i), 1);
        }
        if (lane == 0) {
            for (u32 i = STAGE_OUT; i <= STAGE_TAKEN; ++i) barrier_init(base + BARRIERS + i * 8, 1);
            barrier_init(base + WORK_FOUND, 1);
        }
        barrier_init_done();
    }
    if (!SINGLE && warp == WARPS && lane == 0) {
        for (u32 i = 0; i < 4; ++i) fetch_map(p.x_maps[i]);
        for (u32 i = 0; i < MAX_X_SLOTS; ++i) {
            barrier_init(x_full + i * 8, 1);
            barrier_init(x_empty + i * 8, WARPS * X_GROUP);
        }
        barrier_init_done();
    }
    __syncthreads();

    if (warp >= WARPS) { // weights and activations
        asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
        const u32 of_ring = lane * ISSUERS + (warp - ISSUER_WARP);
        if (warp >= ISSUER_WARP && of_ring < WARPS) keep_full(p, base, of_ring, work);
        if (warp > WARPS || SINGLE) return;
        pdl_wait();
        const u32 target = (*p.epoch + 1) * gridDim.x;
        // Each chunk is read by one warp of each group, which counts for as many as do not.
        u32 at = 0, parity = 1, pass_parity = 0; // the first round finds every place free
        for (u32 stage = 0; stage < p.n_stages; ++stage) {
            const u32 kind = kind_of(p, stage);
            const Shape& s = p.shapes[kind];
            if (lane == 0) {
                if (stage > 0) {
                    wait_for(kind == O ? counter_of(p, stage) - 1 : counter_of(p, stage - 1), target);
                    // What other blocks stored is read by the copy engine, and it writes where sums lay.
                    fence_copy_engine();
                    fence_copy_engine_shared();
                }
                const char* map = p.x_maps[kind & 3];
                for (u32 pass = 0; pass < s.passes; ++pass) {
                    if (pass > 0) {
                        barrier_wait(base + BARRIERS + PASS_OUT * 8, pass_parity);
                        pass_parity ^= 1;
                        fence_copy_engine_shared();
                    }
                    for (u32 chunk = 0; chunk < s.chunks; chunk += X_GROUP) {
                        barrier_wait(x_empty + at * 8, parity);
                        barrier_expect(x_full + at * 8, x_bytes * X_GROUP);
                        copy_box3(base + at * X_GROUP * x_bytes, map, 0, 0, chunk, x_full + at * 8);
                        // Nobody reads chunks past the end.
                        if (chunk + X_GROUP > s.chunks) barrier_arrive_many(x_empty + at * 8, WARPS * (chunk + X_GROUP - s.chunks));
                        if (++at == x_slots) at = 0, parity ^= 1;
                    }
                }
            }
            __syncwarp();
        }
        // All blocks know the number by now: they have finished a stage. Read again by the next launch alone.
        if (blockIdx.x == 0 && lane == 0) *p.epoch += 1;
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    const u32 n_stages = p.n_stages;
    pdl_wait();
    const u32 number = *p.epoch + 1;
    const AttentionShared at_attention = attention_shared(shared, shared + WARPS * 8 * HEAD_DIM * 4);
    const int pages = attention_work(p.attention, p.rows, warp, lane, work, base + WORK_FOUND);
    // The block's columns of the residual stream stay here as far as lanes go; the rest, and the end, is in memory.
    float residual_of[ROWS_OF_WARP];
    {
        const u32 units = p.shapes[O].units, first = share(units, blockIdx.x), count = share(units, blockIdx.x + 1) - first;
#pragma unroll
        for (u32 j = 0; j < ROWS_OF_WARP; ++j) {
            const u32 row = j * WARPS + warp;
            residual_of[j] = lane < count && row < p.rows ? p.residual[(u64)row * units + first + lane] : 0.f;
        }
    }
    u32 tail = 0;           // of the ring, bytes
    Place taken = {0, 0};
    u32 x_before = 0;            // chunks of all passes before
#pragma unroll 1
    for (u32 stage = 0; stage < n_stages; ++stage) {
        const u32 kind = kind_of(p, stage);
        const Shape& s = p.shapes[kind];
        const Layer& layer = p.layers[min(stage / 4, MAX_LAYERS - 1)];
        const u32 use = number * 1024 + p.first_layer + stage / 4; // of words
        if (kind == O) {
            attention_stage(p.attention, layer.attention, work, pages, p.rows, p.eps, use, base, at_attention, tail, taken, warp, lane);
            if (threadIdx.x == 0) {
                if (!SINGLE) signal(counter_of(p, stage) - 1);
                barrier_arrive_many(base + BARRIERS + STAGE_OUT * 8, 1);
            }
        }
        const u32 chunks = s.chunks, row_tiles = s.row_tiles, units = s.units, box_bytes = s.box_rows * 128;
        const u32 way = warp / s.groups, ways = WARPS / s.groups;
        const u32 half = kind == GATE_UP ? s.groups / 2 : s.groups;
        const u32 way_stride = s.groups * COLUMNS * SUM_STRIDE, up_offset = half * COLUMNS * SUM_STRIDE;
        const bool to_residual = kind == O || kind == DOWN;
        const float* norm = kind == O ? layer.post_norm : layer.next_norm;
        const float* squares_in = to_residual || (stage == 0 && !p.first_squares) ? nullptr : p.squares[kind == GATE_UP];
        const u32 box_inverse = 0xffffffffu / s.box_rows + 1; // its high product is the quotient of small numbers
        const u32 first = share(units, blockIdx.x), count = share(units, blockIdx.x + 1) - first;

#if SINGLE
        u64 square_words[MAX_BLOCKS / 32];
#endif
        float squares_of[ROWS_OF_WARP][MAX_BLOCKS / 32], factor[ROWS_OF_WARP], norm_of = 0.f;
#pragma unroll
        for (u32 j = 0; j < ROWS_OF_WARP; ++j) factor[j] = 1.f;
#pragma unroll 1
        for (u32 pass = 0; pass < s.passes; ++pass) {
            float acc[ROW_TILES][COLUMNS / 8][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[r][n][e] = 0.f;

#if SINGLE
            if (pass == 0) {
                take_input(base, p.inputs[kind & 3], stage == 0 ? p.normed[0] : nullptr, tag_of(number * 1024 + p.first_layer + (stage - 1) / 4), chunks, warp, lane);
                if (ways == WARPS) __syncwarp();
                else matrix_warps_sync();
                if (warp == 0)
#pragma unroll
                    for (u32 i = 0; i < MAX_BLOCKS / 32; ++i)
                        if (squares_in && i * 32 + lane < gridDim.x) square_words[i] = load_word(p.square_words[kind == GATE_UP] + i * 32 + lane);
                if (to_residual && lane < count) norm_of = norm[first + lane];
            }
#else
            if (pass == 0) {
                // What the epilogue needs besides the product, asked for now so that it is there by then. The first chunk of
                // activations has come only after the stage before was complete everywhere. It must be the warp's own: the place
                // of another's could be filled twice before this warp looks.
                const u32 first_chunk = x_before + min(way, chunks - 1);
                barrier_wait(x_full + first_chunk / X_GROUP % x_slots * 8, first_chunk / x_chunks & 1);
#pragma unroll
                for (u32 j = 0; j < ROWS_OF_WARP; ++j) {
                    const u32 row = j * WARPS + warp;
#pragma unroll
                    for (u32 i = 0; i < MAX_BLOCKS / 32; ++i) {
                        squares_of[j][i] = 0.f;
                        const u32 block = i * 32 + lane;
                        if (squares_in && row < p.rows && block < gridDim.x) squares_of[j][i] = load_fresh(squares_in + row * gridDim.x + block);
                    }
                }
                if (to_residual && lane < count) norm_of = norm[first + lane];
            }
#endif
            const u32 boxes = chunks > way ? (chunks - way + ways - 1) / ways : 0;
            Place chunk = {SINGLE ? way : (x_before + way) % x_chunks, (x_before + way) / x_chunks & 1};
            // The last box apart: what the rows are scaled by is found before it, while others still multiply.
#pragma unroll 1
            for (u32 part = 0; part < 2; ++part) {
                const u32 some = part > 0 ? min(boxes, 1u) : boxes - min(boxes, 1u);
                if (row_tiles == 3) multiply<3>(acc, base, warp, lane, some, box_bytes, ways, x_bytes, x_chunks, tail, taken, chunk);
                else if (row_tiles == 2) multiply<2>(acc, base, warp, lane, some, box_bytes, ways, x_bytes, x_chunks, tail, taken, chunk);
                else multiply<1>(acc, base, warp, lane, some, box_bytes, ways, x_bytes, x_chunks, tail, taken, chunk);
#if SINGLE
                if (part == 0 && pass == 0 && squares_in && warp == 0) {
                    const u64* from = p.square_words[kind == GATE_UP];
                    const u32 before = number * 1024 + p.first_layer + (stage - 1) / 4;
#pragma unroll
                    for (u32 i = 0; i < MAX_BLOCKS / 32; ++i) {
                        squares_of[0][i] = 0.f;
                        if (i * 32 + lane < gridDim.x) {
                            if (stage == 0) square_words[i] = word_of(__float_as_uint(load_fresh(squares_in + i * 32 + lane)), 0);
                            else while (!is_of(square_words[i], before)) square_words[i] = load_word(from + i * 32 + lane);
                            squares_of[0][i] = __uint_as_float((u32)square_words[i]);
                        }
                    }
                }
#endif
                if (part == 0 && pass == 0 && squares_in)
#pragma unroll
                    for (u32 j = 0; j < ROWS_OF_WARP; ++j) {
                        float sum = 0.f;
#pragma unroll
                        for (u32 i = 0; i < MAX_BLOCKS / 32; ++i) sum += squares_of[j][i];
                        factor[j] = 1.f / sqrtf(warp_sum(sum) / p.columns + p.eps);
                    }
            }
            x_before += (s.chunks + X_GROUP - 1) / X_GROUP * X_GROUP;

            // The warps' sums meet in shared memory, where activations lay: [warp][batch row][row of the box].
            matrix_warps_sync();
            if (threadIdx.x == 0 && kind != QKV && pass + 1 == s.passes) barrier_arrive_many(base + BARRIERS + STAGE_TAKEN * 8, 1);
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
            // A warp's rows side by side, and for each AT_ONCE columns a lane: all loads before the first store, so that their
            // latencies overlap.
            float squares[ROWS_OF_WARP];
#pragma unroll
            for (u32 j = 0; j < ROWS_OF_WARP; ++j) squares[j] = 0.f;
            u16* const out = to_residual ? p.normed[kind == O] : p.gated;
#pragma unroll 1
            for (u32 i = lane; i < here; i += 32 * AT_ONCE) {
                float value[AT_ONCE][ROWS_OF_WARP], up[AT_ONCE][ROWS_OF_WARP];
                const float* from[AT_ONCE];
#pragma unroll
                for (u32 q = 0; q < AT_ONCE; ++q) {
                    const u32 unit = min(i + q * 32, here - 1), in_group = __umulhi(unit, box_inverse);
                    from[q] = sums + (in_group * COLUMNS + warp) * SUM_STRIDE + (unit - in_group * s.box_rows);
#pragma unroll
                    for (u32 j = 0; j < ROWS_OF_WARP; ++j) value[q][j] = up[q][j] = 0.f;
                }
#pragma unroll 1
                for (u32 k = 0; k < ways; k += 4) {
                    float part[4][AT_ONCE][ROWS_OF_WARP];
#pragma unroll
                    for (u32 w = 0; w < 4; ++w)
#pragma unroll
                        for (u32 q = 0; q < AT_ONCE; ++q)
#pragma unroll
                            for (u32 j = 0; j < ROWS_OF_WARP; ++j)
                                part[w][q][j] = k + w < ways ? from[q][(k + w) * way_stride + j * WARPS * SUM_STRIDE] : 0.f;
#pragma unroll
                    for (u32 w = 0; w < 4; ++w)
#pragma unroll
                        for (u32 q = 0; q < AT_ONCE; ++q)
#pragma unroll
                            for (u32 j = 0; j < ROWS_OF_WARP; ++j) value[q][j] += part[w][q][j];
                }
                if (kind == GATE_UP)
                    for (u32 k = 0; k < ways; ++k)
#pragma unroll
                        for (u32 q = 0; q < AT_ONCE; ++q)
#pragma unroll
                            for (u32 j = 0; j < ROWS_OF_WARP; ++j) up[q][j] += from[q][k * way_stride + up_offset + j * WARPS * SUM_STRIDE];
#pragma unroll
                for (u32 q = 0; q < AT_ONCE; ++q) {
                    const u32 unit = i + q * 32;
                    if (unit >= here) break;
                    const u32 column = first + before + unit;
#pragma unroll
                    for (u32 j = 0; j < ROWS_OF_WARP; ++j) {
                        const u32 row = j * WARPS + warp;
                        if (row >= p.rows) break;
                        const float v = value[q][j] * factor[j];
                        const u64 at = (u64)row * units + column;
                        if (to_residual) {
                            const bool kept = q == 0 && pass == 0 && unit < 32;
                            const float sum = v + (kept ? residual_of[j] : p.residual[at]);
                            if (kept) residual_of[j] = sum;
                            if (!kept || stage / 4 + 1 == p.n_layers) p.residual[at] = sum;
                            const u16 normed = float_to_bf16(sum * (kept ? norm_of : norm[column]));
                            if (!SINGLE || stage + 1 == n_stages) out[at] = normed;
#if SINGLE
                            else store_word(p.inputs[kind == O ? GATE_UP : QKV] + column, normed | tag_of(use) << 16);
#endif
                            squares[j] += sum * sum;
                        } else if (kind == GATE_UP) {
                            const u16 gated = float_to_bf16(silu(v) * (up[q][j] * factor[j]));
#if SINGLE
                            store_word(p.inputs[DOWN] + column, gated | tag_of(use) << 16);
#else
                            out[at] = gated;
#endif
                        } else if (kind == QKV) {
                            store_word(p.qkv + at, word_of(float_to_bf16(v), use));
                        } else {
                            p.logits[at] = v;
                        }
                    }
                }
            }
            if (to_residual)
#pragma unroll
                for (u32 j = 0; j < ROWS_OF_WARP; ++j) {
                    const u32 row = j * WARPS + warp;
                    const float sum = warp_sum(squares[j]);
                    if (lane == 0 && row < p.rows) {
#if SINGLE
                        if (stage + 1 == n_stages) p.squares[kind == O][blockIdx.x] = sum;
                        else store_word(p.square_words[kind == O] + blockIdx.x, word_of(__float_as_uint(sum), use));
#else
                        p.squares[kind == O][(u64)row * gridDim.x + blockIdx.x] = sum;
#endif
                    }
                }
            matrix_warps_sync();
            if (!SINGLE && pass + 1 < s.passes && threadIdx.x == 0) barrier_arrive_many(base + BARRIERS + PASS_OUT * 8, 1);
        }
        if (threadIdx.x == 0) {
            if (!SINGLE && stage + 1 < n_stages && kind != QKV) signal(counter_of(p, stage)); // the words of QKV say it themselves
            if (kind != QKV) barrier_arrive_many(base + BARRIERS + STAGE_OUT * 8, 1);
        }
    }
#if SINGLE
    // Launches of more rows wait for counters, and each counts on all launches before it. All blocks know the number by now.
    if (blockIdx.x == 0) {
        for (u32 i = threadIdx.x; i < 5 * p.n_layers; i += WARPS * 32) p.counters[i] += gridDim.x;
        if (threadIdx.x == 0) *p.epoch += 1;
    }
#endif
}
