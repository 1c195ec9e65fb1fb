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
//! prefix for several sequences at once, and the kernel that is made for prompts.

use cuda_graphs::{Compiler, MatmulOptions};

use super::CudaBackend;
use super::options::products;
use super::workspace::Workspace;
use crate::{Error, FusedMatrix, Result};

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
        self.invariant = true;
        Ok(())
    }
}
