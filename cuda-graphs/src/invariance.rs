//! Algorithms that give a row of a product the same bits whatever the number of rows and wherever the row stands.
//!
//! cuBLASLt promises the same bits for the same call alone. What it does on the devices seen so far is to add a row's products
//! in the order of k within each of as many splits as the algorithm says, whatever its tiles, stages and clusters. That is not
//! relied on but tried: one algorithm is chosen as the reference of a matrix shape, and for other numbers of rows those
//! algorithms stay that give the bits of the reference on rows of the matrix itself.

use half::bf16;

use crate::blas::{Addresses, Algorithm, Product};
use crate::buffer::{DeviceBuffer, DeviceSlice};
use crate::choices::Choice;
use crate::error::{Error, Result};
use crate::matmul::{MatmulDims, MatmulElement, name};
use crate::tuning::{Scratch, Tuner};

/// Row counts are padded to multiples of this: the smallest product whose algorithms are compared.
pub(crate) const BLOCK: usize = 64;
/// Rows of the product that the reference must agree with itself on.
const MORE_ROWS: usize = 5 * BLOCK;
/// Different rows whose bits are compared.
const COMPARED: usize = 8;
/// Each block of rows is rotated by so many against the one before.
const ROTATION: usize = 11;
/// Fewer splits are preferred if their product takes at most so much longer: larger products want few.
const TOLERATED: f64 = 1.15;
/// Timed runs per algorithm.
const RUNS: usize = 3;

/// What the other algorithms of a matrix shape must agree with.
#[derive(Debug, Clone)]
pub(crate) struct Reference {
    pub(crate) choice: Choice,
    /// Parts that k is cut into.
    pub(crate) splits: u32,
}

/// Bits of the first rows of a product, `[COMPARED]`.
type Bits = Vec<Vec<u8>>;

impl Tuner<'_> {
    /// The algorithm whose bits all others of `w`'s shape must give.
    pub(crate) fn invariant_reference<T: MatmulElement>(
        &self,
        [n, k]: [usize; 2],
        with_residual: bool,
        w: DeviceSlice<'_, bf16>,
    ) -> Result<Reference> {
        let dims = [BLOCK, MORE_ROWS].map(|m| MatmulDims { m, n, k });
        let named = dims.map(|dims| name::<T>(dims, with_residual));
        let small = Product::new(self.lt, [BLOCK, n, k], T::CODE, named[0].clone())?;
        let large = Product::new(self.lt, [MORE_ROWS, n, k], T::CODE, named[1].clone())?;
        let found = small.heuristics(
            self.lt,
            self.handle,
            self.workspace.1,
            2 * self.algorithms,
            self.split_k,
        )?;
        let mut candidates: Vec<Algorithm> = found.iter().map(|found| found.algorithm).collect();
        let whole = candidates
            .iter()
            .filter_map(|algorithm| algorithm.with_splits(self.lt, 1));
        let whole: Vec<_> = whole.collect();
        candidates.extend(whole);
        let rows = [
            Rows::<T>::new(self, dims[0], w)?,
            Rows::<T>::new(self, dims[1], w)?,
        ];
        let scratch = Scratch::<T>::new(self.stream, dims[0], w)?;
        let mut consistent: Vec<Reference> = Vec::new();
        for algorithm in distinct(candidates) {
            let accepts =
                |product: &Product| product.accepts(self.lt, self.handle, &algorithm, self.workspace.1);
            if !accepts(&small) || !accepts(&large) {
                continue;
            }
            let bits = rows[0].bits(self, &small, &algorithm, with_residual, w);
            let more = rows[1].bits(self, &large, &algorithm, with_residual, w);
            let (Ok(Some(bits)), Ok(Some(more))) = (bits, more) else {
                continue;
            };
            if bits != more {
                continue;
            }
            let microseconds = self.median(&scratch, &small, &algorithm, with_residual, w)?;
            consistent.push(Reference {
                splits: algorithm.splits(self.lt),
                choice: Choice {
                    algorithm,
                    microseconds,
                    tried: found.len(),
                },
            });
        }
        let fastest = |of: &mut dyn Iterator<Item = &Reference>| {
            of.map(|reference| reference.choice.microseconds)
                .fold(f64::INFINITY, f64::min)
        };
        let best = fastest(&mut consistent.iter());
        let fast = consistent
            .iter()
            .filter(|reference| reference.choice.microseconds <= TOLERATED * best);
        let splits = fast.map(|reference| reference.splits).min();
        let of_those = consistent
            .iter()
            .filter(|reference| Some(reference.splits) == splits);
        let chosen = of_those.min_by(|a, b| a.choice.microseconds.total_cmp(&b.choice.microseconds));
        chosen.cloned().ok_or_else(|| no_algorithm(named[0].clone()))
    }

    /// The fastest algorithm for `dims` rows that gives the bits of `reference`.
    pub(crate) fn choose_invariant<T: MatmulElement>(
        &self,
        product: &Product,
        dims: MatmulDims,
        with_residual: bool,
        w: DeviceSlice<'_, bf16>,
        reference: &Reference,
    ) -> Result<Choice> {
        let of_block = MatmulDims { m: BLOCK, ..dims };
        let small = Product::new(
            self.lt,
            [BLOCK, dims.n, dims.k],
            T::CODE,
            name::<T>(of_block, with_residual),
        )?;
        let wanted = Rows::<T>::new(self, of_block, w)?.bits(
            self,
            &small,
            &reference.choice.algorithm,
            with_residual,
            w,
        )?;
        let found = product.heuristics(
            self.lt,
            self.handle,
            self.workspace.1,
            self.algorithms,
            self.split_k,
        )?;
        let algorithms = found
            .iter()
            .filter_map(|found| found.algorithm.with_splits(self.lt, reference.splits));
        let candidates = distinct(algorithms.chain([reference.choice.algorithm]).collect());
        let operands = (
            Rows::<T>::new(self, dims, w),
            Scratch::<T>::new(self.stream, dims, w),
        );
        let (Ok(rows), Ok(scratch)) = operands else {
            // Without memory to try things out the reference itself must do.
            return Ok(Choice {
                microseconds: 0.0,
                ..reference.choice.clone()
            });
        };
        let mut best: Option<Choice> = None;
        for algorithm in &candidates {
            if !product.accepts(self.lt, self.handle, algorithm, self.workspace.1) {
                continue;
            }
            match rows.bits(self, product, algorithm, with_residual, w) {
                Ok(bits) if bits.is_some() && bits == wanted => {}
                _ => continue,
            }
            let microseconds = self.median(&scratch, product, algorithm, with_residual, w)?;
            if best.as_ref().is_none_or(|best| microseconds < best.microseconds) {
                best = Some(Choice {
                    algorithm: *algorithm,
                    microseconds,
                    tried: candidates.len(),
                });
            }
        }
        best.ok_or_else(|| no_algorithm(name::<T>(dims, with_residual)))
    }

    fn median<T: MatmulElement>(
        &self,
        scratch: &Scratch<T>,
        product: &Product,
        algorithm: &Algorithm,
        with_residual: bool,
        w: DeviceSlice<'_, bf16>,
    ) -> Result<f64> {
        let at = scratch.addresses(w, with_residual);
        let mut times = Vec::with_capacity(RUNS);
        for _ in 0..RUNS {
            times.push(self.time(scratch, product, algorithm, at)?);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[RUNS / 2])
    }
}

