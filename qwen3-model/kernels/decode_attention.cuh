// Attention of a decode step inside the persistent kernel: q/k norm, rotation, the write of the new key and value, and causal
// attention over the pages of each row.
//
//   item     (row, K/V head, split of its tokens), dealt to the blocks in turn
//   granule  16 tokens: one warp at a time, warp w takes granules w, w + 8, ... of an item
//
// Keys and values of tokens before this step's come through the warps' rings, like weights: see decode_stream.cuh. A granule is
// a box of keys and one of values, each as it lies in memory. Tokens, and the elements of a head, go into the operands of the
// products in another order than they lie in, the same for both operands. Of two pieces of 16 bytes that a lane loads one after
// the other every second lane takes the other one first, so that fewer lanes meet a bank.
//
//   scores  [16 tokens, 8 heads]  = K [16, D] Qᵀ [D, 8]        lane (g, t): tokens 4 (g / 2) + g % 2, + 2, elements 32 j + 8 t ...
//   sum     [D, 8 heads]         += Vᵀ [D, 16] Pᵀ [16, 8]      lane (g, t): tokens 4 t, + 1, + 2, + 3, elements 16 g ...
//
// The warps' sums meet in shared memory, in the order of the warps. A row of several splits leaves its parts in `partial`; each of
// their blocks adds them up for a share of the columns. So the order of every sum depends on the row's length and on the sizes
// of splits alone.
#pragma once
#include "hopper.cuh"
#include "rope.cuh"

#define GRANULE 16
#define MAX_GROUP 8
#define MAX_SPLIT 8192 // tokens: a row of few others is cut finer, one beside many is not, so that items fill a round of blocks
#define KV_BOX (GRANULE * HEAD_DIM * 2) // bytes of a box of keys or values
#define NEG_INFINITY __uint_as_float(0xff800000u)

struct Attention {
    const u64* qkv;        // [rows, (group + 2) kv_heads, HEAD_DIM]: all q, then k, then v; words, see store_word
    u16* mixed;            // [rows, group * kv_heads, HEAD_DIM]
    u32* mixed_words;      // the same of a single row, words
    const int* positions;  // [rows]
    const int* slots;      // [rows]; 0 is padding
    const int* page_table; // [n_slots, max_pages], -1 for no page
    const float* cos_sin;  // [n_positions, HEAD_DIM]
    u64* partial;          // [rows, kv_heads, max_splits, group, HEAD_DIM], words
    u64* partial_sums;     // [rows, kv_heads, max_splits, group, 2]: maximum, sum; words
    u64 tokens_per_head;   // n_pages * page_size
    u32 kv_heads;
    u32 group; // query heads of a K/V head
    u32 page_shift;
    u32 n_slots;
    u32 max_pages;
    u32 n_positions;
    u32 split;      // tokens besides the newest, more for a row that would need more than `few_splits`, up to MAX_SPLIT
    u32 few_splits;
    u32 max_splits; // what the longest row needs
    float scale; // of scores, times log2(e)
};

// One layer's part.
struct AttentionLayer {
    const float* q_norm; // [HEAD_DIM]
    const float* k_norm;
    u16* k; // [kv_heads, tokens_per_head, HEAD_DIM]
    u16* v;
};

// A row of the batch.
struct AttentionRow {
    u32 slot, position, length, split, first_item, items;
};

__device__ __forceinline__ AttentionRow attention_row(const Attention& p, u32 row) {
    AttentionRow r;
    u32 old = 0; // tokens but the newest
    r.length = r.first_item = 0;
    r.slot = (u32)p.slots[row];
    r.position = (u32)p.positions[row];
    if (r.slot >= p.n_slots) r.slot = 0;
    const u32 most = p.max_pages << p.page_shift;
    if (r.slot > 0) r.length = min(r.position + 1, most), old = min(r.position, most);
    // As few splits as either limit allows, and equal ones, in granules: the blocks that share a row end together, whatever its
    // length. A row of little more than MAX_SPLIT is two halves, not a whole split and one of few tokens.
    const u32 few = max(min((old + p.split - 1) / p.split, p.few_splits), (old + MAX_SPLIT - 1) / MAX_SPLIT);
    r.split = max(((old + max(few, 1u) - 1) / max(few, 1u) + 15) & ~15u, p.split);
    const u32 splits = max((old + r.split - 1) / r.split, 1u);
    r.items = min(splits, p.max_splits) * p.kv_heads;
    return r;
}
// Row `lane`, as every lane of a warp knows its own.
__device__ __forceinline__ AttentionRow attention_row_of_lane(const Attention& p, u32 rows, u32 lane, u32& total) {
    AttentionRow r = {0, 0, 0, p.split, 0, 0};
    if (lane < rows) r = attention_row(p, lane);
    u32 sum = r.items;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(FULL_WARP, sum, d);
        if (lane >= d) sum += other;
    }
    r.first_item = sum - r.items;
    total = __shfl_sync(FULL_WARP, sum, 31);
    return r;
}

