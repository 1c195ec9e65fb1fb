//! Of prefill attention and FlexAttention.

use cuda_graphs::DeviceInfo;

use super::refuse_contiguous;
use crate::cuda::{AttentionShape, CudaError, Functions};
use crate::{PrefillKernel, PrefillKernelOptions};

/// The one compute capability that has warpgroup products.
const WARPGROUP_CAPABILITY: (u32, u32) = (9, 0);

/// Options of [`PrefillAttention`](crate::cuda::PrefillAttention) and [`FlexAttention`](crate::cuda::FlexAttention).
///
/// ```
/// use block_mask::cuda::TileOptions;
///
/// let mut options = TileOptions::default();
/// options.block_m = 64; // half as many query rows a tile
/// assert!(!options.warpgroup_products, "every device has the default's products");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TileOptions {
    /// Query rows of a tile: 64 or 128.
    pub block_m: usize,
    /// Keys that are loaded together: 32, 64 or 128.
    pub block_n: usize,
    /// Warps of a block; each takes 16 or 32 rows.
    pub warps: usize,
    /// Buffers of K and of V: 1 or 2.
    pub stages: usize,
    /// Blocks that share a multiprocessor, 1 to 4.
    pub blocks_per_multiprocessor: usize,
    /// Multiply Q by the scale before the product. Refused unless that is exact (the scale a power of two).
    pub prescale_qk: bool,
    /// Leave out the guards against rows that see no key. Refused where such a row is possible.
    pub rows_guaranteed_safe: bool,
    /// Multiply by warpgroups of four warps (`wgmma`), with keys and values brought by the tensor memory accelerator.
    /// [`PrefillAttention`](crate::cuda::PrefillAttention) on compute capability 9.0 alone; needs 128 query rows, 64 or 128
    /// keys, 8 warps, 2 stages and one block a multiprocessor.
    pub warpgroup_products: bool,
    /// Step through memory instead of the mask's lists. [`FlexAttention`](crate::cuda::FlexAttention) alone, which then refuses
    /// masks whose blocks do not follow each other in the sequence and in memory.
    pub blocks_are_contiguous: bool,
}

impl Default for TileOptions {
    fn default() -> TileOptions {
        TileOptions {
            block_m: 128,
            block_n: 64,
            warps: 4,
            stages: 1,
            blocks_per_multiprocessor: 2,
            prescale_qk: false,
            rows_guaranteed_safe: false,
            warpgroup_products: false,
            blocks_are_contiguous: false,
        }
    }
}

impl TileOptions {
    /// What is best for [`PrefillAttention`](crate::cuda::PrefillAttention) on this device as far as we know: warpgroup products
    /// where there are any.
    pub fn for_device(info: &DeviceInfo) -> TileOptions {
        if info.compute_capability == WARPGROUP_CAPABILITY {
            TileOptions::warpgroups()
        } else {
            TileOptions::default()
        }
    }

    pub(crate) fn warpgroups() -> TileOptions {
        TileOptions {
            block_m: 128,
            block_n: 128,
            warps: 8,
            stages: 2,
            blocks_per_multiprocessor: 1,
            prescale_qk: false,
            rows_guaranteed_safe: false,
            warpgroup_products: true,
            blocks_are_contiguous: false,
        }
    }

    /// Options for [`PrefillAttention`](crate::cuda::PrefillAttention): the device's best, or those of the kernel that is
    /// forced, with what a user gives.
    ///
    /// # Errors
    /// [`CudaError::OptionRefused`] for options that contradict each other and for contiguous blocks; the rest is checked
    /// when the kernel is made. Panics: none.
    pub fn for_prefill(info: &DeviceInfo, given: &PrefillKernelOptions) -> Result<TileOptions, CudaError> {
        refuse_contiguous(given.blocks_are_contiguous)?;
        let by_tma = given.use_tma.map(|tma| match tma {
            true => PrefillKernel::Wgmma,
            false => PrefillKernel::Mma,
        });
        let base = match (given.kernel, by_tma) {
            (Some(kernel), Some(other)) if kernel != other => {
                return Err(CudaError::OptionRefused {
                    option: "use_tma",
                    why: "the kernel wgmma brings keys by the tensor memory accelerator, mma does not"
                        .to_owned(),
                });
            }
            (Some(PrefillKernel::Mma), _) | (None, Some(PrefillKernel::Mma)) => TileOptions::default(),
            (Some(PrefillKernel::Wgmma), _) | (None, Some(PrefillKernel::Wgmma)) => TileOptions::warpgroups(),
            (None, None) => TileOptions::for_device(info),
        };
        Ok(TileOptions {
            block_m: given.block_m.unwrap_or(base.block_m),
            block_n: given.block_n.unwrap_or(base.block_n),
            warps: given.warps.unwrap_or(base.warps),
            stages: given.stages.unwrap_or(base.stages),
            blocks_per_multiprocessor: given
                .blocks_per_multiprocessor
                .unwrap_or(base.blocks_per_multiprocessor),
            prescale_qk: given.prescale_qk.unwrap_or(base.prescale_qk),
            rows_guaranteed_safe: given.rows_guaranteed_safe.unwrap_or(base.rows_guaranteed_safe),
            ..base
        })
    }

