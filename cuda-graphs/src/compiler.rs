//! From kernel source to a cubin for one architecture, through the cache on disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use crate::arch::Arch;
use crate::cache::{CacheLocation, DiskCache, Entry, EntryHeader, key};
use crate::cubin::{ResourceUsage, resource_usage};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::Module;
use crate::nvrtc::Nvrtc;
use crate::spec::KernelSpec;

/// Deep templates make NVRTC recurse; threads of ours get as much stack as a main thread has.
const COMPILE_STACK: usize = 16 << 20;

/// A compiled source for one architecture.
///
/// ```no_run
/// use cuda_graphs::{Arch, Compiler, KernelSpec, Limits};
///
/// let spec = KernelSpec::new("one", "extern \"C\" __global__ void one(int* x) { *x = 1; }").entry("one", Limits::default());
/// let cubin = Compiler::new()?.compile_for(&spec, Arch::SM_90A)?;
/// println!("{} bytes for {}, from the cache: {}", cubin.bytes.len(), cubin.arch, cubin.cached);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Cubin {
    /// Name of the specification it was compiled from.
    pub name: String,
    /// What it runs on.
    pub arch: Arch,
    /// The ELF file.
    pub bytes: Arc<[u8]>,
    /// What its kernels use, sorted by name.
    pub usage: Vec<ResourceUsage>,
    /// The compiler's log: warnings, and the assembler's report.
    pub log: String,
    /// Whether it came from the cache.
    pub cached: bool,
    /// Milliseconds it took, whichever way.
    pub ms: f64,
    nvrtc: (u32, u32),
}

impl Cubin {
    /// The NVRTC that made it: major and minor version.
    pub fn nvrtc_version(&self) -> (u32, u32) {
        self.nvrtc
    }
}

/// How to make a [`Compiler`].
///
/// ```
/// use cuda_graphs::{CacheLocation, CompilerOptions};
///
/// let options = CompilerOptions { cache: CacheLocation::Off, line_info: true, ..CompilerOptions::default() };
/// assert_eq!(options.nvrtc, None, "NVRTC is looked for");
/// ```
#[derive(Debug, Clone, Default)]
pub struct CompilerOptions {
    /// Where compiled kernels are kept.
    pub cache: CacheLocation,
    /// Exactly this `libnvrtc.so`, instead of a search.
    pub nvrtc: Option<PathBuf>,
    /// Line numbers in the cubin, for profilers and `compute-sanitizer`.
    pub line_info: bool,
}

/// NVRTC with a cache on disk. Cheap to clone, usable from several threads at once.
///
/// Needs no GPU: [`Compiler::compile_for`] makes cubins for any architecture that NVRTC knows.
///
/// ```no_run
/// use cuda_graphs::{Arch, Compiler, KernelSpec, Limits};
///
/// let compiler = Compiler::new()?; // needs NVRTC, no GPU
/// let spec = KernelSpec::new("one", "extern \"C\" __global__ void one(int* x) { *x = 1; }").entry("one", Limits::default());
/// let first = compiler.compile_for(&spec, Arch::SM_80)?;
/// let again = compiler.compile_for(&spec, Arch::SM_80)?;
/// assert!(again.cached && first.bytes == again.bytes);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Compiler {
    nvrtc: NvrtcHandle,
    cache: DiskCache,
    line_info: bool,
    /// Microseconds spent so far, by all clones.
    spent: Arc<AtomicU64>,
}

#[derive(Debug, Clone)]
enum NvrtcHandle {
    OfProcess(&'static Nvrtc),
    Own(Arc<Nvrtc>),
}

impl std::ops::Deref for NvrtcHandle {
    type Target = Nvrtc;

    fn deref(&self) -> &Nvrtc {
        match self {
            Self::OfProcess(nvrtc) => nvrtc,
            Self::Own(nvrtc) => nvrtc,
        }
    }
}

impl Compiler {
    /// A compiler with the usual cache and the NVRTC found in the usual places.
    ///
    /// # Errors
    /// [`Error::MissingLibrary`] with advice, [`Error::UnusableLibrary`].
    pub fn new() -> Result<Self> {
        Self::with_options(&CompilerOptions::default())
    }

    /// A compiler of one's own.
    ///
    /// # Errors
    /// As [`Compiler::new`].
    pub fn with_options(options: &CompilerOptions) -> Result<Self> {
        let nvrtc = match &options.nvrtc {
            Some(path) => NvrtcHandle::Own(Arc::new(Nvrtc::from_file(path)?)),
            None => NvrtcHandle::OfProcess(Nvrtc::of_process()?),
        };
        Ok(Self {
            nvrtc,
            cache: DiskCache::new(&options.cache),
            line_info: options.line_info,
            spent: Arc::default(),
        })
    }

    /// NVRTC's major and minor version.
    pub fn nvrtc_version(&self) -> (u32, u32) {
        self.nvrtc.version()
    }

    /// The path or name NVRTC was opened by.
    pub fn nvrtc_path(&self) -> &Path {
        self.nvrtc.path()
    }

    /// The folder compiled kernels are kept in, if any.
    pub fn cache_folder(&self) -> Option<&Path> {
        self.cache.folder()
    }

    /// Seconds that this compiler and its clones have spent so far on compiling, or on taking from the cache what was compiled
    /// before.
    pub fn seconds(&self) -> f64 {
        self.spent.load(Ordering::Relaxed) as f64 / 1e6
    }

