//! The products in whole tiles, against an f64 reference and against each other.
#![cfg(feature = "cuda")]

mod gpu_support;

use cuda_graphs::{DeviceBuffer, Matmul, MatmulDims, MatmulOptions};
use gpu_support::products::{gated, multiply};
use gpu_support::{Gpu, assert_twice, bf16s, rng, round};
use half::bf16;
use qwen3_model::launch::{WholeKind, WholeProduct, WholeProductOp};
use rand::Rng;

/// One row more than the product's, which is not theirs, stays as it is.
fn run_whole(gpu: &Gpu, kernels: &WholeProduct, n: usize, weight: &[bf16], x: &[bf16]) -> Vec<bf16> {
    let (rows, width) = (x.len() * n / weight.len(), kernels.kind().width(n));
    let (weight, x) = (gpu.put(weight), gpu.put(x));
    let out: DeviceBuffer<bf16> = gpu.poisoned((rows + 1) * width);
    let op = WholeProductOp {
        rows,
        weight: weight.as_slice(),
        input: x.as_slice(),
        out: out.slice(..rows * width).unwrap(),
    };
    kernels.run(&gpu.stream, &op).unwrap();
    let mut out = gpu.get(&out);
    assert!(
        out[rows * width..].iter().all(|x| x.is_nan()),
        "beyond the last row"
    );
    out.truncate(rows * width);
    out
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn whole_products_agree_with_the_reference_and_with_each_other() {
    let gpu = Gpu::open();
    let mut rng = rng(6);
    // Racecheck reports the library's own kernels, and fails where kernels of clusters are left out by name.
    let library = (!cuda_graphs::few_cases()).then(|| {
        let options = MatmulOptions {
            row_invariant: true,
            ..MatmulOptions::default()
        };
        Matmul::with_options(&gpu.stream, &options).unwrap()
    });
    // Fewer tiles than blocks; one a block, full or not; two a block; one chunk and many.
    for (n, k) in cuda_graphs::cases([(72, 64), (408, 320), (2560, 1600), (6144, 512), (24_008, 64)]) {
        let weight = bf16s(&mut rng, n * k, 1.0 / (k as f32).sqrt());
        for kind in [WholeKind::Gated, WholeKind::Plain] {
            let most = kind.most_rows();
            let loaded = WholeProduct::load(&gpu.compiler, &gpu.device, kind, n, most).unwrap();
            let kernels = loaded.expect("a device of compute capability 9.0");
            let x = bf16s(&mut rng, most * k, 1.0);
            let whole = run_whole(&gpu, &kernels, n, &weight, &x);
            let as_f64: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
            let exact = multiply(&as_f64, &weight, k);
            let plain: Vec<f64> = exact.iter().map(|&x| round(x)).collect();
            let what = format!("{kind:?} of {n} x {k}");
            match kind {
                WholeKind::Gated => {
                    let (plain, exact) = (gated(&plain, n, round), gated(&exact, n, |x| x));
                    assert_twice(&what, &whole, &plain, &exact);
                }
                WholeKind::Plain => assert_twice(&what, &whole, &plain, &exact),
            }
            // The forms differ in how many rows they pad to; none may show in a row's bits.
            let width = kind.width(n);
            for rows in kernels
                .columns()
                .flat_map(|columns| [columns, columns - 1, columns / 3])
            {
                let from = rng.random_range(0..=most - rows);
                let part = run_whole(&gpu, &kernels, n, &weight, &x[from * k..][..rows * k]);
                let expected = &whole[from * width..][..rows * width];
                assert!(part == expected, "{what}, {rows} rows from {from}");
            }
            let (WholeKind::Plain, Some(library)) = (kind, &library) else {
                continue;
            };
            // What `make_batch_invariant` tries for itself, and does without where it is not so.
            let (w, x, y) = (gpu.put(&weight), gpu.put(&x), gpu.poisoned::<bf16>(most * n));
            let dims = MatmulDims { m: most, n, k };
            library.multiply(dims, &x, &w, &y, None).unwrap();
            let other = gpu.get(&y).iter().zip(&whole).filter(|(a, b)| a != b).count();
            println!(
                "{what}: {other} of {} elements have other bits by cuBLASLt",
                whole.len()
            );
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn whole_products_of_lengths_that_do_not_fit_are_refused() {
    let gpu = Gpu::open();
    let (n, k) = (64, 64);
    let load = |n| WholeProduct::load(&gpu.compiler, &gpu.device, WholeKind::Plain, n, 64).unwrap();
    assert!(load(60).is_none());
    let kernels = load(n).unwrap();
    let (weight, x) = (gpu.poisoned::<bf16>(n * k), gpu.poisoned::<bf16>(65 * k));
    let out = gpu.poisoned::<bf16>(65 * n);
    let run = |rows: usize, weights: usize, outputs: usize| {
        let op = WholeProductOp {
            rows,
            weight: weight.slice(..weights).unwrap(),
            input: x.slice(..rows * k).unwrap(),
            out: out.slice(..outputs).unwrap(),
        };
        kernels.run(&gpu.stream, &op)
    };
    assert!(run(1, n * k, n).is_ok());
    assert!(run(65, n * k, 65 * n).is_err(), "too many rows");
    assert!(run(0, n * k, 0).is_err(), "no rows");
    assert!(run(1, n * k - 64, n).is_err(), "a short weight");
    assert!(run(1, n * k, 2 * n).is_err(), "a long output");
}