fn distinct(mut algorithms: Vec<Algorithm>) -> Vec<Algorithm> {
    let mut seen = std::collections::HashSet::new();
    algorithms.retain(|algorithm| seen.insert(algorithm.0));
    algorithms
}

fn no_algorithm(shape: String) -> Error {
    Error::Blas {
        call: "cublasLtMatmulAlgoGetHeuristic",
        shape,
        status: "no algorithm gives a row the same bits whatever the number of rows".to_string(),
    }
}

/// Operands of which every block of rows holds the same rows, each time rotated.
struct Rows<T> {
    dims: MatmulDims,
    x: DeviceBuffer<bf16>,
    y: DeviceBuffer<T>,
}

impl<T: MatmulElement> Rows<T> {
    fn new(tuner: &Tuner<'_>, dims: MatmulDims, w: DeviceSlice<'_, bf16>) -> Result<Self> {
        let (stream, k) = (tuner.stream, dims.k);
        let device = stream.device();
        let rows = DeviceBuffer::<bf16>::zeroed(device, BLOCK * k)?;
        let mut filled = 0;
        while filled < rows.len() {
            let piece = w.len().min(rows.len() - filled);
            stream.copy(rows.slice(filled..filled + piece)?, w.slice(..piece)?)?;
            filled += piece;
        }
        let x = DeviceBuffer::<bf16>::zeroed(device, dims.m * k)?;
        for block in 0..dims.m / BLOCK {
            let (first, to) = (block * ROTATION % BLOCK, block * BLOCK);
            let turn = BLOCK - first;
            stream.copy(x.slice(to * k..(to + turn) * k)?, rows.slice(first * k..)?)?;
            if first > 0 {
                stream.copy(
                    x.slice((to + turn) * k..(to + BLOCK) * k)?,
                    rows.slice(..first * k)?,
                )?;
            }
        }
        let y = DeviceBuffer::zeroed(device, dims.m * dims.n)?;
        stream.synchronize()?;
        Ok(Self { dims, x, y })
    }

    /// The bits of the first rows; `None` if they differ between the first block and the last.
    fn bits(
        &self,
        tuner: &Tuner<'_>,
        product: &Product,
        algorithm: &Algorithm,
        with_residual: bool,
        w: DeviceSlice<'_, bf16>,
    ) -> Result<Option<Bits>> {
        let stream = tuner.stream;
        stream.fill_bytes(&self.y, 0)?;
        let at = Addresses {
            x: self.x.ptr(),
            w: w.ptr(),
            y: self.y.ptr(),
            residual: with_residual.then(|| self.y.ptr()),
        };
        let raw = stream.bound()?;
        // SAFETY: the operands are as long as the product says and live until the download below has waited for it.
        unsafe { product.run(tuner.lt, tuner.handle, algorithm, at, tuner.workspace, raw.cast()) }?;
        let n = self.dims.n;
        let row = |row: usize| -> Result<Vec<u8>> {
            let values: Vec<T> = stream.download(self.y.slice(row * n..(row + 1) * n)?)?;
            Ok(bytemuck::cast_slice(&values).to_vec())
        };
        let last = self.dims.m / BLOCK - 1;
        let mut bits = Vec::with_capacity(COMPARED);
        for i in 0..COMPARED {
            let again = last * BLOCK + place(last, i);
            let first = row(i)?;
            if first != row(again)? {
                return Ok(None);
            }
            bits.push(first);
        }
        Ok(Some(bits))
    }
}

/// Where row `i` stands within block `block`.
fn place(block: usize, i: usize) -> usize {
    (i + BLOCK - block * ROTATION % BLOCK) % BLOCK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_found_where_its_block_was_rotated_to() {
        for block in 0..20 {
            // As `Rows::new` fills a block: from `first` on, then the rows before it.
            let first = block * ROTATION % BLOCK;
            let filled: Vec<usize> = (first..BLOCK).chain(0..first).collect();
            for i in 0..BLOCK {
                assert_eq!(filled[place(block, i)], i, "block {block}");
            }
        }
    }
}
