//! Tests on a GPU: `cargo test --release -p cuda-graphs --features cuda -- --include-ignored`, or
//! `scripts/gpu-tests.sh`. They need a driver, NVRTC and cuBLASLt.
#![cfg(feature = "cuda")]

mod buffers;
mod capture;
mod interference;
mod kernels;
mod matmul;
mod plain_product;
mod support;

#[test]
fn without_a_gpu_opening_a_device_is_a_typed_error_that_says_what_to_do() {
    use cuda_graphs::{Device, Error};
    match Device::open(0) {
        Ok(device) => assert!(device.info().compute_capability.0 >= 8),
        Err(Error::NoDriver { advice, .. }) => assert!(advice.contains("driver"), "{advice}"),
        Err(
            Error::NoDevice { ordinal: 0, count: 0 }
            | Error::DriverTooOld { .. }
            | Error::UnsupportedDevice { .. },
        ) => {}
        Err(other) => panic!("unexpected error {other:?}"),
    }
}

#[test]
fn the_kernels_of_these_tests_compile_for_every_architecture() {
    cuda_graphs::assert_kernels_compile(&support::kernel_specs());
}
