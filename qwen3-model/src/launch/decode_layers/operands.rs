//! What a launch takes, checked against the shape that the kernel is loaded for, and kept by a capture.

use cuda_graphs::{DeviceSlice, Stream};
use half::bf16;

use super::super::{aligned, refuse, same};
use super::{CHUNK, DecodeLayersScratch, HEAD_DIM, MAX_CHUNKS, MAX_GROUP};
use crate::Result;

/// The widths of a model that the kernel runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayersShape {
    /// Width of the residual stream, a multiple of 64.
    pub hidden: usize,
    /// Query heads of 128, up to eight for each K/V head.
    pub heads: usize,
    /// K/V heads.
    pub kv_heads: usize,
    /// Inner width of the feed-forward part, a multiple of 64.
    pub intermediate: usize,
    /// Rows of the head.
    pub vocab: usize,
}

impl LayersShape {
    pub(super) fn q(&self) -> usize {
        self.heads * HEAD_DIM
    }

    pub(super) fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * HEAD_DIM
    }

    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// Whether a block has room for each stage's input of a single row.
    pub(super) fn is_narrow(&self) -> bool {
        [self.hidden, self.q(), self.intermediate]
            .iter()
            .all(|width| *width <= MAX_CHUNKS * CHUNK)
    }

    /// Whether a kernel is written for it.
    pub fn is_supported(&self, head_dim: usize) -> bool {
        head_dim == HEAD_DIM
            && [self.hidden, self.intermediate]
                .iter()
                .all(|width| *width > 0 && width.is_multiple_of(CHUNK))
            && self.kv_heads > 0
            && self.heads.is_multiple_of(self.kv_heads)
            && (1..=MAX_GROUP).contains(&self.group())
            && self.vocab > 0
    }
}

/// One layer's weights and its part of the cache.
#[derive(Debug, Clone, Copy)]
pub struct LayerOperands<'a> {
    /// `[q + 2 kv, hidden]`.
    pub qkv: DeviceSlice<'a, bf16>,
    /// `[hidden, q]`.
    pub o: DeviceSlice<'a, bf16>,
    /// `[2 intermediate, hidden]`, gate above up.
    pub gate_up: DeviceSlice<'a, bf16>,
    /// `[hidden, intermediate]`.
    pub down: DeviceSlice<'a, bf16>,
    /// `[128]`, norm of query heads.
    pub q_norm: DeviceSlice<'a, f32>,
    /// `[128]`, norm of key heads.
    pub k_norm: DeviceSlice<'a, f32>,
    /// `[hidden]`, norm after attention.
    pub post_norm: DeviceSlice<'a, f32>,
    /// `[hidden]`, norm of the next layer's input, or the final one.
    pub next_norm: DeviceSlice<'a, f32>,
    /// `[kv_heads, n_pages * page_size, 128]`.
    pub keys: DeviceSlice<'a, bf16>,
    /// As `keys`.
    pub values: DeviceSlice<'a, bf16>,
}

/// All layers of a decode step and the head.
#[derive(Debug, Clone, Copy)]
pub struct DecodeLayersOp<'a> {
    /// In order; at least one.
    pub layers: &'a [LayerOperands<'a>],
    /// `[vocab, hidden]`.
    pub head: DeviceSlice<'a, bf16>,
    /// `[rows, hidden]`: input of the first layer's attention part, normed; overwritten.
    pub normed: DeviceSlice<'a, bf16>,
    /// `[rows, hidden]`, the residual stream; moved on.
    pub residual: DeviceSlice<'a, f32>,
    /// `[rows, q]`, overwritten.
    pub mixed: DeviceSlice<'a, bf16>,
    /// `[rows, intermediate]`, overwritten.
    pub gated: DeviceSlice<'a, bf16>,
    /// `[rows, vocab]`, written.
    pub logits: DeviceSlice<'a, f32>,
    /// `[rows]`, 1 to [`MAX_ROWS`](super::MAX_ROWS): logical position of each row's token.
    pub positions: DeviceSlice<'a, i32>,
    /// `[rows]`, slot of each row; 0 for padding, which neither reads nor writes the cache.
    pub slots: DeviceSlice<'a, i32>,
    /// `[n_slots, max_pages]`, −1 for no page.
    pub page_table: DeviceSlice<'a, i32>,
    /// Pages per row of the table.
    pub max_pages: usize,
    /// Tokens in a page, a power of two of 16 or more.
    pub page_size: usize,
    /// `[positions, 128]`: 64 cosines, then as many sines.
    pub cos_sin: DeviceSlice<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
}

