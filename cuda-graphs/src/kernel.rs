//! Loaded modules and kernel launches.

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;
use cudarc::driver::sys;

use crate::compiler::Cubin;
use crate::cubin::ResourceUsage;
use crate::device::{Deferred, Device};
use crate::driver::{cu, version_text};
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Largest parameter struct of a kernel, in bytes: what devices of compute capability 7.0 and later take from CUDA 12.1 on.
pub const MAX_PARAMETER_BYTES: usize = 32_764;
/// Dynamic shared memory a kernel may have without asking for more.
const SHARED_WITHOUT_OPT_IN: u32 = 48 * 1024;
/// Largest cluster that every device with clusters supports.
const PORTABLE_CLUSTER: u32 = 8;

#[derive(Debug)]
struct ModuleInner {
    device: Device,
    raw: sys::CUmodule,
    name: String,
    usage: Vec<ResourceUsage>,
}

// SAFETY: a CUmodule may be used from any thread once its context is current there, and every use binds it first.
unsafe impl Send for ModuleInner {}
// SAFETY: as above; the driver's module functions are thread-safe.
unsafe impl Sync for ModuleInner {}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        self.device.free(Deferred::Module(self.raw as usize));
    }
}

/// A cubin loaded on a device. Cheap to clone; unloaded when the last clone, kernel and captured graph is gone.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let spec = KernelSpec::new("one", "extern \"C\" __global__ void one(int* x) { *x = 1; }").entry("one", Limits::default());
/// let module = Module::load(&device, &Compiler::new()?.compile_for(&spec, device.arch())?)?;
/// assert!(module.kernel("one").is_ok() && module.kernel("two").is_err());
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Module {
    inner: Arc<ModuleInner>,
}

