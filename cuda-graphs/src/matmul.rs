//! Matrix products by cuBLASLt, with the algorithm chosen by timing, or by a plain kernel.
//!
//! `Y[m, n] = X[m, k] · W[n, k]ᵀ (+ residual[m, n])`, all row-major, X and W bf16, sums in f32. W is laid out as in
//! Hugging Face's files. For each class of row counts several of the library's algorithms are timed once on the
//! device, with the L2 cache flushed before each run as it is in a model, and the fastest is kept, in memory and on
//! disk. The result of a product depends on its shape and the choice alone.

mod library;
mod plain;

use bytemuck::Pod;
use half::bf16;

use crate::blas::{ALIGNMENT, Addresses, TYPE_BF16, TYPE_F32};
use crate::buffer::{DeviceBuffer, DeviceSlice};
use crate::cache::CacheLocation;
use crate::compiler::Compiler;
use crate::error::{Error, Result};
use crate::invariance::BLOCK;
use crate::stream::Stream;
use library::{CublasLt, PlanKey};
use plain::PlainProducts;

pub use plain::kernel_specs;

/// Element types of a product's output.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// use half::bf16;
///
/// /// `x · wᵀ` into f32 or bf16.
/// fn project<T: MatmulElement>(matmul: &Matmul, x: &DeviceBuffer<bf16>, w: &DeviceBuffer<bf16>, y: &DeviceBuffer<T>) -> Result<()> {
///     matmul.multiply(MatmulDims { m: 8, n: 64, k: 32 }, x, w, y, None)
/// }
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
pub trait MatmulElement: Pod + sealed::Sealed {
    #[doc(hidden)]
    const CODE: std::ffi::c_int;
    #[doc(hidden)]
    const NAME: &'static str;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::bf16 {}
    impl Sealed for f32 {}
}

impl MatmulElement for bf16 {
    const CODE: std::ffi::c_int = TYPE_BF16;
    const NAME: &'static str = "bf16";
}

impl MatmulElement for f32 {
    const CODE: std::ffi::c_int = TYPE_F32;
    const NAME: &'static str = "f32";
}

/// The sizes of a product `Y[m, n] = X[m, k] · W[n, k]ᵀ`.
///
/// ```
/// use cuda_graphs::MatmulDims;
///
/// // 8 rows of 2,560 features times the transpose of a matrix of 4,096 rows.
/// let dims = MatmulDims { m: 8, n: 4096, k: 2560 };
/// assert_eq!(dims.m * dims.n, 32_768);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatmulDims {
    /// Rows of X and Y: tokens.
    pub m: usize,
    /// Columns of Y, rows of W: output features.
    pub n: usize,
    /// Columns of X and W: input features.
    pub k: usize,
}

/// How to make a [`Matmul`].
///
/// ```
/// use cuda_graphs::{CacheLocation, MatmulOptions};
///
/// let options = MatmulOptions { algorithms: 4, cache: CacheLocation::Off, ..MatmulOptions::default() };
/// assert!(options.workspace_bytes > 0);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatmulOptions {
    /// Device memory that algorithms may use, bytes.
    pub workspace_bytes: usize,
    /// Algorithms to time per product, at least 1. With 1 the library's own guess is taken without timing.
    pub algorithms: usize,
    /// Whether algorithms may split a product along k and add partial sums, which fills a device at few rows. Sums are
    /// added in f32 either way, in another order.
    pub split_k: bool,
    /// Where choices are kept.
    pub cache: CacheLocation,
    /// Keep only algorithms that give a row the same bits whatever the number of rows and wherever it stands: the bits of one
    /// reference algorithm for each shape of W, found by trying. Products are then given padded row counts, see
    /// [`Matmul::padded_rows`].
    pub row_invariant: bool,
}

impl Default for MatmulOptions {
    fn default() -> Self {
        Self {
            workspace_bytes: 32 << 20,
            algorithms: 16,
            split_k: true,
            cache: CacheLocation::Usual,
            row_invariant: false,
        }
    }
}

impl MatmulOptions {
    /// What the choices' names end with.
    fn class(&self) -> String {
        let default = Self::default();
        let mut class = String::new();
        if self.algorithms != default.algorithms {
            class += &format!(", of {}", self.algorithms);
        }
        if self.split_k != default.split_k {
            class += ", not split";
        }
        if self.workspace_bytes != default.workspace_bytes {
            class += &format!(", {} bytes", self.workspace_bytes);
        }
        class
    }
}