struct AttentionItem {
    u32 row, slot, position, head, split, splits, start, end;
};

// Item `inside` of a row.
__device__ __forceinline__ AttentionItem item_of_row(const Attention& p, u32 row, const AttentionRow& r, u32 inside) {
    AttentionItem i;
    i.row = row, i.slot = r.slot, i.position = r.position;
    i.splits = r.items / p.kv_heads;
    i.split = inside / p.kv_heads;
    i.head = inside - i.split * p.kv_heads;
    i.start = i.split * r.split;
    i.end = i.split + 1 == i.splits ? r.length : min(r.length, i.start + r.split);
    return i;
}
// Item `number` of all, by a warp whose lanes know the rows.
__device__ __forceinline__ AttentionItem attention_item(const Attention& p, const AttentionRow& mine, u32 number) {
    const u32 row = 31 - __clz(__ballot_sync(FULL_WARP, mine.items > 0 && mine.first_item <= number));
    AttentionRow r;
    r.slot = __shfl_sync(FULL_WARP, mine.slot, row);
    r.position = __shfl_sync(FULL_WARP, mine.position, row);
    r.length = __shfl_sync(FULL_WARP, mine.length, row);
    r.split = __shfl_sync(FULL_WARP, mine.split, row);
    r.items = __shfl_sync(FULL_WARP, mine.items, row);
    return item_of_row(p, row, r, number - __shfl_sync(FULL_WARP, mine.first_item, row));
}
// The same by one lane.
__device__ __forceinline__ AttentionItem attention_item_alone(const Attention& p, u32 rows, u32 number) {
    u32 row = 0;
    AttentionRow r = attention_row(p, 0);
#pragma unroll 1
    while (number >= r.items && row + 1 < rows) {
        number -= r.items;
        r = attention_row(p, ++row);
    }
    return item_of_row(p, row, r, number);
}

// The page of this lane's granule, counted from `token` in steps of `step`; -1 past the end.
__device__ __forceinline__ int attention_pages(const Attention& p, const AttentionItem& item, u32 token, u32 step, u32 lane) {
    const u32 mine = token + lane * step;
    int page = -1;
    if (mine < item.end) page = p.page_table[(u64)item.slot * p.max_pages + (mine >> p.page_shift)];
    return (u64)page < p.tokens_per_head >> p.page_shift ? page : -1;
}
// Where a token lies from its head's first element on, in elements.
__device__ __forceinline__ u64 attention_offset(const Attention& p, int page, u32 token) {
    return (((u64)(u32)page << p.page_shift) | (token & ((1u << p.page_shift) - 1))) * HEAD_DIM;
}

// Tokens of a granule: of row `lane / 4 + 8 i` of the keys, and those that lane `lane` has of the values.
__device__ __forceinline__ u32 key_token(u32 lane, u32 i) { return (lane >> 3) * 4 + (lane >> 2 & 1) + i * 2; }
__device__ __forceinline__ u32 value_token(u32 lane, u32 i) { return (lane & 3) * 4 + i; }