impl Module {
    /// Loads `cubin` on `device`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it was compiled for another architecture; [`Error::DriverTooOld`] if the driver
    /// refuses it and NVRTC is newer than the driver; [`Error::ForbiddenInCapture`]; [`Error::Driver`].
    pub fn load(device: &Device, cubin: &Cubin) -> Result<Self> {
        let (major, minor) = device.info().compute_capability;
        let (arch_major, arch_minor) = cubin.arch.compute_capability();
        let runs = if cubin.arch.is_specific() {
            (arch_major, arch_minor) == (major, minor)
        } else {
            arch_major == major && arch_minor <= minor
        };
        if !runs {
            return Err(Error::InvalidArgument {
                what: "cubin",
                why: format!(
                    "{} is compiled for {}, the device has {major}.{minor}",
                    cubin.name, cubin.arch
                ),
            });
        }
        crate::capture::forbid("cuModuleLoadData")?;
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the bytes are a whole ELF file, made by NVRTC and guarded by a checksum in the cache.
        let loaded = unsafe { cu!(cuModuleLoadData(&mut raw, cubin.bytes.as_ptr().cast())) };
        let (nvrtc_major, nvrtc_minor) = cubin.nvrtc_version();
        let driver = device.info().driver_version;
        loaded.map_err(|error| {
            if nvrtc_major > driver / 1000 {
                Error::DriverTooOld {
                    driver: version_text(driver),
                    needed: format!("{nvrtc_major}.0"),
                    needed_by: format!("a kernel compiled by NVRTC {nvrtc_major}.{nvrtc_minor}"),
                    advice: format!(
                        "update the driver, or install NVRTC {} (`pip install nvidia-cuda-nvrtc-cu{}`)",
                        driver / 1000,
                        driver / 1000
                    ),
                }
            } else {
                error
            }
        })?;
        let inner = ModuleInner {
            device: device.clone(),
            raw,
            name: cubin.name.clone(),
            usage: cubin.usage.clone(),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// A kernel by the name of its `extern "C"` function.
    ///
    /// # Errors
    /// [`Error::UnknownSymbol`], [`Error::Driver`].
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        let unknown = || self.unknown("kernel", name);
        let usage = self
            .inner
            .usage
            .iter()
            .find(|of| of.kernel == name)
            .ok_or_else(unknown)?
            .clone();
        let symbol = CString::new(name).map_err(|_| unknown())?;
        self.inner.device.bind()?;
        let mut function = std::ptr::null_mut();
        // SAFETY: writes one handle; the module is loaded and the name ends in a zero byte.
        unsafe {
            cu!(cuModuleGetFunction(
                &mut function,
                self.inner.raw,
                symbol.as_ptr()
            ))
        }?;
        let mut max_threads = 0;
        // Also makes the driver load the kernel's code now instead of at its first launch, which may be a captured one.
        // SAFETY: writes one integer; the function is valid as long as the module is loaded.
        unsafe {
            cu!(cuFuncGetAttribute(
                &mut max_threads,
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                function
            ))
        }?;
        Ok(Kernel {
            module: self.inner.clone(),
            function,
            usage: Arc::new(usage),
            max_threads: max_threads.max(0) as u32,
            dynamic_shared: Arc::new(AtomicU32::new(SHARED_WITHOUT_OPT_IN)),
        })
    }

    /// Address and length in bytes of a global variable of the module, by its `extern "C"` name. Valid as long as the
    /// module is loaded.
    ///
    /// # Errors
    /// [`Error::UnknownSymbol`].
    pub fn global(&self, name: &str) -> Result<(u64, usize)> {
        let unknown = || self.unknown("global", name);
        let symbol = CString::new(name).map_err(|_| unknown())?;
        self.inner.device.bind()?;
        let (mut pointer, mut bytes) = (0, 0);
        // SAFETY: writes two integers; the module is loaded and the name ends in a zero byte.
        unsafe {
            cu!(cuModuleGetGlobal_v2(
                &mut pointer,
                &mut bytes,
                self.inner.raw,
                symbol.as_ptr()
            ))
        }
        .map_err(|_| unknown())?;
        Ok((pointer, bytes))
    }

    /// What its kernels use, sorted by name.
    pub fn usage(&self) -> &[ResourceUsage] {
        &self.inner.usage
    }

    /// The device it is loaded on.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    fn unknown(&self, kind: &'static str, name: &str) -> Error {
        Error::UnknownSymbol {
            module: self.inner.name.clone(),
            kind,
            name: name.to_string(),
            available: self.inner.usage.iter().map(|of| of.kernel.clone()).collect(),
        }
    }
}

/// The shape of a launch.
///
/// ```
/// use cuda_graphs::LaunchConfig;
///
/// let config = LaunchConfig::new(132, 256).dynamic_shared_bytes(200 * 1024).programmatic(true);
/// assert_eq!(config.grid, [132, 1, 1]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads per block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory per block; above 48 KiB the kernel is opted in by the launch.
    pub dynamic_shared_bytes: u32,
    /// All blocks resident at once, so that they may wait for each other.
    pub cooperative: bool,
    /// May start before the kernel ahead of it in the stream has ended; it must wait for that one's results with
    /// `griddepcontrol.wait`. Without effect on devices that do not have it.
    pub programmatic: bool,
    /// Blocks per cluster in x, y, z.
    pub cluster: Option<[u32; 3]>,
}

impl LaunchConfig {
    /// `grid` blocks of `block` threads, both in one dimension.
    pub fn new(grid: u32, block: u32) -> Self {
        Self::with_dimensions([grid, 1, 1], [block, 1, 1])
    }

    /// Blocks and threads in three dimensions.
    pub fn with_dimensions(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self {
            grid,
            block,
            dynamic_shared_bytes: 0,
            cooperative: false,
            programmatic: false,
            cluster: None,
        }
    }

    /// Sets the dynamic shared memory per block.
    #[must_use]
    pub fn dynamic_shared_bytes(mut self, bytes: u32) -> Self {
        self.dynamic_shared_bytes = bytes;
        self
    }

