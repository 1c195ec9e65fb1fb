// Checks and times the persistent decode kernel against plain f32 kernels, without the rest of the engine.
// nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -DHIDDEN=2560 -DQ_HEADS=32 -DKV_HEADS=8 -DINTERMEDIATE=9728 -DVOCABULARY=151936 -DBATCH=64 -DBLOCKS=132 decode_probe.cu -o probe
#include <cuda.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include "rows/decode.cu"
#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); exit(1); } } while (0)
__device__ float bf(bf16 v) { return to_float(v); }
__global__ void fill(bf16* p, size_t n, unsigned long long seed, float scale, float mean) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    unsigned long long h = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull; float s = 0;
    for (int j = 0; j < 3; j++) { h ^= h >> 31; h *= 0xBF58476D1CE4E5B9ull; h ^= h >> 29; s += ((int)(h & 0xffff) - 32768) / 32768.f; }
    p[i].bits = (u16)(pack_bf16(s * scale + mean, 0) & 0xffff);
  }
}
__global__ void ref_matmul(float* y, const float* x, const bf16* w, int m, int n, int k, bool add) {
  int i = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, l = threadIdx.x & 31; if (i >= n) return;
  for (int r = 0; r < m; r++) { float s = 0; for (int j = l; j < k; j += 32) s += x[(size_t)r * k + j] * bf(w[(size_t)i * k + j]); for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o); if (l == 0) y[(size_t)r * n + i] = (add ? y[(size_t)r * n + i] : 0) + s; }
}
__global__ void ref_norm(float* y, const float* x, const bf16* w, int n, float eps) {
  int r = blockIdx.x; float s = 0; for (int j = threadIdx.x; j < n; j += 32) s += x[(size_t)r * n + j] * x[(size_t)r * n + j]; for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
  for (int j = threadIdx.x; j < n; j += 32) y[(size_t)r * n + j] = x[(size_t)r * n + j] * rsqrtf(s / n + eps) * bf(w[j]);
}
__global__ void ref_embed(float* x, const bf16* e, const int* tokens) { for (int j = threadIdx.x; j < HIDDEN; j += blockDim.x) x[(size_t)blockIdx.x * HIDDEN + j] = bf(e[(size_t)tokens[blockIdx.x] * HIDDEN + j]); }
// One warp per (row, q/k/v head): norm, rope; q stays f32, k and v go to the cache.
__global__ void ref_heads(float* qkv, const bf16* qn, const bf16* kn, const float2* rope, const int* pos, const int* slots, const int* table, int max_pages, int shift, bf16* kc, bf16* vc, u64 positions, float eps) {
  int r = blockIdx.x, h = blockIdx.y, l = threadIdx.x; float* v = qkv + (size_t)r * (Q_HEADS + 2 * KV_HEADS) * 128 + h * 128; int p = pos[r];
  if (h < Q_HEADS + KV_HEADS) { const bf16* w = h < Q_HEADS ? qn : kn; float s = 0; for (int j = l; j < 128; j += 32) s += v[j] * v[j]; for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o); s = rsqrtf(s / 128 + eps);
    for (int j = l; j < 64; j += 32) { float a = v[j] * s * bf(w[j]), b = v[j + 64] * s * bf(w[j + 64]); float2 c = rope[(size_t)p * 64 + j]; v[j] = a * c.x - b * c.y; v[j + 64] = b * c.x + a * c.y; } }
  __syncwarp(); if (h < Q_HEADS) return; int kv = (h - Q_HEADS) % KV_HEADS; bf16* c = h < Q_HEADS + KV_HEADS ? kc : vc; size_t at = ((u64)kv * positions + ((u64)table[slots[r] * max_pages + (p >> shift)] << shift) + (p & ((1 << shift) - 1))) * 128;
  for (int j = l; j < 128; j += 32) c[at + j].bits = (u16)(pack_bf16(v[j], 0) & 0xffff);
}
__global__ void ref_attention(float* out, const float* qkv, const int* pos, const int* slots, const int* table, int max_pages, int shift, const bf16* kc, const bf16* vc, u64 positions) {
  extern __shared__ float sc[]; int r = blockIdx.x, h = blockIdx.y, kv = h / GROUP, n = pos[r] + 1; const float* q = qkv + (size_t)r * (Q_HEADS + 2 * KV_HEADS) * 128 + h * 128;
  for (int t = threadIdx.x; t < n; t += blockDim.x) { size_t at = ((u64)kv * positions + ((u64)table[slots[r] * max_pages + (t >> shift)] << shift) + (t & ((1 << shift) - 1))) * 128; float s = 0; for (int j = 0; j < 128; j++) s += q[j] * bf(kc[at + j]); sc[t] = s * 0.08838834764831845f; }
  __syncthreads(); float m = -1e30f; for (int t = 0; t < n; t++) m = fmaxf(m, sc[t]); float l = 0, o = 0; int j = threadIdx.x;
  for (int t = 0; t < n; t++) { size_t at = ((u64)kv * positions + ((u64)table[slots[r] * max_pages + (t >> shift)] << shift) + (t & ((1 << shift) - 1))) * 128; float e = expf(sc[t] - m); l += e; o += e * bf(vc[at + j]); }
  out[(size_t)r * ATTENTION + h * 128 + j] = o / l;
}
__global__ void ref_silu(float* y, const float* gu, int n) { int r = blockIdx.x; for (int j = threadIdx.x; j < n; j += blockDim.x) { float g = gu[(size_t)r * 2 * n + j]; y[(size_t)r * n + j] = g / (1 + expf(-g)) * gu[(size_t)r * 2 * n + n + j]; } }

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Encode encode;
static TensorMap map3(const void* p, u64 columns, u64 rows, u32 box_rows, u32 box_tiles) {
  CUtensorMap m; cuuint64_t dim[3] = {64, rows, columns / 64}, stride[2] = {columns * 2, 128}; cuuint32_t box[3] = {64, box_rows, box_tiles}, es[3] = {1, 1, 1};
  CUresult rc = encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void*)p, dim, stride, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (rc) { printf("encode %d rows %u tiles %u\n", rc, box_rows, box_tiles); exit(1); }
  TensorMap t; memcpy(&t, &m, 128); return t;
}
template <class T> T* make(size_t n) { T* p; CK(cudaMalloc(&p, n * sizeof(T))); CK(cudaMemset(p, 0, n * sizeof(T))); return p; }
template <class T> T* up(const std::vector<T>& v) { T* p; CK(cudaMalloc(&p, v.size() * sizeof(T))); CK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice)); return p; }

