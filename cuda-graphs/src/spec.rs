//! Kernels as data: source, what to compile it with, and what it may use.
//!
//! A crate with kernels lists them in one function, `pub fn kernel_specs() -> Vec<KernelSpec>`. That list is what is
//! compiled at start, what the tests without a GPU compile for every architecture, and what the resource table is
//! made from.

use std::borrow::Cow;

use crate::arch::Arch;
use crate::cubin::ResourceUsage;

/// A header given to the compiler in memory; `#include "name"` finds it.
///
/// ```
/// use cuda_graphs::{Header, KernelSpec};
///
/// let spec = KernelSpec::new("twice", "#include \"twice.cuh\"\nextern \"C\" __global__ void twice(int* x) { *x = TWICE(*x); }")
///     .headers([Header::new("twice.cuh", "#define TWICE(x) (2 * (x))")]);
/// assert_eq!(spec.headers[0].name, "twice.cuh");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The name in the `#include`.
    pub name: Cow<'static, str>,
    /// Its text.
    pub text: Cow<'static, str>,
}

impl Header {
    /// A header whose name and text are part of the program (`include_str!`).
    pub const fn new(name: &'static str, text: &'static str) -> Self {
        Self {
            name: Cow::Borrowed(name),
            text: Cow::Borrowed(text),
        }
    }
}

/// What a kernel may use at most. The default forbids spills and stack, and leaves registers and shared memory to the
/// hardware's own limits (255, 48 KiB).
///
/// ```
/// use cuda_graphs::Limits;
///
/// let limits = Limits { spill_bytes: 16, ..Limits::registers(128) };
/// assert_eq!((limits.registers, limits.stack_bytes), (128, 0));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Registers per thread.
    pub registers: u32,
    /// Spill stores plus spill loads, bytes per thread.
    pub spill_bytes: u32,
    /// Local memory, bytes per thread.
    pub stack_bytes: u32,
    /// Shared memory of fixed size, bytes per block.
    pub static_shared_bytes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            registers: 255,
            spill_bytes: 0,
            stack_bytes: 0,
            static_shared_bytes: 48 * 1024,
        }
    }
}

impl Limits {
    /// The default with a limit on registers: 65,536 registers over `registers * threads` is how many blocks fit.
    pub fn registers(registers: u32) -> Self {
        Self {
            registers,
            ..Self::default()
        }
    }

    /// In which points `usage` is over the limits, as text; empty if it is within.
    pub fn violations(&self, usage: &ResourceUsage) -> Vec<String> {
        let spills = usage.spill_store_bytes.saturating_add(usage.spill_load_bytes);
        [
            ("registers", usage.registers, self.registers),
            ("bytes spilled", spills, self.spill_bytes),
            ("bytes of stack", usage.stack_bytes, self.stack_bytes),
            (
                "bytes of static shared memory",
                usage.static_shared_bytes,
                self.static_shared_bytes,
            ),
        ]
        .into_iter()
        .filter(|(_, used, limit)| used > limit)
        .map(|(what, used, limit)| format!("{used} {what}, the limit is {limit}"))
        .collect()
    }
}

/// A kernel in a source: its name and its limits.
///
/// ```
/// use cuda_graphs::{EntryPoint, Limits};
///
/// let entry = EntryPoint::new("scale", Limits::registers(32));
/// assert_eq!((entry.name.as_ref(), entry.limits.registers), ("scale", 32));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryPoint {
    /// The name of an `extern "C" __global__` function.
    pub name: Cow<'static, str>,
    /// What it may use.
    pub limits: Limits,
}

impl EntryPoint {
    /// An entry point with limits.
    pub fn new(name: impl Into<Cow<'static, str>>, limits: Limits) -> Self {
        Self {
            name: name.into(),
            limits,
        }
    }
}

/// The architectures a kernel is for.
///
/// ```
/// use cuda_graphs::{Arch, Archs};
///
/// assert!(Archs::All.contains(Arch::SM_80));
/// assert!(Archs::From(9, 0).contains(Arch::SM_100A) && !Archs::From(9, 0).contains(Arch::SM_89));
/// assert!(!Archs::Only(vec![Arch::SM_90A]).contains(Arch::SM_100A));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Archs {
    /// Every one from compute capability 8.0 on.
    #[default]
    All,
    /// Every one from this compute capability (major, minor) on.
    From(u32, u32),
    /// These alone, such as `sm_90a` for a kernel that uses wgmma.
    Only(Vec<Arch>),
}

