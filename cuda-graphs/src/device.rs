//! Devices, and what is known about them.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, sys};
use sys::CUdevice_attribute as Attribute;

use crate::arch::Arch;
use crate::driver::{cu, failure, initialise};
use crate::error::{Error, Result};

/// What a device is and has. Sizes in bytes.
///
/// ```no_run
/// use cuda_graphs::Device;
///
/// let device = Device::open(0)?;
/// let info = device.info();
/// println!("{}: {} multiprocessors, tensor memory accelerator: {}", info.name, info.multiprocessors, info.has_tma());
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// Number given to [`Device::open`].
    pub ordinal: usize,
    /// The device's name, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// L2 cache.
    pub l2_bytes: usize,
    /// Most shared memory one block may have (by opting in).
    pub shared_bytes_per_block: usize,
    /// Shared memory of one multiprocessor.
    pub shared_bytes_per_multiprocessor: usize,
    /// 32-bit registers of one multiprocessor.
    pub registers_per_multiprocessor: u32,
    /// Most threads resident on one multiprocessor.
    pub threads_per_multiprocessor: u32,
    /// Device memory in all.
    pub memory_bytes: usize,
    /// CUDA version the driver supports: `1000 * major + 10 * minor`.
    pub driver_version: u32,
}

impl DeviceInfo {
    /// Whether a kernel may be launched before the one ahead of it has ended (programmatic dependent launch).
    pub fn has_programmatic_launch(&self) -> bool {
        self.compute_capability.0 >= 9
    }

    /// Whether blocks can form clusters.
    pub fn has_clusters(&self) -> bool {
        self.compute_capability.0 >= 9
    }

    /// Whether there is a tensor memory accelerator, so that [`TensorMap`](crate::TensorMap)s are of use.
    pub fn has_tma(&self) -> bool {
        self.compute_capability.0 >= 9
    }
}

/// Device memory in bytes at one moment.
///
/// ```
/// use cuda_graphs::MemoryInfo;
///
/// let memory = MemoryInfo { free: 3 << 30, total: 4 << 30 };
/// assert_eq!(memory.total - memory.free, 1 << 30);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct MemoryInfo {
    /// Not in use by anyone.
    pub free: usize,
    /// In all.
    pub total: usize,
}

/// A thing whose release a capture forbids, kept until the capture is over.
#[derive(Debug)]
pub(crate) enum Deferred {
    Memory(sys::CUdeviceptr),
    HostMemory(usize),
    Module(usize),
}

#[derive(Debug)]
struct Inner {
    context: Arc<CudaContext>,
    info: DeviceInfo,
    deferred: Mutex<Vec<Deferred>>,
    /// Captures under way, on any thread.
    captures: Mutex<usize>,
    /// There are none any more.
    captured: Condvar,
    /// Handles of cuBLASLt for this context that nobody uses.
    blas_handles: Mutex<Vec<usize>>,
}

/// Frees now. Errors are dropped: there is nobody to report them to, and the context reports them again.
fn release(item: Deferred) {
    // SAFETY: each item was made by the matching driver call, is owned by the one who passes it here, and is passed
    // once; the context is current.
    let _ = unsafe {
        match item {
            Deferred::Memory(pointer) => cu!(cuMemFree_v2(pointer)),
            Deferred::HostMemory(pointer) => cu!(cuMemFreeHost(pointer as *mut std::ffi::c_void)),
            Deferred::Module(module) => cu!(cuModuleUnload(module as sys::CUmodule)),
        }
    };
}

/// A CUDA device with its primary context. Cheap to clone; opening it again gives the same. The context stays until
/// the process ends, since libraries that were used in it do not survive its end.
///
/// Opening a device turns cudarc's event tracking off before anything is allocated: tracked memory touched during a
/// capture would poison the context.
///
/// ```no_run
/// use cuda_graphs::Device;
///
/// let device = Device::open(0)?;
/// println!("{}: {} SMs, {:?}", device.info().name, device.info().multiprocessors, device.memory()?);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.inner.context.cu_ctx() == other.inner.context.cu_ctx()
    }
}

impl Eq for Device {}