// Shared memory of the stage. `sums` lies where activations come in, which nobody uses meanwhile.
struct AttentionShared {
    float* sums;     // [WARPS][MAX_GROUP][HEAD_DIM], groups of four exchanged by the head
    u16* q;          // [MAX_GROUP][HEAD_DIM + 8]
    u16* k;          // [HEAD_DIM], the newest token's
    u16* v;          // [HEAD_DIM]
    float2* softmax; // [WARPS][MAX_GROUP]
};
#define ATTENTION_SMALL_BYTES ((MAX_GROUP * (HEAD_DIM + 8) + 2 * HEAD_DIM) * 2 + WARPS * MAX_GROUP * 8)

__device__ __forceinline__ AttentionShared attention_shared(unsigned char* sums, unsigned char* small) {
    AttentionShared s;
    s.sums = reinterpret_cast<float*>(sums);
    s.q = reinterpret_cast<u16*>(small);
    s.k = s.q + MAX_GROUP * (HEAD_DIM + 8);
    s.v = s.k + HEAD_DIM;
    s.softmax = reinterpret_cast<float2*>(s.v + HEAD_DIM);
    return s;
}

// The query heads of an item, once they are there, normed and rotated, into shared memory; with the newest token also its key
// and value, and into the cache.
__device__ __forceinline__ void attention_heads(const Attention& p, const AttentionLayer& layer, const AttentionItem& item,
                                                bool newest, float eps, u32 use, const AttentionShared& s, u32 warp, u32 lane) {
    const u32 tasks = newest ? p.group + 2 : p.group;
    for (u32 task = warp; task < tasks; task += WARPS) {
        const u32 q_heads = p.group * p.kv_heads;
        const u32 head = task < p.group ? item.head * p.group + task : task == p.group ? q_heads + item.head : q_heads + p.kv_heads + item.head;
        const u64* from = p.qkv + ((u64)item.row * (q_heads + 2 * p.kv_heads) + head) * HEAD_DIM + lane * 2;
        u64 word[4];
        do {
            load_words(from, word[0], word[1]);
            load_words(from + HEAD_DIM / 2, word[2], word[3]);
        } while (!(is_of(word[0], use) && is_of(word[1], use) && is_of(word[2], use) && is_of(word[3], use)));
        u32 low = (u32)word[0] | (u32)word[1] << 16, high = (u32)word[2] | (u32)word[3] << 16;
        if (task <= p.group) {
            const u32 angle = min(item.position, p.n_positions - 1);
            const Rotation r = load_rotation(task < p.group ? layer.q_norm : layer.k_norm, p.cos_sin + (u64)angle * HEAD_DIM, lane);
            float a[PAIRS] = {bf16_low(low), bf16_high(low)}, b[PAIRS] = {bf16_low(high), bf16_high(high)};
            norm_and_rotate(a, b, r, eps);
            low = pack_bf16(a[0], a[1]);
            high = pack_bf16(b[0], b[1]);
        }
        u16* to = task < p.group ? s.q + task * (HEAD_DIM + 8) : task == p.group ? s.k : s.v;
        reinterpret_cast<u32*>(to)[lane] = low;
        reinterpret_cast<u32*>(to + HEAD_DIM / 2)[lane] = high;
        if (task >= p.group) {
            const int page = p.page_table[(u64)item.slot * p.max_pages + (item.position >> p.page_shift)];
            if ((u64)page >= p.tokens_per_head >> p.page_shift) continue; // no such page: ran past its end
            u16* cache = (task == p.group ? layer.k : layer.v) + item.head * p.tokens_per_head * HEAD_DIM + attention_offset(p, page, item.position);
            reinterpret_cast<u32*>(cache)[lane] = low;
            reinterpret_cast<u32*>(cache + HEAD_DIM / 2)[lane] = high;
        }
    }
}

__device__ __forceinline__ void matrix_warps_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}

// Two results.
__device__ __forceinline__ void store_mixed(const Attention& p, u64 at, u32 pair, u32 use) {
#if SINGLE
    const u32 tag = tag_of(use) << 16;
    store_pair(p.mixed_words + at, pair & 0xffff | tag, pair >> 16 | tag);
#else
    *reinterpret_cast<u32*>(p.mixed + at) = pair;
#endif
}

