//! QKV of decode steps of 33 to 256 rows with norm, rotation and the cache's write inside, against an f64 reference and against a
//! product and the kernel behind it.
#![cfg(feature = "cuda")]

mod gpu_support;

use cuda_graphs::DeviceBuffer;
use gpu_support::products::{EPS, FORMS, Normed, multiply};
use gpu_support::{Gpu, assert_twice, bf16s, normals, rng, round};
use half::bf16;
use qwen3_model::launch::{
    QkvProduct, QkvProductOp, QkvRopeWrite, RowScale, WIDE_HEAD_DIM, WholeKind, WholeProduct, WholeProductOp,
};
use rand::Rng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

const PAGE: usize = 16;
const MAX_PAGES: usize = 3;
const N_POSITIONS: usize = PAGE * MAX_PAGES;
const HALF: usize = WIDE_HEAD_DIM / 2;

fn product(gpu: &Gpu) -> QkvProduct {
    let loaded = QkvProduct::load(&gpu.compiler, &gpu.device, 256).unwrap();
    loaded.expect("a device of compute capability 9.0")
}

/// A layer's constants and where a batch's rows go.
struct Case {
    heads: [usize; 2],
    k: usize,
    weight: Vec<bf16>,
    /// Of query and of key heads.
    norms: [Vec<f32>; 2],
    cos_sin: Vec<f32>,
    positions: Vec<i32>,
    slots: Vec<i32>,
    table: Vec<i32>,
}

impl Case {
    /// Slots and pages in random order. The slot of row 3 has no page, and row 5 lies past the table's end.
    fn random(rng: &mut ChaCha8Rng, heads: [usize; 2], k: usize, rows: usize) -> Self {
        let mut slots: Vec<i32> = (0..rows as i32).collect();
        slots.shuffle(rng);
        let mut table: Vec<i32> = (0..(rows * MAX_PAGES) as i32).collect();
        table.shuffle(rng);
        table[slots[3] as usize * MAX_PAGES..][..MAX_PAGES].fill(-1);
        let mut positions: Vec<i32> = (0..rows)
            .map(|_| rng.random_range(0..N_POSITIONS as i32))
            .collect();
        positions[5] = N_POSITIONS as i32 + 1;
        let n = (heads[0] + 2 * heads[1]) * WIDE_HEAD_DIM;
        let norm = |rng: &mut ChaCha8Rng| normals(rng, WIDE_HEAD_DIM, 0.2).iter().map(|x| 1.0 + x).collect();
        let angles = normals(rng, N_POSITIONS * HALF, 2.0);
        let angles = angles.chunks(HALF);
        Self {
            heads,
            k,
            weight: bf16s(rng, n * k, 1.0 / (k as f32).sqrt()),
            norms: [norm(rng), norm(rng)],
            cos_sin: angles
                .flat_map(|x| x.iter().map(|x| x.cos()).chain(x.iter().map(|x| x.sin())))
                .collect(),
            positions,
            slots,
            table,
        }
    }

    fn rows(&self) -> usize {
        self.positions.len()
    }

    fn width(&self) -> usize {
        (self.heads[0] + 2 * self.heads[1]) * WIDE_HEAD_DIM
    }

    /// Elements of the keys or the values of the whole cache.
    fn cache_len(&self) -> usize {
        self.heads[1] * self.table.len() * PAGE * WIDE_HEAD_DIM
    }

    /// Where keys and values of a row's first head begin.
    fn place(&self, row: usize) -> Option<usize> {
        let position = self.positions[row] as usize;
        let pages = &self.table[self.slots[row] as usize * MAX_PAGES..][..MAX_PAGES];
        let page = usize::try_from(*pages.get(position / PAGE)?).ok()?;
        Some((page * PAGE + position % PAGE) * WIDE_HEAD_DIM)
    }

    /// The same rows of a batch of fewer: those of `rows`, in the same slots.
    fn part(&self, rows: std::ops::Range<usize>) -> Self {
        Self {
            weight: self.weight.clone(),
            norms: self.norms.clone(),
            cos_sin: self.cos_sin.clone(),
            positions: self.positions[rows.clone()].to_vec(),
            slots: self.slots[rows].to_vec(),
            table: self.table.clone(),
            ..*self
        }
    }
}

/// A batch's sums of squares, `[parts, columns]`, and what they are divided by.
struct Squares<'a> {
    sums: &'a [f32],
    parts: usize,
}

/// Queries `[rows, q_heads, 128]`, keys and values of the whole cache.
type Written = [Vec<bf16>; 3];

