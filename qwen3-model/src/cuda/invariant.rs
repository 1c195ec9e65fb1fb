//! Steps in which the bits of a row depend on its own sequence alone: not on the other rows, the bucket, how a prompt was cut
//! into chunks, or whether the sequence was computed again after a preemption.
//!
//! ```text
//!   products    one reference algorithm for each matrix; other row counts take algorithms that were tried to give its bits
//!   attention   cut at fixed positions of the sequence; the tokens of prompts by the decode kernel too, several at once
//!   the rest    works row by row anyway
//! ```
//!
//! What it gives up: the persistent kernels of small decode steps, the products with norms inside of middle ones, reads of a
//! prefix for several sequences at once, and the kernel that is made for prompts. QKV and gate and up of decode steps have kernels
//! of our own, which begin before the norm ahead of them has ended, if their bits are those of the reference: that is tried.

use cuda_graphs::{Compiler, MatmulDims, MatmulOptions};
use half::bf16;

use super::options::products;
use super::weights::fused_shape;
use super::workspace::Workspace;
use super::{CudaBackend, Rows};
use crate::launch::{WholeKind, WholeProduct, WholeProductOp};
use crate::{Error, FusedMatrix, Result};

/// What the kernel's chunks of a row are multiples of.
const CHUNK: usize = 64;

/// What steps of invariant rows have of their own.
#[derive(Debug)]
pub(super) struct Invariant {
    /// Kernels for the products of decode steps where these give the bits of the reference, as they were seen to.
    products: Vec<(FusedMatrix, WholeProduct)>,
}

/// The products that have such kernels. O would take longer by one than by cuBLASLt: see docs/performance.md.
const TRIED: [(FusedMatrix, WholeKind); 2] = [
    (FusedMatrix::Qkv, WholeKind::Plain),
    (FusedMatrix::GateUp, WholeKind::Gated),
];

/// Splits of a product that the workspace has room for, at the largest packed step.
const MOST_SPLITS: usize = 4;

impl CudaBackend {
    /// From now on a row's bits depend on its own sequence alone. Chooses algorithms anew when products first run, and drops
    /// captured graphs: to be called before [`capture`](Self::capture).
    ///
    /// # Errors
    /// [`Error::Option`] with weights in 4 bits or adapters beside the weights, whose kernels are chosen by the number of rows;
    /// [`Error::Cuda`]. Panics: none.
    pub fn make_batch_invariant(&mut self, compiler: &Compiler) -> Result<()> {
        let refuse = |problem: &str| {
            Err(Error::Option {
                option: "batch_invariant",
                problem: problem.into(),
            })
        };
        if self.four_bit.is_some() {
            return refuse(
                "is not possible with weights in 4 bits: products of few rows have kernels of their own",
            );
        }
        if self.unmerged.is_some() {
            return refuse("is not possible with adapters beside the weights: merge them");
        }
        self.graphs = None;
        let (config, options) = (&self.config, &self.options);
        let max_rows = options.max_tokens.max(options.max_batch_size);
        let narrow =
            [FusedMatrix::O, FusedMatrix::Down].map(|matrix| super::weights::fused_shape(config, matrix)[0]);
        let widest = narrow.into_iter().max().unwrap_or(0);
        let defaults = MatmulOptions::default();
        let splits_bytes = MOST_SPLITS * max_rows.next_multiple_of(64) * widest * size_of::<f32>();
        let invariant = MatmulOptions {
            row_invariant: true,
            workspace_bytes: defaults.workspace_bytes.max(splits_bytes),
            ..defaults
        };
        // The plain kernel's rows are invariant anyway.
        self.matmul = products(&self.stream, compiler, &options.kernels.matrix, &invariant)?;
        let padded = |rows| self.matmul.padded_rows(rows);
        let device = self.stream.device();
        self.workspace = Workspace::new(device, config, max_rows, options.max_batch_size, padded)?;
        self.attention
            .make_invariant(&self.stream, compiler, config, options)?;
        self.layer_kernel = None;
        self.wide_products = None;
        self.invariant = Some(Invariant { products: Vec::new() });
        let mut products = Vec::new();
        for (matrix, kind) in TRIED {
            let found = self.product_of_same_bits(compiler, matrix, kind)?;
            products.extend(found.map(|product| (matrix, product)));
        }
        self.invariant = Some(Invariant { products });
        Ok(())
    }