// Adds the parts of a row and head, a share of the columns in the block of each split. Splits lie side by side in the lanes of a
// warp, up to 16, and are added in an order that depends on their number alone.
__device__ __forceinline__ void attention_merge(const Attention& p, const AttentionItem& item, u32 use, u32 thread) {
    const u32 shift = item.splits > 8 ? 4 : item.splits > 4 ? 3 : item.splits > 2 ? 2 : 1; // of lanes side by side
    const u32 way = thread & ((1u << shift) - 1);
    const u32 units = p.group * (HEAD_DIM / 4); // of four columns
    const u32 begin = item.split * units / item.splits, end = (item.split + 1) * units / item.splits;
    const u64 base = ((u64)item.row * p.kv_heads + item.head) * p.max_splits;
#pragma unroll 1
    for (u32 first = begin; first < end; first += WARPS * 32 >> shift) {
        const u32 unit = first + (thread >> shift), mine = min(unit, end - 1);
        const u32 in_group = mine / (HEAD_DIM / 4), column = mine % (HEAD_DIM / 4) * 4;
        float maximum = NEG_INFINITY, total = 0.f, x[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
        for (u32 split = way; split < item.splits; split += 1u << shift) {
            const u64 at = (base + split) * p.group + in_group;
            u64 word[6];
            bool there;
            do {
                load_words(p.partial_sums + at * 2, word[0], word[1]);
                load_words(p.partial + at * HEAD_DIM + column, word[2], word[3]);
                load_words(p.partial + at * HEAD_DIM + column + 2, word[4], word[5]);
                there = true;
#pragma unroll
                for (u32 i = 0; i < 6; ++i) there = there && is_of(word[i], use);
            } while (!there);
            const float of = __uint_as_float((u32)word[0]), larger = fmaxf(maximum, of);
            const float relative_to = larger == NEG_INFINITY ? 0.f : larger;
            const float rescale = exp2_fast(maximum - relative_to), weight = exp2_fast(of - relative_to);
            maximum = larger;
            total = fmaf(total, rescale, __uint_as_float((u32)word[1]) * weight);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) x[i] = fmaf(x[i], rescale, __uint_as_float((u32)word[2 + i]) * weight);
        }
        float largest = maximum;
#pragma unroll 1
        for (u32 d = 1; d < 1u << shift; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, d));
        const float weight = exp2_fast(maximum - (largest == NEG_INFINITY ? 0.f : largest));
        total *= weight;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) x[i] *= weight;
#pragma unroll 1
        for (u32 d = 1; d < 1u << shift; d *= 2) {
            total += __shfl_xor_sync(FULL_WARP, total, d);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) x[i] += __shfl_xor_sync(FULL_WARP, x[i], d);
        }
        if (way == 0 && unit < end) {
            const float inverse = total > 0.f ? 1.f / total : 0.f;
            const u64 at = ((u64)(item.row * p.kv_heads + item.head) * p.group + in_group) * HEAD_DIM + column;
            const u32 low = pack_bf16(x[0] * inverse, x[1] * inverse), high = pack_bf16(x[2] * inverse, x[3] * inverse);
#if SINGLE
            store_mixed(p, at, low, use);
            store_mixed(p, at + 2, high, use);
#else
            *reinterpret_cast<uint2*>(p.mixed + at) = make_uint2(low, high);
#endif
        }
    }
}

// What a block knows of its work in every layer, in shared memory: positions do not change during a launch.
struct AttentionWork {
    AttentionItem item; // the block's first
    u32 total;          // items of all rows
};

// Returns the pages of the block's first item, of this lane's granules. `found` is the barrier that is passed when `work` is there.
__device__ __forceinline__ int attention_work(const Attention& p, u32 rows, u32 warp, u32 lane, AttentionWork* work, u32 found) {
    u32 total;
    const AttentionRow row = attention_row_of_lane(p, rows, lane, total);
    const AttentionItem item = attention_item(p, row, min(blockIdx.x, total - 1));
    if (warp == 0 && lane == 0) {
        work->item = item, work->total = total;
        barrier_arrive_many(found, 1);
    }
    return attention_pages(p, item, item.start + warp * GRANULE, WARPS * GRANULE, lane);
}

__device__ __forceinline__ void exchange_if(bool exchange, uint4& a, uint4& b) {
    const uint4 x = exchange ? b : a, y = exchange ? a : b;
    a = x, b = y;
}

