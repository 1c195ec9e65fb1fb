//! The products of a decode step of 17 to 256 rows by kernels of our own, with norms, SiLU and residual sums within them, where
//! these are faster than cuBLASLt with kernels between: see `kernels/wide_product.cuh`, `kernels/gate_up.cuh`,
//! `kernels/cluster_product.cuh` and `kernels/qkv_product.cuh`.
//!
//! ```text
//!   embed, norm ─▶ QKV, rope 0 ─▶ attention 0 ─▶ O 0 ─▶ gate+up 0 ─▶ down 0 ─▶ QKV, rope 1 ─▶ … ─▶ head
//! ```
//!
//! Our O and down leave `normed` not yet scaled, and the sums of squares by which what comes after them scales: gate+up and QKV
//! of our own as part of the product, after a QKV of cuBLASLt the kernel that rotates. A head of cuBLASLt has the norm anew.

use cuda_graphs::{Compiler, Device, DeviceBuffer, DeviceSlice};

use super::{CudaBackend, CudaOptions, Rows};
use crate::launch::{
    ClusterProduct, ClusterProductOp, GATE_UP_ROWS, GateUp, GateUpOp, QKV_PRODUCT_ROWS, QkvProduct,
    QkvProductOp, RowScale, StageOutput, WIDE_ALL_KINDS, WIDE_HEAD_DIM, WIDE_ROWS, WideProductOp,
    WideProducts,
};
use crate::{FusedMatrix, Qwen3Config, Result};

/// Rows that anything of this serves.
const ROWS: std::ops::RangeInclusive<usize> = 17..=*GATE_UP_ROWS.end();

/// Who makes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Maker {
    Library,
    /// `kernels/wide_product.cuh`.
    Wide,
    /// O and down alone: `kernels/cluster_product.cuh`.
    Clusters,
    /// QKV alone: `kernels/qkv_product.cuh`.
    Heads,
}

impl Maker {
    pub(super) const fn is_ours(self) -> bool {
        !matches!(self, Self::Library)
    }
}

/// Which products of a step go through our kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Served {
    pub qkv: Maker,
    /// Only with `gate_up`, which then scales.
    pub o: Maker,
    pub gate_up: bool,
    pub down: Maker,
    pub head: bool,
}

impl Served {
    const NONE: Self = Self {
        qkv: Maker::Library,
        o: Maker::Library,
        gate_up: false,
        down: Maker::Library,
        head: false,
    };

    /// What is faster by our kernels for so many rows; measured on an H200, see docs/performance.md. `heads`: QKV may be by
    /// [`Maker::Heads`], which as our gate+up beyond 64 rows takes sums of squares in however many parts; the wide form, which
    /// is gate+up up to 64 and a little faster for down from 65 to 96 rows, does not.
    const fn of(rows: usize, heads: bool) -> Self {
        use Maker::{Clusters, Heads, Library, Wide};
        let [qkv, o, down] = match (rows, heads) {
            (33..=64, true) => [Heads, Wide, Clusters],
            (..=64, _) => [Wide; 3],
            (65..=96, true) => [Heads, Wide, Wide],
            (65..=96, false) => [Library, Wide, Wide],
            (_, true) => [Heads, Library, Clusters],
            (_, false) => [Library, Library, Clusters],
        };
        Self {
            qkv,
            o,
            gate_up: true,
            down,
            head: rows <= WIDE_ALL_KINDS && matches!(down, Wide),
        }
    }

    pub(super) const fn has(self, matrix: FusedMatrix) -> bool {
        match matrix {
            FusedMatrix::Qkv => self.qkv.is_ours(),
            FusedMatrix::O => self.o.is_ours(),
            FusedMatrix::GateUp => self.gate_up,
            FusedMatrix::Down => self.down.is_ours(),
        }
    }
}

/// The kernels and their buffers.
#[derive(Debug)]
pub(super) struct Wide {
    products: WideProducts,
    gate_up: GateUp,
    clusters: ClusterProduct,
    /// Where it keeps the device at work.
    qkv: Option<QkvProduct>,
    /// After O and after down.
    squares: DeviceBuffer<f32>,
    /// Whether QKV has the rotation and the write of keys and values inside.
    ropes: bool,
}

