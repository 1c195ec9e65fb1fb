//! Options of the kernels of a [`CudaBackend`](crate::cuda::CudaBackend), as a user or a tuned profile gives them.

use std::fmt;
use std::str::FromStr;

use block_mask::{DecodeKernelOptions, KernelOptionsError, PrefillKernelOptions};
use serde::{Deserialize, Serialize};

/// Options of matrix products; what is `None` is left to the defaults.
///
/// ```
/// use qwen3_model::MatrixKernelOptions;
///
/// let options: MatrixKernelOptions = "{\"layer_kernel_rows\": 8, \"split_k\": false}".parse()?;
/// assert_eq!(options.layer_kernel_rows, Some(8));
/// assert!("{\"tile\": 8}".parse::<MatrixKernelOptions>().is_err());
/// # Ok::<(), qwen3_model::KernelOptionsError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct MatrixKernelOptions {
    /// Largest bucket of decode steps that goes through the kernel of whole layers; 0 for none. Default: as many rows as
    /// it takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_kernel_rows: Option<usize>,
    /// Algorithms of cuBLASLt that are timed for a shape, 1 to 64; with 1 its own guess is taken. Default: 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<usize>,
    /// Whether algorithms that split a product along k may be taken. Default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_k: Option<bool>,
    /// Whether cuBLASLt computes the products that have no kernel of their own; `false` for a plain kernel, which is several
    /// times slower: where that library is missing, for comparison, and under tools that its kernels confuse. Default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub library: Option<bool>,
}

impl FromStr for MatrixKernelOptions {
    type Err = KernelOptionsError;

    /// From a JSON object.
    fn from_str(text: &str) -> Result<Self, KernelOptionsError> {
        KernelOptionsError::parse(text)
    }
}

impl fmt::Display for MatrixKernelOptions {
    /// As a JSON object.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl MatrixKernelOptions {
    /// These, with `others` where nothing is given.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            layer_kernel_rows: self.layer_kernel_rows.or(others.layer_kernel_rows),
            algorithms: self.algorithms.or(others.algorithms),
            split_k: self.split_k.or(others.split_k),
            library: self.library.or(others.library),
        }
    }

    /// Whether nothing is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Options of all kernels.
///
/// ```
/// use qwen3_model::KernelOptions;
///
/// let options = KernelOptions::default();
/// assert!(options.is_empty(), "all is left to the device's defaults");
/// assert_eq!(options.or(KernelOptions::default()), options);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct KernelOptions {
    /// Of decode attention.
    #[serde(skip_serializing_if = "DecodeKernelOptions::is_empty")]
    pub decode: DecodeKernelOptions,
    /// Of prefill attention.
    #[serde(skip_serializing_if = "PrefillKernelOptions::is_empty")]
    pub prefill: PrefillKernelOptions,
    /// Of matrix products.
    #[serde(skip_serializing_if = "MatrixKernelOptions::is_empty")]
    pub matrix: MatrixKernelOptions,
}

/// Kernel options for every backend of the process: a JSON object with `decode`, `prefill` and `matrix`, or the path of a tuned
/// profile, as `rollout tune` writes it. What a backend is given itself comes first. For running tests under a profile.
pub const KERNEL_OPTIONS_VARIABLE: &str = "ROLLOUT_KERNEL_OPTIONS";

impl KernelOptions {
    /// From the three kinds.
    pub fn new(
        decode: DecodeKernelOptions,
        prefill: PrefillKernelOptions,
        matrix: MatrixKernelOptions,
    ) -> Self {
        Self {
            decode,
            prefill,
            matrix,
        }
    }

    /// These, with `others` where nothing is given.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            decode: self.decode.or(others.decode),
            prefill: self.prefill.or(others.prefill),
            matrix: self.matrix.or(others.matrix),
        }
    }

    /// Whether nothing is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Those of [`KERNEL_OPTIONS_VARIABLE`].
    ///
    /// # Errors
    /// [`KernelOptionsError`] for what is no such object, or no such file. Panics: none.
    pub fn of_environment() -> Result<Self, KernelOptionsError> {
        match std::env::var(KERNEL_OPTIONS_VARIABLE) {
            Ok(text) if !text.is_empty() => Self::named(&text),
            _ => Ok(Self::default()),
        }
    }

    /// From a JSON object, or from the profile in the file of this name.
    fn named(text: &str) -> Result<Self, KernelOptionsError> {
        /// As far as it matters here.
        #[derive(Deserialize)]
        struct Profile {
            options: Options,
        }
        #[derive(Deserialize)]
        struct Options {
            #[serde(default)]
            kernels: KernelOptions,
        }
        if text.trim_start().starts_with('{') {
            return text.parse();
        }
        let of_file = |problem: &dyn fmt::Display| KernelOptionsError(format!("{text}: {problem}"));
        let profile = std::fs::read(text).map_err(|error| of_file(&error))?;
        let profile: Profile = serde_json::from_slice(&profile).map_err(|error| of_file(&error))?;
        Ok(profile.options.kernels)
    }
}

impl FromStr for KernelOptions {
    type Err = KernelOptionsError;

    /// From a JSON object.
    fn from_str(text: &str) -> Result<Self, KernelOptionsError> {
        KernelOptionsError::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_of_all_kinds_is_read_written_and_merged() {
        let text = "{\"decode\": {\"split_kv\": 256}, \"matrix\": {\"algorithms\": 32}}";
        let options: KernelOptions = text.parse().unwrap();
        let written = serde_json::to_string(&options).unwrap();
        assert_eq!(written, text.replace(' ', ""));
        let others = "{\"decode\": {\"split_kv\": 64, \"warps\": 2}, \"prefill\": {\"block_n\": 64}}";
        let merged = options.or(others.parse().unwrap());
        assert_eq!(
            (merged.decode.split_kv, merged.decode.warps),
            (Some(256), Some(2))
        );
        assert_eq!(
            (merged.prefill.block_n, merged.matrix.algorithms),
            (Some(64), Some(32))
        );
        assert!(KernelOptions::default().is_empty() && !merged.is_empty());
        for wrong in ["{\"decoding\": {}}", "{\"matrix\": {\"warps\": 1}}", "3"] {
            assert!(wrong.parse::<KernelOptions>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn options_for_a_whole_process_are_an_object_or_the_file_of_a_profile() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("profile.json");
        let name = path.to_str().unwrap();
        let text = "{\"decode\": {\"warps\": 8}}";
        let options = KernelOptions::named(text).unwrap();
        assert_eq!(options.decode.warps, Some(8));
        let missing = KernelOptions::named(name).unwrap_err().to_string();
        assert!(missing.contains(name), "{missing}");
        let profile =
            format!("{{\"device\": \"a GPU\", \"options\": {{\"page_size\": 128, \"kernels\": {text}}}}}");
        std::fs::write(&path, profile.replace("warps", "warp")).unwrap();
        let wrong = KernelOptions::named(name).unwrap_err().to_string();
        assert!(wrong.contains(name) && wrong.contains("warp"), "{wrong}");
        std::fs::write(&path, &profile).unwrap();
        assert_eq!(KernelOptions::named(name), Ok(options));
        std::fs::write(&path, "{\"options\": {\"page_size\": 128}}").unwrap();
        assert_eq!(KernelOptions::named(name), Ok(KernelOptions::default()));
    }
}
