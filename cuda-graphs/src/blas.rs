//! cuBLASLt by its own function table, with owners for its descriptors.
//!
//! Enumerations are plain integers here: a status that a newer library invents must not become an invalid Rust enum.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::library::{CUBLAS_LT, OpenLibrary};

pub(crate) type Status = c_int;
pub(crate) type Raw = *mut c_void;

pub(crate) const TYPE_F32: c_int = 0;
pub(crate) const TYPE_BF16: c_int = 14;
const COMPUTE_F32: c_int = 68;
const OPERATION_TRANSPOSE: c_int = 1;
const DESC_TRANSPOSE_A: c_int = 3;
const PREFERENCE_WORKSPACE: c_int = 1;
const PREFERENCE_REDUCTIONS: c_int = 3;
/// Partial sums of a split product are kept in f32. The other schemes keep them in the output's type, which for bf16
/// would round each of them.
const REDUCTION_IN_F32: u32 = 2;
const CONFIG_SPLITS: c_int = 2;
const CONFIG_REDUCTION: c_int = 3;
/// No split products at all.
const NO_REDUCTION: u32 = 0;
/// Four consecutive attributes, for A, B, C and D.
const PREFERENCE_ALIGNMENT_A: c_int = 5;
/// What every operand's address is a multiple of.
pub(crate) const ALIGNMENT: u64 = 16;

/// An algorithm: opaque, valid for one version of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Algorithm(pub(crate) [u64; 8]);

impl Algorithm {
    /// Parts that the inner dimension is cut into, at least 1.
    pub(crate) fn splits(&self, lt: &BlasLt) -> u32 {
        let (mut splits, mut written) = (1u32, 0);
        // SAFETY: the attribute is a 32-bit integer, and as many bytes are there.
        let status = unsafe {
            (lt.config_get)(
                self,
                CONFIG_SPLITS,
                (&raw mut splits).cast(),
                size_of::<u32>(),
                &mut written,
            )
        };
        if status == 0 { splits.max(1) } else { 1 }
    }

    /// The same algorithm with another number of splits, added in f32; whether it works for a product is to be asked.
    pub(crate) fn with_splits(mut self, lt: &BlasLt, splits: u32) -> Option<Self> {
        if self.splits(lt) == splits {
            return Some(self);
        }
        let reduction = if splits > 1 { REDUCTION_IN_F32 } else { 0 };
        for (attribute, value) in [(CONFIG_SPLITS, splits), (CONFIG_REDUCTION, reduction)] {
            // SAFETY: both attributes are 32-bit integers.
            let status =
                unsafe { (lt.config_set)(&mut self, attribute, (&raw const value).cast(), size_of::<u32>()) };
            if status != 0 {
                return None;
            }
        }
        Some(self)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Heuristic {
    pub(crate) algorithm: Algorithm,
    pub(crate) workspace: usize,
    pub(crate) state: Status,
    pub(crate) waves: f32,
    reserved: [c_int; 4],
}

impl Heuristic {
    const EMPTY: Self = Self {
        algorithm: Algorithm([0; 8]),
        workspace: 0,
        state: -1,
        waves: 0.0,
        reserved: [0; 4],
    };
}

type MatmulFunction = unsafe extern "C" fn(
    Raw,
    Raw,
    *const c_void,
    *const c_void,
    Raw,
    *const c_void,
    Raw,
    *const c_void,
    *const c_void,
    Raw,
    *mut c_void,
    Raw,
    *const Algorithm,
    *mut c_void,
    usize,
    Raw,
) -> Status;
type HeuristicFunction =
    unsafe extern "C" fn(Raw, Raw, Raw, Raw, Raw, Raw, Raw, c_int, *mut Heuristic, *mut c_int) -> Status;
type CheckFunction =
    unsafe extern "C" fn(Raw, Raw, Raw, Raw, Raw, Raw, *const Algorithm, *mut Heuristic) -> Status;
type ConfigGetFunction =
    unsafe extern "C" fn(*const Algorithm, c_int, *mut c_void, usize, *mut usize) -> Status;
type ConfigSetFunction = unsafe extern "C" fn(*mut Algorithm, c_int, *const c_void, usize) -> Status;
type SetFunction = unsafe extern "C" fn(Raw, c_int, *const c_void, usize) -> Status;
type DestroyFunction = unsafe extern "C" fn(Raw) -> Status;

pub(crate) struct BlasLt {
    #[allow(dead_code, reason = "keeps the library open")]
    library: OpenLibrary,
    pub(crate) version: usize,
    status_string: unsafe extern "C" fn(Status) -> *const c_char,
    create: unsafe extern "C" fn(*mut Raw) -> Status,
    desc_create: unsafe extern "C" fn(*mut Raw, c_int, c_int) -> Status,
    desc_set: SetFunction,
    desc_destroy: DestroyFunction,
    layout_create: unsafe extern "C" fn(*mut Raw, c_int, u64, u64, i64) -> Status,
    layout_destroy: DestroyFunction,
    preference_create: unsafe extern "C" fn(*mut Raw) -> Status,
    preference_set: SetFunction,
    preference_destroy: DestroyFunction,
    heuristic: HeuristicFunction,
    algorithm_check: CheckFunction,
    config_get: ConfigGetFunction,
    config_set: ConfigSetFunction,
    matmul: MatmulFunction,
}

impl std::fmt::Debug for BlasLt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlasLt")
            .field("path", &self.library.path())
            .field("version", &self.version)
            .finish()
    }
}

