// The kernels of one number of batch rows, one for each kind of product: see wide_product.cuh.
#include "wide_product.cuh"

#define PRODUCT(kind, p, qkv)                                                                                      \
    extern __shared__ __align__(1024) unsigned char shared[];                                                      \
    wide_product<kind, OF_COLUMNS, OF_W_SLOTS, OF_X_SLOTS, OF_W_FLYING>(p, qkv, shared)
#define KERNEL(name, kind)                                                                                         \
    extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) name(const __grid_constant__ WideParams p) {  \
        PRODUCT(kind, p, nullptr);                                                                                 \
    }

KERNEL(wide_residual, TO_RESIDUAL)
#if OF_COLUMNS <= 64 // with more rows others are faster
KERNEL(wide_gated, TO_GATED)
KERNEL(wide_bf16, TO_BF16)
KERNEL(wide_f32, TO_F32)

struct WideHeadsParams {
    WideParams product;
    QkvRopeWriteParams qkv;
};
extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) wide_heads(const __grid_constant__ WideHeadsParams p) {
    PRODUCT(TO_HEADS, p.product, &p.qkv);
}
#endif
