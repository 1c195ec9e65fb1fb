//! Everything that can go wrong, with the field, file or tensor that caused it.

use std::path::PathBuf;

/// Errors of this crate. Nothing here is raised by a panic; a failed call leaves the state as it was.
///
/// ```
/// use lora_merge::{AdapterConfig, Error};
///
/// let json = r#"{"peft_type": "LORA", "target_modules": ["q_proj"], "layer_replication": [[0, 4]]}"#;
/// match AdapterConfig::from_json(json) {
///     Err(Error::Unsupported { field, .. }) => assert_eq!(field, "layer_replication"),
///     other => panic!("{other:?}"),
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the adapter folder could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The folder holds no `adapter_config.json` or no `adapter_model.safetensors`.
    #[error("{} has no {missing}: it is not a PEFT adapter folder", folder.display())]
    NotAnAdapterFolder {
        /// The folder.
        folder: PathBuf,
        /// The absent file's name.
        missing: &'static str,
    },
    /// The weights are a pickle, which can run code when read.
    #[error(
        "{} is a pickle and is not read; save the adapter again with \
         `model.save_pretrained(folder, safe_serialization=True)`", path.display()
    )]
    PickleRefused {
        /// The pickle.
        path: PathBuf,
    },
    /// `adapter_config.json` is not a JSON object.
    #[error("adapter_config.json: {reason}")]
    ConfigSyntax {
        /// What the parser said.
        reason: String,
    },
    /// A field of the configuration has a value that it cannot have.
    #[error("adapter_config.json: `{field}` must be {expected}, found {found}")]
    ConfigField {
        /// The field's name.
        field: String,
        /// What would be right.
        expected: &'static str,
        /// The value, shortened.
        found: String,
    },
    /// A field asks for something that this crate does not do.
    #[error("adapter_config.json: `{field}` = {value} is not supported: {reason}")]
    Unsupported {
        /// The field's name.
        field: String,
        /// The value, shortened.
        value: String,
        /// Why it is refused.
        reason: &'static str,
    },
    /// A regular expression of the configuration cannot be compiled or takes too long to match.
    #[error("adapter_config.json: `{field}`: bad pattern {pattern:?}: {reason}")]
    Pattern {
        /// The field that holds the pattern.
        field: &'static str,
        /// The pattern.
        pattern: String,
        /// What the regex engine said.
        reason: String,
    },
    /// The safetensors container is damaged.
    #[error("adapter_model.safetensors: {reason}")]
    Container {
        /// What the parser said.
        reason: String,
    },
    /// A tensor name that no supported part of an adapter has.
    #[error("adapter tensor `{tensor}`: {reason}")]
    TensorName {
        /// The tensor's name.
        tensor: String,
        /// Why it is refused.
        reason: &'static str,
    },
    /// A tensor is stored in a type other than f32, f16 or bf16.
    #[error("adapter tensor `{tensor}` has dtype {dtype}; f32, f16 and bf16 are supported")]
    TensorDtype {
        /// The tensor's name.
        tensor: String,
        /// The stored type.
        dtype: String,
    },
    /// A tensor has another shape than the module and the configuration imply.
    #[error("adapter tensor `{tensor}` has shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// The tensor's name.
        tensor: String,
        /// The implied shape.
        expected: Vec<usize>,
        /// The stored shape.
        found: Vec<usize>,
    },
    /// A tensor's data does not have the length that its shape and type imply.
    #[error("adapter tensor `{tensor}` holds {found} bytes, its shape needs {expected}")]
    TensorBytes {
        /// The tensor's name.
        tensor: String,
        /// The implied length in bytes.
        expected: usize,
        /// The given length in bytes.
        found: usize,
    },
    /// A tensor was given twice.
    #[error("adapter tensor `{tensor}` is given twice")]
    DuplicateTensor {
        /// The tensor's name.
        tensor: String,
    },
    /// A tensor holds a NaN or an infinity.
    #[error("adapter tensor `{tensor}` holds {value} at element {index}")]
    NotFinite {
        /// The tensor's name.
        tensor: String,
        /// The first such element, counted in row-major order.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// A targeted module has no tensor of that name.
    #[error("module `{module}` is targeted but the adapter has no tensor `{tensor}`")]
    MissingTensor {
        /// The module's name.
        module: String,
        /// The absent tensor's name.
        tensor: String,
    },
    /// Tensors that the configuration does not use.
    #[error("{} adapter tensor(s) are used by nothing, the first is `{}`", tensors.len(), tensors.first().map_or("", |t| t.as_str()))]
    UnusedTensors {
        /// Their names, sorted.
        tensors: Vec<String>,
    },
    /// The adapter's configuration selects no module of the model.
    #[error("the adapter's `target_modules` match none of the {modules} modules")]
    NoTarget {
        /// How many modules there are.
        modules: usize,
    },
    /// A configuration entry that is valid but cannot be applied to this module.
    #[error("module `{module}`: `{field}` cannot be applied: {reason}")]
    Module {
        /// The module's name.
        module: String,
        /// The configuration field.
        field: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// Two active adapters both replace the same tensor.
    #[error("two active adapters both replace `{tensor}` of module `{module}`")]
    ReplacedTwice {
        /// The module's name.
        module: String,
        /// `weight` or `bias`.
        tensor: &'static str,
    },
    /// An adapter's weight is not finite, or not 1 where the adapter replaces whole tensors.
    #[error("adapter weight {weight}: {reason}")]
    AdapterWeight {
        /// The weight.
        weight: f32,
        /// Why it is refused.
        reason: &'static str,
    },
    /// A row of W₀ + Δ has norm 0, so DoRA's factor is undefined.
    #[error("module `{module}`: row {row} has norm 0, DoRA's factor is undefined")]
    ZeroNorm {
        /// The module's name.
        module: String,
        /// The row (output feature).
        row: usize,
    },
    /// The merged weight (or bias) is not finite: the adapter is too large, or the base is damaged.
    #[error("module `{module}`: the merged value at row {row}, column {column} is not finite")]
    MergedNotFinite {
        /// The module's name.
        module: String,
        /// The row of the first such element.
        row: usize,
        /// The column of the first such element.
        column: usize,
    },
    /// A factor of an adapter beside its weight is not finite in the format that it is applied in: the adapter, or what
    /// its scaling makes of it, is too large.
    #[error("module `{module}`: factor `{factor}` at row {row}, column {column} is too large for {format}")]
    FactorNotFinite {
        /// The module's name.
        module: String,
        /// `lora_A` `[rank, in]`; `lora_B` `[out, rank]`, with its scaling and DoRA's row factor; `gain` `[out, 1]`,
        /// DoRA's factor on the base product. Ranks of several active adapters are counted on.
        factor: &'static str,
        /// The row of the first such element.
        row: usize,
        /// The column of the first such element.
        column: usize,
        /// `f32` or `bf16`.
        format: &'static str,
    },
    /// A slice does not have the length that the shape implies.
    #[error("{what} has {found} elements, expected {expected}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// The implied number of elements.
        expected: usize,
        /// The given number of elements.
        found: usize,
    },
    /// Two modules have the same name.
    #[error("module `{module}` is listed twice")]
    DuplicateModule {
        /// The module's name.
        module: String,
    },
    /// No module has this name or index.
    #[error("there is no module {module}")]
    NoSuchModule {
        /// Its name or index.
        module: String,
    },
    /// The pristine weights could not be read.
    #[error("cannot read the pristine weights of `{module}`: {reason}")]
    Pristine {
        /// The module's name.
        module: String,
        /// What the source said.
        reason: String,
    },
    /// Memory for merged weights could not be had.
    #[error("cannot allocate {bytes} bytes for the merged weights of `{module}`")]
    OutOfMemory {
        /// The module's name.
        module: String,
        /// Bytes asked for.
        bytes: usize,
    },
    /// A fault that the test hook injected.
    #[error("injected fault at {step}")]
    Injected {
        /// The step that was made to fail.
        step: String,
    },
    /// The drift check was asked for no iteration or for a noise that is no finite number ≥ 0.
    #[error("drift check: `{field}` must be {expected}")]
    DriftOptions {
        /// The option.
        field: &'static str,
        /// What would be right.
        expected: &'static str,
    },
    /// The CUDA fence reported an error.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] cuda_graphs::Error),
}

impl Error {
    /// Names the module in an error of something that knows its module's values but not its name, such as
    /// [`ModuleUpdate::unmerged`](crate::ModuleUpdate::unmerged). An error that names one already, or none at all, stays.
    #[must_use]
    pub fn in_module(mut self, name: &str) -> Self {
        if let Self::Module { module, .. }
        | Self::ZeroNorm { module, .. }
        | Self::MergedNotFinite { module, .. }
        | Self::FactorNotFinite { module, .. } = &mut self
            && module.is_empty()
        {
            name.clone_into(module);
        }
        self
    }
}

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