/// What is known about a product's algorithm.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// use half::bf16;
///
/// let matmul = Matmul::new(&stream)?;
/// let w = DeviceBuffer::<bf16>::zeroed(&device, 64 * 32)?;
/// let report = matmul.prepare::<f32>(MatmulDims { m: 8, n: 64, k: 32 }, &w, false)?;
/// println!("{} us, the best of {} algorithms", report.microseconds, report.tried);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct MatmulReport {
    /// Its time when it was chosen, for the class's largest row count, microseconds; 0 if it was not timed.
    pub microseconds: f64,
    /// How many algorithms were compared; 0 for [plain](Matmul::plain) products.
    pub tried: usize,
}

/// Matrix products on one stream.
///
/// Bound to its stream because all products share one workspace. Products can be captured once their shape has run
/// outside a capture, which the warm-up of a [`GraphCache`](crate::GraphCache) does.
///
/// ```no_run
/// use cuda_graphs::{Device, DeviceBuffer, Matmul, MatmulDims, Stream};
/// use half::bf16;
///
/// let device = Device::open(0)?;
/// let stream = Stream::new(&device)?;
/// let matmul = Matmul::new(&stream)?;
/// let dims = MatmulDims { m: 8, n: 6144, k: 2560 };
/// let x = DeviceBuffer::from_slice(&stream, &vec![bf16::ONE; dims.m * dims.k])?;
/// let w = DeviceBuffer::from_slice(&stream, &vec![bf16::ONE; dims.n * dims.k])?;
/// let y = DeviceBuffer::<f32>::zeroed(&device, dims.m * dims.n)?;
/// matmul.multiply(dims, &x, &w, &y, None)?;
/// assert_eq!(stream.download(&y)?[0], 2560.0);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug)]
pub struct Matmul {
    stream: Stream,
    by: By,
}

/// What computes.
#[derive(Debug)]
enum By {
    CublasLt(Box<CublasLt>),
    Plain(PlainProducts),
}

impl Matmul {
    /// Products on `stream` with the default options.
    ///
    /// # Errors
    /// [`Error::MissingLibrary`] with advice, [`Error::Blas`], [`Error::Driver`].
    pub fn new(stream: &Stream) -> Result<Self> {
        Self::with_options(stream, &MatmulOptions::default())
    }

    /// Products on `stream`.
    ///
    /// # Errors
    /// As [`Matmul::new`].
    pub fn with_options(stream: &Stream, options: &MatmulOptions) -> Result<Self> {
        Ok(Self {
            stream: stream.clone(),
            by: By::CublasLt(Box::new(CublasLt::new(stream, options)?)),
        })
    }

    /// Products on `stream` by a kernel of this crate in place of cuBLASLt: plain tiles, for any shape whose operands begin at
    /// multiples of 16 bytes. Several times slower; nothing is timed or chosen, cuBLASLt need not be there, and a row's bits
    /// depend on its own elements alone.
    ///
    /// For devices without cuBLASLt, for comparison, and for tools that watch every access of a kernel, which those of a library
    /// confuse. The kernel is compiled by `compiler`, or taken from its cache.
    ///
    /// # Errors
    /// Those of [`Compiler::load`]. Panics: none.
    pub fn plain(stream: &Stream, compiler: &Compiler) -> Result<Self> {
        Ok(Self {
            stream: stream.clone(),
            by: By::Plain(PlainProducts::load(stream.device(), compiler)?),
        })
    }