    /// Our kernel for a product of the present rows, and how many these are, where there is one. With it go what is around the
    /// product: gate and up come with the gated unit.
    pub(super) fn whole_product(&self, matrix: FusedMatrix) -> Option<(&WholeProduct, usize)> {
        let (Some(invariant), Rows::Decode { bucket }) = (&self.invariant, self.rows) else {
            return None;
        };
        let mut of_matrix = invariant.products.iter().filter(|(of, _)| *of == matrix);
        let (_, product) = of_matrix.next()?;
        let fits = bucket <= product.kind().most_rows() && !self.weights.has_biases();
        fits.then_some((product, bucket))
    }

    /// A layer's product by such a kernel.
    pub(super) fn project_whole(
        &self,
        kernel: &WholeProduct,
        layer: usize,
        matrix: FusedMatrix,
        rows: usize,
    ) -> Result<()> {
        let (w, [n, k]) = (&self.workspace, fused_shape(&self.config, matrix));
        let out = match kernel.kind() {
            WholeKind::Gated => &w.gated,
            WholeKind::Plain => &w.qkv,
        };
        let op = WholeProductOp {
            rows,
            weight: self.weights.layers[layer].matrix(matrix).as_slice(),
            input: w.normed.slice(..rows * k)?,
            out: out.slice(..rows * kernel.kind().width(n))?,
        };
        kernel.run(&self.stream, &op)
    }

    /// The kernel for a product, if the device can run it and it was seen to give the bits of the reference, with every number
    /// of rows that it is compiled for, on rows of the first layer's matrix itself. Overwrites the workspace.
    fn product_of_same_bits(
        &self,
        compiler: &Compiler,
        matrix: FusedMatrix,
        kind: WholeKind,
    ) -> Result<Option<WholeProduct>> {
        let (w, stream, [n, k]) = (&self.workspace, &self.stream, fused_shape(&self.config, matrix));
        let most = self.options.max_batch_size.min(kind.most_rows());
        if !k.is_multiple_of(CHUNK) {
            return Ok(None);
        }
        let loaded = WholeProduct::load(compiler, stream.device(), kind, n, most)?;
        let Some(kernel) = loaded else {
            return Ok(None);
        };
        let weight = self.weights.layers[0].matrix(matrix);
        for rows in kernel.columns().map(|columns| columns.min(most)) {
            let m = self.matmul.padded_rows(rows);
            let x = w.normed.slice(..m * k)?;
            let mut filled = 0;
            while filled < x.len() {
                let piece = weight.len().min(x.len() - filled);
                stream.copy(x.slice(filled..filled + piece)?, weight.slice(..piece)?)?;
                filled += piece;
            }
            let product = match kind {
                WholeKind::Gated => w.gate_up.slice(..m * n)?,
                WholeKind::Plain => w.qkv.slice(..m * n)?,
            };
            self.matmul
                .multiply(MatmulDims { m, n, k }, x, weight, product, None)?;
            let out = match kind {
                WholeKind::Gated => w.gated.slice(..rows * kind.width(n))?,
                WholeKind::Plain => product.slice(..rows * n)?,
            };
            if kind == WholeKind::Gated {
                let product = product.slice(..rows * n)?;
                self.kernels.silu_mul(stream, product, out, rows)?;
            }
            let bits = |values: Vec<bf16>| -> Vec<u16> { values.into_iter().map(bf16::to_bits).collect() };
            let expected = bits(stream.download(out)?);
            stream.fill_bytes(out, 0xff)?;
            self.project_whole(&kernel, 0, matrix, rows)?;
            if bits(stream.download(out)?) != expected {
                tracing::debug!(
                    ?matrix,
                    rows,
                    "our kernel has other bits than the reference: products by cuBLASLt"
                );
                return Ok(None);
            }
        }
        Ok(Some(kernel))
    }
}