// Waits for the box that comes next in a warp's ring, of keys or values, and says where it lies.
__device__ __forceinline__ u32 granule_box(u32 base, u32 warp, u32& tail, const Place& taken) {
    const u32 place = ring_place(tail, KV_BOX);
    barrier_wait(full_barrier(base, warp, taken.at), taken.parity);
    tail = place + KV_BOX;
    return base + RINGS + warp * RING_BYTES + place;
}
// Gives its place back.
__device__ __forceinline__ void granule_box_read(u32 base, u32 warp, u32 lane, Place& taken) {
    __syncwarp();
    if (lane == 0) barrier_arrive_many(empty_barrier(base, warp, taken.at), 1);
    taken.advance(1, MAX_BOXES);
}

// The stage, by the warps that multiply. `use` is the number that the layer's words bear; `tail` and `taken` say where a warp is
// in its ring.
__device__ __forceinline__ void attention_stage(const Attention& p, const AttentionLayer& layer, const AttentionWork* work,
                                                int first_pages, u32 rows, float eps, u32 use, u32 base,
                                                const AttentionShared& s, u32& tail, Place& taken, u32 warp, u32 lane) {
    const u32 g = lane >> 2, t = lane & 3, thread = warp * 32 + lane;
    AttentionItem item = work->item;
    const u32 total = work->total;
#pragma unroll 1
    for (u32 number = blockIdx.x; number < total; number += gridDim.x) {
        const u32 step = WARPS * GRANULE;
        int pages = first_pages; // of 32 granules, one a lane
        if (number != blockIdx.x) {
            u32 all;
            item = attention_item(p, attention_row_of_lane(p, rows, lane, all), number);
            pages = attention_pages(p, item, item.start + warp * GRANULE, step, lane);
        }
        const u32 first = item.start + warp * GRANULE;
        // The newest token's key and value are not in the cache yet.
        const u32 old_end = min(item.end, item.position);
        const bool newest = item.slot > 0 && item.position >= item.start && item.position < item.end;
        attention_heads(p, layer, item, newest, eps, use, s, warp, lane);
        matrix_warps_sync();

        const uint4* q = reinterpret_cast<const uint4*>(s.q + g * (HEAD_DIM + 8) + t * 8);
        float sum[HEAD_DIM / 16][4], maximum[2] = {NEG_INFINITY, NEG_INFINITY}, tokens_sum[2] = {0.f, 0.f};
#pragma unroll
        for (u32 m = 0; m < HEAD_DIM / 16; ++m)
#pragma unroll
            for (u32 e = 0; e < 4; ++e) sum[m][e] = 0.f;
        u32 i = 0;
#pragma unroll 1
        for (u32 token = first; token < item.end; token += step, ++i) {
            if (i == 32) {
                i = 0;
                pages = attention_pages(p, item, token, step, lane);
            }
            const bool mapped = __shfl_sync(FULL_WARP, pages, i) >= 0;
            const u32 old = mapped && token < old_end ? old_end - token : 0; // tokens of it that come through the ring, or more
            const bool has_newest = newest && item.position - token < GRANULE;
            const u32 newest_at = item.position - token;
            uint4 k[HEAD_DIM / 32][2], v[HEAD_DIM / 64][4];
            if (old > 0) {
                const u32 from = granule_box(base, warp, tail, taken) + t * 16;
#pragma unroll
                for (u32 n = 0; n < 2; ++n)
#pragma unroll
                    for (u32 j = 0; j < HEAD_DIM / 32; ++j) {
                        const u32 mine = key_token(lane, n);
                        k[j][n] = mine < old ? load_shared(from + mine * (HEAD_DIM * 2) + (j ^ g & 1) * 64) : make_uint4(0, 0, 0, 0);
                    }
#pragma unroll
                for (u32 n = 0; n < 2; ++n)
#pragma unroll
                    for (u32 j = 0; j < HEAD_DIM / 32; j += 2) exchange_if(g & 1, k[j][n], k[j + 1][n]);
                granule_box_read(base, warp, lane, taken);
            } else {
#pragma unroll
                for (u32 n = 0; n < 2; ++n)
#pragma unroll
                    for (u32 j = 0; j < HEAD_DIM / 32; ++j) k[j][n] = make_uint4(0, 0, 0, 0);
            }
            if (has_newest)
#pragma unroll
                for (u32 n = 0; n < 2; ++n)
                    if (key_token(lane, n) == newest_at)
#pragma unroll
                        for (u32 j = 0; j < HEAD_DIM / 32; ++j) k[j][n] = *reinterpret_cast<const uint4*>(s.k + j * 32 + t * 8);
            float score[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (u32 j = 0; j < HEAD_DIM / 32; ++j) {
                const uint4 low = k[j][0], high = k[j][1], of = q[j * 4];
                const u32 a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
                mma(score, a, of.x, of.y);
                mma(score, b, of.z, of.w);
            }
            if (old > 0) {
                const u32 from = granule_box(base, warp, tail, taken) + t * (4 * HEAD_DIM * 2) + g * 32;
#pragma unroll
                for (u32 n = 0; n < 4; ++n)
#pragma unroll
                    for (u32 h = 0; h < HEAD_DIM / 64; ++h)
                        v[h][n] = value_token(lane, n) < old ? load_shared(from + n * (HEAD_DIM * 2) + (h ^ t & 1) * 16) : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (u32 n = 0; n < 4; ++n) exchange_if(t & 1, v[0][n], v[1][n]);
                granule_box_read(base, warp, lane, taken);
            } else {
#pragma unroll
                for (u32 n = 0; n < 4; ++n)
#pragma unroll
                    for (u32 h = 0; h < HEAD_DIM / 64; ++h) v[h][n] = make_uint4(0, 0, 0, 0);
            }
            if (has_newest)
#pragma unroll
                for (u32 n = 0; n < 4; ++n)
                    if (value_token(lane, n) == newest_at)
#pragma unroll
                        for (u32 h = 0; h < HEAD_DIM / 64; ++h) v[h][n] = *reinterpret_cast<const uint4*>(s.v + g * 16 + h * 8);
            float rescale[2];
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const u32 mine = token + key_token(lane, e >> 1);
                score[e] = mapped && mine < item.end ? __fmul_rn(score[e], p.scale) : NEG_INFINITY;
            }
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                float m = fmaxf(score[e], score[e + 2]);
                m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 4));
                m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 8));
                m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 16));
                m = fmaxf(m, maximum[e]);
                const float relative_to = m == NEG_INFINITY ? 0.f : m;
                rescale[e] = exp2_fast(maximum[e] - relative_to);
                maximum[e] = m;
                score[e] = exp2_fast(score[e] - relative_to);
                score[e + 2] = exp2_fast(score[e + 2] - relative_to);
                tokens_sum[e] = fmaf(tokens_sum[e], rescale[e], score[e] + score[e + 2]);
            }
            const u32 w0 = transpose(pack_bf16(score[0], score[1])), w1 = transpose(pack_bf16(score[2], score[3]));
