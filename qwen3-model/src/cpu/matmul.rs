//! Products of bf16 matrices, or matrices in 4 bits, with f32 rows: `out[t, n] = Σₖ x[t, k] · w[n, k]`.
//!
//! One kernel serves one token and many: a tile of R weight rows and T tokens, whose R·T sums stay
//! in registers. Two bf16 weights are one 32-bit word, and both become f32 by one operation each:
//!
//! ```text
//! memory      | w₀ w₁ | w₂ w₃ | …        one 32-bit lane per pair
//! word << 16          → w₀, w₂, …        multiplies x's even elements
//! word & ffff0000     → w₁, w₃, …        multiplies x's odd elements
//! ```
//!
//! so the rows of x are stored as their even elements followed by their odd ones ([`SplitRows`]),
//! and no shuffle is needed. Weights are read once from memory: a block of rows that fits the
//! second-level cache is multiplied with all tokens before the next block.
//!
//! Of a matrix in 4 bits each block of rows is dequantised to bf16 first, by the thread that multiplies it.
//!
//! Every sum is taken in the same order whatever the tile, so a token's result does not depend on
//! what else is in the step.

use half::bf16;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use std::cell::RefCell;

use super::simd::dispatch;
use crate::QuantizedMatrix;

/// Bytes of weights in one task: a few microseconds of reading, and half of a small second-level
/// cache.
const BLOCK_BYTES: usize = 128 << 10;
/// Block sizes are multiples of this, which all tile heights divide: no block but the last ends in
/// single rows.
const ROW_QUANTUM: usize = 24;
/// Output elements computed before they are put in place: bounds the scratch memory of a product
/// with many tokens and a vocabulary of rows.
const SLAB_ELEMENTS: usize = 1 << 20;
/// Below this many elements a copy is not worth sharing among threads.
const PARALLEL_COPY: usize = 1 << 14;

/// A weight matrix `[rows, cols]`.
#[derive(Clone, Copy)]
pub(crate) enum Matrix<'a> {
    /// Row-major.
    Bf16(&'a [bf16]),
    FourBit(&'a QuantizedMatrix),
}

impl Matrix<'_> {
    fn n_rows(&self, cols: usize) -> usize {
        match self {
            Self::Bf16(data) => data.len() / cols,
            Self::FourBit(matrix) => matrix.rows(),
        }
    }
}

thread_local! {
    /// The rows that a thread has dequantised last.
    static DEQUANTIZED: RefCell<Vec<bf16>> = const { RefCell::new(Vec::new()) };
}

/// Rows of f32, each stored as its even elements followed by its odd ones.
#[derive(Debug, Default)]
pub(crate) struct SplitRows {
    data: Vec<f32>,
    cols: usize,
}

impl SplitRows {
    /// Elements that it holds memory for.
    pub(crate) fn capacity(&self) -> usize {
        self.data.capacity()
    }

    /// Takes over `rows`, `[n, cols]` with `cols` even.
    pub(crate) fn set(&mut self, rows: &[f32], cols: usize) {
        self.cols = cols;
        // Every element is written below; only growth needs a value.
        self.data.resize(rows.len(), 0.0);
        let split = |(to, from): (&mut [f32], &[f32])| {
            let (even, odd) = to.split_at_mut(cols / 2);
            for ((pair, even), odd) in from.chunks_exact(2).zip(even).zip(odd) {
                (*even, *odd) = (pair[0], pair[1]);
            }
        };
        if rows.len() < PARALLEL_COPY {
            self.data
                .chunks_exact_mut(cols)
                .zip(rows.chunks_exact(cols))
                .for_each(split);
        } else {
            self.data
                .par_chunks_exact_mut(cols)
                .zip(rows.par_chunks_exact(cols))
                .for_each(split);
        }
    }

    fn n_rows(&self) -> usize {
        self.data.len() / self.cols
    }

    fn row(&self, row: usize) -> (&[f32], &[f32]) {
        self.data[row * self.cols..][..self.cols].split_at(self.cols / 2)
    }
}