int main(int argc, char** argv) {
  const int check_layers = 3, L = argc > 1 ? atoi(argv[1]) : 36; void* fn; cudaDriverEntryPointQueryResult qr; CK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &fn, cudaEnableDefault, &qr)); encode = (Encode)fn;
  const int page = 64, shift = 6, max_pages = 1024, n_slots = BATCH + 1, n_pages = 4500; const u64 positions = (u64)n_pages * page;
  const size_t wq = (size_t)(ATTENTION + 2 * KV_HEADS * 128) * HIDDEN, wo = (size_t)HIDDEN * ATTENTION, wg = (size_t)2 * INTERMEDIATE * HIDDEN, wd = (size_t)HIDDEN * INTERMEDIATE;
  int made = 0; auto mk = [&](size_t n, float sc, float mean) { bf16* w = make<bf16>(n); fill<<<4096, 256>>>(w, n, ++made + 11, sc, mean); return w; };
  bf16* embedding = mk((size_t)VOCABULARY * HIDDEN, .02f, 0); const size_t ns = 2 * HIDDEN + 256; bf16* norms = mk(L * ns + HIDDEN, .1f, 1);
  const u64 layer_stride = (u64)KV_HEADS * positions * 128; bf16* kc = make<bf16>(layer_stride * L); bf16* vc = make<bf16>(layer_stride * L);
  bf16 *wqs = mk(wq * L, .02f, 0), *wos = mk(wo * L, .02f, 0), *wgs = mk(wg * L, .02f, 0), *wds = mk(wd * L, .02f, 0);
  Parameters p = {}; p.x_in = make<bf16>(BATCH * HIDDEN); p.x_post = make<bf16>(BATCH * HIDDEN); p.attention = make<bf16>(BATCH * ATTENTION); p.inter = make<bf16>(BATCH * INTERMEDIATE); p.qkv = make<float>(BATCH * QKV);
  std::vector<float2> rope((size_t)65536 * 64); for (int i = 0; i < 65536; i++) for (int j = 0; j < 64; j++) { double a = i * pow(1e6, -j / 64.0); rope[(size_t)i * 64 + j] = make_float2(cos(a), sin(a)); }
  p.embedding = embedding; p.norms = norms; p.rope = up(rope); p.k_cache = kc; p.v_cache = vc; p.cache_layer_stride = layer_stride; p.cache_positions = positions; p.squares = make<float>(2 * BLOCKS * BATCH);
  p.max_splits = 256; p.partial_out = make<float>((size_t)BATCH * KV_HEADS * p.max_splits * GROUP * 128); p.partial_stat = make<float>((size_t)BATCH * KV_HEADS * p.max_splits * GROUP * 2); p.head_part = make<float4>(BLOCKS * BATCH);
  const int n_counters = 192 + BATCH * KV_HEADS; p.counters = make<u32>(n_counters); p.page_shift = shift; p.max_pages = max_pages; p.epsilon = 1e-6f; p.attention_scale = 0.08838834764831845f * 1.4426950408889634f;
  p.logprobs = make<float>(BATCH); p.sampled = make<int>(BATCH); int* positions_d = make<int>(BATCH); int* tokens_d = make<int>(BATCH); p.positions = positions_d; p.tokens = tokens_d; float* residual = make<float>(BATCH * HIDDEN);
  std::vector<int> perm(n_pages - 1); for (int i = 0; i < n_pages - 1; i++) perm[i] = i + 1; srand(5); for (int i = n_pages - 2; i > 0; i--) std::swap(perm[i], perm[rand() % (i + 1)]);
  CK(cudaFuncSetAttribute(decode_step, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
  int sms; CK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0)); printf("BATCH %d shared %d W_SLOTS %d sums %d x %d tiles qkv %d o %d down %d, %d multiprocessors\n", BATCH, SHARED_BYTES, W_SLOTS, SUM_BUFFERS, SUMS_BYTES, QKV_TILES, O_TILES, DOWN_TILES, sms); if (sms < BLOCKS) return 1;
  p.maps.qkv = map3(wqs, HIDDEN, (u64)QKV * L, QKV_ROWS, QKV_TILES); p.maps.o = map3(wos, ATTENTION, (u64)HIDDEN * L, HIDDEN_ROWS, O_TILES); p.maps.gate_up = map3(wgs, HIDDEN, 2ull * INTERMEDIATE * L, GATE_ROWS, 1); p.maps.down = map3(wds, INTERMEDIATE, (u64)HIDDEN * L, HIDDEN_ROWS, DOWN_TILES);
  p.maps.head = map3(embedding, HIDDEN, VOCABULARY, HEAD_ROWS, 1); p.maps.k = map3(kc, 128, (u64)L * KV_HEADS * positions, 32, 2); p.maps.v = map3(vc, 128, (u64)L * KV_HEADS * positions, 32, 2);
  p.maps.x_in = map3(p.x_in, HIDDEN, BATCH, BATCH, X_TILES); p.maps.attention = map3(p.attention, ATTENTION, BATCH, BATCH, X_TILES); p.maps.x_post = map3(p.x_post, HIDDEN, BATCH, BATCH, X_TILES); p.maps.inter = map3(p.inter, INTERMEDIATE, BATCH, BATCH, X_TILES);
  std::vector<int> pos, tok;
  auto setup = [&](int rows, int lo, int hi) { pos.assign(BATCH, 0); tok.assign(BATCH, 0); std::vector<int> table((size_t)n_slots * max_pages, 0), slots(BATCH, 0); int next = 0;
    for (int i = 0; i < rows; i++) { slots[i] = n_slots - 1 - i; pos[i] = lo + (hi > lo ? rand() % (hi - lo) : 0); tok[i] = rand() % VOCABULARY; for (int j = 0; j <= (pos[i] + 64) / page; j++) table[(size_t)slots[i] * max_pages + j] = perm[next++ % perm.size()]; }
    static int *dt = nullptr, *ds = nullptr; if (dt) { cudaFree(dt); cudaFree(ds); } dt = up(table); ds = up(slots); p.page_table = dt; p.slots = ds; CK(cudaMemcpy(positions_d, pos.data(), BATCH * 4, cudaMemcpyHostToDevice)); CK(cudaMemcpy(tokens_d, tok.data(), BATCH * 4, cudaMemcpyHostToDevice)); p.n_rows = rows; };
  auto launch = [&]() { CK(cudaMemsetAsync(p.counters, 0, n_counters * 4)); decode_step<<<BLOCKS, THREADS, SHARED_BYTES>>>(p); CK(cudaGetLastError()); };
  // --- check ---------------------------------------------------------------------------------------------------------
  float *x = make<float>(BATCH * HIDDEN), *xn = make<float>(BATCH * HIDDEN), *qkv = make<float>(BATCH * QKV), *at = make<float>(BATCH * ATTENTION), *gu = make<float>((size_t)BATCH * 2 * INTERMEDIATE), *act = make<float>((size_t)BATCH * INTERMEDIATE), *logits = make<float>((size_t)BATCH * VOCABULARY);
  bf16* kr = make<bf16>(layer_stride * check_layers); bf16* vr = make<bf16>(layer_stride * check_layers);
  int failed = 0;
  for (int trial = 0; trial < (getenv("SKIP") ? 0 : 6); trial++) {
    const int rows = trial == 0 ? BATCH : trial == 1 ? 1 : 1 + rand() % BATCH, lo = trial == 3 ? 0 : 1, hi = trial == 2 ? 3000 : trial == 3 ? 3 : 600; p.split_tiles = trial & 1 ? 4 : 8; p.n_layers = check_layers;
    setup(rows, lo, hi); p.residual_out = residual;
    fill<<<2048, 256>>>(kc, layer_stride * check_layers, 100 + trial, 1.f, 0); fill<<<2048, 256>>>(vc, layer_stride * check_layers, 200 + trial, 1.f, 0); CK(cudaMemcpy(kr, kc, layer_stride * check_layers * 2, cudaMemcpyDeviceToDevice)); CK(cudaMemcpy(vr, vc, layer_stride * check_layers * 2, cudaMemcpyDeviceToDevice));
    ref_embed<<<rows, 256>>>(x, embedding, tokens_d);
    auto mm = [&](float* y, const float* a, const bf16* w, int n, int k, bool add) { ref_matmul<<<(n + 7) / 8, 256>>>(y, a, w, rows, n, k, add); };
    for (int l = 0; l < check_layers; l++) { const bf16* nw = norms + l * ns; ref_norm<<<rows, 32>>>(xn, x, nw, HIDDEN, 1e-6f); mm(qkv, xn, wqs + l * wq, QKV, HIDDEN, false);
      ref_heads<<<dim3(rows, Q_HEADS + 2 * KV_HEADS), 32>>>(qkv, nw + 2 * HIDDEN, nw + 2 * HIDDEN + 128, p.rope, positions_d, p.slots, p.page_table, max_pages, shift, kr + l * layer_stride, vr + l * layer_stride, positions, 1e-6f);
      ref_attention<<<dim3(rows, Q_HEADS), 128, 16384>>>(at, qkv, positions_d, p.slots, p.page_table, max_pages, shift, kr + l * layer_stride, vr + l * layer_stride, positions);
      mm(x, at, wos + l * wo, HIDDEN, ATTENTION, true); ref_norm<<<rows, 32>>>(xn, x, nw + HIDDEN, HIDDEN, 1e-6f); mm(gu, xn, wgs + l * wg, 2 * INTERMEDIATE, HIDDEN, false); ref_silu<<<rows, 256>>>(act, gu, INTERMEDIATE); mm(x, act, wds + l * wd, HIDDEN, INTERMEDIATE, true); }
    ref_norm<<<rows, 32>>>(xn, x, norms + check_layers * ns, HIDDEN, 1e-6f); mm(logits, xn, embedding, VOCABULARY, HIDDEN, false); CK(cudaDeviceSynchronize());
    CK(cudaMemset(residual, 0xff, BATCH * HIDDEN * 4)); launch(); CK(cudaDeviceSynchronize());
    std::vector<float> a(rows * HIDDEN), b(rows * HIDDEN), lg((size_t)rows * VOCABULARY), lp(BATCH); std::vector<int> tk(BATCH); CK(cudaMemcpy(a.data(), x, a.size() * 4, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(b.data(), residual, b.size() * 4, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(lg.data(), logits, lg.size() * 4, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(lp.data(), p.logprobs, BATCH * 4, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(tk.data(), p.sampled, BATCH * 4, cudaMemcpyDeviceToHost));
    double worst = 0, worst_lp = 0; int same = 0, near = 0; for (int r = 0; r < rows; r++) { double e = 0, n = 0; for (int j = 0; j < HIDDEN; j++) { double d = a[r * HIDDEN + j] - b[r * HIDDEN + j]; e += d * d; n += (double)a[r * HIDDEN + j] * a[r * HIDDEN + j]; } e = sqrt(e / n); if (!(e <= worst)) worst = e;
      const float* q = &lg[(size_t)r * VOCABULARY]; int best = 0; double m = -1e30, s = 0; for (int j = 0; j < VOCABULARY; j++) if (q[j] > m) { m = q[j]; best = j; } for (int j = 0; j < VOCABULARY; j++) s += exp(q[j] - m); same += tk[r] == best; if (tk[r] >= 0 && tk[r] < VOCABULARY) { near += q[tk[r]] > m - 0.05; double d = fabs(lp[r] - (q[tk[r]] - m - log(s))); if (!(d <= worst_lp)) worst_lp = d; } }
    printf("check rows %d context %d..%d split %d: worst row error %.2e, same token %d, near-best %d, worst log-prob error %.2e\n", rows, lo, hi, p.split_tiles, worst, same, near, worst_lp); fflush(stdout); failed += !(worst < 2e-2) || near != rows;
    CK(cudaMemcpy(positions_d, pos.data(), BATCH * 4, cudaMemcpyHostToDevice)); CK(cudaMemcpy(tokens_d, tok.data(), BATCH * 4, cudaMemcpyHostToDevice)); launch(); CK(cudaDeviceSynchronize());
    std::vector<float> again(rows * HIDDEN); CK(cudaMemcpy(again.data(), residual, again.size() * 4, cudaMemcpyDeviceToHost)); const bool equal = !memcmp(again.data(), b.data(), b.size() * 4); printf("  second run %s\n", equal ? "bit-identical" : "DIFFERS"); failed += !equal;
  }
  printf(failed ? "CHECK FAILED\n" : "check passed\n"); if (failed && argc <= 2) return 1;
  // --- time ----------------------------------------------------------------------------------------------------------
  p.n_layers = L; p.residual_out = nullptr; fill<<<4096, 256>>>(kc, layer_stride * L, 7, 1.f, 0); fill<<<4096, 256>>>(vc, layer_stride * L, 8, 1.f, 0);
  double wbytes = 2.0 * (L * (double)(wq + wo + wg + wd) + (double)VOCABULARY * HIDDEN); cudaEvent_t e0, e1; cudaEventCreate(&e0); cudaEventCreate(&e1);
  std::vector<int> row_list = BATCH == 8 ? std::vector<int>{1, 8} : std::vector<int>{BATCH};
  u64* trace = make<u64>(100000); std::vector<int> contexts = {16, 416}; if (getenv("LONG")) contexts = {416, 2000};
  for (int rows : row_list) for (int context : contexts) for (int split : {2, 8}) { if (rows * ((context + 127) / 64) > n_pages) continue; p.split_tiles = split; std::vector<float> ts; p.trace = nullptr;
    setup(rows, context, context); for (int i = 0; i < 25; i++) { cudaEventRecord(e0); launch(); cudaEventRecord(e1); CK(cudaDeviceSynchronize()); float ms; cudaEventElapsedTime(&ms, e0, e1); if (i > 4) ts.push_back(ms); }
    std::sort(ts.begin(), ts.end()); double bytes = wbytes + (double)rows * context * L * KV_HEADS * 512; printf("rows %3d context %5d split %2d: %.3f ms median, %.3f best, floor %.3f ms (%.0f %%), %.0f tok/s\n", rows, context, split, ts[ts.size() / 2], ts[0], bytes / 4.39e9, 100 * bytes / 4.39e9 / ts[ts.size() / 2], rows / ts[ts.size() / 2] * 1e3); fflush(stdout);
    p.trace = trace; launch(); CK(cudaDeviceSynchronize()); std::vector<u64> t(1 + L * 8 + 2); CK(cudaMemcpy(t.data(), trace, t.size() * 8, cudaMemcpyDeviceToHost));
    // events: embed; per layer: qkv wait, qkv published, o sums, o published, inter wait, inter published, down sums, down published; head wait
    double d[8] = {}; for (int l = 1; l < L; l++) for (int i = 0; i < 8; i++) d[i] += (double)(t[1 + l * 8 + i] - t[l * 8 + i]) / (L - 1); printf("  wall %.0f us, head %.0f us; mean cycles: wait hidden %.0f, qkv %.0f, attention+o sums %.0f, o publish %.0f, wait o %.0f, inter %.0f, down sums %.0f, publish %.0f\n", (t[L * 8] - t[0]) / 1.98e3, (t[L * 8 + 2] - t[L * 8]) / 1.98e3, d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]); fflush(stdout); }
}
