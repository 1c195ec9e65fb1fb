//! The kernels of prefill attention.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    DeviceSlice, Kernel, LaunchConfig, Stream, Swizzle, TensorElement, TensorMap, TensorMapSpec,
};
use half::bf16;

use super::{Paging, TableShape, at_least, check_cache, check_rows, here, int, paging};
use crate::cuda::{AttentionShape, CudaError};

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PrefillParams {
    q: u64,
    k: u64,
    v: u64,
    out: u64,
    lse: u64,
    tiles: u64,
    paging: Paging,
    q_token_stride: i64,
    out_token_stride: i64,
    heads: i32,
    group: i32,
    window: i32,
    scale: f32,
    captures: u64,
    visited: u64,
}

/// A tile of the kernels prefill_attention and prefill_wgmma.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PrefillTile {
    pub(crate) q_start: i32,
    pub(crate) q_len: i32,
    pub(crate) slot: i32,
    pub(crate) position: i32,
    pub(crate) first_row: i32,
    pub(crate) chunk: i32,
    pub(crate) first_block: i32,
    pub(crate) blocks: i32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PrefillWgmmaParams {
    k: TensorMap,
    v: TensorMap,
    prefill: PrefillParams,
    kv_heads: i32,
    units: i32,
}

/// What prefill_attention and prefill_wgmma are given.
pub(crate) struct Prefill<'a> {
    pub(crate) shape: AttentionShape,
    /// Every tile of the list lies within this many rows of Q, names a slot of the table and a position in it, and visits at
    /// least one block of keys.
    pub(crate) tokens: usize,
    pub(crate) tiles: DeviceSlice<'a, PrefillTile>,
    pub(crate) q: DeviceSlice<'a, bf16>,
    pub(crate) q_token_stride: usize,
    pub(crate) k: DeviceSlice<'a, bf16>,
    pub(crate) v: DeviceSlice<'a, bf16>,
    pub(crate) page_table: DeviceSlice<'a, i32>,
    pub(crate) table: TableShape,
    pub(crate) out: DeviceSlice<'a, bf16>,
    pub(crate) lse: Option<DeviceSlice<'a, f32>>,
    pub(crate) window: Option<usize>,
    pub(crate) scale: f32,
    pub(crate) captures: u64,
    /// A counter of visited blocks, for a kernel that counts.
    pub(crate) visited: Option<DeviceSlice<'a, u32>>,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

fn prefill_params(kernel: &Kernel, stream: &Stream, of: &Prefill<'_>) -> Result<PrefillParams, CudaError> {
    let shape = &of.shape;
    check_cache(kernel, stream, shape, of.k, of.v)?;
    let row = shape.heads * shape.head_dim;
    for (what, slice) in [("q", of.q), ("out", of.out)] {
        here(kernel, stream, what, slice)?;
    }
    here(kernel, stream, "tiles", of.tiles)?;
    check_rows("q", of.q, of.tokens, row, of.q_token_stride)?;
    check_rows("out", of.out, of.tokens, row, row)?;
    if let Some(lse) = of.lse {
        here(kernel, stream, "lse", lse)?;
        at_least("lse", of.tokens * shape.heads, lse.len())?;
    }
    if let Some(visited) = of.visited {
        here(kernel, stream, "visited", visited)?;
        at_least("visited", 1, visited.len())?;
    }
    Ok(PrefillParams {
        q: of.q.ptr(),
        k: of.k.ptr(),
        v: of.v.ptr(),
        out: of.out.ptr(),
        lse: of.lse.map_or(0, |lse| lse.ptr()),
        tiles: of.tiles.ptr(),
        paging: paging(kernel, stream, shape, of.page_table, of.table)?,
        q_token_stride: of.q_token_stride as i64,
        out_token_stride: row as i64,
        heads: shape.heads as i32,
        group: shape.group() as i32,
        window: of
            .window
            .map_or(0, |window| window.clamp(1, i32::MAX as usize) as i32),
        scale: of.scale,
        captures: of.captures,
        visited: of.visited.map_or(0, |visited| visited.ptr()),
    })
}

/// Attends for every tile of the list.
pub(crate) fn prefill_attention(kernel: &Kernel, stream: &Stream, of: &Prefill<'_>) -> Result<(), CudaError> {
    let params = prefill_params(kernel, stream, of)?;
    if of.tiles.is_empty() {
        return Ok(());
    }
    let tiles = int("tiles", of.tiles.len())? as u32;
    let grid = [tiles, of.shape.kv_heads as u32, 1];
    let config =
        LaunchConfig::with_dimensions(grid, [of.threads, 1, 1]).dynamic_shared_bytes(of.shared_bytes);
    // SAFETY: the tiles were checked when the list was made; lengths, strides and alignment are checked above;
    // `captures` as in `decode_attention`.
    unsafe { kernel.launch(stream, &config, &params) }?;
    Ok(())
}

/// The same with warpgroup products, on compute capability 9.0. `block_n`: keys of a block of the kernel.
pub(crate) fn prefill_wgmma(
    kernel: &Kernel,
    stream: &Stream,
    of: &Prefill<'_>,
    block_n: usize,
) -> Result<(), CudaError> {
    let prefill = prefill_params(kernel, stream, of)?;
    if of.tiles.is_empty() {
        return Ok(());
    }
    let shape = &of.shape;
    let row_bytes = shape.head_dim as u64 * 2;
    let positions = (shape.n_pages * shape.page_size) as u64;
    let spec = TensorMapSpec {
        element: TensorElement::Bf16,
        dims: &[shape.head_dim as u64, positions, shape.kv_heads as u64],
        strides: &[row_bytes, row_bytes * positions],
        box_dims: &[64, shape.page_size.min(block_n) as u32, 1],
        swizzle: Swizzle::Bytes128,
    };
    let units = int("tiles", of.tiles.len().saturating_mul(shape.kv_heads))?;
    let params = PrefillWgmmaParams {
        k: TensorMap::tiled(of.k, &spec)?,
        v: TensorMap::tiled(of.v, &spec)?,
        prefill,
        kv_heads: shape.kv_heads as i32,
        units,
    };
    let blocks = (units as u32).min(kernel.device().info().multiprocessors.max(1));
    let config = LaunchConfig::new(blocks, of.threads).dynamic_shared_bytes(of.shared_bytes);
    // SAFETY: as in `prefill_attention`; the tensor maps describe the cache, whose length is checked.
    unsafe { kernel.launch(stream, &config, &params) }?;
    Ok(())
}