impl Archs {
    /// Whether `arch` is one of them.
    pub fn contains(&self, arch: Arch) -> bool {
        match self {
            Self::All => true,
            Self::From(major, minor) => arch.compute_capability() >= (*major, *minor),
            Self::Only(archs) => archs.contains(&arch),
        }
    }
}

/// One compilation: a source with its headers and defines, and the kernels that come out.
///
/// ```
/// use cuda_graphs::{EntryPoint, KernelSpec, Limits};
///
/// let spec = KernelSpec::new("scale<4>", "extern \"C\" __global__ void scale(float* x) { x[threadIdx.x] *= N; }")
///     .define("N", 4)
///     .entry("scale", Limits::registers(32));
/// assert_eq!(spec.defines, [("N".to_string(), "4".to_string())]);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelSpec {
    /// Names this specialisation in errors and tables; two of a list must not share it.
    pub name: Cow<'static, str>,
    /// CUDA C++.
    pub source: Cow<'static, str>,
    /// Headers that the source, or another header, includes.
    pub headers: Vec<Header>,
    /// Macros: name and value.
    pub defines: Vec<(String, String)>,
    /// More options for NVRTC, such as `--use_fast_math`.
    pub options: Vec<String>,
    /// The kernels.
    pub entry_points: Vec<EntryPoint>,
    /// The architectures it is for.
    pub archs: Archs,
}

impl KernelSpec {
    /// A source without headers, defines or declared kernels.
    pub fn new(name: impl Into<Cow<'static, str>>, source: impl Into<Cow<'static, str>>) -> Self {
        Self {
            name: name.into(),
            source: source.into(),
            ..Self::default()
        }
    }

    /// Adds headers.
    #[must_use]
    pub fn headers(mut self, headers: impl IntoIterator<Item = Header>) -> Self {
        self.headers.extend(headers);
        self
    }

    /// Adds a macro.
    #[must_use]
    pub fn define(mut self, name: impl Into<String>, value: impl ToString) -> Self {
        self.defines.push((name.into(), value.to_string()));
        self
    }

    /// Adds an option for NVRTC.
    #[must_use]
    pub fn option(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }

    /// Declares a kernel and what it may use.
    #[must_use]
    pub fn entry(mut self, name: impl Into<Cow<'static, str>>, limits: Limits) -> Self {
        self.entry_points.push(EntryPoint::new(name, limits));
        self
    }

    /// Restricts the architectures.
    #[must_use]
    pub fn archs(mut self, archs: Archs) -> Self {
        self.archs = archs;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_over_any_limit_is_told_and_usage_at_the_limit_is_not() {
        let limits = Limits {
            registers: 64,
            spill_bytes: 8,
            stack_bytes: 16,
            static_shared_bytes: 1024,
        };
        let mut usage = ResourceUsage {
            kernel: "k".to_string(),
            registers: 64,
            spill_store_bytes: 4,
            spill_load_bytes: 4,
            stack_bytes: 16,
            static_shared_bytes: 1024,
            parameters: 1,
            parameter_bytes: 8,
        };
        assert!(limits.violations(&usage).is_empty());
        usage.registers = 65;
        usage.spill_load_bytes = 8;
        usage.stack_bytes = 17;
        usage.static_shared_bytes = 1025;
        assert_eq!(limits.violations(&usage).len(), 4);
        assert_eq!(limits.violations(&usage)[0], "65 registers, the limit is 64");
        usage.spill_store_bytes = u32::MAX;
        assert_eq!(limits.violations(&usage).len(), 4, "the sum does not wrap");
    }

    #[test]
    fn architectures_are_restricted_as_declared() {
        assert!(Archs::All.contains(Arch::SM_80));
        assert!(!Archs::From(9, 0).contains(Arch::SM_89));
        assert!(Archs::From(9, 0).contains(Arch::SM_120));
        assert!(Archs::Only(vec![Arch::SM_90A]).contains(Arch::SM_90A));
        assert!(!Archs::Only(vec![Arch::SM_90A]).contains(Arch::new(9, 0, false)));
    }
}