    /// Gives `Y = X · Wᵀ`, plus `residual` if there is one, to the stream; does not wait, except the first time for a
    /// class of shapes, when algorithms are timed. `residual` may be `y` itself; other overlaps with `y` are refused.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] if an operand is not as long as `dims` says; [`Error::InvalidArgument`] for empty
    /// dimensions, an address that is no multiple of 16, or overlaps; [`Error::NotPrepared`] while capturing a shape
    /// that has not run before; [`Error::WrongDevice`], [`Error::Blas`], [`Error::Driver`].
    pub fn multiply<'a, T: MatmulElement>(
        &self,
        dims: MatmulDims,
        x: impl Into<DeviceSlice<'a, bf16>>,
        w: impl Into<DeviceSlice<'a, bf16>>,
        y: impl Into<DeviceSlice<'a, T>>,
        residual: Option<DeviceSlice<'a, T>>,
    ) -> Result<()> {
        let (x, w, y) = (x.into(), w.into(), y.into());
        self.run(dims, dims.n, [x, w], y, residual)
    }

    /// As [`Matmul::multiply`], into `dims.n` neighbouring columns of a wider `y` of `stride` columns, from column `first` on;
    /// the others are not touched. So the rows of a large W can be multiplied by piece after piece.
    ///
    /// ```no_run
    /// # use cuda_graphs::*;
    /// # let device = Device::open(0)?;
    /// # let stream = Stream::new(&device)?;
    /// use half::bf16;
    ///
    /// let matmul = Matmul::new(&stream)?;
    /// let dims = MatmulDims { m: 8, n: 32, k: 64 };
    /// let (x, w) = (DeviceBuffer::<bf16>::zeroed(&device, 8 * 64)?, DeviceBuffer::<bf16>::zeroed(&device, 96 * 64)?);
    /// let y = DeviceBuffer::<f32>::zeroed(&device, 8 * 96)?;
    /// for first in [0, 32, 64] {
    ///     matmul.multiply_columns(dims, &x, w.slice(first * 64..(first + 32) * 64)?, &y, first, 96)?;
    /// }
    /// # Ok::<(), cuda_graphs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Matmul::multiply`]; [`Error::LengthMismatch`] if `y` is not `dims.m` times `stride` long,
    /// [`Error::InvalidArgument`] for columns that it does not have, and for a `stride` whose bytes are no multiple of 16.
    pub fn multiply_columns<'a, T: MatmulElement>(
        &self,
        dims: MatmulDims,
        x: impl Into<DeviceSlice<'a, bf16>>,
        w: impl Into<DeviceSlice<'a, bf16>>,
        y: impl Into<DeviceSlice<'a, T>>,
        first: usize,
        stride: usize,
    ) -> Result<()> {
        let (x, w, y) = (x.into(), w.into(), y.into());
        let MatmulDims { m, n, .. } = dims;
        let fits = first.checked_add(n).is_some_and(|end| end <= stride);
        if !fits || !(stride as u64).is_multiple_of(ALIGNMENT / size_of::<T>() as u64) {
            return Err(Error::InvalidArgument {
                what: "product",
                why: format!("columns {first}.. of {stride} for {n}"),
            });
        }
        let expected = m.saturating_mul(stride);
        if m == 0 || y.len() != expected {
            return Err(Error::LengthMismatch {
                what: "Y of a product",
                expected,
                got: y.len(),
            });
        }
        let columns = y.slice(first..(m - 1) * stride + first + n)?;
        self.run(dims, stride, [x, w], columns, None)
    }

    fn run<T: MatmulElement>(
        &self,
        dims: MatmulDims,
        stride: usize,
        [x, w]: [DeviceSlice<'_, bf16>; 2],
        y: DeviceSlice<'_, T>,
        residual: Option<DeviceSlice<'_, T>>,
    ) -> Result<()> {
        let at = self.check(dims, stride, [x, w], y, residual)?;
        match &self.by {
            By::CublasLt(library) => {
                let key = PlanKey::of::<T>(dims, stride, residual.is_some());
                library.run::<T>(key, w, at)?;
            }
            By::Plain(plain) => plain.run::<T>(&self.stream, dims, stride, at)?,
        }
        for owner in [x.owner(), w.owner(), y.owner()] {
            self.stream.keep(owner);
        }
        if let Some(residual) = residual {
            self.stream.keep(residual.owner());
        }
        Ok(())
    }

    /// Chooses the algorithm of a product ahead of its first use, and runs it once on scratch memory so that it can be
    /// captured. `w` is the matrix that will be multiplied by, or one like it.
    ///
    /// # Errors
    /// As [`Matmul::multiply`].
    pub fn prepare<'a, T: MatmulElement>(
        &self,
        dims: MatmulDims,
        w: impl Into<DeviceSlice<'a, bf16>>,
        with_residual: bool,
    ) -> Result<MatmulReport> {
        let w = w.into();
        let device = self.stream.device();
        let elements = |a: usize, b: usize| {
            a.checked_mul(b)
                .filter(|&len| len > 0)
                .ok_or_else(|| Error::InvalidArgument {
                    what: "product",
                    why: format!("{dims:?} has no or too many elements"),
                })
        };
        let x = DeviceBuffer::<bf16>::zeroed(device, elements(dims.m, dims.k)?)?;
        let y = DeviceBuffer::<T>::zeroed(device, elements(dims.m, dims.n)?)?;
        self.multiply(dims, &x, w, &y, with_residual.then(|| y.as_slice()))?;
        self.stream.synchronize()?;
        match &self.by {
            By::CublasLt(library) => {
                let key = PlanKey::of::<T>(dims, dims.n, with_residual);
                library.report::<T>(key, w)
            }
            By::Plain(_) => Ok(MatmulReport::default()),
        }
    }

    /// Rows that a product of `m` rows must be given: `m`, or with [`MatmulOptions::row_invariant`] the next multiple of 64. What
    /// the rows too many hold does not matter.
    pub fn padded_rows(&self, m: usize) -> usize {
        match &self.by {
            By::CublasLt(library) => library.padded_rows(m),
            By::Plain(_) => m,
        }
    }

    /// The stream products are given to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// cuBLASLt's version as it tells it, such as 130000; `None` for [plain](Matmul::plain) products.
    pub fn library_version(&self) -> Option<usize> {
        match &self.by {
            By::CublasLt(library) => Some(library.version()),
            By::Plain(_) => None,
        }
    }

    fn check<T: MatmulElement>(
        &self,
        dims: MatmulDims,
        stride: usize,
        [x, w]: [DeviceSlice<'_, bf16>; 2],
        y: DeviceSlice<'_, T>,
        residual: Option<DeviceSlice<'_, T>>,
    ) -> Result<Addresses> {
        let MatmulDims { m, n, k } = dims;
        let length = |what, expected: Option<usize>, got| match expected {
            Some(expected) if expected == got => Ok(()),
            expected => Err(Error::LengthMismatch {
                what,
                expected: expected.unwrap_or(usize::MAX),
                got,
            }),
        };
        if m == 0 || n == 0 || k == 0 {
            return Err(Error::InvalidArgument {
                what: "product",
                why: format!("{dims:?} is empty"),
            });
        }
        if self.padded_rows(m) != m {
            let why = format!("{m} rows are no multiple of {BLOCK}, as products of invariant rows want it");
            return Err(Error::InvalidArgument { what: "product", why });
        }
        length("X of a product", m.checked_mul(k), x.len())?;
        length("W of a product", n.checked_mul(k), w.len())?;
        // Up to the last element of the last row.
        let spanned = (m - 1).checked_mul(stride).and_then(|rows| rows.checked_add(n));
        length("Y of a product", spanned, y.len())?;
        let span = |ptr: u64, bytes: usize| ptr..ptr + bytes as u64;
        let written = span(y.ptr(), y.byte_len());
        let overlaps = |ptr: u64, bytes: usize| {
            let other = span(ptr, bytes);
            other.start < written.end && written.start < other.end
        };
        let mut operands = vec![
            ("X", x.ptr(), x.byte_len(), x.device()),
            ("W", w.ptr(), w.byte_len(), w.device()),
        ];
        if let Some(residual) = residual {
            length("the residual of a product", m.checked_mul(n), residual.len())?;
            if residual.ptr() != y.ptr() {
                operands.push((
                    "the residual",
                    residual.ptr(),
                    residual.byte_len(),
                    residual.device(),
                ));
            }
        }
        for (what, ptr, bytes, device) in operands {
            self.stream.same_device(device, what)?;
            if !ptr.is_multiple_of(ALIGNMENT) {
                let why = format!("{what} is at {ptr:#x}, which is no multiple of {ALIGNMENT}");
                return Err(Error::InvalidArgument { what: "product", why });
            }
            if overlaps(ptr, bytes) {
                return Err(Error::InvalidArgument {
                    what: "product",
                    why: format!("{what} overlaps Y"),
                });
            }
        }
        self.stream.same_device(y.device(), "Y")?;
        if !y.ptr().is_multiple_of(ALIGNMENT) {
            let why = format!("Y is at {:#x}, which is no multiple of {ALIGNMENT}", y.ptr());
            return Err(Error::InvalidArgument { what: "product", why });
        }
        Ok(Addresses {
            x: x.ptr(),
            w: w.ptr(),
            y: y.ptr(),
            residual: residual.map(|r| r.ptr()),
        })
    }
}