    /// Compiles one source for one architecture, or takes it from the cache.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log; [`Error::InvalidArgument`] if the specification is not for `arch`
    /// or NVRTC does not know it; [`Error::UnknownSymbol`] if a declared entry point is not there.
    pub fn compile_for(&self, spec: &KernelSpec, arch: Arch) -> Result<Cubin> {
        if !spec.archs.contains(arch) {
            return Err(Error::InvalidArgument {
                what: "architecture",
                why: format!("kernel {} is for {:?}, not for {arch}", spec.name, spec.archs),
            });
        }
        let start = Instant::now();
        let span =
            tracing::debug_span!("compile", kernel = %spec.name, %arch, cached = tracing::field::Empty);
        let _entered = span.enter();
        let options = self.options(spec, arch);
        let (major, minor) = self.nvrtc.version();
        let version = format!("{major}.{minor}");
        let key = cache_key(spec, &options, &version);
        let (entry, cached) = match self.cache.load(&key) {
            Some(entry) => (entry, true),
            None => {
                let compiled = self.nvrtc.compile(spec, arch, &options)?;
                let usage = resource_usage(&compiled.cubin, &compiled.log)?;
                let header = EntryHeader {
                    key,
                    kernel: spec.name.to_string(),
                    arch: arch.to_string(),
                    nvrtc: version,
                    usage,
                    log: compiled.log,
                };
                (
                    Entry {
                        cubin: compiled.cubin,
                        header,
                    },
                    false,
                )
            }
        };
        span.record("cached", cached);
        let usage = &entry.header.usage;
        for entry_point in &spec.entry_points {
            if !usage.iter().any(|of| of.kernel == entry_point.name) {
                return Err(Error::UnknownSymbol {
                    module: spec.name.to_string(),
                    kind: "kernel",
                    name: entry_point.name.to_string(),
                    available: usage.iter().map(|of| of.kernel.clone()).collect(),
                });
            }
        }
        if !cached {
            self.cache.store(&entry);
        }
        let ms = start.elapsed().as_secs_f64() * 1e3;
        self.spent.fetch_add((ms * 1e3) as u64, Ordering::Relaxed);
        tracing::debug!(kernel = %spec.name, %arch, cached, ms, "compiled");
        Ok(Cubin {
            name: spec.name.to_string(),
            arch,
            bytes: entry.cubin.into(),
            usage: entry.header.usage,
            log: entry.header.log,
            cached,
            ms,
            nvrtc: (major, minor),
        })
    }

    /// Compiles many at once on all processors; results are in the order of `jobs`.
    pub fn compile_all(&self, jobs: &[(&KernelSpec, Arch)]) -> Vec<Result<Cubin>> {
        let workers = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(jobs.len());
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(&(spec, arch)) = jobs.get(index) else {
                    return done;
                };
                done.push((index, self.compile_for(spec, arch)));
            }
        };
        let mut results: Vec<Option<Result<Cubin>>> = jobs.iter().map(|_| None).collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers)
                .map_while(|_| {
                    std::thread::Builder::new()
                        .stack_size(COMPILE_STACK)
                        .spawn_scoped(scope, work)
                        .ok()
                })
                .collect();
            let mut finished = Vec::new();
            if threads.is_empty() {
                finished.extend(work());
            }
            for thread in threads {
                finished.extend(thread.join().unwrap_or_default());
            }
            for (index, result) in finished {
                results[index] = Some(result);
            }
        });
        let lost = || Error::Nvrtc {
            call: "nvrtcCompileProgram",
            message: "the compiling thread ended".to_string(),
        };
        results
            .into_iter()
            .map(|result| result.unwrap_or_else(|| Err(lost())))
            .collect()
    }

    /// Compiles for `device` and loads the module.
    ///
    /// # Errors
    /// As [`Compiler::compile_for`] and [`Module::load`].
    pub fn load(&self, device: &Device, spec: &KernelSpec) -> Result<Module> {
        Module::load(device, &self.compile_for(spec, device.arch())?)
    }

    /// Compiles many for `device` on all processors and loads the modules, in the order of `specs`.
    ///
    /// # Errors
    /// The first error of [`Compiler::load`].
    pub fn load_all(&self, device: &Device, specs: &[KernelSpec]) -> Result<Vec<Module>> {
        let jobs: Vec<_> = specs.iter().map(|spec| (spec, device.arch())).collect();
        self.compile_all(&jobs)
            .into_iter()
            .map(|cubin| Module::load(device, &cubin?))
            .collect()
    }

    /// Everything NVRTC is told for `spec`.
    fn options(&self, spec: &KernelSpec, arch: Arch) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={arch}"),
            "--std=c++17".to_string(),
            // Makes the assembler report what each kernel uses.
            "--ptxas-options=-v".to_string(),
        ];
        if self.line_info {
            options.push("--generate-line-info".to_string());
        }
        options.extend(
            spec.defines
                .iter()
                .map(|(name, value)| format!("--define-macro={name}={value}")),
        );
        options.extend(spec.options.iter().cloned());
        options
    }
}

/// What identifies a compilation: source, headers, options (architecture and defines among them), NVRTC's version.
fn cache_key(spec: &KernelSpec, options: &[String], nvrtc: &str) -> String {
    let count = (spec.headers.len() as u64).to_le_bytes();
    let mut parts: Vec<&[u8]> = vec![b"cubin", nvrtc.as_bytes(), spec.source.as_bytes(), &count];
    for header in &spec.headers {
        parts.extend([header.name.as_bytes(), header.text.as_bytes()]);
    }
    parts.extend(options.iter().map(|option| option.as_bytes()));
    key(parts)
}
