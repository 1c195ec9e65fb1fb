//! The parameters of a launch, as the kernel lays them out.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{DeviceSlice, Swizzle, TensorElement, TensorMap, TensorMapSpec};
use half::bf16;

use super::{CHUNK, LayerOperands, LayersShape, MAX_LAYERS};
use crate::Result;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct ShapeParams {
    pub(super) units: u32,
    pub(super) chunks: u32,
    pub(super) groups: u32,
    pub(super) box_rows: u32,
    pub(super) row_tiles: u32,
    pub(super) passes: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct AttentionParams {
    pub(super) qkv: u64,
    pub(super) mixed: u64,
    pub(super) mixed_words: u64,
    pub(super) positions: u64,
    pub(super) slots: u64,
    pub(super) page_table: u64,
    pub(super) cos_sin: u64,
    pub(super) partial: u64,
    pub(super) partial_sums: u64,
    pub(super) tokens_per_head: u64,
    pub(super) kv_heads: u32,
    pub(super) group: u32,
    pub(super) page_shift: u32,
    pub(super) n_slots: u32,
    pub(super) max_pages: u32,
    pub(super) n_positions: u32,
    pub(super) split: u32,
    pub(super) few_splits: u32,
    pub(super) max_splits: u32,
    pub(super) scale: f32,
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct LayerParams {
    pub(super) w_maps: [TensorMap; 4],
    pub(super) q_norm: u64,
    pub(super) k_norm: u64,
    pub(super) keys: u64,
    pub(super) values: u64,
    pub(super) post_norm: u64,
    pub(super) next_norm: u64,
    pub(super) unused: [u64; 2],
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct DecodeLayersParams {
    pub(super) x_maps: [TensorMap; 4],
    pub(super) head_map: TensorMap,
    pub(super) shapes: [ShapeParams; 5],
    pub(super) n_layers: u32,
    pub(super) rows: u32,
    pub(super) x_rows: u32,
    pub(super) n_stages: u32,
    pub(super) first_squares: u32,
    pub(super) first_layer: u32,
    pub(super) residual: u64,
    pub(super) normed: [u64; 2],
    pub(super) squares: [u64; 2],
    pub(super) qkv: u64,
    pub(super) gated: u64,
    pub(super) inputs: [u64; 4],
    pub(super) square_words: [u64; 2],
    pub(super) logits: u64,
    pub(super) epoch: u64,
    pub(super) counters: u64,
    pub(super) columns: f32,
    pub(super) eps: f32,
    pub(super) attention: AttentionParams,
    pub(super) unused: [u64; 6],
    pub(super) layers: [LayerParams; MAX_LAYERS],
}

pub(super) fn layer_params(
    shape: &LayersShape,
    layer: &LayerOperands<'_>,
    box_rows: &[usize],
) -> Result<LayerParams> {
    Ok(LayerParams {
        w_maps: [
            tiles_of(layer.qkv, shape.qkv(), shape.hidden, box_rows[0], 1)?,
            tiles_of(layer.o, shape.hidden, shape.q(), box_rows[1], 1)?,
            tiles_of(
                layer.gate_up,
                2 * shape.intermediate,
                shape.hidden,
                box_rows[2],
                1,
            )?,
            tiles_of(layer.down, shape.hidden, shape.intermediate, box_rows[3], 1)?,
        ],
        q_norm: layer.q_norm.ptr(),
        k_norm: layer.k_norm.ptr(),
        keys: layer.keys.ptr(),
        values: layer.values.ptr(),
        post_norm: layer.post_norm.ptr(),
        next_norm: layer.next_norm.ptr(),
        unused: [0; 2],
    })
}

/// A row-major `[rows, k]` matrix as chunks of 64 columns, in boxes of `box_rows` rows by `tiles` chunks.
pub(super) fn tiles_of(
    matrix: DeviceSlice<'_, bf16>,
    rows: usize,
    k: usize,
    box_rows: usize,
    tiles: usize,
) -> Result<TensorMap> {
    let spec = TensorMapSpec {
        element: TensorElement::Bf16,
        dims: &[CHUNK as u64, rows as u64, (k / CHUNK) as u64],
        strides: &[2 * k as u64, 2 * CHUNK as u64],
        box_dims: &[CHUNK as u32, box_rows as u32, tiles as u32],
        swizzle: Swizzle::Bytes128,
    };
    Ok(TensorMap::tiled(matrix, &spec)?)
}
