//! Choosing the algorithm of a product by timing.

use half::bf16;

use crate::blas::{Addresses, Algorithm, BlasLt, Handle, Product};
use crate::buffer::{DeviceBuffer, DeviceSlice};
use crate::choices::Choice;
use crate::error::{Error, Result};
use crate::matmul::{MatmulDims, MatmulElement, name};
use crate::stream::{Event, Stream};

/// Timed runs per algorithm.
const RUNS: usize = 5;
/// An algorithm whose first run takes this much longer than the best so far is not run again.
const HOPELESS: f64 = 1.5;

/// What timing needs.
pub(crate) struct Tuner<'a> {
    pub(crate) lt: &'a BlasLt,
    pub(crate) handle: &'a Handle,
    pub(crate) stream: &'a Stream,
    /// Address and bytes.
    pub(crate) workspace: (u64, usize),
    /// How many algorithms to compare.
    pub(crate) algorithms: usize,
    /// Whether products may be split along k.
    pub(crate) split_k: bool,
}

impl Tuner<'_> {
    /// The library's own first guess for a product.
    pub(crate) fn guess(&self, product: &Product) -> Result<Choice> {
        let found = product.heuristics(self.lt, self.handle, self.workspace.1, 1, self.split_k)?;
        let first = found.first().ok_or_else(|| unsupported("no algorithm"))?;
        Ok(Choice {
            algorithm: first.algorithm,
            microseconds: 0.0,
            tried: 1,
        })
    }

    /// Times the algorithms for a class of shapes and returns the fastest.
    pub(crate) fn choose<T: MatmulElement>(
        &self,
        product: &Product,
        dims: MatmulDims,
        with_residual: bool,
        w: DeviceSlice<'_, bf16>,
    ) -> Result<Choice> {
        let product_name = name::<T>(dims, with_residual);
        let found = product.heuristics(
            self.lt,
            self.handle,
            self.workspace.1,
            self.algorithms,
            self.split_k,
        )?;
        let Some(first) = found.first() else {
            return Err(Error::Blas {
                call: "cublasLtMatmulAlgoGetHeuristic",
                shape: product_name,
                status: "no algorithm".to_string(),
            });
        };
        let untimed = Choice {
            algorithm: first.algorithm,
            microseconds: 0.0,
            tried: 1,
        };
        // Without memory to try things out the library's guess must do.
        let scratch = Scratch::<T>::new(self.stream, dims, w);
        let (1.., Ok(scratch)) = (found.len().saturating_sub(1), scratch) else {
            return Ok(untimed);
        };
        let at = scratch.addresses(w, with_residual);
        let mut best: Option<Choice> = None;
        for candidate in &found {
            let mut times = Vec::with_capacity(RUNS);
            // The first run loads the kernel and is not counted.
            for run in 0..=RUNS {
                let Ok(us) = self.time(&scratch, product, &candidate.algorithm, at) else {
                    break;
                };
                if run > 0 {
                    times.push(us);
                }
                if times.len() == 1
                    && best
                        .as_ref()
                        .is_some_and(|best| us > HOPELESS * best.microseconds)
                {
                    break;
                }
            }
            times.sort_by(f64::total_cmp);
            if let Some(&microseconds) = times.get(times.len() / 2)
                && best.as_ref().is_none_or(|best| microseconds < best.microseconds)
            {
                best = Some(Choice {
                    algorithm: candidate.algorithm,
                    microseconds,
                    tried: found.len(),
                });
            }
        }
        if let Some(best) = &best {
            tracing::debug!(product = %product_name, us = best.microseconds, tried = best.tried, "algorithm chosen");
        }
        best.ok_or_else(|| Error::Blas {
            call: "cublasLtMatmul",
            shape: product_name,
            status: format!("none of {} algorithms runs", found.len()),
        })
    }

    /// Microseconds of one run with a cold L2 cache.
    pub(crate) fn time<T: MatmulElement>(
        &self,
        scratch: &Scratch<T>,
        product: &Product,
        algorithm: &Algorithm,
        at: Addresses,
    ) -> Result<f64> {
        if let Some(flush) = &scratch.flush {
            self.stream.fill_bytes(flush, 1)?;
        }
        let raw = self.stream.bound()?;
        self.stream.record(&scratch.start)?;
        // SAFETY: the scratch operands are as long as the product says and live until the wait below.
        unsafe { product.run(self.lt, self.handle, algorithm, at, self.workspace, raw.cast()) }?;
        self.stream.record(&scratch.end)?;
        Ok(f64::from(scratch.start.elapsed_ms(&scratch.end)?) * 1e3)
    }
}