impl BlasLt {
    /// The process's cuBLASLt, found once.
    ///
    /// # Errors
    /// [`Error::MissingLibrary`], [`Error::UnusableLibrary`].
    pub(crate) fn of_process() -> Result<&'static Self> {
        static FOUND: OnceLock<Result<BlasLt>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let driver = crate::driver::initialise().ok().map(|version| version / 1000);
            Self::from_library(OpenLibrary::find(CUBLAS_LT, driver)?)
        });
        found.as_ref().map_err(Clone::clone)
    }

    fn from_library(library: OpenLibrary) -> Result<Self> {
        // SAFETY: the types are those of cublasLt.h, the same in CUDA 12 and 13.
        unsafe {
            let version: unsafe extern "C" fn() -> usize = library.function("cublasLtGetVersion")?;
            Ok(Self {
                version: version(),
                status_string: library.function("cublasLtGetStatusString")?,
                create: library.function("cublasLtCreate")?,
                desc_create: library.function("cublasLtMatmulDescCreate")?,
                desc_set: library.function("cublasLtMatmulDescSetAttribute")?,
                desc_destroy: library.function("cublasLtMatmulDescDestroy")?,
                layout_create: library.function("cublasLtMatrixLayoutCreate")?,
                layout_destroy: library.function("cublasLtMatrixLayoutDestroy")?,
                preference_create: library.function("cublasLtMatmulPreferenceCreate")?,
                preference_set: library.function("cublasLtMatmulPreferenceSetAttribute")?,
                preference_destroy: library.function("cublasLtMatmulPreferenceDestroy")?,
                heuristic: library.function("cublasLtMatmulAlgoGetHeuristic")?,
                algorithm_check: library.function("cublasLtMatmulAlgoCheck")?,
                config_get: library.function("cublasLtMatmulAlgoConfigGetAttribute")?,
                config_set: library.function("cublasLtMatmulAlgoConfigSetAttribute")?,
                matmul: library.function("cublasLtMatmul")?,
                library,
            })
        }
    }

    /// A handle for the device's context.
    pub(crate) fn handle(&'static self, device: &Device) -> Result<Handle> {
        device.bind()?;
        let raw = match device.spare_blas_handle() {
            Some(raw) => raw as Raw,
            None => self.made("cublasLtCreate", |raw| {
                // SAFETY: writes one handle; a context is current.
                unsafe { (self.create)(raw) }
            })?,
        };
        Ok(Handle {
            raw,
            device: device.clone(),
        })
    }

    /// Turns a status into a [`Result`].
    pub(crate) fn check(
        &self,
        call: &'static str,
        shape: &dyn std::fmt::Display,
        status: Status,
    ) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for every status.
        let text = unsafe {
            let text = (self.status_string)(status);
            if text.is_null() {
                String::new()
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        };
        Err(Error::Blas {
            call,
            shape: shape.to_string(),
            status: format!("{text} ({status})"),
        })
    }

    fn made(&self, call: &'static str, make: impl FnOnce(*mut Raw) -> Status) -> Result<Raw> {
        let mut raw = std::ptr::null_mut();
        let status = make(&mut raw);
        self.check(call, &"a descriptor", status)?;
        Ok(raw)
    }

    /// Of columns that begin `stride` elements apart.
    fn layout(&self, element: c_int, rows: usize, cols: usize, stride: usize) -> Result<Owned> {
        let raw = self.made("cublasLtMatrixLayoutCreate", |raw| {
            // SAFETY: writes one handle.
            unsafe { (self.layout_create)(raw, element, rows as u64, cols as u64, stride as i64) }
        })?;
        Ok(Owned {
            raw,
            destroy: self.layout_destroy,
        })
    }
}

