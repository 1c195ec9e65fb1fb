use std::time::Instant;

use cuda_graphs::{
    DeviceBuffer, Error, LaunchConfig, Module, Swizzle, TensorElement, TensorMap, TensorMapSpec,
};

use crate::support::{
    Add, Barrier, LoadBox, Shift, compiler, kernel, kernel_specs, module, stream, tma_kernel,
};

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_kernel_is_compiled_for_the_device_launched_and_right() {
    let stream = stream();
    let add = kernel(&stream, "add");
    let x = DeviceBuffer::from_slice(&stream, &(0..1000u32).collect::<Vec<_>>()).unwrap();
    let params = Add {
        x: x.ptr(),
        n: 999,
        value: 5,
    };
    // SAFETY: `x` has more than `n` elements and outlives the download.
    unsafe { add.launch(&stream, &LaunchConfig::new(4, 256), &params) }.unwrap();
    let mut expected: Vec<u32> = (5..1005).collect();
    expected[999] = 999;
    assert_eq!(stream.download(&x).unwrap(), expected);
    assert!(add.usage().registers > 0 && add.blocks_per_multiprocessor(256, 0).unwrap() > 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn launches_that_cannot_be_right_are_refused_before_the_driver_sees_them() {
    let stream = stream();
    let add = kernel(&stream, "add");
    let good = Add { x: 0, n: 0, value: 0 };
    let refused = |config: LaunchConfig, why: &str| {
        // SAFETY: refused before anything runs.
        let result = unsafe { add.launch(&stream, &config, &good) };
        let Err(Error::InvalidArgument { why: got, .. }) = result else {
            panic!("{config:?}: {result:?}")
        };
        assert!(got.contains(why), "{got}");
    };
    refused(LaunchConfig::new(0, 32), "must not be empty");
    refused(LaunchConfig::new(1, 2048), "2048 threads");
    refused(
        LaunchConfig::new(1, 32).dynamic_shared_bytes(1 << 20),
        "shared memory",
    );
    let one = LaunchConfig::new(1, 32);
    // SAFETY: refused before anything runs.
    let wrong_size = unsafe { add.launch(&stream, &one, &7u64) };
    assert!(
        matches!(wrong_size, Err(Error::InvalidArgument { .. })),
        "{wrong_size:?}"
    );
    // SAFETY: as above.
    let too_large = unsafe { add.launch(&stream, &one, &[0u64; 1024]) };
    assert!(
        matches!(too_large, Err(Error::InvalidArgument { .. })),
        "{too_large:?}"
    );
    // SAFETY: the kernel has no parameters and does nothing.
    unsafe { kernel(&stream, "nothing").launch(&stream, &one, &()) }.unwrap();
    stream.synchronize().unwrap();
    let Err(Error::UnknownSymbol { available, .. }) = module(&stream).kernel("missing") else {
        panic!()
    };
    assert!(available.contains(&"add".to_string()));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn dynamic_shared_memory_above_48_kib_is_opted_in() {
    let stream = stream();
    let n = 24_576;
    let x = DeviceBuffer::from_slice(&stream, &(0..n).collect::<Vec<u32>>()).unwrap();
    let config = LaunchConfig::new(1, 1024).dynamic_shared_bytes(n * 4);
    let params = Add {
        x: x.ptr(),
        n,
        value: 0,
    };
    // SAFETY: `x` has `n` elements, and so has the shared memory.
    unsafe { kernel(&stream, "reverse").launch(&stream, &config, &params) }.unwrap();
    assert_eq!(stream.download(&x).unwrap(), (0..n).rev().collect::<Vec<_>>());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_cooperative_launch_has_all_blocks_resident() {
    let stream = stream();
    let barrier = kernel(&stream, "barrier");
    let blocks = barrier.blocks_per_multiprocessor(64, 0).unwrap() * stream.device().info().multiprocessors;
    let counter = DeviceBuffer::<u32>::zeroed(stream.device(), 1).unwrap();
    let seen = DeviceBuffer::<u32>::zeroed(stream.device(), blocks as usize).unwrap();
    let params = Barrier {
        counter: counter.ptr(),
        seen: seen.ptr(),
    };
    let config = LaunchConfig::new(blocks, 64).cooperative(true);
    // SAFETY: both buffers are as long as the kernel writes.
    unsafe { barrier.launch(&stream, &config, &params) }.unwrap();
    assert_eq!(stream.download(&seen).unwrap(), vec![blocks; blocks as usize]);
    // One more than fit cannot be resident at once.
    // SAFETY: refused by the driver.
    let too_many = unsafe {
        barrier.launch(
            &stream,
            &LaunchConfig::new(blocks + 1, 64).cooperative(true),
            &params,
        )
    };
    assert!(
        matches!(
            too_many,
            Err(Error::Driver {
                call: "cuLaunchKernelEx",
                ..
            })
        ),
        "{too_many:?}"
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn clusters_are_formed_where_there_are_clusters() {
    let stream = stream();
    let rank = kernel(&stream, "cluster_rank");
    let x = DeviceBuffer::<u32>::filled_with_bytes(stream.device(), 32, 0xff).unwrap();
    let params = Add {
        x: x.ptr(),
        n: 32,
        value: 0,
    };
    for size in [2u32, 4, 16] {
        let config = LaunchConfig::new(32, 32).cluster([size, 1, 1]);
        // SAFETY: `x` has an element per block.
        let launched = unsafe { rank.launch(&stream, &config, &params) };
        if !stream.device().info().has_clusters() {
            assert!(matches!(launched, Err(Error::InvalidArgument { .. })));
            continue;
        }
        launched.unwrap();
        assert_eq!(
            stream.download(&x).unwrap(),
            (0..32).map(|block| block % size).collect::<Vec<_>>()
        );
    }
    // SAFETY: refused before anything runs.
    let odd = unsafe { rank.launch(&stream, &LaunchConfig::new(32, 32).cluster([3, 1, 1]), &params) };
    assert!(matches!(odd, Err(Error::InvalidArgument { .. })));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn early_starting_kernels_still_see_what_the_ones_ahead_wrote() {
    let stream = stream();
    let shift = kernel(&stream, "shift");
    let n = 1 << 20;
    let start: Vec<u32> = (0..n).map(|i| i * 3).collect();
    let run = |programmatic: bool| {
        let buffers = [
            DeviceBuffer::from_slice(&stream, &start).unwrap(),
            DeviceBuffer::<u32>::zeroed(stream.device(), n as usize).unwrap(),
        ];
        let config = LaunchConfig::new(n / 256, 256).programmatic(programmatic);
        for step in 0..40u32 {
            let (from, to) = (&buffers[step as usize % 2], &buffers[(step as usize + 1) % 2]);
            let params = Shift {
                from: from.ptr(),
                to: to.ptr(),
                n,
                by: step * 7919,
            };
            // SAFETY: both buffers have `n` elements and outlive the download.
            unsafe { shift.launch(&stream, &config, &params) }.unwrap();
        }
        stream.download(&buffers[0]).unwrap()
    };
    let by: u32 = (0..40).map(|step| step * 7919).sum();
    let expected: Vec<u32> = (0..n).map(|i| (i + by) % n * 3 + 40).collect();
    assert_eq!(run(false), expected);
    assert_eq!(run(true), expected);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_global_of_a_module_can_be_found_and_missing_ones_are_told() {
    let stream = stream();
    let module = module(&stream);
    let (address, bytes) = module.global("table").unwrap();
    assert!(address != 0 && bytes == 16);
    assert!(matches!(
        module.global("missing"),
        Err(Error::UnknownSymbol { kind: "global", .. })
    ));
    let x = DeviceBuffer::<u32>::zeroed(stream.device(), 4).unwrap();
    let params = Add {
        x: x.ptr(),
        n: 4,
        value: 10,
    };
    // SAFETY: `x` has four elements.
    unsafe {
        module
            .kernel("read_table")
            .unwrap()
            .launch(&stream, &LaunchConfig::new(1, 32), &params)
    }
    .unwrap();
    drop(module);
    assert_eq!(stream.download(&x).unwrap(), [10, 20, 30, 40]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_tensor_map_brings_the_box_it_describes() {
    let stream = stream();
    let (rows, columns) = (40u64, 256u64);
    let values: Vec<u16> = (0..rows * columns).map(|i| i as u16).collect();
    let matrix = DeviceBuffer::from_slice(&stream, &values).unwrap();
    let spec = TensorMapSpec {
        element: TensorElement::Bf16,
        dims: &[columns, rows],
        strides: &[columns * 2],
        box_dims: &[64, 8],
        swizzle: Swizzle::None,
    };
    let map = TensorMap::tiled(matrix.as_slice(), &spec);
    if !stream.device().info().has_tma() {
        assert!(matches!(map, Err(Error::InvalidArgument { .. })));
        return;
    }
    let map = map.unwrap();
    let out = DeviceBuffer::<u16>::filled_with_bytes(stream.device(), 8 * 64, 0xff).unwrap();
    let load = tma_kernel(&stream);
    for (column, row) in [(0, 0), (64, 16), (192, 36)] {
        let params = LoadBox {
            map,
            out: out.ptr(),
            column,
            row,
            rest: [0; 6],
        };
        // SAFETY: the matrix is as described, and `out` as long as a box.
        unsafe { load.launch(&stream, &LaunchConfig::new(1, 128), &params) }.unwrap();
        let expected: Vec<u16> = (0..8)
            .flat_map(|r| (0..64).map(move |c| (row as u64 + r, column as u64 + c)))
            // Rows beyond the matrix read as 0.
            .map(|(r, c)| if r < rows { (r * columns + c) as u16 } else { 0 })
            .collect();
        assert_eq!(stream.download(&out).unwrap(), expected, "box at {column}, {row}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_warm_cache_loads_all_kernels_in_well_under_a_second() {
    let stream = stream();
    let folder = tempfile::tempdir().unwrap();
    let device = stream.device();
    let specs: Vec<_> = kernel_specs()
        .into_iter()
        .filter(|spec| spec.archs.contains(device.arch()))
        .collect();
    let start = Instant::now();
    compiler(folder.path()).load_all(device, &specs).unwrap();
    let cold = start.elapsed();
    let start = Instant::now();
    let modules = compiler(folder.path()).load_all(device, &specs).unwrap();
    let warm = start.elapsed();
    eprintln!("cold {cold:?}, warm {warm:?}");
    assert_eq!(modules.len(), specs.len());
    assert!(warm.as_millis() < 200, "{warm:?}");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_cubin_of_another_architecture_is_refused() {
    let stream = stream();
    let folder = tempfile::tempdir().unwrap();
    let other = if stream.device().info().compute_capability.0 == 8 {
        cuda_graphs::Arch::SM_90A
    } else {
        cuda_graphs::Arch::SM_80
    };
    let cubin = compiler(folder.path())
        .compile_for(&kernel_specs()[0], other)
        .unwrap();
    assert!(matches!(
        Module::load(stream.device(), &cubin),
        Err(Error::InvalidArgument { .. })
    ));
}
