//! Kernel options as a user gives them: all optional, read from JSON, unknown names refused.
//!
//! ```
//! use block_mask::{DecodeKernelOptions, PrefillKernelOptions};
//!
//! let decode: DecodeKernelOptions = "{\"split_kv\": 256, \"num_warps\": 4}".parse()?;
//! assert_eq!((decode.split_kv, decode.warps), (Some(256), Some(4)));
//! let prefill: PrefillKernelOptions = "{\"BLOCK_N\": 64}".parse()?;
//! assert_eq!(prefill.block_n, Some(64));
//! let refused = "{\"BLOCK_K\": 64}".parse::<PrefillKernelOptions>().unwrap_err();
//! assert!(refused.to_string().contains("BLOCK_K"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The names are those of the kernels' own options, and where FlexAttention has a name for the same thing
//! (`BLOCK_M`, `num_warps`, `PRESCALE_QK`, …), that one as well. Whether values can work depends on device and shape, and
//! is checked where the kernel is made: what would give wrong numbers is refused there with a typed error.

use std::fmt;
use std::str::FromStr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// JSON that is not a set of kernel options.
///
/// ```
/// use block_mask::KernelOptionsError;
///
/// assert_eq!(KernelOptionsError("warps: a number is expected".into()).to_string(), "warps: a number is expected");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct KernelOptionsError(pub String);

/// Options of decode attention; what is `None` is left to the device's defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct DecodeKernelOptions {
    /// Warps of a block.
    #[serde(alias = "num_warps", skip_serializing_if = "Option::is_none")]
    pub warps: Option<usize>,
    /// Stages of each warp's ring of keys and values.
    #[serde(alias = "num_stages", skip_serializing_if = "Option::is_none")]
    pub stages: Option<usize>,
    /// Blocks that share a multiprocessor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks_per_multiprocessor: Option<usize>,
    /// Tokens of a split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_kv: Option<usize>,
    /// Splits of a row at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_splits: Option<usize>,
    /// "Blocks are contiguous": refused, since pages of sequences that grow in turns are not.
    #[serde(alias = "BLOCKS_ARE_CONTIGUOUS", skip_serializing_if = "Option::is_none")]
    pub blocks_are_contiguous: Option<bool>,
}

/// A form of the prefill kernel.
///
/// ```
/// use block_mask::{PrefillKernel, PrefillKernelOptions};
///
/// let mut options = PrefillKernelOptions::default();
/// options.kernel = Some(PrefillKernel::Mma); // on a device that would take warpgroups, too
/// assert_ne!(options, PrefillKernelOptions::default());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PrefillKernel {
    /// Products of single warps (`mma.sync`), keys by asynchronous copies: any device from compute capability 8.0 on.
    Mma,
    /// Products of warpgroups (`wgmma`), keys by the tensor memory accelerator: compute capability 9.0.
    Wgmma,
}

/// Options of prefill attention; what is `None` is left to the device's defaults, or to those of the kernel that is forced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct PrefillKernelOptions {
    /// The form to take, instead of the device's best.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PrefillKernel>,
    /// Whether keys come by the tensor memory accelerator, which decides the form.
    #[serde(alias = "USE_TMA", skip_serializing_if = "Option::is_none")]
    pub use_tma: Option<bool>,
    /// Query rows of a tile.
    #[serde(alias = "BLOCK_M", skip_serializing_if = "Option::is_none")]
    pub block_m: Option<usize>,
    /// Keys that are loaded together.
    #[serde(alias = "BLOCK_N", skip_serializing_if = "Option::is_none")]
    pub block_n: Option<usize>,
    /// Warps of a block.
    #[serde(alias = "num_warps", skip_serializing_if = "Option::is_none")]
    pub warps: Option<usize>,
    /// Buffers of keys and values.
    #[serde(alias = "num_stages", skip_serializing_if = "Option::is_none")]
    pub stages: Option<usize>,
    /// Blocks that share a multiprocessor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks_per_multiprocessor: Option<usize>,
    /// Multiply queries by the scale before the product.
    #[serde(alias = "PRESCALE_QK", skip_serializing_if = "Option::is_none")]
    pub prescale_qk: Option<bool>,
    /// Leave out the guards against rows that see no key.
    #[serde(alias = "ROWS_GUARANTEED_SAFE", skip_serializing_if = "Option::is_none")]
    pub rows_guaranteed_safe: Option<bool>,
    /// "Blocks are contiguous": refused, since pages of sequences that grow in turns are not.
    #[serde(alias = "BLOCKS_ARE_CONTIGUOUS", skip_serializing_if = "Option::is_none")]
    pub blocks_are_contiguous: Option<bool>,
}

