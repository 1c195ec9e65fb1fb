//! Products of decode steps by `kernels/gate_up.cuh` in whole tiles: every sum is added up along K in order, by one accumulator.
//! So they give the bits of every other product of that order, whatever its tiles.

use bytemuck::Zeroable;
use cuda_graphs::{
    Arch, Compiler, Device, DeviceSlice, Kernel, KernelSpec, LaunchConfig, Stream, Swizzle, TensorElement,
    TensorMap, TensorMapSpec,
};
use half::bf16;

use super::gate_up::{Form, GateUpParams, Output, tile_rows};
use super::wide_product::{CHUNK, input_map, needed};
use super::{aligned, refuse, same, small};
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

    const fn form(self, columns: usize, tile_rows: usize) -> Form {
        Form {
            columns,
            tile_rows,
            output: match self {
                Self::Gated => Output::GatedApart,
                Self::Plain => Output::Plain,
            },
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
    kernels: Vec<(Form, Kernel)>,
    kind: WholeKind,
    n: usize,
    blocks: usize,
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
        let blocks = device.info().multiprocessors as usize;
        if device.arch() != Arch::SM_90A || n == 0 || !n.is_multiple_of(8) {
            return Ok(None);
        }
        let (columns, tile_rows) = (kind.columns(), tile_rows(n, blocks));
        let forms = columns.iter().take(needed(columns, 1, max_rows));
        let forms: Vec<Form> = forms.map(|&columns| kind.form(columns, tile_rows)).collect();
        let specs: Vec<_> = forms.iter().map(Form::spec).collect();
        let modules = compiler.load_all(device, &specs)?;
        let kernel = |module: &cuda_graphs::Module| Ok(module.kernel("wide_gate_up")?);
        let kernels: Vec<Kernel> = modules.iter().map(kernel).collect::<Result<_>>()?;
        Ok(Some(Self {
            kernels: forms.into_iter().zip(kernels).collect(),
            kind,
            n,
            blocks,
        }))
    }

    /// What it leaves.
    pub fn kind(&self) -> WholeKind {
        self.kind
    }

    /// The numbers of batch rows that kernels were loaded for, ascending; fewer are padded.
    pub fn columns(&self) -> impl Iterator<Item = usize> {
        self.kernels.iter().map(|(form, _)| form.columns)
    }

    /// Gives one launch to `stream`. Weights may be read before the kernels ahead in the stream have ended: whoever writes
    /// weights must wait for the device before more work is given to the stream.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn run(&self, stream: &Stream, op: &WholeProductOp<'_>) -> Result<()> {
        let (rows, n, width) = (op.rows, self.n, self.kind.width(self.n));
        let fits = |form: &Form| (1..=form.columns).contains(&rows);
        let Some((form, kernel)) = self.kernels.iter().find(|(form, _)| fits(form)) else {
            return refuse("rows", format!("{rows} rows at once are not possible"));
        };
        let k = op.input.len() / rows;
        if k == 0 || !k.is_multiple_of(CHUNK) {
            return refuse("input", format!("of {k} columns is not possible"));
        }
        same("input", op.input.len(), rows * k)?;
        same("weight", op.weight.len(), n * k)?;
        same("output", op.out.len(), rows * width)?;
        aligned("weight", op.weight.ptr(), 16)?;
        aligned("output", op.out.ptr(), 8)?;
        for buffer in [op.weight, op.input, op.out] {
            stream.keep_memory(buffer);
        }
        let tiles = n.div_ceil(form.tile_rows);
        let params = GateUpParams {
            w_map: self.weight_map(op.weight, k, form)?,
            x_map: input_map(op.input, rows, k, form.columns)?,
            out: op.out.ptr(),
            rows: small("rows", rows)?,
            units: small("columns", width)?,
            chunks: small("chunks", k / CHUNK)?,
            tiles: small("tiles", tiles)?,
            ..Zeroable::zeroed()
        };
        let config = LaunchConfig::new(self.blocks.min(tiles) as u32, form.threads() as u32)
            .dynamic_shared_bytes(form.shared_bytes() as u32)
            .programmatic(true);
        // SAFETY: every buffer has the length that the kernel gives it, checked here, and is kept by a capture; the kernel
        // writes rows and columns that exist alone.
        Ok(unsafe { kernel.launch(stream, &config, &params) }?)
    }

    /// Boxes of 64 columns and the rows of a tile: four of gate and four of up in turn, or all in their order.
    fn weight_map(&self, weight: DeviceSlice<'_, bf16>, k: usize, form: &Form) -> Result<TensorMap> {
        let row = 2 * k as u64;
        let [second_four, next] = match self.kind {
            WholeKind::Gated => [self.n as u64 / 2 * row, 4 * row],
            WholeKind::Plain => [4 * row, 8 * row],
        };
        let spec = TensorMapSpec {
            element: TensorElement::Bf16,
            dims: &[k as u64, 4, 2, self.n as u64 / 8],
            strides: &[row, second_four, next],
            box_dims: &[CHUNK as u32, 4, 2, (form.tile_rows / 8) as u32],
            swizzle: Swizzle::Bytes128,
        };
        Ok(TensorMap::tiled(weight, &spec)?)
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
