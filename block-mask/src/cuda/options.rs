//! What can be tuned, and what is refused.

use cuda_graphs::DeviceInfo;

use super::{AttentionShape, CudaError, Functions};
use crate::{DecodeKernelOptions, PrefillKernel, PrefillKernelOptions};

/// Options of [`DecodeAttention`](super::DecodeAttention). They change speed; `split`, `max_splits` and `shared_prefix` also
/// decide where a row is cut, and so the order of its sum, but not how exact it is.
///
/// ```no_run
/// # use block_mask::cuda::*;
/// # use block_mask::*;
/// # use cuda_graphs::{Compiler, Device, DeviceBuffer, Stream};
/// # use half::bf16;
/// # use paged_kv::{PageTable, PageTableConfig, Slot};
/// # let device = Device::open(0)?;
/// # let (stream, compiler) = (Stream::new(&device)?, Compiler::new()?);
/// # let shape = AttentionShape { heads: 8, kv_heads: 2, head_dim: 64, page_size: 16, n_pages: 9 };
/// let mut options = DecodeOptions::for_device(device.info(), &shape);
/// options.split = Some(256); // a row's bits no longer depend on how many rows a step has
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DecodeOptions {
    /// Warps of a block: 1, 2, 4 or 8. Each takes 16 tokens in turn.
    pub warps: usize,
    /// Stages of each warp's ring, 2 to 8, of `64 * head_dim` bytes: all but one are in flight.
    pub stages: usize,
    /// Blocks that share a multiprocessor, 1 to 8.
    pub blocks_per_multiprocessor: usize,
    /// Tokens of a split, a multiple of 16; doubled for rows that would need more than `max_splits`. `None`: 128, 256 or
    /// 512 by the rows of the step, padding included. Few rows are cut finely, to give every multiprocessor work; many
    /// rows coarsely, since each split costs a block a round of sums and its row a merge.
    ///
    /// With a number a row's bits do not depend on the other rows of the step. With `None` they depend on how many rows
    /// there are: the same row in a step of another size may be cut elsewhere and summed in another order.
    pub split: Option<usize>,
    /// Splits of a row at most, 1 to 256; a shared prefix takes up to 8 more.
    pub max_splits: usize,
    /// Read a prefix of at least so many tokens once for all neighbouring rows that share its pages, if the plan is made by
    /// [`plan_shared`](super::DecodeAttention::plan_shared). `None`: never; a row's bits then do not depend on its neighbours.
    pub shared_prefix: Option<usize>,
    /// Compute neighbouring rows of one slot together, up to 32 query heads at once: the tokens of a prompt, each with its own
    /// length. A row gets the bits that it gets without this by the same `split`, `max_splits` and `warps`, if the values of the
    /// tokens that only its neighbours see are finite: they are read, and weigh 0. Needs a `split` of which `max_splits` hold the
    /// longest row, no functions and no window.
    pub together: bool,
}

impl DecodeOptions {
    /// What is best on this device as far as we know: the deepest rings that fit.
    pub fn for_device(info: &DeviceInfo, shape: &AttentionShape) -> DecodeOptions {
        let fits = |&(warps, stages, blocks): &(usize, usize, usize)| {
            let options = DecodeOptions::of(warps, stages, blocks);
            let bytes = options.shared_bytes(shape);
            bytes <= info.shared_bytes_per_block
                && (bytes + 1024) * blocks <= info.shared_bytes_per_multiprocessor
        };
        let (warps, stages, blocks) = DECODE_FORMS
            .iter()
            .copied()
            .find(|form| fits(form))
            .unwrap_or((2, 2, 1));
        DecodeOptions::of(warps, stages, blocks)
    }

    pub(crate) fn of(warps: usize, stages: usize, blocks_per_multiprocessor: usize) -> DecodeOptions {
        DecodeOptions {
            warps,
            stages,
            blocks_per_multiprocessor,
            split: None,
            max_splits: 32,
            shared_prefix: Some(SHARED_PREFIX),
            together: false,
        }
    }

