//! Every kernel against an f64 reference on random shapes, outputs poisoned first.
#![cfg(feature = "cuda")]

mod gpu_support;

use gpu_support::{Gpu, assert_twice, bf16s, config, normals, rng, round};
use half::bf16;
use qwen3_model::launch::{Kernels, QkvRopeWrite, RmsNorm, RowScale, TokenSource, kernel_specs};
use rand::Rng;
use rand::seq::SliceRandom;

#[test]
fn kernels_compile_for_every_architecture() {
    cuda_graphs::assert_kernels_compile(&kernel_specs());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn embedding_rows_are_copied_exactly_and_bad_ids_show_as_nan() {
    let gpu = Gpu::open();
    for (seed, hidden) in [(1, 8), (2, 256), (3, 1032), (4, 2560)] {
        let kernels = gpu.kernels(hidden, 128);
        let mut rng = rng(seed);
        let (vocab, n_slots, rows) = (rng.random_range(1..200usize), rng.random_range(2..40usize), 37);
        let table = bf16s(&mut rng, vocab * hidden, 1.0);
        let device_table = gpu.put(&table);
        let ids: Vec<u32> = (0..rows).map(|_| rng.random_range(0..vocab as u32 + 2)).collect();
        let slots: Vec<i32> = (0..rows)
            .map(|_| rng.random_range(-1..n_slots as i32 + 1))
            .collect();
        let last: Vec<u32> = (0..n_slots).map(|_| rng.random_range(0..vocab as u32)).collect();
        let check = |out: &[f32], ids: &[u32]| {
            for (row, &id) in out.chunks(hidden).zip(ids) {
                if (id as usize) < vocab {
                    let expected = &table[id as usize * hidden..][..hidden];
                    assert!(row.iter().zip(expected).all(|(a, b)| *a == b.to_f32()), "id {id}");
                } else {
                    assert!(row.iter().all(|x| x.is_nan()), "id {id} of {vocab}");
                }
            }
        };
        let out = gpu.poisoned::<f32>(rows * hidden);
        let device_ids = gpu.put(&ids);
        let source = TokenSource::Ids(device_ids.as_slice());
        kernels
            .embed(&gpu.stream, device_table.as_slice(), source, out.as_slice())
            .unwrap();
        check(&gpu.get(&out), &ids);

        let out = gpu.poisoned::<f32>(rows * hidden);
        let (device_slots, device_last) = (gpu.put(&slots), gpu.put(&last));
        let source = TokenSource::Last {
            slots: device_slots.as_slice(),
            last_token: device_last.as_slice(),
        };
        kernels
            .embed(&gpu.stream, device_table.as_slice(), source, out.as_slice())
            .unwrap();
        let of_slot = |&slot: &i32| {
            usize::try_from(slot)
                .ok()
                .and_then(|slot| last.get(slot))
                .copied()
        };
        let ids: Vec<u32> = slots
            .iter()
            .map(|slot| of_slot(slot).unwrap_or(u32::MAX))
            .collect();
        check(&gpu.get(&out), &ids);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rms_norm_with_and_without_residual_and_row_index() {
    let gpu = Gpu::open();
    let eps = 1e-6;
    for (seed, hidden) in (10..).zip([
        8usize, 64, 256, 1024, 1032, 2048, 2560, 3000, 4096, 5120, 6152, 8192,
    ]) {
        let kernels = gpu.kernels(hidden, 128);
        let mut rng = rng(seed);
        for mode in 0..4 {
            let (with_delta, with_index) = (mode & 1 == 1, mode & 2 == 2);
            let source_rows = rng.random_range(1..70usize);
            let rows = if with_index {
                rng.random_range(1..50)
            } else {
                source_rows
            };
            let residual = normals(&mut rng, source_rows * hidden, 3.0);
            let delta = normals(&mut rng, source_rows * hidden, 1.0);
            let weight = normals(&mut rng, hidden, 1.0);
            let index: Vec<i32> = (0..rows)
                .map(|_| rng.random_range(0..source_rows as i32))
                .collect();
            let device_residual = gpu.put(&residual);
            let device_delta = gpu.put(&delta);
            let device_weight = gpu.put(&weight);
            let device_index = gpu.put(&index);
            let out = gpu.poisoned::<bf16>(rows * hidden);
            let op = RmsNorm {
                residual: device_residual.as_slice(),
                delta: with_delta.then(|| device_delta.as_slice()),
                weight: device_weight.as_slice(),
                row_index: with_index.then(|| device_index.as_slice()),
                out: out.as_slice(),
                eps,
            };
            kernels.rms_norm(&gpu.stream, &op).unwrap();
            let sum: Vec<f32> = match with_delta {
                true => residual.iter().zip(&delta).map(|(a, b)| a + b).collect(),
                false => residual.clone(),
            };
            let stored = if with_index { &residual } else { &sum };
            assert_eq!(&gpu.get(&device_residual), stored, "hidden {hidden}, mode {mode}");
            let (mut exact, mut plain) = (Vec::new(), Vec::new());
            for (row, &indexed) in index.iter().enumerate() {
                let source = if with_index { indexed as usize } else { row };
                let x = &sum[source * hidden..][..hidden];
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / hidden as f64;
                let scale = 1.0 / (mean + f64::from(eps)).sqrt();
                for (&x, &w) in x.iter().zip(&weight) {
                    exact.push(f64::from(x) * scale * f64::from(w));
                    plain.push(round(round(round(f64::from(x)) * scale) * round(f64::from(w))));
                }
            }
            assert_twice(
                &format!("rms_norm {hidden} mode {mode}"),
                &gpu.get(&out),
                &plain,
                &exact,
            );
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn silu_mul_at_ordinary_and_extreme_values() {
    let gpu = Gpu::open();
    let kernels = gpu.kernels(256, 128);
    for (seed, inner) in (20..).zip([8usize, 640, 2056, 3072, 9728]) {
        let mut rng = rng(seed);
        let rows = rng.random_range(1..40usize);
        let mut x = bf16s(&mut rng, rows * 2 * inner, 4.0);
        // Where exp overflows and where silu saturates.
        for (i, extreme) in [-200.0, -89.0, -88.0, 88.0, 200.0, 0.0, -0.0]
            .into_iter()
            .enumerate()
        {
            x[i] = bf16::from_f32(extreme);
        }
        let device = gpu.put(&x);
        let out = gpu.poisoned::<bf16>(rows * inner);
        kernels
            .silu_mul(&gpu.stream, device.as_slice(), out.as_slice(), rows)
            .unwrap();
        let (mut exact, mut plain) = (Vec::new(), Vec::new());
        for row in x.chunks(2 * inner) {
            for (gate, up) in row[..inner].iter().zip(&row[inner..]) {
                let (gate, up) = (gate.to_f64(), up.to_f64());
                let silu = gate / (1.0 + (-gate).exp());
                exact.push(silu * up);
                plain.push(round(round(silu) * up));
            }
        }
        assert_twice(&format!("silu_mul {inner}"), &gpu.get(&out), &plain, &exact);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rope_and_cache_write_for_every_page_size_and_head_ratio() {
    let gpu = Gpu::open();
    let shapes = [
        (64, 1, 1),
        (64, 6, 2),
        (128, 16, 1),
        (128, 16, 8),
        (128, 32, 8),
        (128, 5, 5),
        (64, 14, 2),
    ];
    for (seed, (head_dim, q_heads, kv_heads)) in cuda_graphs::cases((30..).zip(shapes)) {
        for page_size in cuda_graphs::cases([16usize, 32, 64, 128, 256]) {
            rope_case(
                &gpu,
                seed * 1000 + page_size as u64,
                head_dim,
                q_heads,
                kv_heads,
                page_size,
            );
        }
    }
}

fn rope_case(gpu: &Gpu, seed: u64, head_dim: usize, q_heads: usize, kv_heads: usize, page_size: usize) {
    let what = format!("head_dim {head_dim}, {q_heads}/{kv_heads} heads, page size {page_size}");
    let config = config(256, head_dim, q_heads, kv_heads);
    let kernels = Kernels::load(&gpu.compiler, &gpu.device, &config).unwrap();
    let mut rng = rng(seed);
    let (n_slots, max_pages, eps) = (7usize, 3usize, 1e-6f32);
    let n_pages = 1 + (n_slots - 1) * max_pages;
    let mut pages: Vec<i32> = (1..n_pages as i32).collect();
    pages.shuffle(&mut rng);
    let mut table = vec![0; max_pages];
    table.extend(&pages);
    // The last slot's last page is not mapped.
    let unmapped = (n_slots - 1, max_pages - 1);
    *table.last_mut().unwrap() = -1;
    // Distinct places, two padded rows, one row in an unmapped page, one past the table.
    let mut places: Vec<(usize, usize)> = (1..n_slots)
        .flat_map(|slot| (0..max_pages * page_size).map(move |position| (slot, position)))
        .filter(|&(slot, position)| (slot, position / page_size) != unmapped)
        .collect();
    places.shuffle(&mut rng);
    // A warp has one head of few rows and three of many.
    let n_mapped = if page_size == 32 { 150 } else { 40 };
    places.truncate(n_mapped);
    places.extend([
        (0, 0),
        (0, 0),
        (unmapped.0, unmapped.1 * page_size + 1),
        (1, max_pages * page_size),
    ]);
    let rows = places.len();
    let slots: Vec<i32> = places.iter().map(|place| place.0 as i32).collect();
    let positions: Vec<i32> = places.iter().map(|place| place.1 as i32).collect();
    let heads = q_heads + 2 * kv_heads;
    let mut qkv = bf16s(&mut rng, rows * heads * head_dim, 1.0);
    // Padded rows carry the same values, as they do in a step.
    let row = heads * head_dim;
    qkv.copy_within(n_mapped * row..(n_mapped + 1) * row, (n_mapped + 1) * row);
    let q_norm = normals(&mut rng, head_dim, 1.0);
    let k_norm = normals(&mut rng, head_dim, 1.0);
    let half = head_dim / 2;
    let n_positions = max_pages * page_size + 1;
    let frequencies = config.rope.frequencies(head_dim);
    let mut cos_sin = vec![0f32; n_positions * head_dim];
    for (position, row) in cos_sin.chunks_mut(head_dim).enumerate() {
        let (cos, sin) = row.split_at_mut(half);
        frequencies.cos_sin(position, cos, sin);
    }
    let tokens = n_pages * page_size;
    let k = gpu.poisoned::<bf16>(kv_heads * tokens * head_dim);
    let v = gpu.poisoned::<bf16>(kv_heads * tokens * head_dim);
    let (dq, dqn, dkn, dcs) = (
        gpu.put(&qkv),
        gpu.put(&q_norm),
        gpu.put(&k_norm),
        gpu.put(&cos_sin),
    );
    let (dp, ds, dt) = (gpu.put(&positions), gpu.put(&slots), gpu.put(&table));
    let op = QkvRopeWrite {
        qkv: dq.as_slice(),
        q_norm: dqn.as_slice(),
        k_norm: dkn.as_slice(),
        cos_sin: dcs.as_slice(),
        positions: dp.as_slice(),
        slots: ds.as_slice(),
        page_table: dt.as_slice(),
        max_pages,
        k_cache: k.as_slice(),
        v_cache: v.as_slice(),
        q_heads,
        kv_heads,
        page_size,
        eps,
    };
    kernels.qkv_rope_write(&gpu.stream, &op, None).unwrap();
    let (q, k, v) = (gpu.get(&dq), gpu.get(&k), gpu.get(&v));

    // Rows that their norm has not yet scaled, by powers of two, so that nothing is rounded.
    let power = |row: usize| 2f32.powi((row % 7) as i32 - 2);
    let unscaled: Vec<bf16> = (qkv.iter().enumerate())
        .map(|(i, x)| bf16::from_f32(x.to_f32() * power(i / row)))
        .collect();
    let (width, columns) = (256, rows + 3);
    let squares: Vec<f32> = (0..width / 64 * columns)
        .map(|i| 64.0 * power(i % columns).powi(2))
        .collect();
    let squares = gpu.put(&squares);
    let (unscaled, k2, v2) = (
        gpu.put(&unscaled),
        gpu.poisoned::<bf16>(kv_heads * tokens * head_dim),
        gpu.poisoned::<bf16>(kv_heads * tokens * head_dim),
    );
    let scaled = QkvRopeWrite {
        qkv: unscaled.as_slice(),
        k_cache: k2.as_slice(),
        v_cache: v2.as_slice(),
        ..op
    };
    let scale = RowScale {
        squares: squares.as_slice(),
        parts: width / 64,
        width,
        eps: 0.0,
    };
    kernels
        .qkv_rope_write(&gpu.stream, &scaled, Some(&scale))
        .unwrap();
    let bits = |values: &[bf16]| -> Vec<u16> { values.iter().map(|x| x.to_bits()).collect() };
    let queries = |qkv: &[bf16]| -> Vec<u16> {
        let of = |row: &[bf16]| bits(&row[..q_heads * head_dim]);
        qkv.chunks(row).flat_map(of).collect()
    };
    assert!(
        queries(&gpu.get(&unscaled)) == queries(&q),
        "{what}: queries of scaled rows"
    );
    assert!(bits(&gpu.get(&k2)) == bits(&k), "{what}: keys of scaled rows");
    assert!(bits(&gpu.get(&v2)) == bits(&v), "{what}: values of scaled rows");

    let mut written = vec![false; kv_heads * tokens];
    let (mut got, mut plain, mut exact) = (Vec::new(), Vec::new(), Vec::new());
    for (row, &(slot, position)) in places.iter().enumerate() {
        let page = table
            .get(slot * max_pages + position / page_size)
            .copied()
            .unwrap_or(-1);
        let mapped = position < max_pages * page_size && page >= 0;
        for head in 0..heads {
            let x = &qkv[(row * heads + head) * head_dim..][..head_dim];
            let is_q = head < q_heads;
            let place = |kv_head: usize| kv_head * tokens + page as usize * page_size + position % page_size;
            if head >= q_heads + kv_heads {
                if mapped {
                    let at = place(head - q_heads - kv_heads) * head_dim;
                    assert_eq!(&v[at..at + head_dim], x, "{what}: value row {row}");
                }
                continue;
            }
            let out = if is_q {
                &q[(row * heads + head) * head_dim..][..head_dim]
            } else if mapped {
                let at = place(head - q_heads);
                written[at] = true;
                &k[at * head_dim..][..head_dim]
            } else {
                continue;
            };
            let weight = if is_q { &q_norm } else { &k_norm };
            let mean = x.iter().map(|x| x.to_f64().powi(2)).sum::<f64>() / head_dim as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            let exact_norm: Vec<f64> = x
                .iter()
                .zip(weight)
                .map(|(x, &w)| x.to_f64() * scale * f64::from(w))
                .collect();
            let plain_norm: Vec<f64> = x
                .iter()
                .zip(weight)
                .map(|(x, &w)| round(round(x.to_f64() * scale) * round(f64::from(w))))
                .collect();
            for i in 0..head_dim {
                let table = &cos_sin[position * head_dim..][..head_dim];
                let (c, s) = (f64::from(table[i % half]), f64::from(table[half + i % half]));
                let other = (i + half) % head_dim;
                let sign = if i < half { -1.0 } else { 1.0 };
                exact.push(exact_norm[i] * c + sign * exact_norm[other] * s);
                plain.push(round(
                    round(plain_norm[i] * round(c)) + round(sign * plain_norm[other] * round(s)),
                ));
                got.push(out[i]);
            }
        }
    }
    assert_twice(&what, &got, &plain, &exact);
    for (place, _) in written.iter().enumerate().filter(|(_, written)| !**written) {
        let at = place * head_dim..(place + 1) * head_dim;
        assert!(
            k[at.clone()].iter().chain(&v[at]).all(|x| x.is_nan()),
            "{what}: place {place} was written"
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn lengths_that_do_not_fit_are_refused_before_a_launch() {
    let gpu = Gpu::open();
    let kernels = gpu.kernels(256, 128);
    let table = gpu.poisoned::<bf16>(4 * 256);
    let ids = gpu.put(&[0u32, 1]);
    let residual = gpu.poisoned::<f32>(3 * 256);
    let source = TokenSource::Ids(ids.as_slice());
    assert!(
        kernels
            .embed(&gpu.stream, table.as_slice(), source, residual.as_slice())
            .is_err()
    );
    let shifted = residual.slice(1..513).unwrap();
    assert!(
        kernels
            .embed(&gpu.stream, table.as_slice(), source, shifted)
            .is_err(),
        "unaligned"
    );
    let gate_up = gpu.poisoned::<bf16>(24);
    let out = gpu.poisoned::<bf16>(12);
    assert!(
        kernels
            .silu_mul(&gpu.stream, gate_up.as_slice(), out.as_slice(), 1)
            .is_err(),
        "12 is no multiple of 8"
    );
    assert!(
        Kernels::load(&gpu.compiler, &gpu.device, &config(256, 96, 4, 2)).is_err(),
        "head_dim 96"
    );
    assert!(
        Kernels::load(&gpu.compiler, &gpu.device, &config(8200, 128, 4, 2)).is_err(),
        "hidden 8200"
    );
    gpu.stream.synchronize().unwrap();
}