/// Computes `out[t, ..] = [w₀ x_t, w₁ x_t, …]` for all rows of `x`, the matrices' outputs side by
/// side. `matrices` are `[rows, cols]` row-major with `cols` as in `x`; `scratch` keeps its size
/// from call to call.
pub(crate) fn matmul(matrices: &[Matrix<'_>], x: &SplitRows, scratch: &mut Vec<f32>, out: &mut [f32]) {
    let tokens = x.n_rows();
    let total_rows = matrices.iter().map(|m| m.n_rows(x.cols)).sum::<usize>();
    debug_assert_eq!(out.len(), tokens * total_rows);
    let block_rows = (BLOCK_BYTES / (2 * x.cols) / ROW_QUANTUM).max(1) * ROW_QUANTUM;
    if tokens == 1 {
        out.par_chunks_mut(block_rows)
            .enumerate()
            .for_each(|(block, out)| multiply_block(matrices, x, block * block_rows, out));
        return;
    }
    // Blocks write side by side, [rows, tokens of the block]; then each token gathers its row.
    let slab_rows = (SLAB_ELEMENTS / tokens / block_rows).max(1) * block_rows;
    for first in (0..total_rows).step_by(slab_rows) {
        let rows = slab_rows.min(total_rows - first);
        scratch.resize(rows * tokens, 0.0);
        scratch
            .par_chunks_mut(block_rows * tokens)
            .enumerate()
            .for_each(|(block, out)| {
                multiply_block(matrices, x, first + block * block_rows, out);
            });
        let gather = |(token, out): (usize, &mut [f32])| {
            for (block, out) in out[first..first + rows].chunks_mut(block_rows).enumerate() {
                let begin = block * block_rows * tokens + token * out.len();
                out.copy_from_slice(&scratch[begin..begin + out.len()]);
            }
        };
        if rows * tokens < PARALLEL_COPY {
            out.chunks_exact_mut(total_rows).enumerate().for_each(gather);
        } else {
            out.par_chunks_exact_mut(total_rows).enumerate().for_each(gather);
        }
    }
}

/// Rows `first..` of the stacked matrices times all tokens: `out` is `[tokens, rows of the block]`.
fn multiply_block(matrices: &[Matrix<'_>], x: &SplitRows, first: usize, out: &mut [f32]) {
    let rows = out.len() / x.n_rows();
    let (mut first, mut done) = (first, 0);
    for matrix in matrices {
        let matrix_rows = matrix.n_rows(x.cols);
        if first < matrix_rows && done < rows {
            let n = (matrix_rows - first).min(rows - done);
            let mut multiply = |weights: &[bf16]| {
                dispatch(Block {
                    weights: bytemuck::cast_slice(weights),
                    x,
                    out,
                    stride: rows,
                    column: done,
                });
            };
            match matrix {
                Matrix::Bf16(data) => multiply(&data[first * x.cols..(first + n) * x.cols]),
                Matrix::FourBit(matrix) => DEQUANTIZED.with_borrow_mut(|weights| {
                    weights.resize(n * x.cols, bf16::ZERO);
                    matrix.fill(first * x.cols, weights);
                    multiply(weights);
                }),
            }
            done += n;
            first = 0;
        } else {
            first = first.saturating_sub(matrix_rows);
        }
    }
}

/// Brings a block into the cache, first one word of every memory page and then every line in order:
/// the rows of a tile are too short for the processor to foresee the next ones.
#[inline(always)]
fn fetch(weights: &[u16]) {
    const PAGE: usize = 4096 / size_of::<u16>();
    const LINE: usize = 64 / size_of::<u16>();
    let mut all = 0;
    for word in weights.iter().step_by(PAGE) {
        all |= word;
    }
    for word in weights.iter().step_by(LINE) {
        all |= word;
    }
    std::hint::black_box(all);
}

/// All tokens times the rows of `weights`, into columns `column..` of `out` `[tokens, stride]`.
struct Block<'a> {
    weights: &'a [u16],
    x: &'a SplitRows,
    out: &'a mut [f32],
    stride: usize,
    column: usize,
}

impl WithSimd for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            weights,
            x,
            out,
            stride,
            column,
        } = self;
        fetch(weights);
        let mut band = Band {
            weights,
            x,
            out,
            stride,
            column,
        };
        let tokens = x.n_rows();
        let mut token = 0;
        // At least eight sums hide the latency of a multiplication; with the operands of a tile they
        // still fit sixteen vector registers.
        while token + 4 <= tokens {
            band.rows::<S, 2, 4>(simd, token);
            token += 4;
        }
        match tokens - token {
            3 => band.rows::<S, 3, 3>(simd, token),
            2 => band.rows::<S, 4, 2>(simd, token),
            1 => band.rows::<S, 8, 1>(simd, token),
            _ => {}
        }
    }
}

struct Band<'a> {
    weights: &'a [u16],
    x: &'a SplitRows,
    out: &'a mut [f32],
    stride: usize,
    column: usize,
}

