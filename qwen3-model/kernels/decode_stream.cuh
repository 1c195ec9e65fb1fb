// What a decode step reads of memory once, weights and the keys and values of tokens before it, into the rings of the warps that
// multiply. One lane each keeps a ring full, in the order in which its warp takes the boxes:
//
//   QKV ... | keys, values of a granule, of the next, ... | O ... | gate+up ... | down ... | next layer's QKV ...
//
// Nothing of it depends on the step's own activations, so the stream need not stop where these are waited for.
#pragma once
#include "decode_attention.cuh"

// The boxes of one warp, in the order in which it takes them, over all stages. What the next copy needs stands in registers:
// parameters indexed by the stage are slow to read.
struct Boxes {
    u32 stage; // of the box that comes next, and of the weights that follow when it is of keys or values
    u32 bytes; // that it takes in the ring
    // Of weights.
    const char* map;
    u32 passes_left, pass_rows, row;
    u32 box, first_box, n_boxes, step;
    // Of keys and values: granules of an item of the block, every eighth.
    bool attention, values; // whether such a box comes next, and whether its keys have gone
    u32 attended;           // stage before which all have gone
    u32 number, token, end; // of the item; first token of the granule; where tokens in the cache end
    int page, page_after;   // of the granule and the one after it, maybe none
    const int* pages;       // of the row
    u64 head;               // where the head begins, in elements

    // Asks for a page and goes on: the register is not looked at before the granule is next.
    __device__ __forceinline__ void ask_page(const Attention& p, int& into, u32 of_token) const {
        into = -1;
        asm volatile("{\n.reg .pred there;\nsetp.lt.u32 there, %2, %3;\n@there ld.global.s32 %0, [%1];\n}\n"
                     : "+r"(into) : "l"(pages + (of_token >> p.page_shift)), "r"(of_token), "r"(end) : "memory");
    }
    __device__ __forceinline__ bool mapped(const Attention& p) const { return (u64)page < p.tokens_per_head >> p.page_shift; }
    __device__ __forceinline__ void enter_item(const Attention& p, const AttentionItem& item, u32 warp) {
        pages = p.page_table + (u64)item.slot * p.max_pages;
        head = item.head * p.tokens_per_head * HEAD_DIM;
        token = item.start + warp * GRANULE;
        end = min(item.end, item.position);
        values = false;
        ask_page(p, page, token);
        ask_page(p, page_after, token + WARPS * GRANULE);
    }
    __device__ __forceinline__ void next_granule(const Attention& p) {
        token += WARPS * GRANULE;
        page = page_after;
        ask_page(p, page_after, token + WARPS * GRANULE);
    }
    // The item after, or the weights that follow.
    __device__ __forceinline__ void next_item(const DecodeLayersParams& p, const AttentionWork* work, u32 warp) {
        number += gridDim.x;
        if (number < work->total) {
            enter_item(p.attention, attention_item_alone(p.attention, p.rows, number), warp);
        } else {
            attention = false;
            attended = stage;
            enter(p, warp, work);
        }
    }