/// Memory and events to time with.
pub(crate) struct Scratch<T> {
    x: DeviceBuffer<bf16>,
    y: DeviceBuffer<T>,
    /// Twice the L2 cache, if there is memory for it.
    flush: Option<DeviceBuffer<u8>>,
    start: Event,
    end: Event,
}

impl<T: MatmulElement> Scratch<T> {
    /// X is filled with pieces of `w`: never time on zeros, which cost less power and so less time.
    pub(crate) fn new(stream: &Stream, dims: MatmulDims, w: DeviceSlice<'_, bf16>) -> Result<Self> {
        let device = stream.device();
        let too_large = || unsupported("too many elements");
        let x_len = dims.m.checked_mul(dims.k).ok_or_else(too_large)?;
        let y_len = dims.m.checked_mul(dims.n).ok_or_else(too_large)?;
        let x = DeviceBuffer::<bf16>::zeroed(device, x_len)?;
        let mut filled = 0;
        while filled < x_len {
            let piece = w.len().min(x_len - filled);
            stream.copy(x.slice(filled..filled + piece)?, w.slice(..piece)?)?;
            filled += piece;
        }
        let y = DeviceBuffer::zeroed(device, y_len)?;
        let flush = DeviceBuffer::zeroed(device, 2 * device.info().l2_bytes).ok();
        let (start, end) = (Event::new(device)?, Event::new(device)?);
        Ok(Self {
            x,
            y,
            flush,
            start,
            end,
        })
    }
}

impl<T: MatmulElement> Scratch<T> {
    /// Where the operands of a timed product lie.
    pub(crate) fn addresses(&self, w: DeviceSlice<'_, bf16>, with_residual: bool) -> Addresses {
        Addresses {
            x: self.x.ptr(),
            w: w.ptr(),
            y: self.y.ptr(),
            residual: with_residual.then(|| self.y.ptr()),
        }
    }
}

fn unsupported(status: &str) -> Error {
    Error::Blas {
        call: "cublasLtMatmul",
        shape: "a product".to_string(),
        status: status.to_string(),
    }
}

/// More rows than any product has.
const MOST_ROWS: usize = 1 << 40;

/// The row count whose algorithm also serves `m` rows: the buckets of decoding up to 256, then four per doubling. An algorithm
/// for many more rows may have tiles so high that the last one is nearly empty.
pub(crate) fn row_class(m: usize) -> usize {
    match m {
        0..=8 => m.max(1).next_power_of_two(),
        9..=256 => m.next_multiple_of(16),
        // Beyond any batch; a class of its own keeps the arithmetic in range.
        _ if m > MOST_ROWS => m,
        _ => m.next_multiple_of(m.next_power_of_two() / 8),
    }
}

/// The row counts, ascending, that the algorithms of products of up to `max` rows are chosen for. A product of each chooses them
/// all ahead of their first use, which else waits for the choice.
///
/// ```
/// assert_eq!(cuda_graphs::row_classes(40), [1, 2, 4, 8, 16, 32, 48]);
/// ```
pub fn row_classes(max: usize) -> Vec<usize> {
    let mut classes = vec![1];
    // Beyond, every row count is a class of its own.
    let max = max.min(MOST_ROWS);
    while let Some(&last) = classes.last().filter(|&&last| last < max) {
        classes.push(row_class(last + 1));
    }
    classes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_classes_hold_every_row_count_and_do_not_grow_it_by_more_than_a_quarter_beyond_16() {
        let mut classes = std::collections::BTreeSet::new();
        for m in 1..=20_000 {
            let class = row_class(m);
            assert!(class >= m);
            assert_eq!(row_class(class), class, "a class serves itself");
            if m > 8 {
                assert!(class <= (m + 15).max(m + m.div_ceil(4)), "{m} -> {class}");
            }
            classes.insert(class);
        }
        assert_eq!(row_class(usize::MAX), usize::MAX);
        assert!(classes.len() < 50, "{} classes to time", classes.len());
        assert!(row_classes(20_000).into_iter().eq(classes));
        assert_eq!(row_classes(usize::MAX).last(), Some(&MOST_ROWS));
        for bucket in crate::BucketSet::new(256).unwrap().sizes() {
            assert_eq!(
                row_class(*bucket),
                *bucket,
                "each bucket of decoding has its own class"
            );
        }
    }
}