impl Device {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`Error::NoDriver`] and [`Error::DriverTooOld`] with advice, [`Error::NoDevice`],
    /// [`Error::UnsupportedDevice`] below compute capability 8.0, [`Error::Driver`] otherwise. Never panics for want
    /// of a library.
    pub fn open(ordinal: usize) -> Result<Self> {
        static OPEN: Mutex<BTreeMap<usize, Device>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.get(&ordinal) {
            return Ok(device.clone());
        }
        let device = Self::open_first(ordinal)?;
        open.insert(ordinal, device.clone());
        Ok(device)
    }

    fn open_first(ordinal: usize) -> Result<Self> {
        let driver_version = initialise()?;
        let count = Self::count()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let context =
            CudaContext::new(ordinal).map_err(|error| failure("cuDevicePrimaryCtxRetain", error.0))?;
        // SAFETY: nothing has been allocated through this context object, and nothing will be: buffers of this crate
        // are ordered by streams alone, which is what disabling the tracking asks for.
        unsafe { context.disable_event_tracking() };
        let device = context.cu_device();
        let attribute = |attribute| -> Result<u32> {
            let mut value = 0;
            // SAFETY: writes one integer; the device is valid.
            unsafe { cu!(cuDeviceGetAttribute(&mut value, attribute, device)) }?;
            Ok(value.max(0) as u32)
        };
        let mut memory_bytes = 0;
        // SAFETY: writes one integer; the device is valid.
        unsafe { cu!(cuDeviceTotalMem_v2(&mut memory_bytes, device)) }?;
        let mut name = [0u8; 256];
        // SAFETY: writes at most 256 bytes, ended by a zero.
        unsafe {
            cu!(cuDeviceGetName(
                name.as_mut_ptr().cast(),
                name.len() as i32,
                device
            ))
        }?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        let info = DeviceInfo {
            ordinal,
            name: String::from_utf8_lossy(&name[..end]).into_owned(),
            compute_capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            shared_bytes_per_block: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )? as usize,
            shared_bytes_per_multiprocessor: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )? as usize,
            registers_per_multiprocessor: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
            )?,
            threads_per_multiprocessor: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
            )?,
            memory_bytes,
            driver_version,
        };
        let (major, minor) = info.compute_capability;
        if major < 8 {
            return Err(Error::UnsupportedDevice {
                name: info.name,
                major,
                minor,
            });
        }
        Ok(Self {
            inner: Arc::new(Inner {
                context,
                info,
                deferred: Mutex::new(Vec::new()),
                captures: Mutex::new(0),
                captured: Condvar::new(),
                blas_handles: Mutex::new(Vec::new()),
            }),
        })
    }

    /// How many devices the driver sees; 0 is no error.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::DriverTooOld`].
    pub fn count() -> Result<usize> {
        initialise()?;
        let mut count = 0;
        // SAFETY: writes one integer.
        match unsafe { sys::cuDeviceGetCount(&mut count) } {
            sys::CUresult::CUDA_SUCCESS => Ok(count.max(0) as usize),
            // What an initialised driver without devices answers.
            sys::CUresult::CUDA_ERROR_NO_DEVICE | sys::CUresult::CUDA_ERROR_NOT_INITIALIZED => Ok(0),
            code => crate::driver::check("cuDeviceGetCount", code).map(|()| 0),
        }
    }

    /// What the device is and has.
    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// The architecture kernels are compiled for on this device.
    pub fn arch(&self) -> Arch {
        let (major, minor) = self.inner.info.compute_capability;
        Arch::of_device(major, minor)
    }

    /// Free and total memory now. The difference of two calls around an action is what it took.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn memory(&self) -> Result<MemoryInfo> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers; a context is current.
        unsafe { cu!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(MemoryInfo { free, total })
    }

    /// Waits until everything given to the device is done, and before that until no other thread captures: the driver
    /// would break its capture. A thread that waits for this one inside its capture waits for ever, and no capture begins
    /// meanwhile.
    ///
    /// # Errors
    /// [`Error::ForbiddenInCapture`] if this thread is capturing, [`Error::Driver`] also for errors of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        crate::capture::forbid("cuCtxSynchronize")?;
        self.bind()?;
        let captures = self.captures();
        let waited = self.inner.captured.wait_while(captures, |captures| *captures > 0);
        // Held meanwhile, so that no capture begins.
        let _none = waited.unwrap_or_else(PoisonError::into_inner);
        // SAFETY: a context is current.
        unsafe { cu!(cuCtxSynchronize()) }
    }

    fn captures(&self) -> MutexGuard<'_, usize> {
        self.inner.captures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A capture begins on this thread.
    pub(crate) fn capture_begins(&self) {
        *self.captures() += 1;
    }

    /// A capture has ended.
    pub(crate) fn capture_ended(&self) {
        let mut captures = self.captures();
        *captures = captures.saturating_sub(1);
        if *captures == 0 {
            self.inner.captured.notify_all();
        }
    }

    fn blas_handles(&self) -> MutexGuard<'_, Vec<usize>> {
        self.inner
            .blas_handles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// A handle of cuBLASLt for this context that was kept.
    pub(crate) fn spare_blas_handle(&self) -> Option<usize> {
        self.blas_handles().pop()
    }

    /// Keeps a handle for the next who asks for one.
    pub(crate) fn keep_blas_handle(&self, handle: usize) {
        self.blas_handles().push(handle);
    }

    /// Makes the device's context current on this thread.
    pub(crate) fn bind(&self) -> Result<()> {
        self.inner
            .context
            .bind_to_thread()
            .map_err(|error| failure("cuCtxSetCurrent", error.0))
    }

    /// Frees `item`, now or, if this thread is capturing, when that is over.
    pub(crate) fn free(&self, item: Deferred) {
        if crate::capture::this_thread_captures() {
            self.inner
                .deferred
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(item);
        } else if self.bind().is_ok() {
            release(item);
        }
    }

    /// Frees what a capture kept from being freed.
    pub(crate) fn free_deferred(&self) {
        let items = std::mem::take(&mut *self.inner.deferred.lock().unwrap_or_else(PoisonError::into_inner));
        if self.bind().is_ok() {
            items.into_iter().for_each(release);
        }
    }
}
