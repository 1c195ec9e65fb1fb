//! NVRTC by its own function table: a missing function is an error, not a panic, and the library used is exactly the
//! one that was found.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;
use std::sync::OnceLock;

use crate::arch::Arch;
use crate::error::{Error, Result};
use crate::library::{NVRTC, OpenLibrary};
use crate::spec::KernelSpec;

type Program = *mut std::ffi::c_void;
type Code = c_int;

const COMPILATION_FAILED: Code = 6;

/// Version numbers of an NVRTC, as major and minor.
pub(crate) type Version = (u32, u32);

pub(crate) struct Nvrtc {
    library: OpenLibrary,
    version: Version,
    supported: Vec<u32>,
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Code,
    destroy: unsafe extern "C" fn(*mut Program) -> Code,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Code,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Code,
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nvrtc")
            .field("path", &self.library.path())
            .field("version", &self.version)
            .finish()
    }
}

/// Destroys a program on every path.
struct ProgramGuard<'a>(&'a Nvrtc, Program);

impl Drop for ProgramGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `create`, destroyed once.
        unsafe { (self.0.destroy)(&mut self.1) };
    }
}

/// A compiled source.
pub(crate) struct Compiled {
    pub(crate) cubin: Vec<u8>,
    pub(crate) log: String,
}

impl Nvrtc {
    /// The process's NVRTC: found once, one that the driver can serve if there is a driver.
    ///
    /// # Errors
    /// [`Error::MissingLibrary`], [`Error::UnusableLibrary`].
    pub(crate) fn of_process() -> Result<&'static Self> {
        static FOUND: OnceLock<Result<Nvrtc>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let driver = crate::driver::initialise().ok().map(|version| version / 1000);
            Self::from_library(OpenLibrary::find(NVRTC, driver)?)
        });
        found.as_ref().map_err(Clone::clone)
    }

    /// The NVRTC in exactly this file.
    ///
    /// # Errors
    /// [`Error::UnusableLibrary`].
    pub(crate) fn from_file(path: &Path) -> Result<Self> {
        Self::from_library(OpenLibrary::open(NVRTC, path)?)
    }

    fn from_library(library: OpenLibrary) -> Result<Self> {
        // SAFETY: the types are those of nvrtc.h, unchanged since CUDA 11.2.
        unsafe {
            let version_function: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code =
                library.function("nvrtcVersion")?;
            let (mut major, mut minor) = (0, 0);
            version_function(&mut major, &mut minor);
            let mut nvrtc = Self {
                version: (major.max(0) as u32, minor.max(0) as u32),
                supported: Vec::new(),
                error_string: library.function("nvrtcGetErrorString")?,
                create: library.function("nvrtcCreateProgram")?,
                destroy: library.function("nvrtcDestroyProgram")?,
                compile: library.function("nvrtcCompileProgram")?,
                cubin_size: library.function("nvrtcGetCUBINSize")?,
                cubin: library.function("nvrtcGetCUBIN")?,
                log_size: library.function("nvrtcGetProgramLogSize")?,
                log: library.function("nvrtcGetProgramLog")?,
                library,
            };
            let count_function: unsafe extern "C" fn(*mut c_int) -> Code =
                nvrtc.library.function("nvrtcGetNumSupportedArchs")?;
            let list_function: unsafe extern "C" fn(*mut c_int) -> Code =
                nvrtc.library.function("nvrtcGetSupportedArchs")?;
            let mut count = 0;
            nvrtc.check("nvrtcGetNumSupportedArchs", count_function(&mut count))?;
            let mut list: Vec<c_int> = vec![0; count.max(0) as usize];
            if !list.is_empty() {
                nvrtc.check("nvrtcGetSupportedArchs", list_function(list.as_mut_ptr()))?;
            }
            nvrtc.supported = list.into_iter().map(|arch| arch.max(0) as u32).collect();
            Ok(nvrtc)
        }
    }

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    pub(crate) fn path(&self) -> &Path {
        self.library.path()
    }

    /// Compiles for one architecture to a cubin.
    ///
    /// # Errors
    /// [`Error::Compile`] with the log, [`Error::InvalidArgument`] for an architecture NVRTC does not know or text
    /// with zero bytes, [`Error::Nvrtc`] otherwise.
    pub(crate) fn compile(&self, spec: &KernelSpec, arch: Arch, options: &[String]) -> Result<Compiled> {
        if !self.supported.contains(&arch.number()) {
            return Err(Error::InvalidArgument {
                what: "architecture",
                why: format!(
                    "NVRTC {}.{} ({}) does not know {arch}; a newer one does",
                    self.version.0,
                    self.version.1,
                    self.path().display()
                ),
            });
        }
        let source = text(&spec.source, &spec.name)?;
        let file_name = text(&format!("{}.cu", spec.name), &spec.name)?;
        let names: Vec<CString> = spec
            .headers
            .iter()
            .map(|header| text(&header.name, &spec.name))
            .collect::<Result<_>>()?;
        let texts: Vec<CString> = spec
            .headers
            .iter()
            .map(|header| text(&header.text, &spec.name))
            .collect::<Result<_>>()?;
        let options: Vec<CString> = options
            .iter()
            .map(|option| text(option, &spec.name))
            .collect::<Result<_>>()?;
        let (names_raw, texts_raw, options_raw) = (pointers(&names), pointers(&texts), pointers(&options));
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings end in a zero byte and outlive the program, which the guard below destroys.
        let code = unsafe {
            (self.create)(
                &mut program,
                source.as_ptr(),
                file_name.as_ptr(),
                names.len() as c_int,
                texts_raw.as_ptr(),
                names_raw.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", code)?;
        let program = ProgramGuard(self, program);
        // SAFETY: the program is valid, and so are the options.
        let code = unsafe { (self.compile)(program.1, options.len() as c_int, options_raw.as_ptr()) };
        let log = self.read("nvrtcGetProgramLog", program.1, self.log_size, self.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
        if code == COMPILATION_FAILED {
            return Err(Error::Compile {
                kernel: spec.name.to_string(),
                arch: arch.to_string(),
                log,
            });
        }
        self.check("nvrtcCompileProgram", code)
            .map_err(|error| match error {
                Error::Nvrtc { call, message } => Error::Nvrtc {
                    call,
                    message: format!("{message} {log}"),
                },
                other => other,
            })?;
        let cubin = self.read("nvrtcGetCUBIN", program.1, self.cubin_size, self.cubin)?;
        Ok(Compiled { cubin, log })
    }

    /// Reads one of a program's results, whose length NVRTC tells first.
    fn read(
        &self,
        call: &'static str,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> Code,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    ) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program is valid; writes one integer.
        self.check(call, unsafe { size(program, &mut len) })?;
        let mut bytes = vec![0u8; len];
        if len > 0 {
            // SAFETY: writes exactly the length told.
            self.check(call, unsafe { get(program, bytes.as_mut_ptr().cast()) })?;
        }
        Ok(bytes)
    }

    fn check(&self, call: &'static str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for every code.
        let message = unsafe {
            let text = (self.error_string)(code);
            if text.is_null() {
                String::new()
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        };
        Err(Error::Nvrtc {
            call,
            message: format!("{message} ({code})"),
        })
    }
}

fn text(value: &str, kernel: &str) -> Result<CString> {
    CString::new(value).map_err(|_| Error::InvalidArgument {
        what: "kernel source",
        why: format!("{kernel}: a zero byte in a source, header or option"),
    })
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}