    pub(crate) fn check(&self, shape: &AttentionShape, scale: f32) -> Result<(), CudaError> {
        let refuse = |option, why: String| Err(CudaError::OptionRefused { option, why });
        if ![64, 128].contains(&self.block_m) {
            return refuse("block_m", "64 and 128 are possible".to_owned());
        }
        if ![32, 64, 128].contains(&self.block_n) {
            return refuse("block_n", "32, 64 and 128 are possible".to_owned());
        }
        if ![4, 8].contains(&self.warps) || ![16, 32].contains(&(self.block_m / self.warps)) {
            return refuse(
                "warps",
                "4 and 8 are possible, with 16 or 32 rows each".to_owned(),
            );
        }
        if self.warps * 32 > self.block_n * shape.head_dim / 8 {
            return refuse(
                "warps",
                "more threads than 16-byte words in a block of keys".to_owned(),
            );
        }
        if ![1, 2].contains(&self.stages) {
            return refuse("stages", "1 and 2 are possible".to_owned());
        }
        if !(1..=4).contains(&self.blocks_per_multiprocessor) {
            return refuse("blocks_per_multiprocessor", "1 to 4 are possible".to_owned());
        }
        // A power of two has an empty mantissa: then the product of every bf16 with it is exact.
        let exact = scale.is_normal() && scale.to_bits() & 0x007f_ffff == 0;
        if self.prescale_qk && !exact {
            return refuse(
                "prescale_qk",
                format!("the scale {scale} is no power of two, Q would be rounded again"),
            );
        }
        let form = (
            self.block_m,
            self.warps,
            self.stages,
            self.blocks_per_multiprocessor,
        );
        if self.warpgroup_products && (form != (128, 8, 2, 1) || self.block_n == 32 || self.prescale_qk) {
            return refuse(
                "warpgroup_products",
                "they take 128 rows, 64 or 128 keys, 8 warps, 2 stages, one block, and no prescaling"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// Refuses warpgroup products where the device has none.
    pub(crate) fn check_device(&self, info: &DeviceInfo) -> Result<(), CudaError> {
        if !self.warpgroup_products || info.compute_capability == WARPGROUP_CAPABILITY {
            return Ok(());
        }
        let (major, minor) = info.compute_capability;
        Err(CudaError::OptionRefused {
            option: "warpgroup_products",
            why: format!("the device has compute capability {major}.{minor}, they are of 9.0 alone"),
        })
    }

    /// Refuses `rows_guaranteed_safe` for reasons that are known when the kernel is made.
    pub(crate) fn check_rows_safe(
        &self,
        functions: &Functions,
        window: Option<usize>,
    ) -> Result<(), CudaError> {
        let why = if !self.rows_guaranteed_safe {
            return Ok(());
        } else if functions.has_mask() {
            "a mask function can hide every key of a block"
        } else if functions.has_score() {
            "a score function can make every score −∞"
        } else if window.is_some() {
            "a window can hide every key of a row's first block"
        } else {
            return Ok(());
        };
        Err(CudaError::OptionRefused {
            option: "rows_guaranteed_safe",
            why: why.to_owned(),
        })
    }

    /// Dynamic shared memory of a block; in step with prefill_attention.cuh and prefill_wgmma.cuh.
    pub(crate) fn shared_bytes(&self, shape: &AttentionShape) -> usize {
        // Warpgroups stage their output beside the next tile's queries, and have barriers.
        let (tiles, barriers) = if self.warpgroup_products {
            (2, 8 * (4 * self.stages + 1))
        } else {
            (1, 0)
        };
        (tiles * self.block_m + 2 * self.stages * self.block_n) * shape.head_dim * 2 + barriers
    }

    /// Threads of a block: one warpgroup more where it brings the keys.
    pub(crate) fn threads(&self) -> u32 {
        let loading = if self.warpgroup_products { 128 } else { 0 };
        self.warps as u32 * 32 + loading
    }
}
