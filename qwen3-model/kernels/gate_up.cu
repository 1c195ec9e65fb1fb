// Gate and up of one number of batch rows and one height of tiles: see gate_up.cuh.
#include "gate_up.cuh"

extern "C" __global__ void __launch_bounds__(GateUpMemory<OF_COLUMNS, OF_TILE, OF_W_SLOTS, OF_X_SLOTS>::THREADS, 1)
    wide_gate_up(const __grid_constant__ GateUpParams p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    gate_up<OF_COLUMNS, OF_TILE, OF_W_SLOTS, OF_X_SLOTS, OF_W_FLYING>(p, shared);
}
