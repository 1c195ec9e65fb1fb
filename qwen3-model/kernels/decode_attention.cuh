// Attention of a decode step inside the persistent kernel: q/k norm, rotation, the write of the new key and value, and causal
// attention over the pages of each row.
//
//   item     (row, K/V head, split of its tokens), dealt to the blocks in turn
//   granule  16 tokens: one warp at a time, warp w takes granules w, w + 8, ... of an item
//
// Keys and values go straight from memory into the operands of the products: with 16 bytes a lane, the elements of a head are
// taken in another order than they lie in, the same for both operands.
//
//   scores  [16 tokens, 8 heads]  = K [16, D] Qᵀ [D, 8]        lane (g, t): tokens g, g + 8, elements 32 j + 8 t ...
//   sum     [D, 8 heads]         += Vᵀ [D, 16] Pᵀ [16, 8]      lane (g, t): tokens 2 t, +1, +8, +9, elements 64 h + 8 g ...
//
// The first granule of each warp is on its way before the step's own queries are there. The warps' sums meet in shared memory,
// in the order of the warps. A row of several splits leaves its parts in `partial`; the block that comes last adds them in
// their order. So the order of every sum depends on the row's length and on the sizes of splits alone.
#pragma once
#include "hopper.cuh"
#include "rope.cuh"

#define GRANULE 16
#define MAX_GROUP 8
#define MAX_SPLIT 2048 // tokens: 16 granules a warp, whose pages a warp's lanes hold
#define MERGE_AT_ONCE 8
#define NEG_INFINITY __uint_as_float(0xff800000u)