/// The launch, with everything that it might write poisoned, or `apart`: a product of 64 rows at a time and the kernel behind it.
fn run(
    gpu: &Gpu,
    inside: Option<&QkvProduct>,
    case: &Case,
    x: &[bf16],
    squares: Option<&Squares<'_>>,
) -> Written {
    let (rows, n, k) = (case.rows(), case.width(), case.k);
    let (weight, input) = (gpu.put(&case.weight), gpu.put(x));
    // One row more, which is not theirs.
    let qkv: DeviceBuffer<bf16> = gpu.poisoned((rows + 1) * n);
    let [q_norm, k_norm] = [gpu.put(&case.norms[0]), gpu.put(&case.norms[1])];
    let cos_sin = gpu.put(&case.cos_sin);
    let [positions, slots, table] = [&case.positions, &case.slots, &case.table].map(|x| gpu.put(x));
    let [k_cache, v_cache] = [0; 2].map(|_| gpu.poisoned::<bf16>(case.cache_len()));
    let sums = squares.map(|squares| (gpu.put(squares.sums), squares.parts));
    let scale = sums.as_ref().map(|(sums, parts)| RowScale {
        squares: sums.as_slice(),
        parts: *parts,
        width: k,
        eps: EPS,
    });
    let heads = QkvRopeWrite {
        qkv: qkv.slice(..rows * n).unwrap(),
        q_norm: q_norm.as_slice(),
        k_norm: k_norm.as_slice(),
        cos_sin: cos_sin.as_slice(),
        positions: positions.as_slice(),
        slots: slots.as_slice(),
        page_table: table.as_slice(),
        max_pages: MAX_PAGES,
        k_cache: k_cache.as_slice(),
        v_cache: v_cache.as_slice(),
        q_heads: case.heads[0],
        kv_heads: case.heads[1],
        page_size: PAGE,
        eps: EPS,
    };
    match inside {
        Some(product) => {
            let op = QkvProductOp {
                weight: weight.as_slice(),
                input: input.as_slice(),
                scale,
                heads,
            };
            product.run(&gpu.stream, &op).unwrap();
        }
        None => {
            let loaded = WholeProduct::load(&gpu.compiler, &gpu.device, WholeKind::Plain, n, 64).unwrap();
            for from in (0..rows).step_by(64) {
                let to = (from + 64).min(rows);
                let op = WholeProductOp {
                    rows: to - from,
                    weight: weight.as_slice(),
                    input: input.slice(from * k..to * k).unwrap(),
                    out: qkv.slice(from * n..to * n).unwrap(),
                };
                loaded.as_ref().unwrap().run(&gpu.stream, &op).unwrap();
            }
            let kernels = gpu.kernels(256, WIDE_HEAD_DIM);
            kernels
                .qkv_rope_write(&gpu.stream, &heads, scale.as_ref())
                .unwrap();
        }
    }
    let qkv = gpu.get(&qkv);
    let queries = case.heads[0] * WIDE_HEAD_DIM;
    assert!(
        qkv[rows * n..].iter().all(|x| x.is_nan()),
        "beyond the last row of {rows}"
    );
    if inside.is_some() {
        let others = qkv[..rows * n].chunks(n).flat_map(|row| &row[queries..]);
        assert!(
            others.clone().all(|x| x.is_nan()),
            "keys or values beside queries"
        );
    }
    let queries = qkv[..rows * n].chunks(n).flat_map(|row| &row[..queries]);
    [queries.copied().collect(), gpu.get(&k_cache), gpu.get(&v_cache)]
}

/// Heads of rows `[rows, heads, 128]` from products of their rows, by a formula with this rounding between its steps.
fn heads_of(case: &Case, products: &[f64], rounding: fn(f64) -> f64) -> Vec<f64> {
    let [q_heads, kv_heads] = case.heads;
    let mut out = Vec::with_capacity(products.len());
    for (index, head) in products.chunks(WIDE_HEAD_DIM).enumerate() {
        let (row, head_index) = (index / (q_heads + 2 * kv_heads), index % (q_heads + 2 * kv_heads));
        let head: Vec<f64> = head.iter().map(|&x| rounding(x)).collect();
        if head_index >= q_heads + kv_heads {
            out.extend(head);
            continue;
        }
        let norm = &case.norms[usize::from(head_index >= q_heads)];
        let mean = head.iter().map(|x| x * x).sum::<f64>() / WIDE_HEAD_DIM as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        let weighed = head.iter().zip(norm);
        let normed: Vec<f64> = weighed
            .map(|(x, &w)| rounding(rounding(x * scale) * f64::from(w)))
            .collect();
        let position = (case.positions[row] as usize).min(N_POSITIONS - 1);
        let (cos, sin) = case.cos_sin[position * WIDE_HEAD_DIM..][..WIDE_HEAD_DIM].split_at(HALF);
        for i in 0..WIDE_HEAD_DIM {
            let (cos, sin) = (f64::from(cos[i % HALF]), f64::from(sin[i % HALF]));
            let other = match i < HALF {
                true => -normed[i + HALF],
                false => normed[i - HALF],
            };
            out.push(rounding(rounding(normed[i] * cos) + rounding(other * sin)));
        }
    }
    out
}

