// Products whose inner dimension is shared by the blocks of a cluster, for one form: see cluster_product.cuh.
#include "cluster_product.cuh"

#define THREADS ClusterMemory<OF_COLUMNS, OF_TILE, OF_SPLITS, OF_HALVES, OF_W_SLOTS, OF_X_SLOTS>::THREADS

extern "C" __global__ void __launch_bounds__(THREADS, 1) cluster_product(const __grid_constant__ ClusterParams p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    cluster_product<OF_COLUMNS, OF_TILE, OF_SPLITS, OF_HALVES, OF_W_SLOTS, OF_X_SLOTS, OF_W_FLYING>(p, shared);
}
