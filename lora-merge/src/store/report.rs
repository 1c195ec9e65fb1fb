//! What a store tells: the steps of a refresh, what it did, and the memory of both copies.

use crate::PolicyVersion;
use std::time::Duration;

/// A step of a refresh, as the fault hook sees it. Modules are indices into the specs.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// # let tensor = |name, shape, values| TensorSlice { name, shape, values: TensorValues::F32(values) };
/// # let a = tensor("q_proj.lora_A.weight", &[1, 2], &[1.0, 2.0]);
/// # let b = tensor("q_proj.lora_B.weight", &[2, 1], &[0.5, 0.25]);
/// # let adapter = Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[a, b])?;
/// # let specs = vec![ModuleSpec::linear("q_proj", 2, 2)];
/// # let mut store = MergedStore::new(specs, OwnedWeights::new([vec![bf16::ONE; 4]]))?;
/// use lora_merge::{Error, RefreshStep};
///
/// store.set_fault_hook(Some(Box::new(|step| step == RefreshStep::Publish)));
/// let error = store.refresh(&[ActiveAdapter::new(adapter)]).unwrap_err();
/// assert!(matches!(error, Error::Injected { .. }));
/// assert_eq!(store.version().number, 0, "the base is still in force");
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefreshStep {
    /// Adapters are matched with modules.
    Resolve,
    /// Storage for a merged weight is allocated.
    Allocate(usize),
    /// A pristine weight that is not in memory is read.
    Read(usize),
    /// Row factors and biases are computed.
    Prepare(usize),
    /// A merged weight is written.
    Commit(usize),
    /// Biases, version and active set are about to change.
    Publish,
}

/// What a refresh did.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// # let tensor = |name, shape, values| TensorSlice { name, shape, values: TensorValues::F32(values) };
/// # let a = tensor("q_proj.lora_A.weight", &[1, 2], &[1.0, 2.0]);
/// # let b = tensor("q_proj.lora_B.weight", &[2, 1], &[0.5, 0.25]);
/// # let adapter = Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[a, b])?;
/// # let specs = vec![ModuleSpec::linear("q_proj", 2, 2)];
/// # let mut store = MergedStore::new(specs, OwnedWeights::new([vec![bf16::ONE; 4]]))?;
/// let report = store.refresh(&[ActiveAdapter::new(adapter)])?;
/// assert_eq!((report.version.number, report.adapted_modules, report.changed_modules), (1, 1, 1));
/// let report = store.refresh(&[])?;
/// assert_eq!((report.restored_modules, report.differs_from_base), (1, false));
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RefreshReport {
    /// The policy now in force.
    pub version: PolicyVersion,
    /// Modules that an adapter touches.
    pub adapted_modules: usize,
    /// Modules that were merged before and went back to the pristine weight.
    pub restored_modules: usize,
    /// Modules of which at least one weight or bias element changed. 0 means that the update changed nothing.
    pub changed_modules: usize,
    /// Whether any served weight or bias differs from the base. `false` with an adapter active means that it has no
    /// effect at all.
    pub differs_from_base: bool,
    /// Elements whose rounding needed f64.
    pub recomputed: u64,
    /// Wall time.
    pub elapsed: Duration,
    /// Remarks on settings that are overridden as in PEFT.
    pub warnings: Vec<String>,
}

/// Bytes held by a [`MergedStore`](crate::MergedStore).
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// # let tensor = |name, shape, values| TensorSlice { name, shape, values: TensorValues::F32(values) };
/// # let a = tensor("q_proj.lora_A.weight", &[1, 2], &[1.0, 2.0]);
/// # let b = tensor("q_proj.lora_B.weight", &[2, 1], &[0.5, 0.25]);
/// # let adapter = Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[a, b])?;
/// # let specs = vec![ModuleSpec::linear("q_proj", 2, 2)];
/// # let mut store = MergedStore::new(specs, OwnedWeights::new([vec![bf16::ONE; 4]]))?;
/// assert_eq!(store.memory().merged_bytes, 0, "nothing is held twice before it is adapted");
/// store.refresh(&[ActiveAdapter::new(adapter)])?;
/// assert_eq!((store.memory().merged_modules, store.memory().merged_bytes), (1, 8));
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryReport {
    /// Modules in all.
    pub modules: usize,
    /// Modules with merged storage of their own.
    pub merged_modules: usize,
    /// Bytes of all modules' weights, counted once.
    pub weight_bytes: usize,
    /// Bytes of memory of the pristine copy, as the source reports them.
    pub pristine_bytes: usize,
    /// Bytes of merged storage.
    pub merged_bytes: usize,
}