#pragma unroll
            for (u32 h = 0; h < HEAD_DIM / 64; ++h) {
                const u32 of[4][4] = {{v[h][0].x, v[h][0].y, v[h][0].z, v[h][0].w},
                                      {v[h][1].x, v[h][1].y, v[h][1].z, v[h][1].w},
                                      {v[h][2].x, v[h][2].y, v[h][2].z, v[h][2].w},
                                      {v[h][3].x, v[h][3].y, v[h][3].z, v[h][3].w}};
#pragma unroll
                for (u32 r = 0; r < 4; ++r) { // elements 16 g + 8 h + 2 r in rows g, the one after it in rows g + 8
                    const u32 a[4] = {__byte_perm(of[0][r], of[1][r], 0x5410), __byte_perm(of[0][r], of[1][r], 0x7632),
                                      __byte_perm(of[2][r], of[3][r], 0x5410), __byte_perm(of[2][r], of[3][r], 0x7632)};
                    float(&d)[4] = sum[h * 4 + r];
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) d[e] *= rescale[e & 1];
                    mma(d, a, w0, w1);
                }
            }
        }

        // All items' keys and values are taken, or nearly so in other warps.
        if (number + gridDim.x >= total && thread == 0) barrier_arrive_many(base + BARRIERS + STAGE_TAKEN * 8, 1);
        // Sums of the warps, heads 2 t and 2 t + 1 of each lane.
        const u32 working = item.end > item.start ? min((item.end - item.start + GRANULE - 1) / GRANULE, (u32)WARPS) : 0;
        __syncwarp();
        if (warp < working) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                float sum_of = tokens_sum[e];
                sum_of += __shfl_xor_sync(FULL_WARP, sum_of, 4);
                sum_of += __shfl_xor_sync(FULL_WARP, sum_of, 8);
                sum_of += __shfl_xor_sync(FULL_WARP, sum_of, 16);
                const u32 head = t * 2 + e;
                if (head >= p.group) continue;
                if (g == 0) s.softmax[warp * MAX_GROUP + head] = make_float2(maximum[e], sum_of);
                float4* to = reinterpret_cast<float4*>(s.sums + (warp * MAX_GROUP + head) * HEAD_DIM);