impl KernelOptionsError {
    /// Options from a JSON object, and from nothing else: serde would take a list for the fields in their order.
    ///
    /// # Errors
    /// With what is wrong and where. Panics: none.
    pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, Self> {
        match text.trim_start().starts_with('{') {
            true => serde_json::from_str(text).map_err(|error| Self(error.to_string())),
            false => Err(Self("not a JSON object".into())),
        }
    }
}

macro_rules! json {
    ($name:ident) => {
        impl FromStr for $name {
            type Err = KernelOptionsError;

            /// From a JSON object.
            fn from_str(text: &str) -> Result<Self, KernelOptionsError> {
                KernelOptionsError::parse(text)
            }
        }

        impl fmt::Display for $name {
            /// As a JSON object.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
            }
        }

        impl $name {
            /// These, with `others` where nothing is given.
            #[must_use]
            pub fn or(self, others: Self) -> Self {
                self.filled(others)
            }

            /// Whether nothing is given.
            pub fn is_empty(&self) -> bool {
                *self == Self::default()
            }
        }
    };
}

json!(DecodeKernelOptions);
json!(PrefillKernelOptions);

impl DecodeKernelOptions {
    fn filled(self, others: Self) -> Self {
        Self {
            warps: self.warps.or(others.warps),
            stages: self.stages.or(others.stages),
            blocks_per_multiprocessor: self
                .blocks_per_multiprocessor
                .or(others.blocks_per_multiprocessor),
            split_kv: self.split_kv.or(others.split_kv),
            max_splits: self.max_splits.or(others.max_splits),
            blocks_are_contiguous: self.blocks_are_contiguous.or(others.blocks_are_contiguous),
        }
    }
}

impl PrefillKernelOptions {
    fn filled(self, others: Self) -> Self {
        Self {
            kernel: self.kernel.or(others.kernel),
            use_tma: self.use_tma.or(others.use_tma),
            block_m: self.block_m.or(others.block_m),
            block_n: self.block_n.or(others.block_n),
            warps: self.warps.or(others.warps),
            stages: self.stages.or(others.stages),
            blocks_per_multiprocessor: self
                .blocks_per_multiprocessor
                .or(others.blocks_per_multiprocessor),
            prescale_qk: self.prescale_qk.or(others.prescale_qk),
            rows_guaranteed_safe: self.rows_guaranteed_safe.or(others.rows_guaranteed_safe),
            blocks_are_contiguous: self.blocks_are_contiguous.or(others.blocks_are_contiguous),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_are_read_and_the_own_one_is_written() {
        let text = "{\"num_warps\": 8, \"PRESCALE_QK\": false, \"USE_TMA\": true, \"kernel\": \"wgmma\", \"BLOCK_M\": 128}";
        let options: PrefillKernelOptions = text.parse().unwrap();
        assert_eq!(options.kernel, Some(PrefillKernel::Wgmma));
        let written = options.to_string();
        assert_eq!(written.parse::<PrefillKernelOptions>().unwrap(), options);
        for name in ["\"warps\":8", "\"prescale_qk\":false", "\"block_m\":128"] {
            assert!(written.contains(name), "{written}");
        }
        assert_eq!(DecodeKernelOptions::default().to_string(), "{}");
    }

    #[test]
    fn what_is_no_option_is_refused_by_name() {
        for (text, word) in [
            ("{\"SPLIT_KV\": 4}", "SPLIT_KV"),
            ("{\"warps\": -1}", "-1"),
            ("{\"warps\": \"4\"}", "string"),
            ("[4]", "not a JSON object"),
            ("{", "EOF"),
            ("{\"warps\": 4, \"num_warps\": 4}", "duplicate"),
        ] {
            let error = text.parse::<DecodeKernelOptions>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
        let error = "{\"kernel\": \"cudnn\"}"
            .parse::<PrefillKernelOptions>()
            .unwrap_err();
        assert!(error.to_string().contains("cudnn"), "{error}");
    }

    #[test]
    fn given_options_come_before_others() {
        let given: DecodeKernelOptions = "{\"warps\": 2}".parse().unwrap();
        let others = "{\"warps\": 4, \"stages\": 3}".parse().unwrap();
        let merged = given.or(others);
        assert_eq!(
            (merged.warps, merged.stages, merged.split_kv),
            (Some(2), Some(3), None)
        );
        assert!(!merged.is_empty() && DecodeKernelOptions::default().is_empty());
    }
}