/// A descriptor, destroyed when dropped.
#[derive(Debug)]
struct Owned {
    raw: Raw,
    destroy: DestroyFunction,
}

// SAFETY: descriptors are plain data of the library's; the owners below are only used under a lock or read-only.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by the matching create function, destroyed once.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// A library handle for a device's context.
///
/// The next owner takes it when this one is dropped; the library is never asked to destroy it, since it waits for the whole
/// context then. That breaks the captures of other threads, and a driver (13.0) has crashed in it while another thread began
/// one.
#[derive(Debug)]
pub(crate) struct Handle {
    raw: Raw,
    device: Device,
}

// SAFETY: a handle may be used from any thread, and its owner uses it under a lock or read-only.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        self.device.keep_blas_handle(self.raw as usize);
    }
}

/// The addresses of one product.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addresses {
    pub(crate) x: u64,
    pub(crate) w: u64,
    pub(crate) y: u64,
    /// Added to the product; `None` is nothing.
    pub(crate) residual: Option<u64>,
}

/// The descriptors of `Y[m, n] = X[m, k] · W[n, k]ᵀ`, all row-major.
///
/// cuBLASLt thinks in columns: a row-major `[a, b]` is its column-major `[b, a]`, so it computes
/// `Yᵀ[n, m] = (Wᵀ[k, n])ᵀ · Xᵀ[k, m]`, with W as its first operand, transposed.
#[derive(Debug)]
pub(crate) struct Product {
    desc: Owned,
    a: Owned,
    b: Owned,
    c: Owned,
    name: String,
}

impl Product {
    pub(crate) fn new(
        lt: &BlasLt,
        [m, n, k]: [usize; 3],
        output: c_int,
        name: impl Into<String>,
    ) -> Result<Self> {
        Self::with_stride(lt, [m, n, k], n, output, name)
    }

    /// The same with rows of Y `stride` elements apart.
    pub(crate) fn with_stride(
        lt: &BlasLt,
        [m, n, k]: [usize; 3],
        stride: usize,
        output: c_int,
        name: impl Into<String>,
    ) -> Result<Self> {
        let raw = lt.made("cublasLtMatmulDescCreate", |raw| {
            // SAFETY: writes one handle.
            unsafe { (lt.desc_create)(raw, COMPUTE_F32, TYPE_F32) }
        })?;
        let desc = Owned {
            raw,
            destroy: lt.desc_destroy,
        };
        let name = name.into();
        // SAFETY: the attribute is a 32-bit integer.
        let status = unsafe {
            (lt.desc_set)(
                desc.raw,
                DESC_TRANSPOSE_A,
                (&raw const OPERATION_TRANSPOSE_VALUE).cast(),
                4,
            )
        };
        lt.check("cublasLtMatmulDescSetAttribute", &name, status)?;
        Ok(Self {
            a: lt.layout(TYPE_BF16, k, n, k)?,
            b: lt.layout(TYPE_BF16, k, m, k)?,
            c: lt.layout(output, n, m, stride)?,
            desc,
            name,
        })
    }

