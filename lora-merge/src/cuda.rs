//! Merging on an NVIDIA GPU: few launches for all matrices of a refresh.
//!
//! A [`MergePlan`] holds what a set of adapters does to a list of modules, on the device: making one may fail and
//! touches no weight. [`MergePlan::run`] then writes every merged weight, straight into the storage that is served.
//! The former plan, kept, is the way back: running it again restores the former policy bit for bit.
//!
//! ```text
//! ModuleUpdate ─▶ MergePlan::new ── page-locked memory ─▶ A, B, scalings; DoRA's row norms ──▶ MergePlan
//!                  (packs in parallel)  (own stream)                                           │ run
//!   pristine W₀ [rows, columns] ──────────────────────────────────────────────▶ out: a module's rows of the
//!                                                                                fused QKV or gate+up storage
//! ```
//!
//! Neither waits for the device (but with DoRA). [`MergeWorkspace::make_plans`] makes several plans, of a few layers each, whose
//! factors are packed ahead while those before them are uploaded and merged.
//!
//! The bits are those of the CPU's merge: see the kernel's header in `kernels/merge.cu` for how.
//!
//! A module's rows lie together in a fused row-major matrix, so its part of the storage is a plain
//! [`DeviceSlice`], for instance `qkv.slice(q_rows * columns..)`.

mod layout;
mod pack;
mod packing;
mod plan;
mod plans;
mod workspace;

pub use crate::launch::kernel_specs;
pub use plan::MergePlan;
pub use plans::PlansInTheMaking;
pub use workspace::MergeWorkspace;

use crate::launch;
use crate::{Error, Result};
use cuda_graphs::{Compiler, Device, DeviceSlice, Kernel};
use half::bf16;

/// The compiled kernels of this crate on one device.
#[derive(Clone, Debug)]
pub struct MergeKernels {
    merge: launch::Kernels,
    dora: Kernel,
}

impl MergeKernels {
    /// Compiles (or takes from the cache) and loads the kernels.
    ///
    /// # Errors
    /// [`Error::Cuda`]. Panics: none.
    pub fn load(compiler: &Compiler, device: &Device) -> Result<Self> {
        let mut specs = kernel_specs();
        specs.retain(|spec| spec.archs.contains(device.arch()));
        let modules = compiler.load_all(device, &specs)?;
        let kernel = |name: &'static str| {
            let found = modules.iter().find_map(|m| m.kernel(name).ok());
            found.ok_or(Error::Cuda(cuda_graphs::Error::InvalidArgument {
                what: "kernel",
                why: name.to_owned(),
            }))
        };
        Ok(Self {
            merge: launch::Kernels {
                prepare: kernel("prepare")?,
                split: kernel("merge_split")?,
                deep: kernel("merge_deep")?,
                whole: kernel("merge_whole")?,
                general: kernel("merge_general")?,
                groups: match specs.iter().any(|spec| spec.name == "merge_wgmma") {
                    true => Some([
                        kernel("merge_wgmma_split")?,
                        kernel("merge_wgmma_whole")?,
                        kernel("settle_doubts")?,
                    ]),
                    false => None,
                },
            },
            dora: kernel("dora_rows")?,
        })
    }
}

/// Where one module's weights are on the device, both `[rows, columns]` as stored.
///
/// `columns` must be a multiple of 8, and both must begin at a multiple of 16 bytes.
///
/// ```no_run
/// use cuda_graphs::{Compiler, Device, DeviceBuffer, Stream};
/// use half::bf16;
/// use lora_merge::ModuleUpdate;
/// use lora_merge::cuda::{MergeKernels, MergePlan, MergeTarget, MergeWorkspace};
///
/// # fn merge(q: &ModuleUpdate) -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(0)?;
/// let stream = Stream::new(&device)?;
/// let kernels = MergeKernels::load(&Compiler::new()?, &device)?;
/// let mut workspace = MergeWorkspace::new(&device)?;
/// let (rows, columns) = q.shape();
/// let pristine = DeviceBuffer::<bf16>::zeroed(&device, rows * columns)?;
/// let served = DeviceBuffer::<bf16>::zeroed(&device, rows * columns)?;
/// let targets = [MergeTarget { pristine: pristine.as_slice(), merged: served.as_slice() }];
/// // Making the plan may fail and touches no weight; running it writes them all.
/// let mut plan = MergePlan::new(&kernels, &mut workspace, &stream, &[("q_proj", q)], &targets)?;
/// plan.run(&kernels, &mut workspace, &stream, &targets)?;
/// println!("{:?}", plan.outcomes(&stream)?);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct MergeTarget<'a> {
    /// The pristine weight; only read.
    pub pristine: DeviceSlice<'a, bf16>,
    /// The merged weight: the module's rows of the storage that is served.
    pub merged: DeviceSlice<'a, bf16>,
}