pub(crate) fn name<T: MatmulElement>(dims: MatmulDims, residual: bool) -> String {
    let residual = if residual { " + residual" } else { "" };
    format!("m{} n{} k{} {}{residual}", dims.m, dims.n, dims.k, T::NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blas::BlasLt;

    #[test]
    fn products_are_named_by_shape_type_and_residual() {
        let dims = MatmulDims {
            m: 16,
            n: 6144,
            k: 2560,
        };
        assert_eq!(name::<bf16>(dims, false), "m16 n6144 k2560 bf16");
        assert_eq!(name::<f32>(dims, true), "m16 n6144 k2560 f32 + residual");
    }

    #[test]
    fn choices_under_other_options_have_names_of_their_own() {
        assert_eq!(MatmulOptions::default().class(), "");
        let other = MatmulOptions {
            algorithms: 1,
            split_k: false,
            ..MatmulOptions::default()
        };
        assert_eq!(other.class(), ", of 1, not split");
    }

    #[test]
    fn a_machine_without_cublaslt_gets_a_typed_error_and_no_panic() {
        match BlasLt::of_process() {
            Ok(lt) => assert!(lt.version >= 110_000),
            Err(Error::MissingLibrary { name, advice, .. }) => {
                assert_eq!(name, "libcublasLt.so");
                assert!(advice.contains("nvidia-cublas"));
            }
            Err(other) => panic!("unexpected error {other:?}"),
        }
    }
}
