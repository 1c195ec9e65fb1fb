//! Every kernel in every specialisation, for every architecture, held to its limits. Needs NVRTC, not a GPU.
#![cfg(feature = "cuda")]

#[test]
fn kernels_compile_for_every_architecture() {
    cuda_graphs::assert_kernels_compile(&block_mask::cuda::kernel_specs());
}
