//! Sizes of a backend and options of its kernels.

use cuda_graphs::{Compiler, Matmul, MatmulOptions, Stream};
use paged_kv::PageTableConfig;

use crate::launch::MAX_ROWS;
use crate::{Error, KernelOptions, MatrixKernelOptions, Qwen3Config, Result};
#[cfg(doc)]
use crate::{KERNEL_OPTIONS_VARIABLE, cuda::CudaBackend};

/// Sizes of a [`CudaBackend`]: they decide how much memory it takes.
///
/// ```
/// use qwen3_model::cuda::CudaOptions;
///
/// let options = CudaOptions { max_batch_size: 16, ..CudaOptions::default() };
/// // The slots of 16 sequences, and slot 0, which padding uses.
/// assert_eq!(options.page_table().n_slots, 17);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaOptions {
    /// Most tokens in one packed step.
    pub max_tokens: usize,
    /// Most rows in a decode step, and most rows whose logits are kept on the device at once.
    pub max_batch_size: usize,
    /// Most tokens of a sequence.
    pub max_seq_length: usize,
    /// Pages of the KV cache, page 0 included.
    pub n_pages: usize,
    /// Tokens in a page: 16, 32, 64, 128 or 256.
    pub page_size: usize,
    /// Options of the kernels, after them those of [`KERNEL_OPTIONS_VARIABLE`].
    pub kernels: KernelOptions,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            max_tokens: 4096,
            max_batch_size: 64,
            max_seq_length: 4096,
            n_pages: 1025,
            page_size: 64,
            kernels: KernelOptions::default(),
        }
    }
}

impl CudaOptions {
    /// Shape of the page table that steps must use: a slot more than `max_batch_size` for slot 0.
    pub fn page_table(&self) -> PageTableConfig {
        PageTableConfig {
            n_pages: self.n_pages,
            page_size: self.page_size,
            n_slots: self.max_batch_size + 1,
            max_pages_per_slot: self.max_seq_length.div_ceil(self.page_size.max(1)),
        }
    }

    pub(super) fn check(&self, config: &Qwen3Config) -> Result<()> {
        let refuse = |option, problem: String| Err(Error::Option { option, problem });
        for (option, value) in [
            ("max_tokens", self.max_tokens),
            ("max_batch_size", self.max_batch_size),
            ("max_seq_length", self.max_seq_length),
        ] {
            if value == 0 || value > 1 << 24 {
                return refuse(
                    option,
                    format!("is {value}; between 1 and {} is possible", 1 << 24),
                );
            }
        }
        if self.max_seq_length > config.max_positions() {
            let max = config.max_positions();
            return refuse(
                "max_seq_length",
                format!("is {}; the model has {max} positions", self.max_seq_length),
            );
        }
        if !self.page_size.is_power_of_two() || !(16..=256).contains(&self.page_size) {
            return refuse(
                "page_size",
                format!("is {}; on CUDA it is 16, 32, 64, 128 or 256", self.page_size),
            );
        }
        let matrix = &self.kernels.matrix;
        if let Some(algorithms) = matrix.algorithms.filter(|n| !(1..=64).contains(n)) {
            return refuse(
                MATRIX_OPTIONS,
                format!("algorithms is {algorithms}: 1 to 64 are possible"),
            );
        }
        if let Some(rows) = matrix.layer_kernel_rows.filter(|&rows| rows > MAX_ROWS) {
            return refuse(
                MATRIX_OPTIONS,
                format!(
                    "layer_kernel_rows is {rows}: the kernel takes at most {MAX_ROWS}, and 0 does without it"
                ),
            );
        }
        if self.n_pages < 2 {
            return refuse(
                "n_pages",
                format!("is {}; at least 2, since page 0 is reserved", self.n_pages),
            );
        }
        Ok(())
    }
}

/// What the kinds of kernel options are called in errors.
const MATRIX_OPTIONS: &str = "matrix_kernel_options";

/// Products on `stream` as they are asked for, `options` for those of cuBLASLt.
pub(super) fn products(
    stream: &Stream,
    compiler: &Compiler,
    given: &MatrixKernelOptions,
    options: &MatmulOptions,
) -> Result<Matmul> {
    Ok(match given.library {
        Some(false) => Matmul::plain(stream, compiler)?,
        _ => Matmul::with_options(stream, options)?,
    })
}

pub(super) fn matmul_options(given: &MatrixKernelOptions) -> MatmulOptions {
    let default = MatmulOptions::default();
    MatmulOptions {
        algorithms: given.algorithms.unwrap_or(default.algorithms),
        split_k: given.split_k.unwrap_or(default.split_k),
        ..default
    }
}