#pragma unroll
                for (u32 h = 0; h < HEAD_DIM / 64; ++h)
#pragma unroll
                    for (u32 half = 0; half < 2; ++half) {
                        const float(&c)[4] = sum[h * 4 + half * 2];
                        const float(&d)[4] = sum[h * 4 + half * 2 + 1];
                        to[(g * 4 + h * 2 + half) ^ head] = make_float4(c[e], c[e + 2], d[e], d[e + 2]);
                    }
            }
        }
        matrix_warps_sync();
        const u64 part = (((u64)item.row * p.kv_heads + item.head) * p.max_splits + item.split) * p.group;
        for (u32 u = thread; u < p.group * (HEAD_DIM / 2); u += WARPS * 32) {
            const u32 in_group = u / (HEAD_DIM / 2), pair = u % (HEAD_DIM / 2);
            const u32 place = ((pair >> 1) ^ in_group) * 2 + (pair & 1);
            // All loads before the first sum, so that their latencies overlap.
            float2 part_of[WARPS], value[WARPS];
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) {
                const bool works = w < working;
                part_of[w] = works ? s.softmax[w * MAX_GROUP + in_group] : make_float2(NEG_INFINITY, 0.f);
                const float2* from = reinterpret_cast<const float2*>(s.sums + (w * MAX_GROUP + in_group) * HEAD_DIM);
                value[w] = works ? from[place] : make_float2(0.f, 0.f);
            }
            float largest = NEG_INFINITY, all = 0.f, a = 0.f, b = 0.f;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) largest = fmaxf(largest, part_of[w].x);
            const float relative_to = largest == NEG_INFINITY ? 0.f : largest;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) {
                const float weight = exp2_fast(part_of[w].x - relative_to);
                all = fmaf(part_of[w].y, weight, all);
                a = fmaf(value[w].x, weight, a);
                b = fmaf(value[w].y, weight, b);
            }
            if (item.splits == 1) {
                const float inverse = all > 0.f ? 1.f / all : 0.f;
                const u64 to = ((u64)(item.row * p.kv_heads + item.head) * p.group + in_group) * HEAD_DIM + pair * 2;
                store_mixed(p, to, pack_bf16(a * inverse, b * inverse), use);
            } else {
                store_words(p.partial + (part + in_group) * HEAD_DIM + pair * 2, word_of(__float_as_uint(a), use),
                            word_of(__float_as_uint(b), use));
                if (pair == 0)
                    store_words(p.partial_sums + (part + in_group) * 2, word_of(__float_as_uint(largest), use),
                                word_of(__float_as_uint(all), use));
            }
        }
        if (number + gridDim.x < total) matrix_warps_sync();
    }
    // Only now: an item waited for could come after another of this block.
#pragma unroll 1
    for (u32 number = blockIdx.x; number < total; number += gridDim.x) {
        if (total > gridDim.x) {
            u32 all;
            item = attention_item(p, attention_row_of_lane(p, rows, lane, all), number);
        }
        if (item.splits > 1) attention_merge(p, item, use, thread);
    }
    if (blockIdx.x >= total && thread == 0) barrier_arrive_many(base + BARRIERS + STAGE_TAKEN * 8, 1);
    // Whoever has no item need not wait either.
    matrix_warps_sync();
}