struct Attention {
    const u16* qkv;        // [rows, (group + 2) kv_heads, HEAD_DIM]: all q, then k, then v
    u16* mixed;            // [rows, group * kv_heads, HEAD_DIM]
    const int* positions;  // [rows]
    const int* slots;      // [rows]; 0 is padding
    const int* page_table; // [n_slots, max_pages], -1 for no page
    const float* cos_sin;  // [n_positions, HEAD_DIM]
    float* partial;        // [rows, kv_heads, max_splits, group, HEAD_DIM]
    float* partial_sums;   // [rows, kv_heads, max_splits, group, 2]: maximum, sum
    u32* arrived;          // [rows, kv_heads], 0 between uses
    u64 tokens_per_head;   // n_pages * page_size
    u32 kv_heads;
    u32 group; // query heads of a K/V head
    u32 page_shift;
    u32 n_slots;
    u32 max_pages;
    u32 n_positions;
    u32 split;      // tokens, more for a row that would need more than `few_splits`, up to MAX_SPLIT
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

// Row `lane` of the batch, as every lane of a warp knows its own.
struct AttentionRow {
    u32 slot, position, length, split, first_item, items;
};

__device__ __forceinline__ AttentionRow attention_row(const Attention& p, u32 rows, u32 lane, u32& total) {
    AttentionRow r;
    r.slot = r.position = r.length = r.items = 0;
    r.split = p.split;
    if (lane < rows) {
        r.slot = (u32)p.slots[lane];
        r.position = (u32)p.positions[lane];
        if (r.slot >= p.n_slots) r.slot = 0;
        const u32 most = p.max_pages << p.page_shift;
        if (r.slot > 0) r.length = r.position < most ? r.position + 1 : most;
        // Equal splits, in granules: the blocks that share a row end together, whatever its length.
        const u32 equal = ((r.length + p.few_splits - 1) / p.few_splits + 15) & ~15u;
        r.split = min(max(p.split, equal), (u32)MAX_SPLIT);
        const u32 splits = r.length > 0 ? (r.length + r.split - 1) / r.split : 1;
        r.items = min(splits, p.max_splits) * p.kv_heads;
    }
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

__device__ __forceinline__ AttentionItem attention_item(const Attention& p, const AttentionRow& r, u32 number) {
    AttentionItem i;
    i.row = 31 - __clz(__ballot_sync(FULL_WARP, r.items > 0 && r.first_item <= number));
    i.slot = __shfl_sync(FULL_WARP, r.slot, i.row);
    i.position = __shfl_sync(FULL_WARP, r.position, i.row);
    const u32 length = __shfl_sync(FULL_WARP, r.length, i.row);
    const u32 inside = number - __shfl_sync(FULL_WARP, r.first_item, i.row);
    i.splits = __shfl_sync(FULL_WARP, r.items, i.row) / p.kv_heads;
    i.split = inside / p.kv_heads;
    i.head = inside - i.split * p.kv_heads;
    const u32 tokens = __shfl_sync(FULL_WARP, r.split, i.row);
    i.start = i.split * tokens;
    i.end = min(length, i.start + tokens);
    return i;
}

// The page of this lane's granule, counted from `token` in steps of `step`; -1 past the end.
__device__ __forceinline__ int attention_pages(const Attention& p, const AttentionItem& item, u32 token, u32 step, u32 lane) {
    const u32 mine = token + lane * step;
    int page = -1;
    if (mine < item.end) page = p.page_table[(u64)item.slot * p.max_pages + (mine >> p.page_shift)];
    return (u64)page < p.tokens_per_head >> p.page_shift ? page : -1;
}
__device__ __forceinline__ u64 attention_offset(const Attention& p, u32 head, int page, u32 token) {
    const u64 at = ((u64)(u32)page << p.page_shift) | (token & ((1u << p.page_shift) - 1));
    return (head * p.tokens_per_head + at) * HEAD_DIM;
}

// A granule in registers.
struct Granule {
    uint4 k[HEAD_DIM / 32][2];    // [j][token g, g + 8]
    uint4 v[HEAD_DIM / 64][4];    // [half][token 2t, 2t + 1, 2t + 8, 2t + 9]
};

__device__ __forceinline__ u32 value_token(u32 lane, u32 i) { return (lane & 3) * 2 + (i & 1) + (i >> 1) * 8; }

__device__ __forceinline__ void load_keys(Granule& x, const u16* k, u64 at, u32 token, u32 end, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 mine = (lane >> 2) + i * 8;
        const u16* from = k + at + mine * HEAD_DIM + (lane & 3) * 8;
#pragma unroll
        for (u32 j = 0; j < HEAD_DIM / 32; ++j)
            x.k[j][i] = token + mine < end ? load_once(from + j * 32) : make_uint4(0, 0, 0, 0);
    }
}
__device__ __forceinline__ void load_values(Granule& x, const u16* v, u64 at, u32 token, u32 end, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 mine = value_token(lane, i);
        const u16* from = v + at + mine * HEAD_DIM + (lane >> 2) * 8;
#pragma unroll
        for (u32 h = 0; h < HEAD_DIM / 64; ++h)
            x.v[h][i] = token + mine < end ? load_once(from + h * 64) : make_uint4(0, 0, 0, 0);
    }
}

// Shared memory of the stage. `sums` lies where activations come in, which nobody uses meanwhile.
struct AttentionShared {
    float* sums;     // [WARPS][group][HEAD_DIM], groups of four exchanged by the head
    u16* q;          // [MAX_GROUP][HEAD_DIM + 8]
    u16* k;          // [HEAD_DIM], the newest token's
    u16* v;          // [HEAD_DIM]
    float2* softmax; // [WARPS][MAX_GROUP]
    u32* flag;
};
#define ATTENTION_SMALL_BYTES ((MAX_GROUP * (HEAD_DIM + 8) + 2 * HEAD_DIM) * 2 + WARPS * MAX_GROUP * 8 + 16)

__device__ __forceinline__ AttentionShared attention_shared(unsigned char* sums, unsigned char* small) {
    AttentionShared s;
    s.sums = reinterpret_cast<float*>(sums);
    s.q = reinterpret_cast<u16*>(small);
    s.k = s.q + MAX_GROUP * (HEAD_DIM + 8);
    s.v = s.k + HEAD_DIM;
    s.softmax = reinterpret_cast<float2*>(s.v + HEAD_DIM);
    s.flag = reinterpret_cast<u32*>(s.softmax + WARPS * MAX_GROUP);
    return s;
}

