//! Of decode attention.

use cuda_graphs::DeviceInfo;

use super::refuse_contiguous;
use crate::DecodeKernelOptions;
use crate::cuda::{AttentionShape, CudaError};

/// Options of [`DecodeAttention`](crate::cuda::DecodeAttention). They change speed; `split`, `max_splits` and `shared_prefix` also
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
    /// Tokens of a split, a multiple of 16; doubled for rows that would need more than `max_splits`. `None`: 128, 256,
    /// 512 or 1,024 by the rows of the step, padding included, see `split_for`. Few rows are cut finely, to give every
    /// multiprocessor work; many rows coarsely, since each split costs a block a round of sums and its row a merge. In a step
    /// that is cut every 512 tokens or more, and whose lengths would keep some blocks a third longer than the mean or make a
    /// quarter more parts than rows, all tokens are dealt to the blocks in equal shares instead, and rows are cut where a
    /// share ends; not where rows share a prefix or a row would have more than `max_splits` parts.
    ///
    /// With a number a row's bits do not depend on the other rows of the step. With `None` they depend on how many rows
    /// there are and how long: the same row in another step may be cut elsewhere and summed in another order.
    pub split: Option<usize>,
    /// Splits of a row at most, 1 to 256; a shared prefix takes up to 8 more.
    pub max_splits: usize,
    /// Read a prefix of at least so many tokens once for all neighbouring rows that share its pages, if the plan is made by
    /// [`plan_shared`](crate::cuda::DecodeAttention::plan_shared). `None`: never; a row's bits then do not depend on its neighbours.
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

    /// These options with cuts that depend on nothing but the sequence, for rows of up to `max_length` tokens: every
    /// [`split`](Self::split) of them, 1,024 if that is `None`, or more where 256 splits would not hold the longest row; nothing shared
    /// with other sequences.
    pub fn in_fixed_splits(self, max_length: usize) -> DecodeOptions {
        let mut split = self.split.unwrap_or(Self::LARGEST_SPLIT).max(16);
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
    /// heads (264 blocks): 128 up to 4 rows, 256 up to 8, 512 up to 16, then 1,024.
    pub(crate) fn split_for(&self, rows: usize, kv_heads: usize, blocks: usize) -> usize {
        let units = rows.saturating_mul(kv_heads);
        self.split.unwrap_or(match blocks / units.max(1) {
            8.. => SMALLEST_SPLIT,
            4.. => 2 * SMALLEST_SPLIT,
            2.. => 4 * SMALLEST_SPLIT,
            _ => Self::LARGEST_SPLIT,
        })
    }

    /// The largest that [`split_for`](Self::split_for) chooses.
    pub(crate) const LARGEST_SPLIT: usize = 8 * SMALLEST_SPLIT;

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

/// Tiles of query heads of [`DecodeOptions::together`].
const TOGETHER_TILES: usize = 4;
/// Splits of a row at most.
const MOST_SPLITS: usize = 256;
/// A prefix worth the sums that sharing adds.
const SHARED_PREFIX: usize = 128;

/// Of the splits that are chosen by the number of rows.
const SMALLEST_SPLIT: usize = 128;

/// (warps, stages, blocks per multiprocessor), preferred first.
pub(crate) const DECODE_FORMS: [(usize, usize, usize); 6] =
    [(4, 3, 2), (4, 4, 1), (4, 3, 1), (2, 5, 1), (2, 3, 1), (2, 2, 1)];
