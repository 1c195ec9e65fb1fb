//! What the tests of a crate with kernels need: compiling the kernels for every architecture without a GPU, and holding them to
//! their limits.

use crate::arch::Arch;
use crate::compiler::Compiler;
use crate::cubin::ResourceUsage;
use crate::error::{Error, Result};
use crate::spec::KernelSpec;

/// When set, [`assert_kernels_compile`] fails without NVRTC instead of saying so and passing.
pub const REQUIRE_NVRTC_VARIABLE: &str = "ROLLOUT_REQUIRE_NVRTC";

/// What one kernel uses on one architecture.
///
/// ```
/// use cuda_graphs::{Arch, Limits, ResourceUsage, UsageRow};
///
/// let usage = ResourceUsage { kernel: "scale".into(), registers: 40, ..ResourceUsage::default() };
/// let violations = Limits::registers(32).violations(&usage);
/// let row = UsageRow { spec: "scale<4>".into(), arch: Arch::SM_90A, usage, violations };
/// assert_eq!(row.violations, ["40 registers, the limit is 32"]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageRow {
    /// Name of the specification.
    pub spec: String,
    /// The architecture.
    pub arch: Arch,
    /// What it uses.
    pub usage: ResourceUsage,
    /// In which points it is over its limits.
    pub violations: Vec<String>,
}

/// What kernels use, one line each; prints as a table.
///
/// ```
/// use cuda_graphs::UsageTable;
///
/// let table = UsageTable::default();
/// assert_eq!(table.violations().count(), 0);
/// assert!(table.to_string().contains("registers"), "prints as a table");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageTable {
    /// In the order of specifications, then of architectures.
    pub rows: Vec<UsageRow>,
}

impl UsageTable {
    /// The lines of kernels that are over their limits.
    pub fn violations(&self) -> impl Iterator<Item = &UsageRow> {
        self.rows.iter().filter(|row| !row.violations.is_empty())
    }
}

impl std::fmt::Display for UsageTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |of: fn(&UsageRow) -> &str, title: &str| {
            self.rows
                .iter()
                .map(|row| of(row).len())
                .chain([title.len()])
                .max()
                .unwrap_or(0)
        };
        let spec = width(|row| &row.spec, "specification");
        let kernel = width(|row| &row.usage.kernel, "kernel");
        writeln!(
            f,
            "{:<spec$}  {:<kernel$}  arch     registers  spill st/ld  stack  static shared  parameters",
            "specification", "kernel"
        )?;
        for row in &self.rows {
            let usage = &row.usage;
            write!(
                f,
                "{:<spec$}  {:<kernel$}  {:<8} {:>9}  {:>11}  {:>5}  {:>13}  {:>10}",
                row.spec,
                usage.kernel,
                row.arch.to_string(),
                usage.registers,
                format!("{}/{}", usage.spill_store_bytes, usage.spill_load_bytes),
                usage.stack_bytes,
                usage.static_shared_bytes,
                usage.parameter_bytes,
            )?;
            let over = row.violations.join("; ");
            writeln!(f, "{}{over}", if over.is_empty() { "" } else { "  <-- " })?;
        }
        Ok(())
    }
}

/// Compiles every specification for every one of `archs` that it is for, and compares with the declared limits.
///
/// # Errors
/// The first that does not compile ([`Error::Compile`] has the log); [`Error::MissingLibrary`] without NVRTC.
pub fn check_kernels(compiler: &Compiler, specs: &[KernelSpec], archs: &[Arch]) -> Result<UsageTable> {
    let jobs: Vec<(&KernelSpec, Arch)> = specs
        .iter()
        .flat_map(|spec| archs.iter().map(move |&arch| (spec, arch)))
        .filter(|(spec, arch)| spec.archs.contains(*arch))
        .collect();
    let mut table = UsageTable::default();
    for ((spec, arch), cubin) in jobs.iter().zip(compiler.compile_all(&jobs)) {
        for usage in cubin?.usage {
            let declared = spec.entry_points.iter().find(|entry| entry.name == usage.kernel);
            let violations = match declared {
                Some(entry) => entry.limits.violations(&usage),
                None => vec!["not declared as an entry point".to_string()],
            };
            table.rows.push(UsageRow {
                spec: spec.name.to_string(),
                arch: *arch,
                usage,
                violations,
            });
        }
    }
    Ok(table)
}

/// The whole test of a crate with kernels:
///
/// ```no_run
/// # use cuda_graphs::KernelSpec;
/// # fn kernel_specs() -> Vec<KernelSpec> { Vec::new() }
/// #[test]
/// fn kernels_compile_for_every_architecture() {
///     cuda_graphs::assert_kernels_compile(&kernel_specs());
/// }
/// ```
///
/// Prints the table to standard error, which a test shows with `--nocapture` or when it fails. Without NVRTC it says
/// so and checks nothing, unless `ROLLOUT_REQUIRE_NVRTC` is set.
///
/// # Panics
/// If a kernel does not compile or is over its limits: it is an assertion for tests.
pub fn assert_kernels_compile(specs: &[KernelSpec]) {
    let mut names: Vec<_> = specs.iter().map(|spec| &spec.name).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), specs.len(), "two specifications share a name");
    let compiler = match Compiler::new() {
        Ok(compiler) => compiler,
        Err(error @ Error::MissingLibrary { .. }) if std::env::var_os(REQUIRE_NVRTC_VARIABLE).is_none() => {
            eprintln!("NOT CHECKED: {} kernel specifications: {error}", specs.len());
            return;
        }
        Err(error) => panic!("{error}"),
    };
    match check_kernels(&compiler, specs, &Arch::TESTED) {
        Ok(table) => {
            eprintln!("{table}");
            let over = table.violations().count();
            assert_eq!(over, 0, "{over} kernels are over their limits:\n{table}");
        }
        Err(error) => panic!("{error}"),
    }
}
