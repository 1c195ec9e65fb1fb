//! The products of decode steps of many rows, against an f64 reference.
#![cfg(feature = "cuda")]
#![expect(clippy::print_stdout, reason = "tests on a GPU print what they measured")]

mod gpu_support;

use cuda_graphs::{DeviceBuffer, few_cases};
use gpu_support::products::{EPS, FORMS, Normed, gated, multiply, to_bf16};
use gpu_support::{Gpu, assert_twice, bf16s, normals, rng, round};
use half::bf16;
use qwen3_model::launch::{
    ClusterProduct, ClusterProductOp, GateUp, GateUpOp, QkvRopeWrite, StageOutput, WIDE_HEAD_DIM,
    WideProductOp, WideProducts,
};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

fn products(gpu: &Gpu) -> WideProducts {
    let loaded = WideProducts::load(&gpu.compiler, &gpu.device, 96).unwrap();
    loaded.expect("a device of compute capability 9.0")
}

fn clusters(gpu: &Gpu, n: usize) -> ClusterProduct {
    let loaded = ClusterProduct::load(&gpu.compiler, &gpu.device, n, 256).unwrap();
    loaded.expect("a device of compute capability 9.0")
}

struct Residual {
    residual: Vec<f32>,
    normed: Vec<bf16>,
    squares: Vec<f32>,
    /// Sums of squares of a row.
    parts: usize,
}

