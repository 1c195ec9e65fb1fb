//! Operands of the norms and rotation of queries and keys and the write of keys and values, for the kernel of that alone and
//! for the product that has it inside.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{DeviceSlice, Stream};
use half::bf16;

use super::{aligned, refuse, same, small};
use crate::Result;

/// Operands of [`Kernels::qkv_rope_write`](super::Kernels::qkv_rope_write).
#[derive(Debug, Clone, Copy)]
pub struct QkvRopeWrite<'a> {
    /// `[rows, q_heads + 2 * kv_heads, head_dim]`: query, key, value heads. Query heads are normed and rotated in
    /// place.
    pub qkv: DeviceSlice<'a, bf16>,
    /// `[head_dim]`, norm of query heads.
    pub q_norm: DeviceSlice<'a, f32>,
    /// `[head_dim]`, norm of key heads.
    pub k_norm: DeviceSlice<'a, f32>,
    /// `[positions, head_dim]`: `head_dim / 2` cosines, then as many sines.
    pub cos_sin: DeviceSlice<'a, f32>,
    /// `[rows]`, logical position of each row.
    pub positions: DeviceSlice<'a, i32>,
    /// `[rows]`, slot of each row; 0 for padding.
    pub slots: DeviceSlice<'a, i32>,
    /// `[n_slots, max_pages]`, −1 for no page.
    pub page_table: DeviceSlice<'a, i32>,
    /// Pages per row of the table.
    pub max_pages: usize,
    /// `[kv_heads, n_pages * page_size, head_dim]`, one layer's keys.
    pub k_cache: DeviceSlice<'a, bf16>,
    /// The layer's values, of the keys' shape.
    pub v_cache: DeviceSlice<'a, bf16>,
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Tokens in a page.
    pub page_size: usize,
    /// Added to the mean square.
    pub eps: f32,
}

/// The norm that a product's input still lacked: rows of the product are divided by the root of its mean square.
#[derive(Debug, Clone, Copy)]
pub struct RowScale<'a> {
    /// Sums of squares of some columns each: `[parts, columns]`, with at least as many columns as there are rows.
    pub squares: DeviceSlice<'a, f32>,
    /// Sums of a row.
    pub parts: usize,
    /// Columns of the product's input.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
}

/// As in `kernels/rope_write.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct QkvRopeWriteLaunch {
    heads: QkvRopeWriteParams,
    squares: u64,
    parts: u32,
    columns: u32,
    inverse_k: f32,
    eps: f32,
}

impl QkvRopeWriteLaunch {
    /// Checks the lengths, and keeps the memory for a capture of `stream`.
    pub(super) fn new(
        heads: QkvRopeWriteParams,
        scale: Option<&RowScale<'_>>,
        stream: &Stream,
    ) -> Result<Self> {
        let Some(scale) = scale else {
            return Ok(Self {
                heads,
                ..Zeroable::zeroed()
            });
        };
        let columns = scale.squares.len().checked_div(scale.parts).unwrap_or(0);
        same("squares", scale.squares.len(), scale.parts * columns)?;
        if columns < heads.rows as usize {
            return refuse(
                "squares",
                format!("are of {columns} rows, {} are asked for", heads.rows),
            );
        }
        stream.keep_memory(scale.squares);
        Ok(Self {
            heads,
            squares: scale.squares.ptr(),
            parts: small("parts", scale.parts)?,
            columns: small("columns", columns)?,
            inverse_k: 1.0 / scale.width as f32,
            eps: scale.eps,
        })
    }
}

/// As in `kernels/rope_write.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct QkvRopeWriteParams {
    qkv: u64,
    q_norm: u64,
    k_norm: u64,
    cos_sin: u64,
    positions: u64,
    slots: u64,
    page_table: u64,
    q: u64,
    k_cache: u64,
    v_cache: u64,
    q_row_stride: u64,
    tokens_per_head: u64,
    pub rows: u32,
    q_heads: u32,
    kv_heads: u32,
    page_size: u32,
    n_slots: u32,
    max_pages: u32,
    n_positions: u32,
    eps: f32,
}

impl QkvRopeWrite<'_> {
    /// Checks the lengths, and keeps the memory for a capture of `stream`.
    pub(super) fn accept(&self, stream: &Stream, head_dim: usize) -> Result<QkvRopeWriteParams> {
        let rows = self.positions.len();
        let heads = self.q_heads + 2 * self.kv_heads;
        for (what, size) in [
            ("kv_heads", self.kv_heads),
            ("q_heads", self.q_heads),
            ("max_pages", self.max_pages),
            ("page_size", self.page_size),
            ("cos_sin", self.cos_sin.len()),
        ] {
            if size == 0 {
                return refuse(what, "is 0".into());
            }
        }
        let tokens_per_head = self.k_cache.len() / (self.kv_heads * head_dim);
        let n_slots = self.page_table.len() / self.max_pages;
        let n_positions = self.cos_sin.len() / head_dim;
        same("qkv", self.qkv.len(), rows * heads * head_dim)?;
        same("slots", self.slots.len(), rows)?;
        same("q_norm", self.q_norm.len(), head_dim)?;
        same("k_norm", self.k_norm.len(), head_dim)?;
        same("cos_sin", self.cos_sin.len(), n_positions * head_dim)?;
        same("page_table", self.page_table.len(), n_slots * self.max_pages)?;
        same(
            "k_cache",
            self.k_cache.len(),
            self.kv_heads * tokens_per_head * head_dim,
        )?;
        same("v_cache", self.v_cache.len(), self.k_cache.len())?;
        for (what, buffer) in [
            ("qkv", self.qkv),
            ("k_cache", self.k_cache),
            ("v_cache", self.v_cache),
        ] {
            aligned(what, buffer.ptr(), 4)?;
            stream.keep_memory(buffer);
        }
        for buffer in [self.q_norm, self.k_norm, self.cos_sin] {
            stream.keep_memory(buffer);
        }
        for buffer in [self.positions, self.slots, self.page_table] {
            stream.keep_memory(buffer);
        }
        Ok(QkvRopeWriteParams {
            qkv: self.qkv.ptr(),
            q_norm: self.q_norm.ptr(),
            k_norm: self.k_norm.ptr(),
            cos_sin: self.cos_sin.ptr(),
            positions: self.positions.ptr(),
            slots: self.slots.ptr(),
            page_table: self.page_table.ptr(),
            q: self.qkv.ptr(),
            k_cache: self.k_cache.ptr(),
            v_cache: self.v_cache.ptr(),
            q_row_stride: (heads * head_dim) as u64,
            tokens_per_head: tokens_per_head as u64,
            rows: small("rows", rows)?,
            q_heads: small("q_heads", self.q_heads)?,
            kv_heads: small("kv_heads", self.kv_heads)?,
            page_size: small("page_size", self.page_size)?,
            n_slots: small("n_slots", n_slots)?,
            max_pages: small("max_pages", self.max_pages)?,
            n_positions: small("n_positions", n_positions)?,
            eps: self.eps,
        })
    }
}