// The query heads of an item, normed and rotated, into shared memory; with the newest token also its key and value, and
// into the cache.
__device__ __forceinline__ void attention_heads(const Attention& p, const AttentionLayer& layer, const AttentionItem& item,
                                                bool newest, float eps, const AttentionShared& s, u32 warp, u32 lane) {
    const u32 tasks = newest ? p.group + 2 : p.group;
    for (u32 task = warp; task < tasks; task += WARPS) {
        const u32 q_heads = p.group * p.kv_heads;
        const u32 head = task < p.group ? item.head * p.group + task : task == p.group ? q_heads + item.head : q_heads + p.kv_heads + item.head;
        const u16* from = p.qkv + ((u64)item.row * (q_heads + 2 * p.kv_heads) + head) * HEAD_DIM;
        const u32 low_bits = load_fresh(reinterpret_cast<const u32*>(from) + lane);
        const u32 high_bits = load_fresh(reinterpret_cast<const u32*>(from + HEAD_DIM / 2) + lane);
        u32 low = low_bits, high = high_bits;
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
            u16* cache = (task == p.group ? layer.k : layer.v) + attention_offset(p, item.head, page, item.position);
            reinterpret_cast<u32*>(cache)[lane] = low;
            reinterpret_cast<u32*>(cache + HEAD_DIM / 2)[lane] = high;
        }
    }
}

__device__ __forceinline__ void matrix_warps_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}

// Adds the parts of a row and head in the order of the splits.
__device__ __forceinline__ void attention_merge(const Attention& p, const AttentionItem& item, u32 thread) {
    const u64 base = ((u64)item.row * p.kv_heads + item.head) * p.max_splits * p.group;
    for (u32 u = thread; u < p.group * (HEAD_DIM / 2); u += WARPS * 32) {
        const u32 in_group = u / (HEAD_DIM / 2), column = u % (HEAD_DIM / 2) * 2;
        float maximum = NEG_INFINITY, total = 0.f, x = 0.f, y = 0.f;
        for (u32 first = 0; first < item.splits; first += MERGE_AT_ONCE) {
            float2 part[MERGE_AT_ONCE], value[MERGE_AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < MERGE_AT_ONCE; ++i) {
                part[i] = make_float2(NEG_INFINITY, 0.f);
                value[i] = make_float2(0.f, 0.f);
                if (first + i < item.splits) {
                    const u64 at = base + (u64)(first + i) * p.group + in_group;
                    part[i] = load_fresh(reinterpret_cast<const float2*>(p.partial_sums) + at);
                    value[i] = load_fresh(reinterpret_cast<const float2*>(p.partial + at * HEAD_DIM + column));
                }
            }
            float larger = maximum;
#pragma unroll
            for (u32 i = 0; i < MERGE_AT_ONCE; ++i) larger = fmaxf(larger, part[i].x);
            const float relative_to = larger == NEG_INFINITY ? 0.f : larger, rescale = exp2_fast(maximum - relative_to);
            maximum = larger;
            total *= rescale, x *= rescale, y *= rescale;
#pragma unroll
            for (u32 i = 0; i < MERGE_AT_ONCE; ++i) {
                const float weight = exp2_fast(part[i].x - relative_to);
                total = fmaf(part[i].y, weight, total);
                x = fmaf(value[i].x, weight, x);
                y = fmaf(value[i].y, weight, y);
            }
        }
        const float inverse = total > 0.f ? 1.f / total : 0.f;
        const u64 at = ((u64)(item.row * p.kv_heads + item.head) * p.group + in_group) * HEAD_DIM + column;
        *reinterpret_cast<u32*>(p.mixed + at) = pack_bf16(x * inverse, y * inverse);
    }
}

// What a warp knows of its work in every layer: positions do not change during a launch.
struct AttentionWork {
    AttentionRow row;
    u32 total;
    AttentionItem item; // the block's first
    int pages;
};

__device__ __forceinline__ AttentionWork attention_work(const Attention& p, u32 rows, u32 warp, u32 lane) {
    AttentionWork w;
    w.row = attention_row(p, rows, lane, w.total);
    w.item = attention_item(p, w.row, min(blockIdx.x, w.total - 1));
    w.pages = attention_pages(p, w.item, w.item.start + warp * GRANULE, WARPS * GRANULE, lane);
    return w;
}