pub(super) fn tokens_per_head(shape: &LayersShape, op: &DecodeLayersOp<'_>) -> usize {
    op.layers
        .first()
        .map_or(0, |layer| layer.keys.len() / (shape.kv_heads * HEAD_DIM))
}

/// Every length against the shape.
pub(super) fn check(scratch: &DecodeLayersScratch, op: &DecodeLayersOp<'_>) -> Result<()> {
    let (shape, rows) = (&scratch.shape, op.positions.len());
    let (hidden, inner) = (shape.hidden, shape.intermediate);
    if op.max_pages == 0 || op.cos_sin.len() < HEAD_DIM {
        return refuse("page_table", "or the table of rotations is empty".into());
    }
    if !op.page_size.is_power_of_two() || op.page_size < 16 {
        return refuse(
            "page_size",
            format!("is {}; a power of two from 16 on is needed", op.page_size),
        );
    }
    if op.max_pages.saturating_mul(op.page_size) > scratch.max_length {
        return refuse(
            "max_pages",
            format!(
                "is {}, more than the {} tokens that the scratch is for",
                op.max_pages, scratch.max_length
            ),
        );
    }
    same("normed", op.normed.len(), rows * hidden)?;
    same("residual", op.residual.len(), rows * hidden)?;
    same("mixed", op.mixed.len(), rows * shape.q())?;
    same("gated", op.gated.len(), rows * inner)?;
    same("logits", op.logits.len(), rows * shape.vocab)?;
    same("slots", op.slots.len(), rows)?;
    same("head", op.head.len(), shape.vocab * hidden)?;
    let n_slots = op.page_table.len() / op.max_pages;
    same("page_table", op.page_table.len(), n_slots * op.max_pages)?;
    same(
        "cos_sin",
        op.cos_sin.len(),
        op.cos_sin.len() / HEAD_DIM * HEAD_DIM,
    )?;
    aligned("mixed", op.mixed.ptr(), 8)?;
    let tokens = tokens_per_head(shape, op);
    for layer in op.layers {
        same("qkv weight", layer.qkv.len(), shape.qkv() * hidden)?;
        same("o weight", layer.o.len(), hidden * shape.q())?;
        same("gate_up weight", layer.gate_up.len(), 2 * inner * hidden)?;
        same("down weight", layer.down.len(), hidden * inner)?;
        same("q_norm", layer.q_norm.len(), HEAD_DIM)?;
        same("k_norm", layer.k_norm.len(), HEAD_DIM)?;
        same("post_norm", layer.post_norm.len(), hidden)?;
        same("next_norm", layer.next_norm.len(), hidden)?;
        same("keys", layer.keys.len(), shape.kv_heads * tokens * HEAD_DIM)?;
        same("values", layer.values.len(), layer.keys.len())?;
        aligned("keys", layer.keys.ptr(), 16)?;
        aligned("values", layer.values.ptr(), 16)?;
    }
    Ok(())
}

/// A captured graph must own what it uses.
pub(super) fn keep(stream: &Stream, scratch: &DecodeLayersScratch, op: &DecodeLayersOp<'_>) {
    for buffer in [op.head, op.normed, op.mixed, op.gated, scratch.normed.as_slice()] {
        stream.keep_memory(buffer);
    }
    for buffer in [op.residual, op.logits, op.cos_sin] {
        stream.keep_memory(buffer);
    }
    for buffer in &scratch.squares {
        stream.keep_memory(buffer.as_slice());
    }
    for buffer in [&scratch.qkv, &scratch.partial, &scratch.partial_sums]
        .into_iter()
        .chain(&scratch.square_words)
    {
        stream.keep_memory(buffer.as_slice());
    }
    for buffer in &scratch.inputs {
        stream.keep_memory(buffer.as_slice());
    }
    for buffer in [op.positions, op.slots, op.page_table] {
        stream.keep_memory(buffer);
    }
    stream.keep_memory(scratch.sync.as_slice());
    for layer in op.layers {
        for buffer in [
            layer.qkv,
            layer.o,
            layer.gate_up,
            layer.down,
            layer.keys,
            layer.values,
        ] {
            stream.keep_memory(buffer);
        }
        for buffer in [layer.q_norm, layer.k_norm, layer.post_norm, layer.next_norm] {
            stream.keep_memory(buffer);
        }
    }
}