    /// These options with cuts that depend on nothing but the sequence, for rows of up to `max_length` tokens: every 512 of them,
    /// nothing shared with other sequences.
    pub fn in_fixed_splits(self, max_length: usize) -> DecodeOptions {
        let mut split = FIXED_SPLIT;
        while max_length.div_ceil(split) > MOST_SPLITS {
            split *= 2;
        }
        DecodeOptions {
            split: Some(split),
            max_splits: max_length.div_ceil(split).max(1),
            shared_prefix: None,
            ..self
        }
    }

    /// These options with [`together`](Self::together): shorter rings, to make room for more queries.
    pub fn for_tokens_together(self) -> DecodeOptions {
        DecodeOptions {
            stages: 2,
            // The sums take all registers of eight warps.
            blocks_per_multiprocessor: self.blocks_per_multiprocessor.min((8 / self.warps.max(1)).max(1)),
            shared_prefix: None,
            together: true,
            ..self
        }
    }

    /// Rows of an item with [`together`](Self::together), and refuses what that cannot do.
    pub(crate) fn check_together(
        &self,
        plain: bool,
        shape: &AttentionShape,
        max_length: usize,
    ) -> Result<usize, CudaError> {
        let why = if !plain {
            "functions and windows are not possible"
        } else if self
            .split
            .is_none_or(|split| max_length.div_ceil(split) > self.max_splits)
        {
            "it needs a split of which max_splits hold the longest row"
        } else {
            return Ok(TOGETHER_TILES * 8 / shape.group().max(1));
        };
        Err(CudaError::OptionRefused {
            option: "together",
            why: why.to_owned(),
        })
    }

    /// Rows that one read of a shared prefix serves: 16 query heads a warp. 0 where the ring has no two stages, in step with
    /// decode_shared.cuh.
    pub fn shared_rows(&self, shape: &AttentionShape) -> usize {
        let ring = self.warps * self.stages;
        let large = ring >= 12 && DecodeOptions::head_tiles(shape) == 1;
        let stages = ring * 16 / if large { 64 } else { 32 };
        if stages < 2 || shape.group() == 0 {
            return 0;
        }
        self.warps * 16 / shape.group()
    }

    /// These with what a user gives.
    ///
    /// # Errors
    /// [`CudaError::OptionRefused`] for contiguous blocks; the rest is checked when the kernel is made. Panics: none.
    pub fn with(self, given: &DecodeKernelOptions) -> Result<DecodeOptions, CudaError> {
        refuse_contiguous(given.blocks_are_contiguous)?;
        Ok(DecodeOptions {
            warps: given.warps.unwrap_or(self.warps),
            stages: given.stages.unwrap_or(self.stages),
            blocks_per_multiprocessor: given
                .blocks_per_multiprocessor
                .unwrap_or(self.blocks_per_multiprocessor),
            split: given.split_kv.or(self.split),
            max_splits: given.max_splits.unwrap_or(self.max_splits),
            ..self
        })
    }

    pub(crate) fn check(&self) -> Result<(), CudaError> {
        let refuse = |option, why: &str| {
            Err(CudaError::OptionRefused {
                option,
                why: why.to_owned(),
            })
        };
        if ![1, 2, 4, 8].contains(&self.warps) {
            return refuse("warps", "1, 2, 4 and 8 are possible");
        }
        if !(2..=8).contains(&self.stages) {
            return refuse("stages", "2 to 8 are possible");
        }
        if !(1..=8).contains(&self.blocks_per_multiprocessor) {
            return refuse("blocks_per_multiprocessor", "1 to 8 are possible");
        }
        // A split that starts inside a granule would read another granule's page.
        let allowed = |split: usize| split.is_multiple_of(16) && (16..=1 << 20).contains(&split);
        if !self.split.is_none_or(allowed) {
            return refuse("split", "it must be a multiple of 16 between 16 and 1,048,576");
        }
        if !(1..=MOST_SPLITS).contains(&self.max_splits) {
            return refuse("max_splits", "1 to 256 are possible");
        }
        Ok(())
    }

    /// Tokens of a split in a step of `rows` rows on a device that holds `blocks` blocks at once. On an H200 with 8 KV
    /// heads (264 blocks): 128 up to 4 rows, 256 up to 8, then 512.
    pub(crate) fn split_for(&self, rows: usize, kv_heads: usize, blocks: usize) -> usize {
        let units = rows.saturating_mul(kv_heads);
        self.split.unwrap_or(match blocks / units.max(1) {
            8.. => SMALLEST_SPLIT,
            4.. => 2 * SMALLEST_SPLIT,
            _ => 4 * SMALLEST_SPLIT,
        })
    }