    // Goes to `stage` or to the first one after it where the warp has a box, with attention before O.
    __device__ __forceinline__ void enter(const DecodeLayersParams& p, u32 warp, const AttentionWork* work) {
        for (; stage < p.n_stages; ++stage) {
            const u32 kind = kind_of(p, stage);
            if (kind == O && attended != stage) {
                // What kernels before this one wrote, and what the block's warps found in it.
                if (stage == O) pdl_wait(), barrier_wait(shared_address(work) + WORK_FOUND - WORK, 0);
                attention = true;
                bytes = KV_BOX;
                number = blockIdx.x;
                if (number < work->total) enter_item(p.attention, work->item, warp);
                else token = end = 0;
                return;
            }
            const Shape& s = p.shapes[kind];
            const u32 half = kind == GATE_UP ? s.groups / 2 : s.groups, group = warp % s.groups;
            map = kind == HEAD ? p.head_map : p.layers[stage / 4].w_maps[kind];
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
    // Whether a box of weights is the warp's last of its stage.
    __device__ __forceinline__ bool last() const { return box + step >= n_boxes && passes_left == 1; }
    __device__ __forceinline__ void advance(const DecodeLayersParams& p, u32 warp, const AttentionWork* work) {
        box += step;
        if (box < n_boxes) return;
        box = first_box;
        row += pass_rows;
        if (--passes_left > 0) return;
        ++stage;
        enter(p, warp, work);
    }
};

// Whether a warp multiplies a part of a matrix.
__device__ __forceinline__ bool has_box(const Shape& s, u32 warp) { return s.chunks > warp / s.groups; }

// The pace of a ring: its warp takes a stage's boxes; has taken them, or all of QKV's and now keys and values, as other warps of
// the block still do; all warps have, so that results are on their way out; results are out, so that the next activations are
// awaited.
enum Pace { STREAM, LAST_TAKEN, ALL_TAKEN, WAIT };

// Keeps a warp's ring full, by one lane.
__device__ __forceinline__ void keep_full(const DecodeLayersParams& p, u32 base, u32 ring, const AttentionWork* work) {
    Boxes next;
    next.stage = 0;
    next.attention = false;
    next.attended = 0xffffffffu;
    next.enter(p, ring, work);
    const u32 at = base + RINGS + ring * RING_BYTES, full = full_barrier(base, ring, 0), empty = empty_barrier(base, ring, 0);
    u32 head = 0, tail = 0; // bytes
    Place issued = {0, 0}, arrived = {0, 0}, taken = {0, 0};
    u32 on_the_way = 0, inside = 0; // boxes
    u64 ends[2] = {0, 0};           // where the boxes inside end, in 128 bytes, a byte each
    u32 kinds = 0;                  // 0 for keys and values, 1 for weights, 3 for the last of a stage, two bits each
    u32 ended = 0;                  // stages whose boxes are all taken
    u32 most = STREAM_BYTES;        // of weights, on the way
    Pace pace = STREAM;
    bool paced = true; // a warp that has a box in each stage
    for (u32 kind = 0; kind < HEAD; ++kind) paced = paced && has_box(p.shapes[kind], ring);
#pragma unroll 1
    while (!next.done(p.n_stages)) {
        if (next.attention) {
            if (next.token >= next.end) {
                next.next_item(p, work, ring);
                continue;
            }
            if (!next.mapped(p.attention)) {
                next.next_granule(p.attention);
                continue;
            }
        }
        // All asked before the first is used, so that their latencies overlap.
        const bool came = barrier_reached(full + arrived.at * 8, arrived.parity);
        const bool given_back = barrier_reached(empty + taken.at * 8, taken.parity);
        const bool all_taken = barrier_reached(base + BARRIERS + STAGE_TAKEN * 8, ended - 1 & 1);
        const bool out = barrier_reached(base + BARRIERS + STAGE_OUT * 8, ended - 1 & 1);
        if (came) --on_the_way, arrived.advance(1, MAX_BOXES);
        if (pace == LAST_TAKEN && all_taken) pace = ALL_TAKEN, most = (ended & 3) == 1 ? READ_BYTES : QUIET_BYTES;
        if ((pace == LAST_TAKEN || pace == ALL_TAKEN) && out) pace = WAIT, most = WAIT_BYTES;
        if (given_back) {
            const u32 place = taken.at, kind = kinds >> place * 2 & 3;
            tail = (u32)((place & 8 ? ends[1] : ends[0]) >> (place & 7) * 8 & 0xff) << 7;
            --inside;
            taken.advance(1, MAX_BOXES);
            // Weights are of the stage after: results are out, even if the barriers have not been looked at since.
            if (kind > 0) pace = STREAM, most = STREAM_BYTES;
            if (kind == 3) {
                if (paced) pace = LAST_TAKEN, most = (ended & 3) == 0 ? AHEAD_BYTES : AFTER_BYTES;
                ++ended;
            }
        }
        const u32 bytes = next.bytes;
        // Keys and values are never held back: their warp takes them before results are out.
        const u32 limit = next.attention ? KV_BYTES : pace == STREAM && next.stage > ended && paced ? TAIL_BYTES : most;
        bool go = limit > 0 && (on_the_way == 0 || (on_the_way + 1) * bytes <= limit);
        if (inside > 0)
            go = go && inside < MAX_BOXES && (head > tail ? head + bytes <= RING_BYTES || bytes <= tail : head + bytes <= tail);
        if (go) {
            const u32 to = ring_place(head, bytes), barrier = full + issued.at * 8, place = issued.at;
            head = to + bytes;
            const u64 byte = 0xffull << (place & 7) * 8, end = (u64)(head >> 7) << (place & 7) * 8;
            if (place & 8) ends[1] = (ends[1] & ~byte) | end;
            else ends[0] = (ends[0] & ~byte) | end;
            const u32 kind = next.attention ? 0 : next.last() ? 3 : 1;
            kinds = kinds & ~(3u << place * 2) | kind << place * 2;
            issued.advance(1, MAX_BOXES);
            ++inside, ++on_the_way;
            if (!next.attention) {
                barrier_expect(barrier, bytes);
                copy_box3_once(at + to, next.map, 0, next.row, next.box, barrier);
                next.advance(p, ring, work);
            } else {
                // Tokens past the end are not copied. Their places hold whatever was there before, and are not read.
                const u32 tokens = min(next.end - next.token, (u32)GRANULE);
                const AttentionLayer& layer = p.layers[next.stage / 4].attention;
                const u16* from = (next.values ? layer.v : layer.k) + next.head + attention_offset(p.attention, next.page, next.token);
                // Bytes that come before they are expected are counted all the same, and the barrier waits for the arrival.
                copy_bytes_once(at + to, from, tokens * HEAD_DIM * 2, barrier);
                barrier_expect(barrier, tokens * HEAD_DIM * 2);
                if (next.values) next.next_granule(p.attention);
                next.values = !next.values;
            }
        }
    }
}