/// The rows that were written to a cache, in the order of rows and heads, and whether nothing else was.
fn written_rows(case: &Case, cache: &[bf16]) -> Vec<bf16> {
    let mut rest = cache.to_vec();
    let head_len = cache.len() / case.heads[1];
    let mut rows = Vec::new();
    for place in (0..case.rows()).filter_map(|row| case.place(row)) {
        for head in 0..case.heads[1] {
            let at = head * head_len + place..head * head_len + place + WIDE_HEAD_DIM;
            rows.extend_from_slice(&cache[at.clone()]);
            rest[at].fill(bf16::NAN);
        }
    }
    assert!(
        rest.iter().all(|x| x.is_nan()),
        "a place that belongs to no row was written"
    );
    rows
}

/// Heads `from..from + n` of rows `[rows, heads, 128]`; with `placed` of those alone that have a page.
fn select(case: &Case, heads: &[f64], from: usize, n: usize, placed: bool) -> Vec<f64> {
    let rows = heads.chunks(case.width()).enumerate();
    rows.filter(|&(row, _)| !placed || case.place(row).is_some())
        .flat_map(|(_, row)| row[from * WIDE_HEAD_DIM..][..n * WIDE_HEAD_DIM].iter().copied())
        .collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn heads_agree_with_the_reference() {
    let gpu = Gpu::open();
    let product = product(&gpu);
    let mut rng = rng(1);
    // One chunk, fewer than slots and many more; one head of keys for several of queries; heads that do not all fit at once.
    for (heads, k) in cuda_graphs::cases([
        ([2, 1], 128),
        ([2, 1], 64),
        ([4, 2], 320),
        ([2, 2], 2560),
        ([64, 8], 64),
        ([32, 8], 192),
    ]) {
        for rows in cuda_graphs::cases([33, 64, 65, 96, 97, 128, 129, 192, 200, 256]) {
            let case = Case::random(&mut rng, heads, k, rows);
            let input = Normed::random(&mut rng, rows, k);
            let columns = FORMS.into_iter().find(|&columns| rows <= columns).unwrap();
            let squares = Squares {
                sums: &input.squares,
                parts: input.squares.len() / columns,
            };
            let unscaled: Vec<f64> = input.x.iter().map(|x| x.to_f64()).collect();
            for scaled in [true, false] {
                let got = run(&gpu, Some(&product), &case, &input.x, scaled.then_some(&squares));
                let [exact, plain] = match scaled {
                    true => [&input.exact, &input.plain],
                    false => [&unscaled, &unscaled],
                }
                .map(|x| multiply(x, &case.weight, k));
                let exact = heads_of(&case, &exact, |x| x);
                let plain = heads_of(&case, &plain, round);
                let [keys, values] = [1, 2].map(|which| written_rows(&case, &got[which]));
                let [q, kv] = heads;
                for (what, got, from, n) in [
                    ("queries", &got[0], 0, q),
                    ("keys", &keys, q, kv),
                    ("values", &values, q + kv, kv),
                ] {
                    let [plain, exact] =
                        [&plain, &exact].map(|heads| select(&case, heads, from, n, what != "queries"));
                    let what =
                        format!("{what} of {heads:?} heads, {k} columns, {rows} rows, scaled: {scaled}");
                    assert_twice(&what, got, &plain, &exact);
                }
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn bits_are_those_of_a_product_and_the_kernel_behind_it() {
    let gpu = Gpu::open();
    let product = product(&gpu);
    let mut rng = rng(2);
    // Of small whole numbers every sum is exact, in whatever order.
    let whole = |rng: &mut ChaCha8Rng, n: usize, unit: f32| -> Vec<bf16> {
        let numbers = (0..n).map(|_| unit * rng.random_range(-4..=4) as f32);
        numbers.map(bf16::from_f32).collect()
    };
    for (heads, k) in cuda_graphs::cases([([2, 2], 128), ([4, 2], 2560), ([16, 8], 448)]) {
        for rows in cuda_graphs::cases([33, 50, 64, 65, 96, 97, 128, 129, 192, 193, 256]) {
            let mut case = Case::random(&mut rng, heads, k, rows);
            case.weight = whole(&mut rng, case.weight.len(), 1.0 / 64.0);
            let x = whole(&mut rng, rows * k, 1.0);
            // Sums that are exact in any order; more parts than columns of the input have, and fewer.
            for parts in [0, 3, 27, 120] {
                let columns = rows + 3;
                let sums: Vec<f32> = (0..parts * columns)
                    .map(|_| 0.25 * rng.random_range(1..64) as f32)
                    .collect();
                let squares = Squares { sums: &sums, parts };
                let squares = (parts > 0).then_some(&squares);
                let apart = run(&gpu, None, &case, &x, squares);
                let inside = run(&gpu, Some(&product), &case, &x, squares);
                for (what, (apart, inside)) in ["queries", "keys", "values"]
                    .iter()
                    .zip(apart.iter().zip(&inside))
                {
                    let other = apart
                        .iter()
                        .zip(inside)
                        .filter(|(a, b)| a.to_bits() != b.to_bits());
                    assert_eq!(
                        other.count(),
                        0,
                        "{what} of {heads:?} heads, {k} columns, {rows} rows, {parts} parts"
                    );
                }
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_row_gives_the_same_bits_in_every_batch_of_a_form_and_at_every_run() {
    let gpu = Gpu::open();
    let product = product(&gpu);
    let mut rng = rng(3);
    let (heads, k) = ([4, 2], 1600);
    let bits = |values: &[bf16]| -> Vec<u16> { values.iter().map(|x| x.to_bits()).collect() };
    for (fewer, most) in [(32, 64), (64, 96), (96, 128), (128, 192), (192, 256)] {
        let case = Case::random(&mut rng, heads, k, most);
        let x = bf16s(&mut rng, most * k, 1.0);
        let whole = run(&gpu, Some(&product), &case, &x, None);
        for _ in 0..if cuda_graphs::few_cases() { 2 } else { 10 } {
            let rows = rng.random_range(fewer + 1..=most);
            let first = rng.random_range(0..=most - rows);
            let part = case.part(first..first + rows);
            let got = run(&gpu, Some(&product), &part, &x[first * k..][..rows * k], None);
            let width = heads[0] * WIDE_HEAD_DIM;
            assert!(
                bits(&got[0]) == bits(&whole[0][first * width..][..rows * width]),
                "queries of {rows} of {most} rows, from {first}"
            );
            // Each row's place is its own in both.
            for which in [1, 2] {
                let expected = (0..rows).filter_map(|row| part.place(row));
                let head_len = part.cache_len() / heads[1];
                for place in expected {
                    for head in 0..heads[1] {
                        let at = head * head_len + place..head * head_len + place + WIDE_HEAD_DIM;
                        assert_eq!(
                            bits(&got[which][at.clone()]),
                            bits(&whole[which][at]),
                            "{rows} of {most}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_does_not_fit_is_refused() {
    let gpu = Gpu::open();
    let product = product(&gpu);
    let mut rng = rng(4);
    let case = Case::random(&mut rng, [2, 1], 128, 257);
    let weight = gpu.poisoned::<bf16>(case.weight.len());
    let (input, qkv) = (
        gpu.poisoned::<bf16>(257 * 128),
        gpu.poisoned::<bf16>(257 * case.width()),
    );
    let [norm, cos_sin] = [gpu.put(&case.norms[0]), gpu.put(&case.cos_sin)];
    let [positions, slots, table] = [&case.positions, &case.slots, &case.table].map(|x| gpu.put(x));
    let cache = gpu.poisoned::<bf16>(case.cache_len());
    let sums = gpu.poisoned::<f32>(4 * 257);
    let refused = |rows: usize, weights: usize, columns: usize, width: Option<usize>| {
        let op = QkvProductOp {
            weight: weight.slice(..weights).unwrap(),
            input: input.slice(..rows * columns).unwrap(),
            scale: width.map(|width| RowScale {
                squares: sums.as_slice(),
                parts: 4,
                width,
                eps: EPS,
            }),
            heads: QkvRopeWrite {
                qkv: qkv.slice(..rows * case.width()).unwrap(),
                q_norm: norm.as_slice(),
                k_norm: norm.as_slice(),
                cos_sin: cos_sin.as_slice(),
                positions: positions.slice(..rows).unwrap(),
                slots: slots.slice(..rows).unwrap(),
                page_table: table.as_slice(),
                max_pages: MAX_PAGES,
                k_cache: cache.as_slice(),
                v_cache: cache.as_slice(),
                q_heads: 2,
                kv_heads: 1,
                page_size: PAGE,
                eps: EPS,
            },
        };
        product.run(&gpu.stream, &op).unwrap_err().to_string()
    };
    let n = case.width();
    assert!(refused(0, n * 128, 128, None).contains("0 rows"));
    assert!(refused(32, n * 128, 128, None).contains("32 rows"));
    assert!(refused(257, n * 128, 128, None).contains("257 rows"));
    assert!(refused(100, n * 128, 96, None).contains("96 columns"));
    assert!(refused(100, n * 128 - 64, 128, None).contains("weight"));
    assert!(refused(100, n * 128, 128, Some(64)).contains("scaled columns"));
}