impl Band<'_> {
    /// T tokens times all rows, R rows at a time.
    #[inline(always)]
    fn rows<S: Simd, const R: usize, const T: usize>(&mut self, simd: S, token: usize) {
        let n_rows = self.weights.len() / self.x.cols;
        let whole = n_rows / R * R;
        for row in (0..whole).step_by(R) {
            self.tile::<S, R, T>(simd, row, token);
        }
        for row in whole..n_rows {
            self.tile::<S, 1, T>(simd, row, token);
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const T: usize>(&mut self, simd: S, row: usize, token: usize) {
        let cols = self.x.cols;
        let mut weights: [&[u16]; R] = [&[]; R];
        for (r, weights) in weights.iter_mut().enumerate() {
            *weights = &self.weights[(row + r) * cols..][..cols];
        }
        let mut x: [(&[f32], &[f32]); T] = [(&[], &[]); T];
        for (t, x) in x.iter_mut().enumerate() {
            *x = self.x.row(token + t);
        }
        let sums: [[f32; T]; R] = dot_tile(simd, weights, x);
        for (r, sums) in sums.iter().enumerate() {
            for (t, sum) in sums.iter().enumerate() {
                self.out[(token + t) * self.stride + self.column + row + r] = *sum;
            }
        }
    }
}

#[inline(always)]
fn dot_tile<S: Simd, const R: usize, const T: usize>(
    simd: S,
    weights: [&[u16]; R],
    x: [(&[f32], &[f32]); T],
) -> [[f32; T]; R] {
    // Plain loops throughout: a closure that is not inlined is compiled without the vector
    // instructions that its caller was dispatched to.
    let whole = x.first().map_or(0, |(even, _)| even.len()) / S::F32_LANES;
    let mut words: [&[S::u16s]; R] = [&[]; R];
    for (words, weights) in words.iter_mut().zip(weights) {
        *words = &S::as_simd_u16s(weights).0[..whole];
    }
    let mut even: [&[S::f32s]; T] = [&[]; T];
    let mut odd: [&[S::f32s]; T] = [&[]; T];
    for t in 0..T {
        even[t] = &S::as_simd_f32s(x[t].0).0[..whole];
        odd[t] = &S::as_simd_f32s(x[t].1).0[..whole];
    }
    let shift = simd.splat_u32s(16);
    let high = simd.splat_u32s(0xffff_0000);
    let zero = simd.splat_f32s(0.0);
    let mut sums = [[zero; T]; R];
    for i in 0..whole {
        if T == 1 {
            for r in 0..R {
                let pair: S::u32s = bytemuck::cast(words[r][i]);
                let low: S::f32s = bytemuck::cast(simd.wrapping_dyn_shl_u32s(pair, shift));
                sums[r][0] = simd.mul_add_f32s(low, even[0][i], sums[r][0]);
                let upper: S::f32s = bytemuck::cast(simd.and_u32s(pair, high));
                sums[r][0] = simd.mul_add_f32s(upper, odd[0][i], sums[r][0]);
            }
            continue;
        }
        let mut pairs = [shift; R];
        let mut weights = [zero; R];
        for r in 0..R {
            pairs[r] = bytemuck::cast(words[r][i]);
            weights[r] = bytemuck::cast(simd.wrapping_dyn_shl_u32s(pairs[r], shift));
        }
        for t in 0..T {
            let x = even[t][i];
            for r in 0..R {
                sums[r][t] = simd.mul_add_f32s(weights[r], x, sums[r][t]);
            }
        }
        for r in 0..R {
            weights[r] = bytemuck::cast(simd.and_u32s(pairs[r], high));
        }
        for t in 0..T {
            let x = odd[t][i];
            for r in 0..R {
                sums[r][t] = simd.mul_add_f32s(weights[r], x, sums[r][t]);
            }
        }
    }
    let mut result = [[0.0; T]; R];
    for r in 0..R {
        for t in 0..T {
            result[r][t] = simd.reduce_sum_f32s(sums[r][t]);
        }
    }
    // What is left of rows whose length is no multiple of the vector's.
    let done = whole * S::F32_LANES;
    for (result, weights) in result.iter_mut().zip(weights) {
        for (result, (even, odd)) in result.iter_mut().zip(x) {
            let pairs = weights[2 * done..].chunks_exact(2);
            for ((pair, even), odd) in pairs.zip(&even[done..]).zip(&odd[done..]) {
                *result = bf16::from_bits(pair[0]).to_f32().mul_add(*even, *result);
                *result = bf16::from_bits(pair[1]).to_f32().mul_add(*odd, *result);
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::random;

    fn activations(seed: u64, len: usize) -> Vec<f32> {
        random::norm(seed, "x", len)
            .into_iter()
            .map(|x| 10.0 * (x - 1.0))
            .collect()
    }

    fn product(matrices: &[&[bf16]], x: &[f32], cols: usize) -> Vec<f32> {
        let matrices: Vec<_> = matrices.iter().map(|m| Matrix::Bf16(m)).collect();
        product_of(&matrices, x, cols)
    }

    fn product_of(matrices: &[Matrix<'_>], x: &[f32], cols: usize) -> Vec<f32> {
        let rows: usize = matrices.iter().map(|m| m.n_rows(cols)).sum();
        let mut split = SplitRows::default();
        split.set(x, cols);
        let mut out = vec![f32::NAN; x.len() / cols * rows];
        matmul(matrices, &split, &mut Vec::new(), &mut out);
        out
    }

    /// The product in f64, and the sum of magnitudes that bounds its rounding.
    fn oracle(matrices: &[&[bf16]], x: &[f32], cols: usize) -> Vec<(f64, f64)> {
        let mut out = Vec::new();
        for x in x.chunks_exact(cols) {
            for row in matrices.iter().flat_map(|m| m.chunks_exact(cols)) {
                let terms = row.iter().zip(x).map(|(w, x)| w.to_f64() * f64::from(*x));
                out.push(terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs())));
            }
        }
        out
    }

    proptest! {
        #[test]
        fn products_agree_with_f64(
            half_cols in 1usize..150, rows in prop::collection::vec(1usize..80, 1..4), tokens in 1usize..20, seed: u64,
        ) {
            let cols = 2 * half_cols;
            let matrices: Vec<_> =
                rows.iter().enumerate().map(|(i, n)| random::matrix(seed, &i.to_string(), n * cols)).collect();
            let matrices: Vec<_> = matrices.iter().map(Vec::as_slice).collect();
            let x = activations(seed, tokens * cols);
            for (got, (exact, size)) in product(&matrices, &x, cols).into_iter().zip(oracle(&matrices, &x, cols)) {
                prop_assert!((f64::from(got) - exact).abs() <= 1e-6 * size + 1e-30, "{got} for {exact}");
            }
        }

        #[test]
        fn matrices_in_4_bits_multiply_as_their_bf16_values_do(
            half_cols in 1usize..150, rows in prop::collection::vec(1usize..200, 1..4), tokens in 1usize..6, seed: u64,
        ) {
            let cols = 2 * half_cols;
            let quantized: Vec<_> = rows.iter().enumerate().map(|(i, &n)| {
                let data = random::matrix(seed, &i.to_string(), n * cols);
                QuantizedMatrix::quantize(n, cols, &data, crate::QuantType::Nf4, seed % 2 == 0).unwrap()
            }).collect();
            let values: Vec<_> = quantized.iter().map(QuantizedMatrix::dequantize).collect();
            // One of them in bf16, as in checkpoints that keep some modules so.
            let mixed = quantized.iter().zip(&values).enumerate().map(|(i, (q, v))| {
                if i == 1 { Matrix::Bf16(v) } else { Matrix::FourBit(q) }
            });
            let x = activations(seed, tokens * cols);
            let plain: Vec<_> = values.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(product_of(&mixed.collect::<Vec<_>>(), &x, cols), product(&plain, &x, cols));
        }

        #[test]
        fn a_token_does_not_depend_on_its_neighbours(
            cols in prop::sample::select(vec![16usize, 30, 256]), rows in 1usize..100, tokens in 2usize..20, seed: u64,
        ) {
            let matrix = random::matrix(seed, "w", rows * cols);
            let x = activations(seed, tokens * cols);
            let together = product(&[&matrix], &x, cols);
            for (x, together) in x.chunks_exact(cols).zip(together.chunks_exact(rows)) {
                prop_assert_eq!(product(&[&matrix], x, cols), together);
            }
        }
    }

    #[test]
    fn products_larger_than_a_slab_are_whole() {
        let (cols, rows, tokens) = (2, SLAB_ELEMENTS / 3 + 7, 5);
        let matrix = random::matrix(3, "w", rows * cols);
        let x = activations(3, tokens * cols);
        let together = product(&[&matrix], &x, cols);
        let alone = product(&[&matrix], &x[4 * cols..], cols);
        assert_eq!(together[4 * rows..], alone);
    }
}