/// The kernels that sum into the residual stream.
enum Summers<'a> {
    Wide(&'a WideProducts),
    Clusters(&'a ClusterProduct),
}

fn run_residual(
    gpu: &Gpu,
    summers: &Summers<'_>,
    rows: usize,
    [weight, x]: [&[bf16]; 2],
    [residual, norm]: [&[f32]; 2],
) -> Residual {
    let n = norm.len();
    let (squares_len, parts) = match summers {
        Summers::Wide(products) => (products.squares_len(rows, n), n.div_ceil(64)),
        Summers::Clusters(products) => (products.squares_len(rows), products.squares_parts(rows)),
    };
    let (residual, norm) = (gpu.put(residual), gpu.put(norm));
    let normed = gpu.poisoned::<bf16>(rows * n);
    let squares = gpu.poisoned::<f32>(squares_len);
    let (weight, input) = (gpu.put(weight), gpu.put(x));
    let (weight, input) = (weight.as_slice(), input.as_slice());
    let output = StageOutput::Residual {
        residual: residual.as_slice(),
        norm: norm.as_slice(),
        normed: normed.as_slice(),
        squares: squares.as_slice(),
    };
    match summers {
        Summers::Wide(products) => {
            let op = WideProductOp {
                rows,
                weight,
                input,
                squares: None,
                eps: EPS,
                output,
                heads: None,
            };
            products.run(&gpu.stream, &op)
        }
        Summers::Clusters(products) => {
            let op = ClusterProductOp {
                rows,
                weight,
                input,
                output,
            };
            products.run(&gpu.stream, &op)
        }
    }
    .unwrap();
    Residual {
        residual: gpu.get(&residual),
        normed: gpu.get(&normed),
        squares: gpu.get(&squares),
        parts,
    }
}

/// A product of `[n, k]` and `rows` random rows into a random residual stream.
fn check_residual(
    gpu: &Gpu,
    summers: &Summers<'_>,
    rng: &mut ChaCha8Rng,
    what: &str,
    [rows, n, k]: [usize; 3],
) {
    let weight = bf16s(rng, n * k, 1.0 / (k as f32).sqrt());
    let x = bf16s(rng, rows * k, 1.0);
    let residual = normals(rng, rows * n, 1.0);
    let norm: Vec<f32> = normals(rng, n, 0.2).iter().map(|x| 1.0 + x).collect();
    let got = run_residual(gpu, summers, rows, [&weight, &x], [&residual, &norm]);
    let x: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
    let product = multiply(&x, &weight, k);
    let sum = |rounding: fn(f64) -> f64| -> Vec<f64> {
        let terms = product.iter().zip(&residual);
        terms
            .map(|(p, &r)| rounding(rounding(*p) + f64::from(r)))
            .collect()
    };
    let (exact, plain) = (sum(|x| x), sum(round));
    let what = format!("{what}, {n} x {k}, {rows} rows");
    println!("{what}: {} parts", got.parts);
    assert_twice(&what, &to_bf16(&got.residual), &plain, &exact);
    let weigh = |x: &[f64], rounding: fn(f64) -> f64| -> Vec<f64> {
        let weighed = x.iter().enumerate();
        weighed
            .map(|(i, x)| rounding(x * f64::from(norm[i % n])))
            .collect()
    };
    assert_twice(
        &format!("{what}, normed"),
        &got.normed,
        &weigh(&plain, round),
        &weigh(&exact, |x| x),
    );
    let columns = got.squares.len() / got.parts;
    for (row, residual) in got.residual.chunks(n).enumerate() {
        let sum: f32 = (0..got.parts).map(|part| got.squares[part * columns + row]).sum();
        let exact: f32 = residual.iter().map(|x| x * x).sum();
        assert!(
            (sum - exact).abs() <= 1e-5 * exact,
            "{what}, row {row}: {sum}, {exact}"
        );
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Gated,
    Bf16,
    F32,
}

/// `[rows, columns of the output]`.
fn run_scaled(
    gpu: &Gpu,
    products: &WideProducts,
    rows: usize,
    kind: Kind,
    weight: &[bf16],
    input: &Normed,
) -> Vec<f32> {
    let k = input.x.len() / rows;
    let n = weight.len() / k / if kind == Kind::Gated { 2 } else { 1 };
    let out_bf16: DeviceBuffer<bf16> = gpu.poisoned(rows * n);
    let out_f32: DeviceBuffer<f32> = gpu.poisoned(rows * n);
    let (weight, x, squares) = (gpu.put(weight), gpu.put(&input.x), gpu.put(&input.squares));
    let op = WideProductOp {
        rows,
        weight: weight.as_slice(),
        input: x.as_slice(),
        squares: Some(squares.as_slice()),
        eps: EPS,
        output: match kind {
            Kind::Gated => StageOutput::Gated(out_bf16.as_slice()),
            Kind::Bf16 => StageOutput::Bf16(out_bf16.as_slice()),
            Kind::F32 => StageOutput::F32(out_f32.as_slice()),
        },
        heads: None,
    };
    products.run(&gpu.stream, &op).unwrap();
    match kind {
        Kind::F32 => gpu.get(&out_f32),
        _ => gpu.get(&out_bf16).iter().map(|x| x.to_f32()).collect(),
    }
}

/// Weights: one chunk; fewer rows than a tile; ends within a tile and within 64 rows; many shares per tile.
const RESIDUAL_SHAPES: [(usize, usize); 5] = [(64, 64), (80, 192), (320, 832), (2560, 128), (1024, 3072)];

fn residual_shapes() -> Vec<(usize, usize)> {
    match few_cases() {
        true => vec![(80, 192), (320, 832)],
        false => RESIDUAL_SHAPES.to_vec(),
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sums_into_the_residual_stream_agree_with_the_reference() {
    let gpu = Gpu::open();
    let products = products(&gpu);
    let mut rng = rng(1);
    for (n, k) in residual_shapes() {
        for rows in cuda_graphs::cases([1, 17, 32, 33, 48, 63, 64, 65, 80, 96]) {
            check_residual(&gpu, &Summers::Wide(&products), &mut rng, "wide", [rows, n, k]);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sums_of_clusters_into_the_residual_stream_agree_with_the_reference() {
    let gpu = Gpu::open();
    let mut rng = rng(11);
    for (n, k) in residual_shapes() {
        let products = clusters(&gpu, n);
        let all = [33, 64, 65, 97, 128, 129, 150, 192, 201, 256];
        // Racecheck looks at a block of clusters for long: one of each kind.
        for &rows in if few_cases() { &[40, 150] } else { &all[..] } {
            check_residual(
                &gpu,
                &Summers::Clusters(&products),
                &mut rng,
                "clusters",
                [rows, n, k],
            );
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn scaled_products_agree_with_the_reference() {
    let gpu = Gpu::open();
    let products = products(&gpu);
    let mut rng = rng(2);
    // Split tiles alone, whole tiles alone, and both.
    for (n, k) in [(64, 64), (208, 320), (4000, 128), (19_456, 64), (33_808, 64)] {
        for rows in [1, 31, 32, 40, 64] {
            let weight = bf16s(&mut rng, n * k, 1.0 / (k as f32).sqrt());
            let input = Normed::random(&mut rng, rows, k);
            let exact = multiply(&input.exact, &weight, k);
            let plain: Vec<f64> = multiply(&input.plain, &weight, k)
                .into_iter()
                .map(round)
                .collect();
            for kind in [Kind::Gated, Kind::Bf16, Kind::F32] {
                let got = run_scaled(&gpu, &products, rows, kind, &weight, &input);
                let what = format!("{n} x {k}, {rows} rows, {kind:?}");
                if kind != Kind::Gated {
                    assert_twice(&what, &to_bf16(&got), &plain, &exact);
                    continue;
                }
                assert_twice(
                    &what,
                    &to_bf16(&got),
                    &gated(&plain, n, round),
                    &gated(&exact, n, |x| x),
                );
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gate_and_up_agree_with_the_reference() {
    let gpu = Gpu::open();
    let mut rng = rng(5);
    // Fewer tiles than blocks; one a block, full or not; two a block; one chunk and many.
    for (inner, k) in cuda_graphs::cases([(36, 64), (204, 320), (2052, 512), (9728, 64), (12_004, 64)]) {
        let kernels = GateUp::load(&gpu.compiler, &gpu.device, inner, 256)
            .unwrap()
            .unwrap();
        let n = 2 * inner;
        let weight = bf16s(&mut rng, n * k, 1.0 / (k as f32).sqrt());
        for rows in [65, 96, 100, 128, 130, 192, 201, 256] {
            let input = Normed::random(&mut rng, rows, k);
            let unscaled: Vec<f64> = input.x.iter().map(|x| x.to_f64()).collect();
            let (w, x, squares) = (gpu.put(&weight), gpu.put(&input.x), gpu.put(&input.squares));
            for scaled in [true, false] {
                // One row more, which is not theirs.
                let out = gpu.poisoned::<bf16>((rows + 1) * inner);
                let op = GateUpOp {
                    rows,
                    weight: w.as_slice(),
                    input: x.as_slice(),
                    squares: scaled.then_some(squares.as_slice()),
                    eps: EPS,
                    out: out.slice(..rows * inner).unwrap(),
                };
                kernels.run(&gpu.stream, &op).unwrap();
                let got = gpu.get(&out);
                let (got, beyond) = got.split_at(rows * inner);
                assert!(beyond.iter().all(|x| x.is_nan()), "{inner} x {k}, {rows} rows");
                let [exact, plain] = match scaled {
                    true => [&input.exact, &input.plain],
                    false => [&unscaled, &unscaled],
                }
                .map(|x| multiply(x, &weight, k));
                let plain: Vec<f64> = plain.into_iter().map(round).collect();
                let what = format!("gate and up of {inner} x {k}, {rows} rows, scaled: {scaled}");
                assert_twice(&what, got, &gated(&plain, n, round), &gated(&exact, n, |x| x));
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_row_gives_the_same_bits_in_every_batch_of_a_form_and_at_every_run() {
    let gpu = Gpu::open();
    let products = products(&gpu);
    let mut rng = rng(3);
    let (n, k) = if few_cases() { (80, 320) } else { (1088, 1600) };
    let weight = bf16s(&mut rng, n * k, 1.0 / (k as f32).sqrt());
    let norm = normals(&mut rng, n, 1.0);
    let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
    let cluster_products = clusters(&gpu, n);
    let forms = cuda_graphs::cases(std::iter::once(0).chain(FORMS).zip(FORMS));
    let forms = forms.into_iter();
    let cases = forms.flat_map(|(fewer, most)| {
        let wide = (most <= 96).then_some(Summers::Wide(&products));
        let clusters = (most > 32).then_some(Summers::Clusters(&cluster_products));
        (wide.into_iter().chain(clusters)).map(move |summers| (fewer, most, summers))
    });
    for (fewer, most, summers) in cases {
        let x = bf16s(&mut rng, most * k, 1.0);
        let residual = normals(&mut rng, most * n, 1.0);
        let whole = run_residual(&gpu, &summers, most, [&weight, &x], [&residual, &norm]);
        println!("up to {most} rows");
        for _ in 0..if few_cases() { 1 } else { 20 } {
            let rows = rng.random_range(fewer + 1..=most);
            let first = rng.random_range(0..=most - rows);
            let (x, residual) = (&x[first * k..][..rows * k], &residual[first * n..][..rows * n]);
            let part = run_residual(&gpu, &summers, rows, [&weight, x], [residual, &norm]);
            let same = bits(&part.residual) == bits(&whole.residual[first * n..][..rows * n]);
            assert!(same, "{rows} of {most} rows, from {first}");
            assert_eq!(part.normed, whole.normed[first * n..][..rows * n]);
        }
    }
}

/// The product and what becomes of its heads, in one launch or in two: queries, keys and values, unwritten places poisoned.
fn run_heads(
    gpu: &Gpu,
    products: &WideProducts,
    [q_heads, kv_heads]: [usize; 2],
    rows: usize,
    [weight, norms, cos_sin]: [&[f32]; 3],
    input: &Normed,
    inside: bool,
) -> [Vec<bf16>; 3] {
    const PAGE: usize = 16;
    let n = (q_heads + 2 * kv_heads) * WIDE_HEAD_DIM;
    let (max_pages, n_positions) = (2, cos_sin.len() / WIDE_HEAD_DIM);
    // Row r is in slot r; slot 3 has no page, and row 5 lies past the table's end.
    let mut table: Vec<i32> = (0..2 * rows as i32).rev().collect();
    table.iter_mut().skip(6).take(2).for_each(|page| *page = -1);
    let mut positions: Vec<i32> = (0..rows).map(|row| (row * 7 % n_positions) as i32).collect();
    positions
        .iter_mut()
        .skip(5)
        .take(1)
        .for_each(|position| *position = n_positions as i32);
    let slots: Vec<i32> = (0..rows as i32).collect();
    let weight = gpu.put(&to_bf16(weight));
    let (x, squares, qkv) = (gpu.put(&input.x), gpu.put(&input.squares), gpu.poisoned(rows * n));
    let (q_norm, k_norm) = norms.split_at(WIDE_HEAD_DIM);
    let (q_norm, k_norm, cos_sin) = (gpu.put(q_norm), gpu.put(k_norm), gpu.put(cos_sin));
    let (positions, slots, table) = (gpu.put(&positions), gpu.put(&slots), gpu.put(&table));
    let cache = 2 * rows * PAGE * kv_heads * WIDE_HEAD_DIM;
    let (k_cache, v_cache) = (gpu.poisoned(cache), gpu.poisoned(cache));
    let heads = QkvRopeWrite {
        qkv: qkv.as_slice(),
        q_norm: q_norm.as_slice(),
        k_norm: k_norm.as_slice(),
        cos_sin: cos_sin.as_slice(),
        positions: positions.as_slice(),
        slots: slots.as_slice(),
        page_table: table.as_slice(),
        max_pages,
        k_cache: k_cache.as_slice(),
        v_cache: v_cache.as_slice(),
        q_heads,
        kv_heads,
        page_size: PAGE,
        eps: EPS,
    };
    let op = WideProductOp {
        rows,
        weight: weight.as_slice(),
        input: x.as_slice(),
        squares: Some(squares.as_slice()),
        eps: EPS,
        output: StageOutput::Bf16(qkv.as_slice()),
        heads: inside.then_some(heads),
    };
    products.run(&gpu.stream, &op).unwrap();
    if !inside {
        let kernels = gpu.kernels(256, WIDE_HEAD_DIM);
        kernels.qkv_rope_write(&gpu.stream, &heads, None).unwrap();
    }
    let queries = |row: &[bf16]| row[..q_heads * WIDE_HEAD_DIM].to_vec();
    let qkv = gpu.get(&qkv);
    [
        qkv.chunks(n).flat_map(queries).collect(),
        gpu.get(&k_cache),
        gpu.get(&v_cache),
    ]
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn norms_rotation_and_cache_inside_give_the_bits_of_the_kernel_of_their_own() {
    let gpu = Gpu::open();
    let products = products(&gpu);
    let mut rng = rng(4);
    let bits = |values: &[bf16]| -> Vec<u16> { values.iter().map(|x| x.to_bits()).collect() };
    // Fewer and more blocks than heads; one head of keys for several of queries.
    for (heads, k) in [
        ([1, 1], 64),
        ([4, 1], 192),
        ([16, 8], 1024),
        ([32, 8], 640),
        ([64, 8], 128),
    ] {
        for rows in [1, 17, 32, 33, 50, 64] {
            let n = (heads[0] + 2 * heads[1]) * WIDE_HEAD_DIM;
            let weight = normals(&mut rng, n * k, 1.0 / (k as f32).sqrt());
            let norms = normals(&mut rng, 2 * WIDE_HEAD_DIM, 1.0);
            let cos_sin = normals(&mut rng, 40 * WIDE_HEAD_DIM, 1.0);
            let input = Normed::random(&mut rng, rows, k);
            let run = |inside| {
                run_heads(
                    &gpu,
                    &products,
                    heads,
                    rows,
                    [&weight, &norms, &cos_sin],
                    &input,
                    inside,
                )
            };
            let (apart, inside) = (run(false), run(true));
            for (what, (apart, inside)) in ["queries", "keys", "values"]
                .iter()
                .zip(apart.iter().zip(&inside))
            {
                assert!(
                    bits(apart) == bits(inside),
                    "{what} of {heads:?} heads, {k} columns, {rows} rows"
                );
            }
            assert!(
                inside[0].iter().all(|x| x.is_finite()),
                "queries were not written"
            );
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn shapes_that_the_kernels_cannot_take_are_refused() {
    let gpu = Gpu::open();
    let products = products(&gpu);
    let (weight, out) = (gpu.poisoned::<bf16>(64 * 64), gpu.poisoned::<f32>(129 * 64));
    let input = gpu.poisoned::<bf16>(129 * 64);
    let refused = |rows: usize, weights: usize, inputs: usize, outputs: usize| {
        let op = WideProductOp {
            rows,
            weight: weight.slice(..weights).unwrap(),
            input: input.slice(..inputs).unwrap(),
            squares: None,
            eps: EPS,
            output: StageOutput::F32(out.slice(..outputs).unwrap()),
            heads: None,
        };
        products.run(&gpu.stream, &op).unwrap_err().to_string()
    };
    assert!(refused(65, 64 * 64, 65 * 64, 65 * 64).contains("65 rows"));
    assert!(refused(97, 64 * 64, 97 * 64, 97 * 64).contains("97 rows"));
    assert!(refused(0, 64 * 64, 0, 0).contains("0 rows"));
    assert!(refused(20, 64 * 32, 20 * 32, 20 * 64).contains("64 rows of 32 columns"));
    assert!(refused(20, 24 * 64, 20 * 64, 20 * 24).contains("24 rows of 64 columns"));
    assert!(refused(20, 64 * 64, 20 * 64, 20 * 63).contains("output"));
    let clusters = clusters(&gpu, 64);
    let output = StageOutput::F32(out.slice(..100 * 64).unwrap());
    let refused_by_clusters = |rows: usize, weights: usize, inputs: usize| {
        let op = ClusterProductOp {
            rows,
            weight: weight.slice(..weights).unwrap(),
            input: input.slice(..inputs).unwrap(),
            output,
        };
        clusters.run(&gpu.stream, &op).unwrap_err().to_string()
    };
    assert!(refused_by_clusters(32, 64 * 64, 32 * 64).contains("32 rows"));
    assert!(refused_by_clusters(100, 64 * 32, 100 * 32).contains("32 columns"));
    assert!(refused_by_clusters(100, 63 * 64, 100 * 64).contains("weight"));
    assert!(refused_by_clusters(100, 64 * 64, 100 * 64).contains("output"));
    let gate_up = GateUp::load(&gpu.compiler, &gpu.device, 32, 256)
        .unwrap()
        .unwrap();
    let out = gpu.poisoned::<bf16>(129 * 32);
    let refused = |rows: usize, outputs: usize| {
        let op = GateUpOp {
            rows,
            weight: weight.as_slice(),
            input: input.slice(..rows * 64).unwrap(),
            squares: None,
            eps: EPS,
            out: out.slice(..outputs).unwrap(),
        };
        gate_up.run(&gpu.stream, &op).unwrap_err().to_string()
    };
    assert!(refused(64, 64 * 32).contains("64 rows"));
    assert!(refused(0, 0).contains("0 rows"));
    assert!(refused(70, 70 * 31).contains("output"));
}