    /// The smallest that [`split_for`](Self::split_for) gives.
    pub(crate) fn smallest_split(&self) -> usize {
        self.split.unwrap_or(SMALLEST_SPLIT)
    }

    /// 8 heads fill one tensor-core tile.
    pub(crate) fn head_tiles(shape: &AttentionShape) -> usize {
        shape.group().div_ceil(8).max(1)
    }

    /// Tensor-core tiles of query heads in a step of a warp.
    pub(crate) fn tiles(&self, shape: &AttentionShape) -> usize {
        match self.together {
            true => TOGETHER_TILES,
            false => DecodeOptions::head_tiles(shape),
        }
    }

    /// Dynamic shared memory of a block; in step with decode_attention.cuh and decode_together.cuh.
    pub(crate) fn shared_bytes(&self, shape: &AttentionShape) -> usize {
        let tiles = self.tiles(shape);
        let ring = self.warps * self.stages * 2 * 16 * shape.head_dim * 2;
        if self.together {
            let heads = 8 * tiles;
            let sums = self.warps * heads * (shape.head_dim / tiles + 4) * 4;
            let rows = heads * (8 + 4);
            return ring
                + heads * shape.head_dim * 2
                + sums
                + self.warps * heads * 8
                + rows
                + self.warps * self.stages * 4;
        }
        let sums = self.warps * shape.group() * (shape.head_dim / tiles + 4) * 4;
        ring + sums + self.warps * 8 * tiles * 8 + self.warps * self.stages * 4 + 16
    }
}

/// Of [`DecodeOptions::in_fixed_splits`]: what many rows take by default.
const FIXED_SPLIT: usize = 512;
/// Tiles of query heads of [`DecodeOptions::together`].
const TOGETHER_TILES: usize = 4;
/// Splits of a row at most.
const MOST_SPLITS: usize = 256;
/// A prefix worth the sums that sharing adds.
const SHARED_PREFIX: usize = 128;