// The stage, by the warps that multiply. `ready` reaches `target` when the batch's queries, keys and values are there.
__device__ __forceinline__ void attention_stage(const Attention& p, const AttentionLayer& layer, const AttentionWork& work, float eps,
                                                const u32* ready, u32 target, const AttentionShared& s, u32 warp, u32 lane) {
    const u32 g = lane >> 2, t = lane & 3, thread = warp * 32 + lane;
    bool waited = false;
    AttentionItem item = work.item;
    int pages = work.pages;
#pragma unroll 1
    for (u32 number = blockIdx.x; number < work.total; number += gridDim.x) {
        const u32 step = WARPS * GRANULE;
        if (waited) {
            item = attention_item(p, work.row, number);
            pages = attention_pages(p, item, item.start + warp * GRANULE, step, lane);
        }
        const u32 first = item.start + warp * GRANULE;
        // The newest token's key and value are not in the cache yet.
        const u32 old_end = min(item.end, item.position);
        const bool newest = item.slot > 0 && item.position >= item.start && item.position < item.end;
        Granule x;
        int page = __shfl_sync(FULL_WARP, pages, 0);
        u64 at = attention_offset(p, item.head, max(page, 0), first);
        load_keys(x, layer.k, at, first, page < 0 ? 0 : old_end, lane);
        load_values(x, layer.v, at, first, page < 0 ? 0 : old_end, lane);
        if (!waited) {
            if (thread == 0) wait_for(ready, target);
            matrix_warps_sync();
            waited = true;
        }
        attention_heads(p, layer, item, newest, eps, s, warp, lane);
        matrix_warps_sync();

        const uint4* q = reinterpret_cast<const uint4*>(s.q + g * (HEAD_DIM + 8) + t * 8);
        float sum[HEAD_DIM / 16][4], maximum[2] = {NEG_INFINITY, NEG_INFINITY}, tokens_sum[2] = {0.f, 0.f};
#pragma unroll
        for (u32 m = 0; m < HEAD_DIM / 16; ++m)
#pragma unroll
            for (u32 e = 0; e < 4; ++e) sum[m][e] = 0.f;
        u32 i = 0;
#pragma unroll 1
        for (u32 token = first; token < item.end; token += step) {
            const bool mapped = page >= 0;
            // The granule that comes next is asked for as soon as its registers are free.
            const u32 next = token + step;
            ++i;
            const int next_page = __shfl_sync(FULL_WARP, pages, i & 31);
            const u64 next_at = attention_offset(p, item.head, max(next_page, 0), next);
            const u32 next_end = next_page < 0 ? 0 : old_end;
            if (newest && item.position - token < GRANULE) {
                const u32 place = item.position - token;
#pragma unroll
                for (u32 k = 0; k < 2; ++k)
                    if (g + k * 8 == place)
#pragma unroll
                        for (u32 j = 0; j < HEAD_DIM / 32; ++j) x.k[j][k] = *reinterpret_cast<const uint4*>(s.k + j * 32 + t * 8);
#pragma unroll
                for (u32 k = 0; k < 4; ++k)
                    if (value_token(lane, k) == place)
#pragma unroll
                        for (u32 h = 0; h < HEAD_DIM / 64; ++h) x.v[h][k] = *reinterpret_cast<const uint4*>(s.v + h * 64 + g * 8);
            }
            float score[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (u32 j = 0; j < HEAD_DIM / 32; ++j) {
                const uint4 low = x.k[j][0], high = x.k[j][1], of = q[j * 4];
                const u32 a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
                mma(score, a, of.x, of.y);
                mma(score, b, of.z, of.w);
            }
            if (next < item.end) load_keys(x, layer.k, next_at, next, next_end, lane);
            float rescale[2];
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const u32 mine = token + g + (e >> 1) * 8;
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
                const u32 v[4][4] = {{x.v[h][0].x, x.v[h][0].y, x.v[h][0].z, x.v[h][0].w},
                                     {x.v[h][1].x, x.v[h][1].y, x.v[h][1].z, x.v[h][1].w},
                                     {x.v[h][2].x, x.v[h][2].y, x.v[h][2].z, x.v[h][2].w},
                                     {x.v[h][3].x, x.v[h][3].y, x.v[h][3].z, x.v[h][3].w}};
#pragma unroll
                for (u32 r = 0; r < 4; ++r) { // elements 64 h + 8 g + 2 r in rows g, the one after it in rows g + 8
                    const u32 a[4] = {__byte_perm(v[0][r], v[1][r], 0x5410), __byte_perm(v[0][r], v[1][r], 0x7632),
                                      __byte_perm(v[2][r], v[3][r], 0x5410), __byte_perm(v[2][r], v[3][r], 0x7632)};
                    float(&d)[4] = sum[h * 4 + r];
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) d[e] *= rescale[e & 1];
                    mma(d, a, w0, w1);
                }
            }
            if (next < item.end) load_values(x, layer.v, next_at, next, next_end, lane);
            page = next_page;
        }

        // Sums of the warps, heads 2 t and 2 t + 1 of each lane.
        const u32 working = item.end > item.start ? min((item.end - item.start + GRANULE - 1) / GRANULE, (u32)WARPS) : 0;
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
                float4* to = reinterpret_cast<float4*>(s.sums + (warp * p.group + head) * HEAD_DIM);
#pragma unroll
                for (u32 h = 0; h < HEAD_DIM / 64; ++h)
#pragma unroll
                    for (u32 half = 0; half < 2; ++half) {
                        const float(&c)[4] = sum[h * 4 + half * 2];
                        const float(&d)[4] = sum[h * 4 + half * 2 + 1];
                        to[(h * 16 + g * 2 + half) ^ head] = make_float4(c[e], c[e + 2], d[e], d[e + 2]);
                    }
            }
        }
        matrix_warps_sync();
        const u64 part = (((u64)item.row * p.kv_heads + item.head) * p.max_splits + item.split) * p.group;
        for (u32 u = thread; u < p.group * (HEAD_DIM / 2); u += WARPS * 32) {
            const u32 in_group = u / (HEAD_DIM / 2), pair = u % (HEAD_DIM / 2);
            const u32 place = ((pair >> 1) ^ in_group) * 2 + (pair & 1);
            float largest = NEG_INFINITY, all = 0.f, a = 0.f, b = 0.f;
            for (u32 w = 0; w < working; ++w) largest = fmaxf(largest, s.softmax[w * MAX_GROUP + in_group].x);
            const float relative_to = largest == NEG_INFINITY ? 0.f : largest;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w)
                if (w < working) {
                    const float2 of = s.softmax[w * MAX_GROUP + in_group];
                    const float2 value = reinterpret_cast<const float2*>(s.sums + (w * p.group + in_group) * HEAD_DIM)[place];
                    const float weight = exp2_fast(of.x - relative_to);
                    all = fmaf(of.y, weight, all);
                    a = fmaf(value.x, weight, a);
                    b = fmaf(value.y, weight, b);
                }
            if (item.splits == 1) {
                const float inverse = all > 0.f ? 1.f / all : 0.f;
                const u64 to = ((u64)(item.row * p.kv_heads + item.head) * p.group + in_group) * HEAD_DIM + pair * 2;
                *reinterpret_cast<u32*>(p.mixed + to) = pack_bf16(a * inverse, b * inverse);
            } else {
                reinterpret_cast<float2*>(p.partial + (part + in_group) * HEAD_DIM)[pair] = make_float2(a, b);
                if (pair == 0) reinterpret_cast<float2*>(p.partial_sums)[part + in_group] = make_float2(largest, all);
            }
        }
        matrix_warps_sync();
        if (item.splits > 1) {
            if (thread == 0) {
                u32* count = p.arrived + item.row * p.kv_heads + item.head;
                const bool last = arrive(count) == item.splits - 1;
                if (last) *count = 0;
                *s.flag = last;
            }
            matrix_warps_sync();
            if (*s.flag) attention_merge(p, item, thread);
        }
    }
    // Whoever has no item need not wait either.
    matrix_warps_sync();
}
