//! The device, the kernels, and reproducible numbers.

use cuda_graphs::{
    Archs, CacheLocation, Compiler, CompilerOptions, Device, EntryPoint, Kernel, KernelSpec, Limits, Module,
    Stream, TensorMap,
};

pub(crate) fn stream() -> Stream {
    Stream::new(&Device::open(0).unwrap()).unwrap()
}

/// A compiler with a cache of its own.
pub(crate) fn compiler(folder: &std::path::Path) -> Compiler {
    let options = CompilerOptions {
        cache: CacheLocation::Folder(folder.to_path_buf()),
        ..CompilerOptions::default()
    };
    Compiler::with_options(&options).unwrap()
}

pub(crate) fn module(stream: &Stream) -> Module {
    let folder = tempfile::tempdir().unwrap();
    compiler(folder.path())
        .load(stream.device(), &kernel_specs()[0])
        .unwrap()
}

pub(crate) fn kernel(stream: &Stream, name: &str) -> Kernel {
    module(stream).kernel(name).unwrap()
}

pub(crate) fn tma_kernel(stream: &Stream) -> Kernel {
    let folder = tempfile::tempdir().unwrap();
    let spec = &kernel_specs()[1];
    compiler(folder.path())
        .load(stream.device(), spec)
        .unwrap()
        .kernel("load_box")
        .unwrap()
}

/// Pseudo-random numbers in -1..1, the same each time.
pub(crate) fn numbers(seed: u64, count: usize) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    (0..count).map(move |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    })
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Add {
    pub(crate) x: u64,
    pub(crate) n: u32,
    pub(crate) value: u32,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Shift {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) n: u32,
    pub(crate) by: u32,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Barrier {
    pub(crate) counter: u64,
    pub(crate) seen: u64,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct LoadBox {
    pub(crate) map: TensorMap,
    pub(crate) out: u64,
    pub(crate) column: i32,
    pub(crate) row: i32,
    pub(crate) rest: [u64; 6],
}

const SOURCE: &str = r#"
struct Add { unsigned* x; unsigned n; unsigned value; };
extern "C" __global__ void add(const __grid_constant__ Add p) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.x[i] += p.value;
}

// to[i] = from[(i + by) % n] + 1, waiting for the kernel ahead where that is possible.
struct Shift { const unsigned* from; unsigned* to; unsigned n; unsigned by; };
extern "C" __global__ void shift(const __grid_constant__ Shift p) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.to[i] = p.from[(i + p.by) % p.n] + 1;
}

// Every block waits until all have come; deadlocks unless all are resident at once.
struct Barrier { unsigned* counter; unsigned* seen; };
extern "C" __global__ void barrier(const __grid_constant__ Barrier p) {
    if (threadIdx.x == 0) {
        atomicAdd(p.counter, 1);
        while (*(volatile unsigned*)p.counter < gridDim.x) {}
        p.seen[blockIdx.x] = *(volatile unsigned*)p.counter;
    }
}

// Reverses 24,576 numbers through 96 KiB of dynamic shared memory.
extern "C" __global__ void reverse(const __grid_constant__ Add p) {
    extern __shared__ unsigned shared[];
    for (unsigned i = threadIdx.x; i < p.n; i += blockDim.x) shared[i] = p.x[i];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < p.n; i += blockDim.x) p.x[i] = shared[p.n - 1 - i];
}

// Each block writes its rank in its cluster.
extern "C" __global__ void cluster_rank(const __grid_constant__ Add p) {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    if (threadIdx.x == 0 && blockIdx.x < p.n) p.x[blockIdx.x] = rank;
}

extern "C" __device__ unsigned table[4] = {1, 2, 3, 4};
extern "C" __global__ void read_table(const __grid_constant__ Add p) {
    if (threadIdx.x < 4) p.x[threadIdx.x] = table[threadIdx.x] * p.value;
}

extern "C" __global__ void nothing() {}
"#;

const TMA: &str = r#"
struct LoadBox { alignas(64) char map[128]; unsigned short* out; int column; int row; unsigned long long rest[6]; };
// Brings a box of 64 columns x 8 rows of 16-bit elements and writes it out row after row.
extern "C" __global__ void load_box(const __grid_constant__ LoadBox p) {
    __shared__ alignas(1024) unsigned short box[8 * 64];
    __shared__ alignas(8) unsigned long long arrived;
    unsigned at = (unsigned)__cvta_generic_to_shared(box);
    unsigned barrier = (unsigned)__cvta_generic_to_shared(&arrived);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(8 * 64 * 2) : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            :: "r"(at), "l"((unsigned long long)p.map), "r"(p.column), "r"(p.row), "r"(barrier) : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done) {
        asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared.b64 q, [%1], 0; selp.u32 %0, 1, 0, q; }"
                     : "=r"(done) : "r"(barrier) : "memory");
    }
    for (unsigned i = threadIdx.x; i < 8 * 64; i += blockDim.x) p.out[i] = box[i];
}
"#;

pub(crate) fn kernel_specs() -> Vec<KernelSpec> {
    let mut plain = KernelSpec::new("plain", SOURCE);
    plain.entry_points = [
        "add",
        "shift",
        "barrier",
        "reverse",
        "cluster_rank",
        "read_table",
        "nothing",
    ]
    .map(|name| EntryPoint::new(name, Limits::registers(40)))
    .to_vec();
    let limits = Limits {
        static_shared_bytes: 2048,
        stack_bytes: 16,
        ..Limits::registers(40)
    };
    let tma = KernelSpec::new("tma", TMA)
        .entry("load_box", limits)
        .archs(Archs::From(9, 0));
    vec![plain, tma]
}
