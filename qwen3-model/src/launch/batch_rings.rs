//! What the launches of products with the batch as the 64-row operand of the tensor cores share: the rings of
//! `kernels/wide_common.cuh`, how kernels of several forms are loaded, and what is checked of a product's operands.

use cuda_graphs::{Compiler, Device, DeviceSlice, Header, Kernel, KernelSpec};
use half::bf16;

use super::decode_layers::HOPPER;
use super::wgmma::product_header;
use super::wide_product::{CHUNK, WGMMA, WIDE_COMMON};
use super::{COMMON, aligned, refuse, same};
use crate::Result;

/// As `BatchRings` in the kernels. A slot has [`CHUNK`] columns.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchRings {
    /// Batch rows of a block.
    pub(super) columns: usize,
    /// Rows of the weight in a tile.
    pub(super) tile_rows: usize,
}

impl BatchRings {
    /// Warpgroups that multiply 64 batch rows each.
    pub(super) const fn groups(&self) -> usize {
        self.columns.div_ceil(64)
    }

    /// Bytes of a slot of weights.
    pub(super) const fn w_slot(&self) -> usize {
        self.tile_rows * 2 * CHUNK
    }

    /// Bytes of a slot of activations.
    pub(super) const fn x_slot(&self) -> usize {
        self.columns * 2 * CHUNK
    }

    /// Bytes behind the last slot, of what the last group multiplies for no row.
    pub(super) const fn padding(&self) -> usize {
        (self.groups() * 64 - self.columns) * 2 * CHUNK
    }

    /// Bytes of so many slots, with the padding.
    pub(super) const fn bytes(&self, w_slots: usize, x_slots: usize) -> usize {
        w_slots * self.w_slot() + x_slots * self.x_slot() + self.padding()
    }
}

/// Bytes of the barriers of so many slots, two each.
pub(super) const fn barrier_bytes(w_slots: usize, x_slots: usize) -> usize {
    16 * (w_slots + x_slots)
}

/// What the kernels include for tiles of so many rows of the weight, beside their own header.
pub(super) fn batch_headers(tile_rows: usize) -> [Header; 5] {
    [COMMON, HOPPER, WGMMA, product_header(tile_rows / 8), WIDE_COMMON]
}

/// Compiles and loads the kernel `entry` of every form.
///
/// # Errors
/// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
pub(super) fn load_forms<F>(
    compiler: &Compiler,
    device: &Device,
    forms: Vec<F>,
    spec: impl Fn(&F) -> KernelSpec,
    entry: &str,
) -> Result<Vec<(F, Kernel)>> {
    let specs: Vec<_> = forms.iter().map(spec).collect();
    let modules = compiler.load_all(device, &specs)?;
    let kernels = modules.iter().map(|module| Ok(module.kernel(entry)?));
    let kernels: Vec<Kernel> = kernels.collect::<Result<_>>()?;
    Ok(forms.into_iter().zip(kernels).collect())
}

/// K of a product of `rows` rows, at least one: of an input `[rows, K]` and a weight `[n, K]`, whose lengths it checks.
///
/// # Errors
/// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other. Panics: none with `rows` above 0.
pub(super) fn inner_columns(
    input: DeviceSlice<'_, bf16>,
    weight: DeviceSlice<'_, bf16>,
    rows: usize,
    n: usize,
) -> Result<usize> {
    let k = input.len() / rows;
    if k == 0 || !k.is_multiple_of(CHUNK) {
        return refuse("input", format!("of {k} columns is not possible"));
    }
    same("input", input.len(), rows * k)?;
    same("weight", weight.len(), n * k)?;
    aligned("weight", weight.ptr(), 16)?;
    Ok(k)
}
