// Embedding rows into the residual stream.
//
//   residual[row, :] = float(table[token(row), :])        residual f32 [rows, hidden]
//   token(row) = token_ids[row]                            prefill: ids from the host
//              = last_token[slots[row]]                    decode: the id sampled last for the slot
//
// The residual stream is f32: with 36 layers each adding two terms to it, a bf16 stream would be
// rounded 72 times, which is most of the distance between a bf16 model and its f32 reference. In
// f32 it costs 4 more bytes per element and per pass, which are small next to the weights.
//
// An id at or past the vocabulary writes NaN, so that it shows in the log-probability instead of
// silently embedding a neighbour.
#include "common.cuh"

#define EMBED_THREADS 128

struct EmbedParams {
    const u16* table;      // bf16 [vocab, hidden]
    const u32* token_ids;  // [rows], or null
    const int* slots;      // [rows], used when token_ids is null
    const u32* last_token; // [n_slots], used when token_ids is null
    float* residual;       // f32 [rows, hidden]
    u32 rows;
    u32 hidden; // a multiple of 8
    u32 vocab;
    u32 n_slots;
};

extern "C" __global__ void __launch_bounds__(EMBED_THREADS) embed(const EmbedParams p) {
    pdl_release();
    pdl_wait();
    const u32 row = blockIdx.x;
    u32 token = p.vocab;
    if (p.token_ids) {
        token = p.token_ids[row];
    } else {
        const u32 slot = (u32)p.slots[row];
        if (slot < p.n_slots) token = p.last_token[slot];
    }
    float* out = p.residual + (u64)row * p.hidden;
    const u16* in = p.table + (u64)token * p.hidden;
    for (u32 i = threadIdx.x * 8; i < p.hidden; i += EMBED_THREADS * 8) {
        uint4 bits = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
        if (token < p.vocab) bits = *reinterpret_cast<const uint4*>(in + i);
        float4 a = make_float4(bf16_low(bits.x), bf16_high(bits.x), bf16_low(bits.y), bf16_high(bits.y));
        float4 b = make_float4(bf16_low(bits.z), bf16_high(bits.z), bf16_low(bits.w), bf16_high(bits.w));
        *reinterpret_cast<float4*>(out + i) = a;
        *reinterpret_cast<float4*>(out + i + 4) = b;
    }
}
