//! The kernel of FlexAttention.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{DeviceSlice, Kernel, LaunchConfig, Stream};
use half::bf16;

use super::{aligned, at_least, check_cache, equal, here, int};
use crate::cuda::{AttentionShape, CudaError};

/// Most blocks in the grid's second and third dimension.
const MAX_GRID_YZ: usize = 65_535;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct FlexParams {
    q: u64,
    k: u64,
    v: u64,
    out: u64,
    lse: u64,
    spans: u64,
    lists: u64,
    entries: u64,
    head_stride: i64,
    q_strides: [i64; 3],
    lse_strides: [i64; 3],
    group: i32,
    mask_heads: i32,
    q_blocks: i32,
    block_q: i32,
    tiles_per_block: i32,
    block_granules_shift: i32,
    scale: f32,
    reserved: u32,
    captures: u64,
}

/// What flex_attention is given.
pub(crate) struct Flex<'a> {
    pub(crate) shape: AttentionShape,
    /// `[batch, 4]`: row, queries, position, keys.
    pub(crate) spans: DeviceSlice<'a, [i32; 4]>,
    /// `[batch, mask_heads, q_blocks, 4]`: first entry, full, partial, 0.
    pub(crate) lists: DeviceSlice<'a, [i32; 4]>,
    /// `[.., 2]`: page, logical block.
    pub(crate) entries: DeviceSlice<'a, [i32; 2]>,
    pub(crate) mask_heads: usize,
    pub(crate) q_blocks: usize,
    pub(crate) block_q: usize,
    pub(crate) block_m: usize,
    /// Elements of Q and of the output that the mask's queries reach, checked by the caller against both.
    pub(crate) q: DeviceSlice<'a, bf16>,
    pub(crate) out: DeviceSlice<'a, bf16>,
    pub(crate) lse: Option<DeviceSlice<'a, f32>>,
    /// Batch, head, token.
    pub(crate) q_strides: [usize; 3],
    pub(crate) lse_strides: [usize; 3],
    /// One past the last row of any batch row.
    pub(crate) q_rows: usize,
    pub(crate) k: DeviceSlice<'a, bf16>,
    pub(crate) v: DeviceSlice<'a, bf16>,
    pub(crate) scale: f32,
    pub(crate) captures: u64,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

/// Attends for every list of a block mask.
pub(crate) fn flex_attention(kernel: &Kernel, stream: &Stream, of: &Flex<'_>) -> Result<(), CudaError> {
    let shape = &of.shape;
    check_cache(kernel, stream, shape, of.k, of.v)?;
    let batch = of.spans.len();
    equal(
        "block lists",
        batch.saturating_mul(of.mask_heads).saturating_mul(of.q_blocks),
        of.lists.len(),
    )?;
    if of.lists.is_empty() || of.q_rows == 0 {
        return Ok(());
    }
    let reach = |strides: [usize; 3], last: usize| {
        let ends = [
            (batch - 1, strides[0]),
            (shape.heads - 1, strides[1]),
            (of.q_rows - 1, strides[2]),
        ];
        ends.iter().fold(last, |sum, &(index, stride)| {
            sum.saturating_add(index.saturating_mul(stride))
        })
    };
    for (what, slice) in [("q", of.q), ("out", of.out)] {
        here(kernel, stream, what, slice)?;
        aligned(what, slice, 16)?;
        if of.q_strides.iter().any(|stride| !stride.is_multiple_of(8)) {
            return Err(CudaError::Misaligned { what, bytes: 16 });
        }
        at_least(what, reach(of.q_strides, shape.head_dim), slice.len())?;
    }
    if let Some(lse) = of.lse {
        here(kernel, stream, "lse", lse)?;
        at_least("lse", reach(of.lse_strides, 1), lse.len())?;
    }
    here(kernel, stream, "block lists", of.lists)?;
    here(kernel, stream, "block entries", of.entries)?;
    here(kernel, stream, "query spans", of.spans)?;
    aligned("block entries", of.entries, 8)?;
    if batch > MAX_GRID_YZ {
        return Err(CudaError::TooMany {
            what: "batch rows",
            asked: batch,
            limit: MAX_GRID_YZ,
        });
    }
    let tiles_per_block = of.block_q.div_ceil(of.block_m);
    let params = FlexParams {
        q: of.q.ptr(),
        k: of.k.ptr(),
        v: of.v.ptr(),
        out: of.out.ptr(),
        lse: of.lse.map_or(0, |lse| lse.ptr()),
        spans: of.spans.ptr(),
        lists: of.lists.ptr(),
        entries: of.entries.ptr(),
        head_stride: shape.head_stride() as i64,
        q_strides: of.q_strides.map(|stride| stride as i64),
        lse_strides: of.lse_strides.map(|stride| stride as i64),
        group: shape.group() as i32,
        mask_heads: int("heads of the mask", of.mask_heads)?,
        q_blocks: int("query blocks", of.q_blocks)?,
        block_q: int("query block size", of.block_q)?,
        tiles_per_block: int("tiles of a query block", tiles_per_block)?,
        block_granules_shift: shape.page_shift() - 4,
        scale: of.scale,
        reserved: 0,
        captures: of.captures,
    };
    let tiles = int("tiles", of.q_blocks.saturating_mul(tiles_per_block))? as u32;
    let config = LaunchConfig::with_dimensions([tiles, shape.heads as u32, batch as u32], [of.threads, 1, 1])
        .dynamic_shared_bytes(of.shared_bytes);
    // SAFETY: lists and entries are those of one block mask, whose pages the caller compared with the cache; lengths,
    // strides and alignment are checked above; `captures` as in `decode_attention`.
    unsafe { kernel.launch(stream, &config, &params) }?;
    Ok(())
}
