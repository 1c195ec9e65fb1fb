//! The fence around driver calls: opening the driver, and turning its results into errors that name the call.

use std::cell::RefCell;
use std::path::Path;
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::error::{Error, Result};

/// Oldest driver this crate works with, as the driver reports it: 12.0, the first with tensor maps.
const MINIMUM_DRIVER: u32 = 12_000;

const ADVICE: &str = "install NVIDIA's driver for this machine (580 or newer serves CUDA 13), or run on the CPU; \
                      in a container, start it with access to the GPU";

/// Where containers and distributions put the driver's library when the loader does not know it.
const DRIVER_PATHS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
];

/// Opens and initialises the driver once; later calls repeat the first answer. Returns the CUDA version it
/// supports, as `1000 * major + 10 * minor`.
///
/// # Errors
/// [`Error::NoDriver`], [`Error::DriverTooOld`].
pub(crate) fn initialise() -> Result<u32> {
    static ANSWER: OnceLock<Result<u32>> = OnceLock::new();
    ANSWER.get_or_init(open).clone()
}

fn open() -> Result<u32> {
    let no_driver = |reason: String| Error::NoDriver {
        reason,
        advice: ADVICE.to_string(),
    };
    // SAFETY: opens libcuda by its well-known names, as every CUDA program does.
    let mut present = unsafe { sys::is_culib_present() };
    if !present {
        for path in DRIVER_PATHS {
            if let Ok(library) = crate::library::open(Path::new(path)) {
                // Open and known by name from here on: cudarc's own search finds it.
                std::mem::forget(library);
                // SAFETY: as above.
                present = unsafe { sys::is_culib_present() };
                break;
            }
        }
    }
    if !present {
        return Err(no_driver("libcuda.so was not found".to_string()));
    }
    let mut version = 0;
    // SAFETY: writes one integer; allowed before cuInit.
    let code = unsafe { sys::cuDriverGetVersion(&mut version) };
    if code != sys::CUresult::CUDA_SUCCESS {
        return Err(no_driver(format!(
            "libcuda.so does not tell its version ({code:?})"
        )));
    }
    let version = version.max(0) as u32;
    if version < MINIMUM_DRIVER {
        return Err(Error::DriverTooOld {
            driver: version_text(version),
            needed: version_text(MINIMUM_DRIVER),
            needed_by: "this program".to_string(),
            advice: "update NVIDIA's driver".to_string(),
        });
    }
    // SAFETY: no preconditions.
    match unsafe { sys::cuInit(0) } {
        // Without a device there is still a driver: opening one reports how many there are.
        sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(version),
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => Err(no_driver(
            "the libcuda.so found is a stub for linking, not a driver".to_string(),
        )),
        sys::CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => Err(no_driver(
            "libcuda.so and the loaded kernel module are of different versions (a restart helps)".to_string(),
        )),
        code => Err(no_driver(format!("cuInit failed with {code:?}"))),
    }
}

/// `13000` as `13.0`.
pub(crate) fn version_text(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

thread_local! {
    /// The first driver call that failed on this thread since the last [`forget_failure`].
    static FIRST_FAILURE: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

/// A driver call that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) call: &'static str,
    pub(crate) code: sys::CUresult,
    /// What the driver says of it.
    pub(crate) text: String,
}

/// Starts a new watch for the first failing call on this thread.
pub(crate) fn forget_failure() {
    FIRST_FAILURE.with_borrow_mut(|failure| *failure = None);
}

/// The first driver call that failed on this thread since [`forget_failure`].
pub(crate) fn first_failure() -> Option<Failure> {
    FIRST_FAILURE.with_borrow(Clone::clone)
}

/// Turns a driver result into a [`Result`] that names the call.
pub(crate) fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(failure(call, code))
    }
}

/// The error of a driver call that did not succeed.
#[cold]
pub(crate) fn failure(call: &'static str, code: sys::CUresult) -> Error {
    let mut text = std::ptr::null();
    // SAFETY: writes a pointer to a static string, or leaves null and fails.
    let detail = unsafe {
        if sys::cuGetErrorString(code, &mut text) == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
            std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned()
        } else {
            String::new()
        }
    };
    let name = format!("{code:?}");
    FIRST_FAILURE.with_borrow_mut(|first| {
        first.get_or_insert_with(|| Failure {
            call,
            code,
            text: if detail.is_empty() {
                name.clone()
            } else {
                detail.clone()
            },
        });
    });
    Error::Driver {
        call,
        code: code as u32,
        name,
        detail,
    }
}

/// Calls a driver function and checks its result. To be used inside an `unsafe` block.
macro_rules! cu {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::driver::check(stringify!($function), ::cudarc::driver::sys::$function($($argument),*))
    };
}
pub(crate) use cu;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_gets_a_typed_error_and_no_panic() {
        match initialise() {
            Ok(version) => assert!(version >= MINIMUM_DRIVER),
            Err(Error::NoDriver { reason, advice }) => {
                assert!(
                    !reason.is_empty() && advice.contains("driver"),
                    "{reason} {advice}"
                );
            }
            Err(Error::DriverTooOld { .. }) => {}
            Err(other) => panic!("unexpected error {other:?}"),
        }
    }

    #[test]
    fn versions_print_as_people_write_them() {
        assert_eq!(version_text(12_080), "12.8");
        assert_eq!(version_text(13_000), "13.0");
    }
}