impl Wide {
    /// `None` where the device, the model's shape or the largest batch is not one for them.
    pub(super) fn new(
        device: &Device,
        compiler: &Compiler,
        config: &Qwen3Config,
        options: &CudaOptions,
    ) -> Result<Option<Self>> {
        let rows = options.max_batch_size.min(*ROWS.end());
        if rows < *ROWS.start() {
            return Ok(None);
        }
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let Some(gate_up) = GateUp::load(compiler, device, inner, rows)? else {
            return Ok(None);
        };
        let Some(products) = WideProducts::load(compiler, device, rows)? else {
            return Ok(None);
        };
        let Some(clusters) = ClusterProduct::load(compiler, device, hidden, rows)? else {
            return Ok(None);
        };
        let heads = config.n_heads + 2 * config.n_kv_heads;
        let multiprocessors = device.info().multiprocessors as usize;
        let fills = QkvProduct::fills(heads, config.head_dim, multiprocessors);
        let qkv = match fills && rows >= *QKV_PRODUCT_ROWS.start() {
            true => QkvProduct::load(compiler, device, rows)?,
            false => None,
        };
        let ropes = config.head_dim == WIDE_HEAD_DIM && products.takes(config.qkv_size(), hidden, true);
        let all = products.takes(config.qkv_size(), hidden, false)
            && products.takes(hidden, config.q_size(), true)
            && products.takes(2 * inner, hidden, false)
            && products.takes(hidden, inner, true)
            && products.takes(config.vocab_size, hidden, false);
        if !all {
            return Ok(None);
        }
        let most = rows.min(*WIDE_ROWS.end());
        let len = (*ROWS.start()..=rows).map(|rows| {
            let wide = products.squares_len(rows.min(most), hidden);
            wide.max(clusters.squares_len(rows))
        });
        let squares = DeviceBuffer::zeroed(device, len.max().unwrap_or(0))?;
        Ok(Some(Self {
            products,
            gate_up,
            clusters,
            qkv,
            squares,
            ropes,
        }))
    }

    /// What a product by `maker` leaves behind it: sums of squares, and how many a row has; none by the library.
    fn squares(&self, maker: Maker, rows: usize, hidden: usize) -> Result<(DeviceSlice<'_, f32>, usize)> {
        let (len, parts) = match maker {
            Maker::Library | Maker::Heads => (0, 0),
            Maker::Wide => (self.products.squares_len(rows, hidden), hidden.div_ceil(64)),
            Maker::Clusters => (self.clusters.squares_len(rows), self.clusters.squares_parts(rows)),
        };
        Ok((self.squares.slice(..len)?, parts))
    }

    /// [`Served::of`] these rows, with what this model's shape makes faster.
    fn served(&self, rows: usize) -> Served {
        Served::of(rows, self.qkv.is_some() && QKV_PRODUCT_ROWS.contains(&rows))
    }
}

impl CudaBackend {
    /// The kernels, the present rows and which products go through them, if these rows do: a number for which they are
    /// faster, and all weights bf16 with nothing beside them.
    pub(super) fn wide(&self) -> Option<(&Wide, usize, Served)> {
        let Rows::Decode { bucket } = self.rows else {
            return None;
        };
        let plain = self.four_bit.is_none() && self.unmerged.is_none() && !self.weights.has_biases();
        match &self.wide_products {
            Some(wide) if plain && ROWS.contains(&bucket) => Some((wide, bucket, wide.served(bucket))),
            _ => None,
        }
    }

    /// Which products of the present rows go through our kernels.
    pub(super) fn wide_served(&self) -> Served {
        self.wide().map_or(Served::NONE, |(_, _, served)| served)
    }

    /// Whether QKV of the present rows has the rotation and the write of keys and values inside.
    pub(super) fn in_wide_qkv(&self) -> bool {
        self.wide().is_some_and(|(wide, _, served)| match served.qkv {
            Maker::Wide => wide.ropes,
            Maker::Heads => true,
            Maker::Library | Maker::Clusters => false,
        })
    }