/// In a cache that is paged by a table, which changes while sequences grow, nothing can be said of the pages ahead.
pub(super) fn refuse_contiguous(asked: Option<bool>) -> Result<(), CudaError> {
    match asked {
        Some(true) => Err(CudaError::OptionRefused {
            option: "blocks_are_contiguous",
            why: "pages of sequences that grow in turns are not; FlexAttention takes it for masks that are checked"
                .to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Of the splits that are chosen by the number of rows.
const SMALLEST_SPLIT: usize = 128;

/// (warps, stages, blocks per multiprocessor), preferred first.
pub(crate) const DECODE_FORMS: [(usize, usize, usize); 6] =
    [(4, 3, 2), (4, 4, 1), (4, 3, 1), (2, 5, 1), (2, 3, 1), (2, 2, 1)];

/// The one compute capability that has warpgroup products.
const WARPGROUP_CAPABILITY: (u32, u32) = (9, 0);

/// Options of [`PrefillAttention`](super::PrefillAttention) and [`FlexAttention`](super::FlexAttention).
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
    /// [`PrefillAttention`](super::PrefillAttention) on compute capability 9.0 alone; needs 128 query rows, 64 or 128
    /// keys, 8 warps, 2 stages and one block a multiprocessor.
    pub warpgroup_products: bool,
    /// Step through memory instead of the mask's lists. [`FlexAttention`](super::FlexAttention) alone, which then refuses
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
    /// What is best for [`PrefillAttention`](super::PrefillAttention) on this device as far as we know: warpgroup products
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

    /// Options for [`PrefillAttention`](super::PrefillAttention): the device's best, or those of the kernel that is
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

#[cfg(test)]
mod tests {
    use super::*;

    fn device(per_block: usize, per_multiprocessor: usize) -> DeviceInfo {
        DeviceInfo {
            ordinal: 0,
            name: "a device".to_owned(),
            compute_capability: (8, 0),
            multiprocessors: 100,
            l2_bytes: 40 << 20,
            shared_bytes_per_block: per_block,
            shared_bytes_per_multiprocessor: per_multiprocessor,
            registers_per_multiprocessor: 65_536,
            threads_per_multiprocessor: 2048,
            memory_bytes: 40 << 30,
            driver_version: 13_000,
        }
    }

    fn shape(group: usize, head_dim: usize) -> AttentionShape {
        AttentionShape {
            heads: group,
            kv_heads: 1,
            head_dim,
            page_size: 16,
            n_pages: 10,
        }
    }

    #[test]
    fn the_default_rings_fit_every_device_for_every_group() {
        // Kilobytes per block and per multiprocessor of compute capability 9.0, 8.0, and 8.6, 8.9 and 12.0.
        for (per_block, per_multiprocessor) in [(227, 228), (163, 164), (99, 100)] {
            let info = device(per_block << 10, per_multiprocessor << 10);
            for group in 1..=16 {
                for head_dim in [64, 128] {
                    let shape = shape(group, head_dim);
                    let options = DecodeOptions::for_device(&info, &shape);
                    options.check().unwrap();
                    let bytes = options.shared_bytes(&shape);
                    assert!(
                        bytes <= info.shared_bytes_per_block,
                        "{options:?} takes {bytes} bytes"
                    );
                }
                let tiles = TileOptions::default();
                assert!(tiles.shared_bytes(&shape(group, 128)) <= info.shared_bytes_per_block);
            }
        }
        let h200 = device(227 << 10, 228 << 10);
        let (warps, stages, blocks) = DECODE_FORMS[0];
        let expected = DecodeOptions::of(warps, stages, blocks);
        assert_eq!(DecodeOptions::for_device(&h200, &shape(4, 128)), expected);
    }

    #[test]
    fn decode_options_that_cannot_run_are_refused_by_name() {
        let good = DecodeOptions::of(4, 3, 2);
        let refused = |options: DecodeOptions| match options.check() {
            Err(CudaError::OptionRefused { option, .. }) => option,
            other => panic!("{options:?} gave {other:?}"),
        };
        assert!(good.check().is_ok());
        assert_eq!(refused(DecodeOptions { warps: 3, ..good }), "warps");
        assert_eq!(refused(DecodeOptions { stages: 1, ..good }), "stages");
        assert_eq!(
            refused(DecodeOptions {
                blocks_per_multiprocessor: 0,
                ..good
            }),
            "blocks_per_multiprocessor"
        );
        assert_eq!(
            refused(DecodeOptions {
                split: Some(100),
                ..good
            }),
            "split"
        );
        assert_eq!(
            refused(DecodeOptions {
                split: Some(0),
                ..good
            }),
            "split"
        );
        assert_eq!(
            refused(DecodeOptions {
                max_splits: 0,
                ..good
            }),
            "max_splits"
        );
    }

    #[test]
    fn prescaling_is_possible_only_where_it_is_exact() {
        let options = TileOptions {
            prescale_qk: true,
            ..TileOptions::default()
        };
        assert!(options.check(&shape(4, 64), 0.125).is_ok());
        assert!(options.check(&shape(4, 64), 2.0).is_ok());
        for scale in [0.088_388_35, 0.3, 0.125_000_01] {
            let refused = options.check(&shape(4, 128), scale);
            assert!(
                matches!(
                    refused,
                    Err(CudaError::OptionRefused {
                        option: "prescale_qk",
                        ..
                    })
                ),
                "{scale}"
            );
        }
    }

    #[test]
    fn warpgroup_products_are_for_one_capability_and_one_form() {
        let mut info = device(227 << 10, 228 << 10);
        assert_eq!(TileOptions::for_device(&info), TileOptions::default());
        let options = TileOptions::warpgroups();
        assert!(options.check_device(&info).is_err());
        info.compute_capability = (9, 0);
        assert_eq!(TileOptions::for_device(&info), options);
        assert!(options.check_device(&info).is_ok());
        for head_dim in [64, 128] {
            let shape = shape(4, head_dim);
            assert!(options.check(&shape, 0.1).is_ok());
            assert!(options.shared_bytes(&shape) <= info.shared_bytes_per_block);
        }
        assert_eq!(options.threads(), 384);
        for wrong in [
            TileOptions {
                block_m: 64,
                warps: 4,
                ..options
            },
            TileOptions {
                block_n: 32,
                ..options
            },
            TileOptions { warps: 4, ..options },
            TileOptions { stages: 1, ..options },
            TileOptions {
                blocks_per_multiprocessor: 2,
                ..options
            },
            TileOptions {
                prescale_qk: true,
                ..options
            },
        ] {
            let refused = wrong.check(&shape(4, 64), 0.125);
            assert!(
                matches!(
                    refused,
                    Err(CudaError::OptionRefused {
                        option: "warpgroup_products",
                        ..
                    })
                ),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn shapes_without_a_kernel_are_refused() {
        let good = shape(4, 128);
        assert!(good.check().is_ok());
        for wrong in [
            AttentionShape { head_dim: 96, ..good },
            AttentionShape { page_size: 8, ..good },
            AttentionShape {
                page_size: 48,
                ..good
            },
            AttentionShape {
                page_size: 512,
                ..good
            },
            AttentionShape { kv_heads: 0, ..good },
            AttentionShape { heads: 17, ..good },
            AttentionShape {
                heads: 5,
                kv_heads: 2,
                ..good
            },
            AttentionShape {
                n_pages: 1 << 28,
                ..good
            },
        ] {
            assert!(
                matches!(wrong.check(), Err(CudaError::Unsupported { .. })),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn few_rows_are_cut_finely_and_many_coarsely() {
        let mut options = DecodeOptions::of(4, 3, 2);
        let splits = [1, 4, 5, 8, 9, 64, 128].map(|rows| options.split_for(rows, 8, 264));
        assert_eq!(splits, [128, 128, 256, 256, 512, 512, 512]);
        assert_eq!(options.smallest_split(), splits[0]);
        assert_eq!(options.split_for(0, 8, 264), 128);
        assert_eq!(options.split_for(usize::MAX, 8, 264), 512);
        options.split = Some(64);
        assert_eq!([1, 128].map(|rows| options.split_for(rows, 8, 264)), [64, 64]);
        assert_eq!(options.smallest_split(), 64);
        options.split = Some(40);
        assert!(matches!(
            options.check(),
            Err(CudaError::OptionRefused { option: "split", .. })
        ));
    }

    #[test]
    fn given_options_replace_the_devices_and_contradictions_are_refused() {
        let mut info = device(227 << 10, 228 << 10);
        info.compute_capability = (9, 0);
        let decode = |text: &str| DecodeOptions::of(4, 3, 2).with(&text.parse().unwrap());
        let options = decode("{\"warps\": 2, \"split_kv\": 64, \"max_splits\": 8}").unwrap();
        let expected = DecodeOptions {
            warps: 2,
            split: Some(64),
            max_splits: 8,
            ..DecodeOptions::of(4, 3, 2)
        };
        assert_eq!(options, expected);
        let prefill = |text: &str| TileOptions::for_prefill(&info, &text.parse().unwrap());
        assert_eq!(prefill("{}").unwrap(), TileOptions::warpgroups());
        for (text, expected) in [
            ("{\"kernel\": \"mma\"}", TileOptions::default()),
            ("{\"USE_TMA\": false}", TileOptions::default()),
            (
                "{\"use_tma\": true, \"kernel\": \"wgmma\"}",
                TileOptions::warpgroups(),
            ),
        ] {
            assert_eq!(prefill(text).unwrap(), expected, "{text}");
        }
        let narrow = prefill("{\"kernel\": \"mma\", \"BLOCK_M\": 64, \"num_stages\": 2}").unwrap();
        assert_eq!(
            (narrow.block_m, narrow.stages, narrow.warpgroup_products),
            (64, 2, false)
        );
        for (refused, name) in [
            (
                prefill("{\"kernel\": \"mma\", \"use_tma\": true}").map(drop),
                "use_tma",
            ),
            (
                prefill("{\"BLOCKS_ARE_CONTIGUOUS\": true}").map(drop),
                "blocks_are_contiguous",
            ),
            (
                decode("{\"blocks_are_contiguous\": true}").map(drop),
                "blocks_are_contiguous",
            ),
        ] {
            match refused {
                Err(CudaError::OptionRefused { option, .. }) => assert_eq!(option, name),
                other => panic!("{name}: {other:?}"),
            }
        }
        assert!(decode("{\"blocks_are_contiguous\": false}").is_ok());
    }
}
