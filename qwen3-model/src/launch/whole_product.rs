//! Products of decode steps by `kernels/gate_up.cuh` in whole tiles: every sum is added up along K in order, by one accumulator.
//! So they give the bits of every other product of that order, whatever its tiles.

use cuda_graphs::{Compiler, Device, DeviceSlice, KernelSpec, Stream};
use half::bf16;

use super::gate_up::{Form, Output, TileKernels, TileOp};
use super::wide_product::needed;
use crate::Result;

/// Batch rows that the kernels of each kind are compiled for.
const GATED_COLUMNS: [usize; 4] = [64, 96, 128, 192];
const PLAIN_COLUMNS: [usize; 1] = [64];
/// The tiles of Qwen3-4B on an H200, by which the kernels are checked where there is no device: gate and up, QKV.
const USUAL_TILES: [(WholeKind, usize); 2] = [(WholeKind::Gated, 152), (WholeKind::Plain, 48)];

/// What a [`WholeProduct`] leaves.
///
/// ```
/// use qwen3_model::launch::WholeKind;
///
/// assert!(WholeKind::Gated.most_rows() > WholeKind::Plain.most_rows());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WholeKind {
    /// `silu(gate) * up` of a weight with the rows of gate above those of up, both rounded to bf16 before: the bits of a bf16
    /// product and [`Kernels::silu_mul`](super::Kernels::silu_mul) behind it.
    Gated,
    /// The product.
    Plain,
}

impl WholeKind {
    const fn columns(self) -> &'static [usize] {
        match self {
            Self::Gated => &GATED_COLUMNS,
            Self::Plain => &PLAIN_COLUMNS,
        }
    }

    /// Most batch rows.
    pub const fn most_rows(self) -> usize {
        let columns = self.columns();
        columns[columns.len() - 1]
    }

    /// Columns of the output for a weight of `n` rows.
    pub const fn width(self, n: usize) -> usize {
        match self {
            Self::Gated => n / 2,
            Self::Plain => n,
        }
    }

    const fn output(self) -> Output {
        match self {
            Self::Gated => Output::GatedApart,
            Self::Plain => Output::Plain,
        }
    }

    const fn form(self, columns: usize, tile_rows: usize) -> Form {
        Form {
            columns,
            tile_rows,
            output: self.output(),
        }
    }
}

/// One product: `out = input · weightᵀ`, or what [`WholeKind::Gated`] makes of it.
#[derive(Debug, Clone, Copy)]
pub struct WholeProductOp<'a> {
    /// Batch rows, at most [`WholeKind::most_rows`].
    pub rows: usize,
    /// `[n, K]`, row-major; K a multiple of 64.
    pub weight: DeviceSlice<'a, bf16>,
    /// `[rows, K]`.
    pub input: DeviceSlice<'a, bf16>,
    /// `[rows, WholeKind::width(n)]`, overwritten.
    pub out: DeviceSlice<'a, bf16>,
}

/// Every specialisation, for the usual tiles.
pub(super) fn specs() -> impl Iterator<Item = KernelSpec> {
    USUAL_TILES.into_iter().flat_map(|(kind, tile_rows)| {
        let columns = kind.columns().iter();
        columns.map(move |&columns| kind.form(columns, tile_rows).spec())
    })
}

/// The kernels for weights of one height, loaded on one device.
#[derive(Debug)]
pub struct WholeProduct {
    kernels: TileKernels,
    kind: WholeKind,
}

impl WholeProduct {
    /// Compiles and loads the kernels for weights of `n` rows and up to `max_rows` batch rows ([`WholeKind::most_rows`] if it
    /// is more), or takes them from the compiler's cache. `None` on a device that cannot run them and for an `n` that is no
    /// multiple of 8.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn load(
        compiler: &Compiler,
        device: &Device,
        kind: WholeKind,
        n: usize,
        max_rows: usize,
    ) -> Result<Option<Self>> {
        let columns = kind.columns();
        let columns = &columns[..needed(columns, 1, max_rows)];
        let kernels = TileKernels::load(compiler, device, kind.output(), n, columns)?;
        Ok(kernels.map(|kernels| Self { kernels, kind }))
    }

    /// What it leaves.
    pub fn kind(&self) -> WholeKind {
        self.kind
    }

    /// The numbers of batch rows that kernels were loaded for, ascending; fewer are padded.
    pub fn columns(&self) -> impl Iterator<Item = usize> {
        self.kernels.columns()
    }

    /// Gives one launch to `stream`. Weights may be read before the kernels ahead in the stream have ended: whoever writes
    /// weights must wait for the device before more work is given to the stream.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn run(&self, stream: &Stream, op: &WholeProductOp<'_>) -> Result<()> {
        let op = TileOp {
            rows: op.rows,
            fewest: 1,
            weight: op.weight,
            input: op.input,
            squares: None,
            eps: 0.0,
            out: op.out,
        };
        self.kernels.run(stream, &op)
    }
}

#[cfg(test)]
mod tests {
    use super::super::wide_product::SHARED_BYTES;
    use super::*;

    #[test]
    fn shared_memory_fits_a_multiprocessor() {
        for kind in [WholeKind::Gated, WholeKind::Plain] {
            for &columns in kind.columns() {
                for tile_rows in (8..=160).step_by(8) {
                    let form = kind.form(columns, tile_rows);
                    assert!(form.shared_bytes() <= SHARED_BYTES, "{form:?}");
                }
            }
        }
    }
}