    /// By what the rows of a QKV product of cuBLASLt have yet to be scaled: our down projection has left them so.
    pub(super) fn wide_row_scale(&self, layer: usize) -> Result<Option<RowScale<'_>>> {
        match self.wide() {
            Some((wide, rows, served)) if !served.qkv.is_ours() => {
                self.left_by_down(wide, rows, served, layer)
            }
            _ => Ok(None),
        }
    }

    /// By what our down projection of the layer before has left rows to be scaled.
    fn left_by_down<'a>(
        &'a self,
        wide: &'a Wide,
        rows: usize,
        served: Served,
        layer: usize,
    ) -> Result<Option<RowScale<'a>>> {
        if layer == 0 || !served.down.is_ours() {
            return Ok(None);
        }
        let width = self.config.hidden_size;
        let (squares, parts) = wide.squares(served.down, rows, width)?;
        Ok(Some(RowScale {
            squares,
            parts,
            width,
            eps: self.config.rms_norm_eps as f32,
        }))
    }

    /// A layer's product.
    pub(super) fn wide_project(
        &self,
        wide: &Wide,
        rows: usize,
        served: Served,
        layer: usize,
        matrix: FusedMatrix,
    ) -> Result<()> {
        let (config, w) = (&self.config, &self.workspace);
        let (hidden, weights) = (config.hidden_size, &self.weights.layers[layer]);
        let normed = w.normed.slice(..rows * hidden)?;
        let (after_o, after_down) = (
            wide.squares(served.o, rows, hidden)?.0,
            wide.squares(served.down, rows, hidden)?.0,
        );
        let to_residual = |norm, squares| -> Result<StageOutput<'_>> {
            Ok(StageOutput::Residual {
                residual: w.residual.slice(..rows * hidden)?,
                norm,
                normed,
                squares,
            })
        };
        let gated = w.gated.slice(..rows * config.intermediate_size)?;
        let next_norm = match self.weights.layers.get(layer + 1) {
            Some(next) => &next.input_norm,
            None => &self.weights.norm,
        };
        if let (FusedMatrix::Qkv, Maker::Heads, Some(qkv)) = (matrix, served.qkv, &wide.qkv) {
            let op = QkvProductOp {
                weight: weights.matrix(matrix).as_slice(),
                input: normed,
                scale: self.left_by_down(wide, rows, served, layer)?,
                heads: self.rope_write(layer)?,
            };
            return qkv.run(&self.stream, &op);
        }
        let (maker, input, squares, output) = match matrix {
            // The first norm is a kernel of its own, which scales; so is every norm before a product of cuBLASLt's.
            FusedMatrix::Qkv => (
                served.qkv,
                normed,
                (layer > 0 && served.down.is_ours()).then_some(after_down),
                StageOutput::Bf16(w.qkv.slice(..rows * config.qkv_size())?),
            ),
            FusedMatrix::O => (
                served.o,
                w.mixed.slice(..rows * config.q_size())?,
                None,
                to_residual(weights.post_attention_norm.as_slice(), after_o)?,
            ),
            FusedMatrix::GateUp if rows <= WIDE_ALL_KINDS => (
                Maker::Wide,
                normed,
                served.o.is_ours().then_some(after_o),
                StageOutput::Gated(gated),
            ),
            FusedMatrix::GateUp => {
                let op = GateUpOp {
                    rows,
                    weight: weights.matrix(matrix).as_slice(),
                    input: normed,
                    squares: served.o.is_ours().then_some(after_o),
                    eps: config.rms_norm_eps as f32,
                    out: gated,
                };
                return wide.gate_up.run(&self.stream, &op);
            }
            FusedMatrix::Down => (
                served.down,
                gated,
                None,
                to_residual(next_norm.as_slice(), after_down)?,
            ),
        };
        if maker == Maker::Clusters {
            let op = ClusterProductOp {
                rows,
                weight: weights.matrix(matrix).as_slice(),
                input,
                output,
            };
            return wide.clusters.run(&self.stream, &op);
        }
        let op = WideProductOp {
            rows,
            weight: weights.matrix(matrix).as_slice(),
            input,
            squares,
            eps: config.rms_norm_eps as f32,
            output,
            heads: match (matrix, wide.ropes) {
                (FusedMatrix::Qkv, true) => Some(self.rope_write(layer)?),
                _ => None,
            },
        };
        wide.products.run(&self.stream, &op)
    }

    /// The logits of all rows.
    pub(super) fn wide_head(&self, wide: &Wide, rows: usize, served: Served) -> Result<()> {
        let (config, w) = (&self.config, &self.workspace);
        let hidden = config.hidden_size;
        let op = WideProductOp {
            rows,
            weight: self.weights.head().as_slice(),
            input: w.normed.slice(..rows * hidden)?,
            squares: match served.down {
                Maker::Library => None,
                maker => Some(wide.squares(maker, rows, hidden)?.0),
            },
            eps: config.rms_norm_eps as f32,
            output: StageOutput::F32(w.logits.slice(..rows * config.vocab_size)?),
            heads: None,
        };
        wide.products.run(&self.stream, &op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wide kernels take sums of squares in parts of 64 columns, as wide kernels leave them.
    #[test]
    fn nothing_wide_follows_sums_of_squares_by_clusters() {
        for (rows, heads) in ROWS.flat_map(|rows| [(rows, false), (rows, true)]) {
            let heads = heads && QKV_PRODUCT_ROWS.contains(&rows);
            let served = Served::of(rows, heads);
            assert_eq!(served.qkv == Maker::Heads, heads, "{rows}: {served:?}");
            if served.down == Maker::Clusters {
                assert!(served.qkv != Maker::Wide && !served.head, "{rows}: {served:?}");
            }
            assert!(served.o != Maker::Clusters, "{rows}: gate and up may be wide");
            assert!(
                !served.o.is_ours() || served.gate_up,
                "{rows}: nobody would scale"
            );
        }
        assert_eq!(Served::of(64, true).down, Maker::Clusters);
        assert_eq!(Served::of(64, false).down, Maker::Wide);
        assert_eq!(Served::of(96, true).down, Maker::Wide);
    }
}