    /// Asks for all blocks to be resident at once.
    #[must_use]
    pub fn cooperative(mut self, on: bool) -> Self {
        self.cooperative = on;
        self
    }

    /// Allows the early start.
    #[must_use]
    pub fn programmatic(mut self, on: bool) -> Self {
        self.programmatic = on;
        self
    }

    /// Groups blocks to clusters.
    #[must_use]
    pub fn cluster(mut self, dimensions: [u32; 3]) -> Self {
        self.cluster = Some(dimensions);
        self
    }
}

/// A kernel ready to be launched. Cheap to clone.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let spec = KernelSpec::new("one", "extern \"C\" __global__ void one(int* x) { *x = 1; }").entry("one", Limits::default());
/// let kernel = Compiler::new()?.load(&device, &spec)?.kernel("one")?;
/// println!("{} registers, {} blocks at once", kernel.usage().registers, kernel.blocks_per_multiprocessor(256, 0)?);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Kernel {
    module: Arc<ModuleInner>,
    function: sys::CUfunction,
    usage: Arc<ResourceUsage>,
    max_threads: u32,
    /// Dynamic shared memory the function is opted in for.
    dynamic_shared: Arc<AtomicU32>,
}

// SAFETY: a CUfunction may be used from any thread once its context is current there, and every use binds it first.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// What it uses.
    pub fn usage(&self) -> &ResourceUsage {
        &self.usage
    }

    /// The device it is loaded on.
    pub fn device(&self) -> &Device {
        &self.module.device
    }

    /// How many blocks of this shape fit on one multiprocessor at once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::Driver`].
    pub fn blocks_per_multiprocessor(&self, threads: u32, dynamic_shared_bytes: u32) -> Result<u32> {
        self.module.device.bind()?;
        self.opt_in(dynamic_shared_bytes)?;
        let mut blocks = 0;
        // SAFETY: writes one integer; the function is valid as long as its module.
        unsafe {
            cu!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.function,
                threads as i32,
                dynamic_shared_bytes as usize
            ))
        }?;
        Ok(blocks.max(0) as u32)
    }

    /// Gives the kernel to `stream`, with `params` as its one parameter, by value.
    ///
    /// The kernel takes a `const __grid_constant__` struct laid out like `P`; [`Pod`] makes sure that `P` has no
    /// padding, and a size other than the kernel's is refused. A kernel without parameters takes `&()`. While
    /// `stream` is being captured, the graph keeps the module loaded.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a shape the device cannot run or a parameter of the wrong size,
    /// [`Error::WrongDevice`], [`Error::Driver`]. Errors of the kernel itself come with a later call.
    ///
    /// # Safety
    /// Every address in `params` must be valid for what the kernel reads and writes there, until the kernel is done;
    /// for a captured launch, as long as the graph is (see [`Stream::keep`]). The launch shape must be one the kernel
    /// is written for.
    pub unsafe fn launch<P: Pod>(&self, stream: &Stream, config: &LaunchConfig, params: &P) -> Result<()> {
        self.check(config, size_of::<P>())?;
        stream.same_device(&self.module.device, "the kernel")?;
        let raw = stream.bound()?;
        self.opt_in(config.dynamic_shared_bytes)?;
        // SAFETY: an all-zero attribute is `IGNORE`, and its value a union of plain numbers.
        let mut attributes: [sys::CUlaunchAttribute; 3] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        let mut add = |id, value| {
            attributes[count].id = id;
            attributes[count].value = value;
            count += 1;
        };
        use sys::CUlaunchAttributeID as Id;
        if config.cooperative {
            add(
                Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
                sys::CUlaunchAttributeValue { cooperative: 1 },
            );
        }
        if config.programmatic && self.module.device.info().has_programmatic_launch() {
            add(
                Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue {
                    programmaticStreamSerializationAllowed: 1,
                },
            );
        }
        if let Some([x, y, z]) = config.cluster {
            // SAFETY: zero is a value of every member of the union.
            let mut value: sys::CUlaunchAttributeValue = unsafe { std::mem::zeroed() };
            value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            add(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value);
        }
        let launch = sys::CUlaunchConfig {
            gridDimX: config.grid[0],
            gridDimY: config.grid[1],
            gridDimZ: config.grid[2],
            blockDimX: config.block[0],
            blockDimY: config.block[1],
            blockDimZ: config.block[2],
            sharedMemBytes: config.dynamic_shared_bytes,
            hStream: raw,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        stream.keep(&self.module);
        let mut pointers = [std::ptr::from_ref(params).cast_mut().cast::<std::ffi::c_void>()];
        // SAFETY: the configuration and the parameter are read before the call returns; the parameter has the kernel's
        // size, checked above; the caller vouches for the addresses in it.
        unsafe {
            cu!(cuLaunchKernelEx(
                &launch,
                self.function,
                pointers.as_mut_ptr(),
                std::ptr::null_mut()
            ))
        }
    }

    fn check(&self, config: &LaunchConfig, parameter_bytes: usize) -> Result<()> {
        let refuse = |why: String| {
            Err(Error::InvalidArgument {
                what: "launch",
                why: format!("{}: {why}", self.usage.kernel),
            })
        };
        let threads = config.block.iter().map(|&n| u64::from(n)).product::<u64>();
        if config.grid.contains(&0) || config.block.contains(&0) {
            return refuse(format!(
                "grid {:?} and block {:?} must not be empty",
                config.grid, config.block
            ));
        }
        if threads > u64::from(self.max_threads) {
            return refuse(format!(
                "{threads} threads per block, at most {} are possible",
                self.max_threads
            ));
        }
        if parameter_bytes > MAX_PARAMETER_BYTES {
            return refuse(format!(
                "{parameter_bytes} bytes of parameters, at most {MAX_PARAMETER_BYTES}"
            ));
        }
        if parameter_bytes != self.usage.parameter_bytes as usize {
            return refuse(format!(
                "the parameter has {parameter_bytes} bytes, the kernel expects {}",
                self.usage.parameter_bytes
            ));
        }
        if self.usage.parameters > 1 {
            return refuse(format!(
                "the kernel has {} parameters; put them into one struct",
                self.usage.parameters
            ));
        }
        if let Some(cluster) = config.cluster {
            if !self.module.device.info().has_clusters() {
                return refuse("the device has no clusters".to_string());
            }
            let whole = cluster
                .iter()
                .zip(config.grid)
                .all(|(&size, grid)| size > 0 && grid.is_multiple_of(size));
            if !whole {
                return refuse(format!(
                    "grid {:?} is no multiple of the cluster {cluster:?}",
                    config.grid
                ));
            }
            if cluster.iter().product::<u32>() > PORTABLE_CLUSTER {
                return self.allow_large_cluster();
            }
        }
        Ok(())
    }

    fn allow_large_cluster(&self) -> Result<()> {
        self.module.device.bind()?;
        // SAFETY: the function is valid as long as its module.
        unsafe {
            cu!(cuFuncSetAttribute(
                self.function,
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
                1
            ))
        }
    }

    /// Allows the kernel this much dynamic shared memory.
    fn opt_in(&self, bytes: u32) -> Result<()> {
        if bytes <= self.dynamic_shared.load(Ordering::Relaxed) {
            return Ok(());
        }
        let limit = self.module.device.info().shared_bytes_per_block as u64;
        let wanted = u64::from(bytes) + u64::from(self.usage.static_shared_bytes);
        if wanted > limit {
            return Err(Error::InvalidArgument {
                what: "launch",
                why: format!(
                    "{}: {wanted} bytes of shared memory per block, the device has {limit}",
                    self.usage.kernel
                ),
            });
        }
        // SAFETY: the function is valid as long as its module.
        unsafe {
            cu!(cuFuncSetAttribute(
                self.function,
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                bytes as i32
            ))
        }?;
        self.dynamic_shared.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }
}
