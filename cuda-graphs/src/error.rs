//! The crate's one error type.

/// Everything that can go wrong in this crate.
///
/// Variants carry what was asked for and what was found. Those about missing or old software also carry
/// advice on how to get it, since they are what a user of a new machine sees first.
///
/// ```
/// use cuda_graphs::{BucketSet, Error};
///
/// assert_eq!(BucketSet::new(0), Err(Error::EmptyBucketSet));
/// ```
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A bucket set was asked for a maximum of 0 rows.
    #[error("the largest bucket must hold at least one row")]
    EmptyBucketSet,
    /// More rows than the largest bucket holds.
    #[error("{rows} rows do not fit the largest bucket, which holds {max}")]
    BatchTooLarge {
        /// Rows asked for.
        rows: usize,
        /// Rows of the largest bucket.
        max: usize,
    },
    /// There is no usable NVIDIA driver.
    #[error("no NVIDIA driver: {reason}; {advice}")]
    NoDriver {
        /// What was tried and how it failed.
        reason: String,
        /// How to get one.
        advice: String,
    },
    /// The driver is older than what this crate, or the NVRTC in use, needs.
    #[error("the NVIDIA driver supports CUDA {driver}, but {needed_by} needs {needed}; {advice}")]
    DriverTooOld {
        /// The CUDA version the driver supports, such as `12.4`.
        driver: String,
        /// The version needed, such as `13.0`.
        needed: String,
        /// What needs it.
        needed_by: String,
        /// What to do.
        advice: String,
    },
    /// A library is on none of the usual paths.
    #[error("{name} was not found; {advice} (looked in: {})", searched.join(", "))]
    MissingLibrary {
        /// File name without version, such as `libnvrtc.so`.
        name: String,
        /// Where it was looked for.
        searched: Vec<String>,
        /// How to get it.
        advice: String,
    },
    /// A library was found but lacks a function or could not be used.
    #[error("{path} cannot be used: {reason}")]
    UnusableLibrary {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// There is no device with this number.
    #[error("there is no CUDA device {ordinal}: {count} present")]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many devices the driver sees.
        count: usize,
    },
    /// The device is older than compute capability 8.0.
    #[error("{name} has compute capability {major}.{minor}; 8.0 or newer is needed")]
    UnsupportedDevice {
        /// The device's name.
        name: String,
        /// Major compute capability.
        major: u32,
        /// Minor compute capability.
        minor: u32,
    },
    /// A call to the driver failed.
    #[error("{call} failed: {name} ({code}){}", if detail.is_empty() { String::new() } else { format!(": {detail}") })]
    Driver {
        /// The driver function.
        call: &'static str,
        /// `CUresult` as a number.
        code: u32,
        /// Its name, such as `CUDA_ERROR_OUT_OF_MEMORY`.
        name: String,
        /// The driver's description, or what was being done.
        detail: String,
    },
    /// A call to NVRTC failed other than by an error in the source.
    #[error("{call} failed: {message}")]
    Nvrtc {
        /// The NVRTC function.
        call: &'static str,
        /// Its message.
        message: String,
    },
    /// A kernel's source did not compile.
    #[error("kernel {kernel} does not compile for {arch}:\n{log}")]
    Compile {
        /// Name of the kernel specification.
        kernel: String,
        /// Architecture, such as `sm_90a`.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// A cubin could not be read.
    #[error("malformed cubin: {0}")]
    Cubin(String),
    /// A module has no kernel or global of this name.
    #[error("module {module} has no {kind} {name}; it has: {}", available.join(", "))]
    UnknownSymbol {
        /// Name of the kernel specification.
        module: String,
        /// `kernel` or `global`.
        kind: &'static str,
        /// The name asked for.
        name: String,
        /// The kernels that are there.
        available: Vec<String>,
    },
    /// An argument was refused before anything was done.
    #[error("{what}: {why}")]
    InvalidArgument {
        /// The function or the argument.
        what: &'static str,
        /// What was given and what would be right.
        why: String,
    },
    /// A range lies outside a buffer.
    #[error("elements {start}..{end} do not lie in a buffer of {len}")]
    OutOfBounds {
        /// First element.
        start: usize,
        /// One past the last element.
        end: usize,
        /// Elements in the buffer.
        len: usize,
    },
    /// Two lengths that must agree do not.
    #[error("{what}: expected {expected} elements, got {got}")]
    LengthMismatch {
        /// The operation.
        what: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// Objects of two devices were mixed.
    #[error("{what} belongs to another device than the stream")]
    WrongDevice {
        /// The argument.
        what: &'static str,
    },
    /// Something that a capture forbids was asked for while this thread captures.
    #[error("{call} is not possible while a graph is being captured")]
    ForbiddenInCapture {
        /// The operation.
        call: &'static str,
    },
    /// A capture ended without a graph.
    #[error("the graph capture failed: {call}: {reason}")]
    CaptureFailed {
        /// The call that broke the capture, as far as it is known.
        call: String,
        /// What it reported.
        reason: String,
    },
    /// A memory pool that may not grow any more was asked for more than it has left.
    #[error("the memory pool has {left} bytes left of {capacity}, {wanted} were asked for")]
    PoolExhausted {
        /// Bytes asked for, rounded up to the alignment.
        wanted: usize,
        /// Bytes left.
        left: usize,
        /// Bytes in all.
        capacity: usize,
    },
    /// A graph's replay and the eager run left different bytes.
    #[error(
        "replay differs from the eager run in buffer {buffer}: {differing} of {bytes} bytes, the first at {first}"
    )]
    ReplayDiffers {
        /// Index into the buffers given.
        buffer: usize,
        /// Offset of the first differing byte.
        first: usize,
        /// How many bytes differ.
        differing: usize,
        /// Bytes compared in this buffer.
        bytes: usize,
    },
    /// A call to cuBLASLt failed.
    #[error("{call} failed for {shape}: {status}")]
    Blas {
        /// The cuBLASLt function.
        call: &'static str,
        /// The product's shape.
        shape: String,
        /// The status.
        status: String,
    },
    /// A product was asked for during capture before its algorithm was chosen.
    #[error("the product {shape} has no algorithm yet: run or prepare it once before capturing")]
    NotPrepared {
        /// The product's shape.
        shape: String,
    },
}

impl Error {
    /// Whether the device's context is broken by what a kernel did or by the hardware: every later call of this process
    /// on the device fails likewise, and only a new process can use it again. The source of the list is what `cuda.h` says
    /// of each `CUresult`.
    ///
    /// ```
    /// use cuda_graphs::Error;
    ///
    /// let of = |code: u32, name: &str| Error::Driver {
    ///     call: "cuStreamSynchronize",
    ///     code,
    ///     name: name.into(),
    ///     detail: String::new(),
    /// };
    /// assert!(of(700, "CUDA_ERROR_ILLEGAL_ADDRESS").breaks_context());
    /// assert!(!of(2, "CUDA_ERROR_OUT_OF_MEMORY").breaks_context());
    /// ```
    pub fn breaks_context(&self) -> bool {
        // Uncorrectable errors of memory and of a link, contained ones; the kernels' faults; a context that is gone, a
        // leak of tensor memory, a client that the multi-process service has ended.
        let Self::Driver { code, .. } = self else {
            return false;
        };
        matches!(
            code,
            214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810
        )
    }
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
