//! Flags for options of the kernels.

use std::path::PathBuf;

use clap::Args;
use qwen3_model::{DecodeKernelOptions, KernelOptions, MatrixKernelOptions, PrefillKernelOptions};

use crate::tuned::TunedChoice;

/// Flags that `rollout bench`, `generate`, `serve` and `tune` share.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct KernelArgs {
    /// Options of a GPU's decode attention, a JSON object of: warps, stages, blocks_per_multiprocessor, split_kv,
    /// max_splits. Default: the device's best as far as we know.
    #[arg(long, value_name = "JSON", default_value = "{}", hide_default_value = true)]
    decode_kernel_options: DecodeKernelOptions,

    /// Options of a GPU's prefill attention, a JSON object of: kernel (mma or wgmma), use_tma, block_m, block_n, warps, stages,
    /// blocks_per_multiprocessor, prescale_qk, rows_guaranteed_safe. Default: the device's best as far as we know.
    #[arg(long, value_name = "JSON", default_value = "{}", hide_default_value = true)]
    prefill_kernel_options: PrefillKernelOptions,

    /// Options of a GPU's matrix products, a JSON object of: layer_kernel_rows, algorithms, split_k, library (false: a
    /// plain kernel in place of cuBLASLt). Default: the device's best as far as we know.
    #[arg(long, value_name = "JSON", default_value = "{}", hide_default_value = true)]
    matrix_kernel_options: MatrixKernelOptions,

    /// Take sizes and kernel options that are not set from this file, which `rollout tune` has written for the device and the
    /// model's shape. Default: the one that `rollout tune` has left for later runs, or the one built in.
    #[arg(long, value_name = "FILE.json", conflicts_with = "no_tuned_profile")]
    tuned_profile: Option<PathBuf>,

    /// Take no tuned profile.
    #[arg(long)]
    no_tuned_profile: bool,
}

impl KernelArgs {
    /// Which profile fills in what is not set.
    pub(super) fn tuned(&self) -> TunedChoice {
        match (&self.tuned_profile, self.no_tuned_profile) {
            (Some(path), _) => TunedChoice::File(path.clone()),
            (None, true) => TunedChoice::Off,
            (None, false) => TunedChoice::Usual,
        }
    }

    /// All of them.
    pub(super) fn options(&self) -> KernelOptions {
        KernelOptions::new(
            self.decode_kernel_options,
            self.prefill_kernel_options,
            self.matrix_kernel_options,
        )
    }

    /// The first flag that asks for something, which only a GPU's kernels can do.
    pub(super) fn given(&self) -> Option<&'static str> {
        let KernelOptions {
            decode,
            prefill,
            matrix,
            ..
        } = self.options();
        [
            ("--decode-kernel-options", decode.is_empty()),
            ("--prefill-kernel-options", prefill.is_empty()),
            ("--matrix-kernel-options", matrix.is_empty()),
        ]
        .into_iter()
        .find_map(|(flag, empty)| (!empty).then_some(flag))
    }
}
