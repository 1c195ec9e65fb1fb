// QKV with what follows it, for one form: see qkv_product.cuh.
#include "qkv_product.cuh"

#define MEMORY QkvProductMemory<OF_COLUMNS, OF_W_SLOTS, OF_X_SLOTS>

extern "C" __global__ void __launch_bounds__(MEMORY::THREADS, 1) qkv_product(const __grid_constant__ QkvProductParams p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    qkv_product<OF_COLUMNS, OF_W_SLOTS, OF_X_SLOTS, OF_W_FLYING>(p, shared);
}