    /// The algorithms the library thinks fastest, best guess first, that need at most `workspace` bytes.
    pub(crate) fn heuristics(
        &self,
        lt: &BlasLt,
        handle: &Handle,
        workspace: usize,
        most: usize,
        split_k: bool,
    ) -> Result<Vec<Heuristic>> {
        let raw = lt.made("cublasLtMatmulPreferenceCreate", |raw| {
            // SAFETY: writes one handle.
            unsafe { (lt.preference_create)(raw) }
        })?;
        let preference = Owned {
            raw,
            destroy: lt.preference_destroy,
        };
        let set = |attribute: c_int, value: &[u8]| {
            // SAFETY: the attribute has as many bytes as the value.
            let status =
                unsafe { (lt.preference_set)(preference.raw, attribute, value.as_ptr().cast(), value.len()) };
            lt.check("cublasLtMatmulPreferenceSetAttribute", &self.name, status)
        };
        set(PREFERENCE_WORKSPACE, &(workspace as u64).to_ne_bytes())?;
        let reductions = if split_k { REDUCTION_IN_F32 } else { NO_REDUCTION };
        set(PREFERENCE_REDUCTIONS, &reductions.to_ne_bytes())?;
        for operand in 0..4 {
            set(
                PREFERENCE_ALIGNMENT_A + operand,
                &(ALIGNMENT as u32).to_ne_bytes(),
            )?;
        }
        let mut found = vec![Heuristic::EMPTY; most];
        let mut count = 0;
        // SAFETY: all descriptors are valid; at most `most` results are written.
        let status = unsafe {
            (lt.heuristic)(
                handle.raw,
                self.desc.raw,
                self.a.raw,
                self.b.raw,
                self.c.raw,
                self.c.raw,
                preference.raw,
                most as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        lt.check("cublasLtMatmulAlgoGetHeuristic", &self.name, status)?;
        found.truncate(count.max(0) as usize);
        found.retain(|result| result.state == 0 && result.workspace <= workspace);
        Ok(found)
    }

    /// Whether `algorithm` can compute this product in `workspace` bytes.
    pub(crate) fn accepts(
        &self,
        lt: &BlasLt,
        handle: &Handle,
        algorithm: &Algorithm,
        workspace: usize,
    ) -> bool {
        let mut result = Heuristic::EMPTY;
        // SAFETY: all descriptors are valid; one result is written.
        let status = unsafe {
            (lt.algorithm_check)(
                handle.raw,
                self.desc.raw,
                self.a.raw,
                self.b.raw,
                self.c.raw,
                self.c.raw,
                algorithm,
                &mut result,
            )
        };
        status == 0 && result.workspace <= workspace
    }

    /// Gives the product to a stream.
    ///
    /// # Safety
    /// The addresses must be valid for the operands' sizes, the workspace for its length, until the product is done;
    /// the stream must be of the current context, in which the handle was made.
    pub(crate) unsafe fn run(
        &self,
        lt: &BlasLt,
        handle: &Handle,
        algorithm: &Algorithm,
        at: Addresses,
        (workspace, workspace_bytes): (u64, usize),
        stream: Raw,
    ) -> Result<()> {
        let one = 1.0f32;
        let beta = if at.residual.is_some() { 1.0f32 } else { 0.0 };
        let c = at.residual.unwrap_or(at.y);
        // SAFETY: the descriptors are valid; alpha and beta are read before the call returns; the caller vouches for
        // the rest.
        let status = unsafe {
            (lt.matmul)(
                handle.raw,
                self.desc.raw,
                (&raw const one).cast(),
                at.w as *const c_void,
                self.a.raw,
                at.x as *const c_void,
                self.b.raw,
                (&raw const beta).cast(),
                c as *const c_void,
                self.c.raw,
                at.y as *mut c_void,
                self.c.raw,
                algorithm,
                workspace as *mut c_void,
                workspace_bytes,
                stream,
            )
        };
        lt.check("cublasLtMatmul", &self.name, status)
    }
}

static OPERATION_TRANSPOSE_VALUE: c_int = OPERATION_TRANSPOSE;

// Both cross the FFI boundary by address.
const _: () = assert!(size_of::<Algorithm>() == 64 && size_of::<Heuristic>() == 96);

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::cublaslt::sys;

    #[test]
    fn numbers_and_layouts_are_those_of_the_bindings() {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        assert_eq!(TYPE_F32, sys::cudaDataType_t::CUDA_R_32F as c_int);
        assert_eq!(TYPE_BF16, sys::cudaDataType_t::CUDA_R_16BF as c_int);
        assert_eq!(COMPUTE_F32, sys::cublasComputeType_t::CUBLAS_COMPUTE_32F as c_int);
        let transpose_a = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        assert_eq!(DESC_TRANSPOSE_A, transpose_a as c_int);
        let workspace = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        assert_eq!(PREFERENCE_WORKSPACE, workspace as c_int);
        let reductions = Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        assert_eq!(PREFERENCE_REDUCTIONS, reductions as c_int);
        for (operand, attribute) in [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(PREFERENCE_ALIGNMENT_A + operand as c_int, attribute as c_int);
        }
        use sys::cublasLtMatmulAlgoConfigAttributes_t as Config;
        assert_eq!(CONFIG_SPLITS, Config::CUBLASLT_ALGO_CONFIG_SPLITK_NUM as c_int);
        assert_eq!(
            CONFIG_REDUCTION,
            Config::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME as c_int
        );
        let in_f32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        assert_eq!(REDUCTION_IN_F32, in_f32 as u32);
        assert_eq!(size_of::<Algorithm>(), size_of::<sys::cublasLtMatmulAlgo_t>());
        assert_eq!(
            size_of::<Heuristic>(),
            size_of::<sys::cublasLtMatmulHeuristicResult_t>()
        );
        assert_eq!(
            std::mem::offset_of!(Heuristic, state),
            std::mem::offset_of!(sys::cublasLtMatmulHeuristicResult_t, state)
        );
    }
}
